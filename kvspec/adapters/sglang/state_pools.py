"""Read the recurrent states of SGLang's `MambaPool` on one rank.

Invariant: nothing is guessed. The pool does not say of which kind its layers are. If more than one
kind fits its shapes, the caller must state it, or the pool is refused.

How it works:
    A pool has one conv tensor and one temporal tensor for all layers. A slot has the whole state of
    a request in all of them, so a slot is a block. No request owns slot 0. On a rank with 4 of the
    model's 8 value heads, and 2 of its 4 key heads:

        tensor      shape                                         of
        conv        layers, slots, channels, rows                 gated delta nets, Mamba
                    layers, slots, rows, channels                 Kimi's delta attention
        temporal    layers, slots, heads, value size, key size    gated delta nets
                    layers, slots, heads, head size, state size   Mamba 2

    The kind follows from what the pool has, in this order:

        no elements in conv             linear attention
        no elements in temporal         a short convolution
        `conv_shard_groups`             a gated delta net: the sizes of q, k and v in the model
        as many channels as heads       Mamba 1: a head is a channel
        the caller passed `n_groups`    Mamba 2: channels are x, B and C

    Gated delta nets without `conv_shard_groups`, such as Jet-Nemotron's, look like Mamba 2, but
    their channels are q, k and v. So Mamba 2 must be stated.
"""

from __future__ import annotations

from math import prod
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.sglang.pools import STATE, check_class
from kvspec.adapters.state_shapes import (
    StateShapes,
    gated_delta_net,
    linear_state,
    mamba1,
    mamba2,
    short_conv,
    with_temporal_name,
)
from kvspec.errors import SpecError
from kvspec.inputs import sequence
from kvspec.memory.from_tensors import check_tensor
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import LayerSpec, MambaSpec

# The names of temporal states whose order is that of SGLang alone: its linear attention, and what
# its kernels for CPUs write. A part moves only to a part of the same name.
_OWN, _CPU = "ssm_sglang", "ssm_sglang_cpu"

# Tensors of a state that is not yet in the temporal state. They begin with this.
_REPLAY = "replayssm_"

# The axes of a tensor of all layers.
_CONV_AXES, _TEMPORAL_AXES = 4, 5


@attrs.frozen
class StatePool:
    """The layers of one rank that keep recurrent states.

    Attributes:
        path: The path to the pool, for error messages.
        layers: The numbers of the layers in the model.
        conv: The tensor [layers, slots, ...] of conv states, or None.
        temporal: The tensor [layers, slots, heads, ...] of temporal states, or None.
        channel_axis: The axis of the channels in the conv state of a slot, 0 or 1.
        sizes: The channels of q, k and v in the model, or None.
        on_cpu: Whether kernels for a CPU write the states.
    """

    path: str
    layers: tuple[int, ...]
    conv: Any
    temporal: Any
    channel_axis: int
    sizes: tuple[int, ...] | None
    on_cpu: bool

    group = STATE

    def axes(self, spec: LayerSpec) -> dict[str, str]:
        """Return the letters of the axes of each tensor, by its name."""
        # The content of a conv state is one element, and that of a temporal state has two axes.
        letters = {"conv": "BHNC", "ssm": "BHCC"}
        return {name: letters[name] for name in self.tensors(0, spec)}

    @property
    def layout(self) -> str:
        """The order of layers, slots, channels (H) and rows (N) in memory."""
        if self.conv is None:
            return "LBHNC"
        # SGLang's kernels for CPUs keep rows outside, under a shape that has channels outside.
        view = self.channels_first(self.conv[0])
        channel, row = (view.strides if hasattr(view, "strides") else view.stride())[1:]
        return "LBNHC" if row > channel and min(view.shape[1:]) > 1 else "LBHNC"

    def channels_first(self, conv: Any) -> Any:  # noqa: ANN401
        """Return the view [slots, channels, rows] of one layer's conv states."""
        return conv if self.channel_axis == 0 else conv.swapaxes(1, 2)

    def tensors(self, place: int, _: LayerSpec) -> dict[str, Any]:
        """Return the views of the layer at *place*, by the name of their tensor."""
        found = {}
        if self.conv is not None:
            found["conv"] = self.channels_first(self.conv[place])[..., None]
        if self.temporal is not None:
            found["ssm"] = self.temporal[place]
        return found

    def spec(self, parallel: ParallelConfig, tp_rank: int, n_groups: int | None) -> MambaSpec:
        """Return the state of the model, of which this is rank *tp_rank*.

        Args:
            parallel: The parallel sizes of the engine.
            tp_rank: The TP rank of the pool.
            n_groups: The groups of the model's Mamba2 layers. None for other layers.

        Raises:
            SpecError: If no kind fits the shapes, or several do.
        """
        tensors = [each for each in (self.conv, self.temporal) if each is not None]
        state = StateShapes(
            field=self.path,
            parallel=parallel,
            tp_rank=tp_rank,
            shapes=tuple(tuple(tensor.shape[2:]) for tensor in tensors),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
            channels=0,
            rows=0,
            n_groups=n_groups,
            block_size=1,
        )
        if self.conv is None:
            return with_temporal_name(linear_state(state), _OWN)
        channels, rows = self.channels_first(self.conv[0]).shape[1:]
        state = attrs.evolve(state, channels=channels, rows=rows)
        if self.temporal is None:
            return short_conv(state)
        if self.sizes is not None:
            spec = self._delta_net(state)
            return with_temporal_name(spec, _CPU) if self.on_cpu else spec
        heads, head_size, state_size = self.temporal.shape[2:]
        if channels == heads and head_size == 1:
            return mamba1(attrs.evolve(state, shapes=(state.shapes[0], (heads, state_size))))
        if n_groups is None:
            wanted = (
                "the groups of B and C in the model, for Mamba 2. Not yet: gated delta nets"
                f" without {self.path}.conv_shard_groups, which look the same"
            )
            raise SpecError("n_groups", None, wanted)
        return mamba2(state)

    def _delta_net(self, state: StateShapes) -> MambaSpec:
        """Return the state of a gated delta net, if it has the channels that SGLang states."""
        spec = gated_delta_net(state)
        own = tuple(part.units for part in spec.parts if part.tensor == "conv")
        if own != self.sizes:
            wanted = f"{own}, from the shapes of rank {state.tp_rank} of {state.tp_size}; not yet:"
            field = f"{self.path}.conv_shard_groups"
            raise SpecError(field, self.sizes, f"{wanted} heads that several ranks hold")
        return spec


