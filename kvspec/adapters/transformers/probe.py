"""Find out what the layers of a transformers model store in its cache, by running the model.

Invariant: nothing is read from the name of a model. The kinds and sizes of layers come from the
cache that the model makes, and the order of rotated elements comes from keys that it computes. A
layer that the probe does not recognise is refused by name.

How it works:
    The model computes eight prompts of one token each, once at position 0 and once at two others.
    A single token attends only to itself, so the values of all layers, and their keys before rotary
    embedding, do not depend on the position. Each element of a key that differs between two
    positions is therefore rotated. `rotation_of` finds out which elements are rotated together.

    An attention sink takes a part of the attention, which is rounded differently at each position.
    Experts would multiply this difference. So all positions get the attention of position 0.

    Modules of the model have buffers of inverse frequencies. The frequencies of a layer are those
    by which its computed keys turn, at each of the positions. With LongRoPE the model uses other
    frequencies if a prompt is long: the keys turn by the buffer at position 1, but not at the last
    position. Such a model is refused, because two prompts would mean different rotations. If no
    buffer fits at position 1, the frequencies are not stated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import attrs
import numpy as np

from kvspec.adapters.attention_modules import KEY_NORMS
from kvspec.adapters.rotation import ROUNDINGS, FloatRows, rotation_of, turns_by
from kvspec.errors import SpecError
from kvspec.ownership.dtypes import dtype_name
from kvspec.specs import FullAttentionSpec, KeyContent, MLAAttentionSpec, SlidingWindowSpec

# transformers is not imported. These are a `PreTrainedModel`, and a `Cache` or a part of one.
Network: TypeAlias = Any
Cached: TypeAlias = Any

AttentionLayer: TypeAlias = FullAttentionSpec | MLAAttentionSpec

# The classes of cache layers that are read, by exact name. A subclass may keep other tensors.
SLIDING = ("DynamicSlidingWindowLayer", "StaticSlidingWindowLayer")
CACHE_KINDS = ("DynamicLayer", "StaticLayer", *SLIDING)

# Modules of an attention layer that normalise other things than keys or the latent of MLA.
_OTHER_NORMS = {"q_norm", "q_layernorm", "query_layernorm", "q_a_layernorm"}

_PROMPTS = 8

# The number of positions of a model that has no limit, such as one with ALiBi.
_LIMIT = 2048


def layer_specs(network: Network, block_size: int) -> list[AttentionLayer]:
    """Return what each layer of *network* stores. It computes 48 tokens with the model.

    Args:
        network: A causal language model of transformers, in evaluation mode.
        block_size: Tokens of a block.

    Raises:
        SpecError: If a layer is of an unknown kind, or its keys are not rotated in a known order.
    """
    check_evaluation(network)
    config, attention = network.config.get_text_config(), dict[int, list[Any]]()
    for module in network.modules():
        if type(module).__name__.endswith("Attention"):
            attention.setdefault(getattr(module, "layer_idx", -1), []).append(module)
    # Position 0 is the last one: some rotary modules change with the length of a prompt, and a
    # short prompt resets them.
    positions = (_max_tokens(network) - 1, 1, 0)
    with _equal_attention(chain.from_iterable(attention.values())):
        _cache_at(network, 0)
        caches = [_cache_at(network, position) for position in positions]
    _check_context(network, caches[1])
    tables = list(_frequencies(network))
    specs: list[AttentionLayer] = []
    for number, found in enumerate(zip(*caches, strict=True)):
        field, modules = f"cache.layers[{number}]", attention.get(number, [])
        if len(modules) != 1:
            names = [type(module).__name__ for module in modules]
            wanted = f"one attention module with layer_idx={number}"
            raise SpecError(f"{field}.attention", names, wanted)
        # transformers gives chunked attention the cache of a window, but it reads other tokens.
        sliding = type(found[0]).__name__ in SLIDING
        if sliding and getattr(config, "attention_chunk_size", None) is not None:
            raise SpecError(field, "chunked attention", "full or sliding attention")
        spec = _spec(field, modules[0], found, block_size, sliding=sliding)
        specs.append(_with_rotation(f"{field}.keys", spec, found, positions, tables))
    return specs


def longest_prompt(network: Network) -> int | None:
    """Return the length up to which the probe knows the rotation, or None for any length.

    LongRoPE uses other frequencies in a longer prompt.
    """
    kinds = chain.from_iterable(map(_rope_types, network.modules()))
    return _max_tokens(network) if any("longrope" in kind for kind in kinds) else None


def _max_tokens(network: Network) -> int:
    """Return the number of positions that the config of *network* has."""
    most: int = getattr(network.config.get_text_config(), "max_position_embeddings", _LIMIT)
    return most


def _rope_types(module: Network) -> list[str]:
    """Return the kinds of rotary embedding of a rotary module. Other modules have none."""
    kinds = getattr(module, "rope_type", [])
    return [*map(str, kinds.values() if isinstance(kinds, dict) else [kinds])]


def _frequencies(network: Network) -> Iterator[dict[str, Any]]:
    """Yield the frequencies and the magnitude of each rotary module, as fields of `KeyContent`."""
    for name, module in network.named_modules():
        kinds = _rope_types(module)
        # It computes new frequencies for each length beyond the last position.
        if any("dynamic" in kind for kind in kinds):
            wanted = "frequencies that do not depend on the length of a prompt"
            raise SpecError(f"network.{name}.rope_type", kinds, wanted)
        for buffer, values in module.named_buffers(recurse=False):
            prefix = buffer.removesuffix("inv_freq")
            if prefix != buffer and not prefix.endswith("original_"):
                size = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                yield {"frequencies": tuple(values.float().tolist()), "magnitude": size}


def _with_rotation(
    field: str,
    spec: AttentionLayer,
    found: tuple[Any, ...],
    positions: tuple[int, ...],
    tables: list[dict[str, Any]],
) -> AttentionLayer:
    """Return *spec* with the frequencies of its keys, if a table has them."""
    import torch  # noqa: PLC0415 - as below

    content = spec.key_content
    if content is None or content.rotary == "none":
        return spec
    latent = isinstance(spec, MLAAttentionSpec)
    rows = [_rows(layer.keys, layer.values) if latent else _rows(layer.keys) for layer in found]
    resolution, base = float(torch.finfo(found[0].keys.dtype).eps), rows[-1]
    failed, fitting = set[int](), list[KeyContent]()
    for table in tables:
        if 2 * len(table["frequencies"]) != content.rotary_size:
            continue
        wrong = {
            position
            for position, row in zip(positions[:-1], rows[:-1], strict=True)
            if not turns_by(content, table["frequencies"], base, row, position, resolution)
        }
        stated = attrs.evolve(content, **table)
        if not wrong and stated not in fitting:
            fitting.append(stated)
        if 1 not in wrong:
            failed |= wrong
    # Two tables may be too near to each other for coarse keys. Then neither is stated.
    if fitting:
        return attrs.evolve(spec, key_content=fitting[0] if len(fitting) == 1 else content)
    if failed:
        wanted = "frequencies that do not depend on the length of a prompt"
        raise SpecError(field, f"other frequencies at position {max(failed)}", wanted)
    return spec


def check_evaluation(network: Network) -> None:
    """Raise `SpecError` unless all modules of *network* are in evaluation mode."""
    training = getattr(network, "training", None)
    if training is False:
        training = any(module.training for module in network.modules())
    if training is not False:
        wanted = "False in all modules: call network.eval() first"
        raise SpecError("network.training", training, wanted)


@contextmanager
def _equal_attention(modules: Iterable[Network]) -> Iterator[None]:
    """Replace each later output of the attention *modules* by the first one."""
    outputs: dict[Network, Any] = {}

    def hook(module: Network, _: object, output: Any) -> Any:  # noqa: ANN401
        if not isinstance(output, tuple):
            return outputs.setdefault(module, output)
        return (outputs.setdefault(module, output[0]), *output[1:])

    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _check_context(network: Network, alone: list[Any]) -> None:
    """Raise `SpecError` if keys depend on later tokens, or not on the positions of the probe.

    Args:
        network: The model. It computes prompts with one first token and other second tokens. A
            consumer computes the last token by itself, so the first keys must be equal.
        alone: The second tokens alone, at position 1. Their keys in the first layer are equal,
            unless the model ignores positions, and counts tokens instead.
    """
    import torch  # noqa: PLC0415 - as below

    layers = _cache_at(network, 0, 1)
    for number, layer in enumerate(layers):
        field, rounding = f"cache.layers[{number}].keys", torch.finfo(layer.keys.dtype).eps
        first, second = layer.keys.float().unbind(dim=2)
        most = ROUNDINGS * rounding * layer.keys.abs().max()
        # Experts may compute the tokens of some prompts with other roundings.
        if (first - first[:1]).abs().amax(dim=(1, 2))[1:].min() > most:
            raise SpecError(field, "keys that depend on later tokens", "those of a causal model")
        if number == 0 and (second - alone[0].keys[:, :, 0].float()).abs().max() > most:
            raise SpecError(field, "keys that ignore position_ids", "keys at their positions")


def _cache_at(network: Network, *positions: int) -> list[Any]:
    """Return the cache layers of prompts with a token at each of *positions*.

    Only the last tokens of the prompts differ.
    """
    import torch  # noqa: PLC0415 - a caller with a model has loaded torch

    vocabulary = network.get_input_embeddings().weight.shape[0]
    at = torch.tensor([positions] * _PROMPTS, device=network.device)
    tokens = torch.zeros_like(at)
    tokens[:, -1] = torch.linspace(0, vocabulary - 1, _PROMPTS).long()
    try:
        with torch.no_grad():
            output = network.base_model(input_ids=tokens, position_ids=at, use_cache=True)
    except Exception as error:  # A model may raise anything.
        message = f"{type(error).__name__}: {error}"
        wanted = "a causal language model that computes the keys of one token"
        raise SpecError("network", message, wanted) from error
    cache: Cached = getattr(output, "past_key_values", None)
    check_cache("network.past_key_values", cache)
    lengths = {int(layer.get_seq_length()) for layer in cache.layers}
    if lengths != {len(positions)}:
        wanted = f"{len(positions)} in each layer, as in the prompt"
        raise SpecError("network.past_key_values.get_seq_length()", sorted(lengths), wanted)
    return list(cache.layers)


def check_cache(field: str, cache: Cached) -> None:
    """Raise `SpecError` unless *cache* consists of known layers."""
    if type(cache).__name__ not in ("DynamicCache", "StaticCache"):
        raise SpecError(field, type(cache).__name__, "a DynamicCache or a StaticCache")
    # It copies its layers to host memory in the background, so their rows may not be there yet.
    if cache.offloading:
        raise SpecError(f"{field}.offloading", cache.offloading, "False")
    for number, layer in enumerate(cache.layers):
        if type(layer).__name__ not in CACHE_KINDS:
            wanted = (
                f"one of {', '.join(CACHE_KINDS)}; not yet: states, indexers and quantised layers"
            )
            raise SpecError(f"{field}.layers[{number}]", type(layer).__name__, wanted)


def _spec(
    field: str,
    attention: Network,
    found: tuple[Any, ...],
    block_size: int,
    *,
    sliding: bool,
) -> AttentionLayer:
    """Return what a layer stores. *found* are its cache layers at the probe's positions."""
    import torch  # noqa: PLC0415 - as above

    keys, values = found[-1].keys, found[-1].values
    if (keys.shape[1], keys.dtype) != (values.shape[1], values.dtype):
        wanted = f"the {keys.shape[1]} heads of the keys, of {keys.dtype}"
        raise SpecError(f"{field}.values", (values.shape[1], values.dtype), wanted)
    # The cache of MLA has the latent as its keys and the rotated part as its values.
    sizes = [getattr(attention, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    latent = keys.shape[1] == 1 and sizes == [keys.shape[-1], values.shape[-1]] and not sliding
    rows = [_rows(layer.keys, layer.values) if latent else _rows(layer.keys) for layer in found]
    content = attrs.evolve(
        rotation_of(f"{field}.keys", rows, float(torch.finfo(keys.dtype).eps)),
        normalized=_normalizes_keys(f"{field}.attention", attention),
    )
    dtype = dtype_name(keys.dtype, f"{field}.keys.dtype")
    common: dict[str, Any] = {"block_size": block_size, "dtype": dtype, "key_content": content}
    if latent:
        if content.rotary_start != keys.shape[-1]:
            wanted = "a latent in the keys, and the rotated part in the values"
            raise SpecError(f"{field}.keys", content, wanted)
        return MLAAttentionSpec(**common, head_size=keys.shape[-1] + values.shape[-1])
    common |= {"total_num_kv_heads": keys.shape[1], "head_size": keys.shape[-1]}
    common |= {"head_size_v": values.shape[-1]}
    if sliding:
        return SlidingWindowSpec(**common, sliding_window=found[-1].sliding_window)
    return FullAttentionSpec(**common)


def _rows(*tensors: Cached) -> FloatRows:
    """Return the rows of all prompts and heads, [rows, elements]."""
    arrays = [t.detach().float().cpu().numpy().reshape(-1, t.shape[-1]) for t in tensors]
    return np.concatenate(arrays, axis=1).astype(np.float64)


def _normalizes_keys(field: str, attention: Network) -> bool:
    """Return whether *attention* has a module that normalises keys."""
    children = {name: type(module).__name__ for name, module in attention.named_children()}
    names = {name for name, kind in children.items() if "norm" in name and kind != "Identity"}
    if unknown := names - {*KEY_NORMS} - _OTHER_NORMS:
        wanted = f"normalisations among {', '.join(sorted({*KEY_NORMS} | _OTHER_NORMS))}"
        raise SpecError(field, sorted(unknown), wanted)
    return bool(names & {*KEY_NORMS})
