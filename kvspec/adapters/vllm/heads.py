"""The KV heads of vLLM's models, layer by layer.

Law: one head on a rank is one of any number that divides the ranks, and vLLM has one number for a
whole model: where layers may differ, and it does not say how, the caller is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config, Group
from kvspec.adapters.vllm.specs import KINDS
from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig

_KV_HEADS = re.compile(r"(kv|key_value)_heads$|n_head_kv$|kv_n_heads$|attention_groups$|group_num$")
"""What models call the number of KV heads of some layers or of all."""

_SHARES = re.compile(r"heads_in_group$")
"""What they call the heads that share one."""


def heads_of(
    given: FieldReader, configs: Sequence[Config], parallel: ParallelConfig
) -> dict[str, int] | None:
    """Return the KV heads of every layer that has any: the target's, layer by layer, or a draft's.

    Where vLLM has one number for all, layers that differ must be said: one head on each rank may
    be sharded or replicated.
    """
    if parallel.tp_size == 1:
        return None
    found: dict[str, int] = {}
    layers_by_heads: dict[int, str] = {}
    for config in configs:
        for at, group in enumerate(config.groups):
            only = (
                sum(len(each.groups[at].layers) for each in configs if at < len(each.groups)) == 1
            )
            for layer in group.layers:
                spec = group.spec_of(layer)
                kind = type(spec.value).__name__
                if kind not in KINDS or "MLA" in kind or kind == "MambaSpec":
                    continue
                models = _models_of(given, group, layer, only=only)
                counts = [_count(model, layer, spec, layers_by_heads) for model in models]
                if min(counts) != max(counts):
                    wanted = (
                        f"one number for each layer: {layer!r} may be the target's or a draft's"
                    )
                    raise SpecError("total_num_kv_heads", None, wanted)
                found[layer] = counts[0]
    return found


def number_of(layer: str) -> int | None:
    """Return the number in the name of *layer*."""
    found = re.search(r"\.(\d+)\.", f".{layer}.")
    return int(found.group(1)) if found else None


def _count(
    model: FieldReader, layer: str, spec: FieldReader, layers_by_heads: dict[int, str]
) -> int:
    """Return the KV heads of *layer*, which is of *model*.

    *layers_by_heads*: layers by their heads on a rank, of models that have one number.
    """
    by_layer, number = model.get("model_arch_config"), number_of(layer)
    local = spec.get("num_kv_heads").size()
    if hasattr(type(by_layer.value), "__getitem__") and number is not None:
        own = FieldReader(f"{by_layer.path}[{number}]", _item(by_layer, number))
        count = own.get("total_num_kv_heads").size()
        if local == 1 and not by_layer.get("per_layer_overrides").value:
            _check_same_heads(model, layer, count)
        return count
    other = layers_by_heads.setdefault(local, layer)
    if len(layers_by_heads) > 1:
        other = next(name for count, name in layers_by_heads.items() if count != local)
        wanted = f"one number for each layer: {layer!r} and {other!r} differ"
        raise SpecError("total_num_kv_heads", None, wanted)
    return model.call("get_total_num_kv_heads").size()


def _check_same_heads(model: FieldReader, layer: str, count: int) -> None:
    """Raise `SpecError` if *model*'s own config has other numbers of KV heads than *count*."""
    text = model.get("hf_text_config")
    shares: dict[str, int] = {}
    for name, value in _numbers(text.path, text.value):
        differs = shares.setdefault(name.rpartition(".")[2], value) != value
        if differs or (value != count and not _SHARES.search(name)):
            wanted = f"one number for each layer, as {layer!r}: {name} is {value}, and vLLM's "
            wanted += f"one number for all {count}"
            raise SpecError("total_num_kv_heads", None, wanted)


def _numbers(path: str, value: object, depth: int = 5) -> Iterator[tuple[str, int]]:
    """Yield what a model's config says of KV heads, at most *depth* deep, and the path to it."""
    if not depth:
        return
    if isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from _numbers(f"{path}[{at}]", each, depth - 1)
        return
    fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    for name, each in fields.items():
        here = f"{path}.{name}"
        if type(each) is int and (_KV_HEADS.search(here) or _SHARES.search(here)):
            yield here, each
        elif isinstance(each, (list, tuple, Mapping)) or hasattr(each, "__dict__"):
            yield from _numbers(here, each, depth - 1)


def _item(place: FieldReader, number: int) -> object:
    try:
        return place.value[number]
    except Exception as error:  # another's method may do anything
        message = f"{type(error).__name__}: {error}"
        raise SpecError(f"{place.path}[{number}]", message, "a value, not an error") from error


def _models_of(
    given: FieldReader, group: Group, layer: str, *, only: bool
) -> tuple[FieldReader, ...]:
    """Return the config of the model that *layer* is of: the target's, or the draft's; or both.

    vLLM marks a whole group for one draft layer in it. *only*: the group has one layer.
    """
    draft, target = given.get("speculative_config"), given.get("model_config")
    if draft.value is None:
        return (target,)
    number, count = number_of(layer), target.call("get_total_num_hidden_layers").size()
    beyond = number is not None and number >= count
    marked = group.spec_of(layer).get("is_draft").value or layer.startswith("draft")
    if marked or beyond or (group.eagle and only):
        return (draft.get("draft_model_config"),)
    return (target, draft.get("draft_model_config")) if group.eagle else (target,)