def read_states(path: str, fields: object) -> StatePool | None:
    """Return the states of *fields*, one of SGLang's pools, or None if it has none.

    Raises:
        SpecError: If the states have an unknown class or shape, or other tensors belong to them.
    """
    if type(fields).__name__ != "HybridLinearKVPool":
        return None
    pool = FieldReader(path, fields).get("mamba_pool")
    check_class(pool, ("MambaPool",))
    _check_whole(pool)
    cache = pool.get("mamba_cache")
    layers = sequence(f"{pool.path}.mamba_layer_ids", pool.get("mamba_layer_ids").value,
                      "numbers of layers")  # fmt: skip
    convs = [each for each in cache.get("conv").members("tensors") if _filled(each, _CONV_AXES)]
    if len(convs) > 1:
        wanted = "one; not yet: layers with several convolutions"
        raise SpecError(f"{cache.path}.conv", f"{len(convs)} tensors", wanted)
    temporal = cache.get("temporal")
    filled = _filled(temporal, _TEMPORAL_AXES)
    tensors = [*convs, *([temporal] if filled else [])]
    for tensor in tensors:
        if tensor.value.shape[0] != len(layers):
            wanted = f"{len(layers)} layers, as mamba_layer_ids has"
            raise SpecError(f"{tensor.path}.shape", tuple(tensor.value.shape), wanted)
    if not layers or not tensors:
        return None
    groups = pool.get("conv_shard_groups")
    axis = pool.get("conv_slice_axis")
    if axis.value not in (0, 1):
        raise SpecError(axis.path, axis.value, "0 (channels first) or 1 (rows first)")
    return StatePool(
        path=pool.path,
        layers=layers,
        conv=convs[0].value if convs else None,
        temporal=temporal.value if filled else None,
        channel_axis=axis.value,
        sizes=None if groups.value is None else groups.sizes(),
        on_cpu=str(pool.get("device").value).startswith("cpu"),
    )


def _check_whole(pool: FieldReader) -> None:
    """Raise `SpecError` if a slot has tensors beside the conv state and the temporal state."""
    if (others := pool.get("_slot_siblings")).value:
        wanted = "empty; not yet: states of other layers that belong to a slot"
        raise SpecError(others.path, len(others.value), wanted)
    cache = pool.get("mamba_cache")
    for name in vars(cache.value) if cache.value is not None else ():
        if name.startswith(_REPLAY) and (late := cache.get(name)).value is not None:
            wanted = "None; not yet: updates that are not yet in the temporal state"
            raise SpecError(late.path, "a tensor", wanted)


def _filled(tensor: FieldReader, axes: int) -> bool:
    """Return whether a tensor has elements. It must have so many *axes*."""
    check_tensor(tensor.path, tensor.value)
    if len(tensor.value.shape) != axes:
        wanted = f"{axes} axes, the first of layers and the second of slots"
        raise SpecError(f"{tensor.path}.shape", tuple(tensor.value.shape), wanted)
    return bool(prod(tensor.value.shape[1:]))
