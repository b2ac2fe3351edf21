"""Find the number of KV heads of each layer in vLLM's configuration of the model.

vLLM has one number of KV heads for a whole model. Layers may differ, and a draft model has a number
of its own. If a rank has one head of a layer, any number of heads that divides the TP size fits.

Invariant: a layer gets vLLM's number only if the checks below pass. Otherwise the caller must pass
`total_num_kv_heads`.

How it works:
    For example, TP is 4 and each rank has 1 KV head in all layers. vLLM's number is 4. But the
    model's own config, `hf_text_config`, has `num_global_key_value_heads` = 2, so some layers have
    2 heads, each held by two ranks. The specs of both kinds of layers are equal, so the number is
    refused.

    For each layer, in this order:

    1. Find its model: the target, the draft, or possibly either (`_models_of`).
    2. If `model_arch_config` has an entry for each layer, take the number of that entry.
    3. Otherwise take the one number of the model, unless its layers differ in heads on a rank.
    4. If a rank has one head, compare the number with `hf_text_config`, as above. Only an entry of
       a `model_arch_config` with overrides for layers is not compared.
    5. If target and draft are both possible, their numbers must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config, Group
from kvspec.adapters.vllm.drafts import is_of_draft, number_of
from kvspec.adapters.vllm.specs import SPEC_KINDS
from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig

# The names that models give to the number of KV heads of some or all layers.
_KV_HEADS = re.compile(r"(kv|key_value)_heads$|n_head_kv$|kv_n_heads$|attention_groups$|group_num$")

# Specs of layers without KV heads: states, and rings, which every rank has whole.
WITHOUT_HEADS = ("MambaSpec", "CircularBufferSpec")

# The names that models give to the number of heads that share one KV head.
_SHARES = re.compile(r"heads_in_group$")


def heads_of(
    fields: FieldReader, configs: Sequence[Config], parallel: ParallelConfig
) -> dict[str, int] | None:
    """Return the number of KV heads in the model, for each layer with KV heads.

    Return None if TP is 1, because a rank's heads are then the model's.
    """
    if parallel.tp_size == 1:
        return None
    heads_by_layer: dict[str, int] = {}
    layers_by_heads: dict[int, str] = {}
    for config in configs:
        for at, group in enumerate(config.groups):
            layers_of_group = sum(
                len(stage.groups[at].layers) for stage in configs if at < len(stage.groups)
            )
            for layer in group.layers:
                spec = group.spec_of(layer)
                kind = type(spec.value).__name__
                if kind not in SPEC_KINDS or "MLA" in kind or kind in WITHOUT_HEADS:
                    continue
                models = _models_of(fields, group, layer, single=layers_of_group == 1)
                counts = [_count(model, layer, spec, layers_by_heads) for model in models]
                if min(counts) != max(counts):
                    wanted = "one number for each layer: "
                    wanted += f"{layer!r} may be the target's or a draft's"
                    raise SpecError("total_num_kv_heads", None, wanted)
                heads_by_layer[layer] = counts[0]
    return heads_by_layer


def _count(
    model: FieldReader, layer: str, spec: FieldReader, layers_by_heads: dict[int, str]
) -> int:
    """Return the KV heads of *layer*, which belongs to *model*.

    *layers_by_heads* collects one layer for each number of heads on a rank. It contains only layers
    whose model has no entries for layers. Two entries mean that these layers differ.
    """
    by_layer, number = model.get("model_arch_config"), number_of(layer)
    local = spec.get("num_kv_heads").size()
    # Some versions of vLLM have a config for each layer, reached by index.
    if hasattr(type(by_layer.value), "__getitem__") and number is not None:
        count = by_layer.item(number).get("total_num_kv_heads").size()
        if by_layer.get("per_layer_overrides").value:
            return count
        # Without overrides, the entries just repeat the one number of the model.
    else:
        layers_by_heads.setdefault(local, layer)
        if len(layers_by_heads) > 1:
            other = next(name for heads, name in layers_by_heads.items() if heads != local)
            wanted = f"one number for each layer: {layer!r} and {other!r} differ"
            raise SpecError("total_num_kv_heads", None, wanted)
        count = model.call("get_total_num_kv_heads").size()
    # Several heads on a rank determine the heads of the model. One head does not.
    if local == 1:
        _check_same_heads(model, layer, count)
    return count


def _check_same_heads(model: FieldReader, layer: str, count: int) -> None:
    """Raise `SpecError` if *model*'s own config has numbers of KV heads other than *count*."""
    text = model.get("hf_text_config")
    first_values: dict[str, int] = {}
    for name, value in _numbers(text.path, text.value):
        differs = first_values.setdefault(name.rpartition(".")[2], value) != value
        # A number of heads that share one KV head is no number of KV heads. It must only be the
        # same everywhere.
        if differs or (value != count and not _SHARES.search(name)):
            wanted = f"one number for each layer, as {layer!r}: {name} is {value}, and vLLM's "
            wanted += f"one number for all is {count}"
            raise SpecError("total_num_kv_heads", None, wanted)


def _numbers(path: str, value: object, depth: int = 5) -> Iterator[tuple[str, int]]:
    """Yield each number of KV heads in a model's config with its path, at most *depth* deep."""
    # The limit ends the walk of a config that contains itself.
    if not depth:
        return
    if isinstance(value, (list, tuple)):
        for at, member in enumerate(value):
            yield from _numbers(f"{path}[{at}]", member, depth - 1)
        return
    fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    for name, member in fields.items():
        here = f"{path}.{name}"
        if type(member) is int and (_KV_HEADS.search(here) or _SHARES.search(here)):
            yield here, member
        elif isinstance(member, (list, tuple, Mapping)) or hasattr(member, "__dict__"):
            yield from _numbers(here, member, depth - 1)


def _models_of(
    fields: FieldReader, group: Group, layer: str, *, single: bool
) -> tuple[FieldReader, ...]:
    """Return the configs of the models that *layer* may belong to: target, draft, or both.

    *single*: whether the group has just one layer, on all stages together.
    """
    draft, target = fields.get("speculative_config"), fields.get("model_config")
    if draft.value is None:
        return (target,)
    count = target.call("get_total_num_hidden_layers").size()
    marked = group.spec_of(layer).get("is_draft").value or is_of_draft(layer, count)
    # vLLM marks a whole group if one of its layers belongs to the draft. So a mark is certain only
    # for the single layer of a group.
    if marked or (group.eagle and single):
        return (draft.get("draft_model_config"),)
    return (target, draft.get("draft_model_config")) if group.eagle else (target,)
