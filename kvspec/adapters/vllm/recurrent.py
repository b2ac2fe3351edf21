"""Read the shapes of vLLM's recurrent states on one rank as the parts of the model's state.

Invariant: vLLM keeps a conv state as one tensor of channels. The division of the channels follows
from the type of the state and from the shape of the temporal state. If the division leaves a
remainder, the state is refused.

How it works:
    A Mamba2 layer on one of 2 TP ranks reports two shapes: conv (96, 3) and temporal (8, 4, 16),
    that is heads, head_dim and state_size. A rank's channels are x, B and C, one after the other:

        x         heads · head_dim = 8 · 4        32 channels
        B and C   (96 - 32) / 2, for each         32 channels = 2 groups of state_size 16

    So the model has 2 · 8 = 16 heads and, if the groups are sharded, 2 · 2 = 4 groups. If a rank
    has only one group, the group may be sharded (the model has 2) or replicated (the model has 1).
    Then the caller must pass `n_groups`.

    The parts must be known one by one. A rank of an engine with another TP size does not hold one
    run of the channels, but a share of x, a share of B and a share of C.

    The shape (96, 3) may have the channels first (``DS``) or the rows first (``SD``). Both orders
    are tried unless the caller passes one. If exactly one order divides without remainder, it is
    taken. If both do, the caller must pass the order, even if both give the same spec. A conv state
    (4, 4) has 4 channels and 4 rows in both orders, but channel 1 is at other addresses:

        DS    bytes 4, 5, 6, 7
        SD    bytes 1, 5, 9, 13

    A rank with 2 of the 4 channels would then receive bytes of the other 2.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.errors import SpecError
from kvspec.ownership.dtypes import itemsize
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.part import Part
from kvspec.specs import MambaSpec


@attrs.frozen(kw_only=True)
class _State:
    """The shapes of one layer's state on one rank.

    *channels* and *rows* belong to the conv state. They are 0 until its order is known.
    """

    field: str
    parallel: ParallelConfig
    tp_rank: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    channels: int
    rows: int
    n_groups: int | None
    block_size: int

    def temporal(self, *names: str) -> tuple[int, ...]:
        """Return the temporal state's shape. Its axes must be as many as *names*."""
        shapes = self.shapes
        if len(shapes) != 2 or len(shapes[1]) != len(names):  # noqa: PLR2004 - conv and ssm
            wanted = f"a conv state of 2 axes and a temporal state ({', '.join(names)})"
            raise SpecError(f"{self.field}.shapes", shapes, wanted)
        return shapes[1]

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that all types with a conv and a temporal state have."""
        conv, ssm = self.dtypes[0], self.dtypes[-1]
        return {
            # The conv state keeps the inputs before the current one, which the kernel covers too.
            "conv_kernel": self.rows + 1,
            "dtype": conv,
            "ssm_dtype": ssm,
            "block_size": self.block_size,
        }

    def wrong_channels(self, wanted: str) -> SpecError:
        """Return the error for a number of channels that cannot be divided into the parts."""
        return SpecError(f"{self.field}.shapes[0]", self.shapes[0], f"{wanted} channels")

    @property
    def tp_size(self) -> int:
        """The TP ranks of the engine."""
        return self.parallel.tp_size


def _mamba1(state: _State) -> MambaSpec:
    width, size = state.temporal("intermediate_size", "state_size")
    if state.channels != width:
        raise state.wrong_channels(f"{width}, the temporal state's,")
    total = width * state.tp_size
    return MambaSpec.mamba1(intermediate_size=total, state_size=size, **state.sizes())


def _mamba2(state: _State) -> MambaSpec:
    heads, head_dim, size = state.temporal("num_heads", "head_dim", "state_size")
    groups, rest = divmod(state.channels - heads * head_dim, 2 * size)
    if rest or groups < 1:
        raise state.wrong_channels(f"{heads * head_dim} (x) and whole pairs of {size} (B, C)")
    total = state.n_groups
    # vLLM replicates the groups of a model that has fewer groups than TP ranks. Then each rank
    # holds one group. Scaling that by TP makes a rank read C where B should be (vllm#55208).
    if total is None and groups == 1 and state.tp_size > 1:
        wanted = "the groups of the model: one group on each rank may be sharded or replicated"
        raise SpecError("n_groups", None, wanted)
    if total is None:
        total = groups * state.tp_size
    spec = MambaSpec.mamba2(
        num_heads=heads * state.tp_size,
        head_dim=head_dim,
        n_groups=total,
        state_size=size,
        **state.sizes(),
    )
    own_units = len(state.parallel.sharding(total * size, size).ranges[state.tp_rank])
    if own_units != groups * size:
        wanted = f"a number of which rank {state.tp_rank} of {state.tp_size} has {groups}"
        raise SpecError("n_groups", total, wanted)
    return spec


def _gated_delta_net(state: _State) -> MambaSpec:
    heads, value_dim, key_dim = state.temporal("num_v_heads", "head_v_dim", "head_k_dim")
    key, rest = divmod(state.channels - heads * value_dim, 2)
    if rest or key < 1 or key % key_dim:
        wanted = f"{heads * value_dim} (v) and two times whole heads of {key_dim} (q, k)"
        raise state.wrong_channels(wanted)
    return MambaSpec.gated_delta_net(
        num_k_heads=key // key_dim * state.tp_size,
        num_v_heads=heads * state.tp_size,
        head_k_dim=key_dim,
        head_v_dim=value_dim,
        **state.sizes(),
    )


def _short_conv(state: _State) -> MambaSpec:
    if len(state.shapes) != 1:
        raise SpecError(f"{state.field}.shapes", state.shapes, "one conv state of 2 axes")
    return MambaSpec.short_conv(
        conv_dim=state.channels * state.tp_size,
        conv_kernel=state.rows + 1,
        dtype=state.dtypes[0],
        block_size=state.block_size,
    )


def _linear(state: _State) -> MambaSpec:
    if len(state.shapes) != 1 or len(state.shapes[0]) < 2:  # noqa: PLR2004 - heads, content
        wanted = "one state of heads and their content"
        raise SpecError(f"{state.field}.shapes", state.shapes, wanted)
    (heads, *content), dtype = state.shapes[0], state.dtypes[0]
    part = Part(
        name="ssm",
        units=heads * state.tp_size,
        states=1,
        content_bytes=prod(content) * itemsize(dtype),
        tokens_per_state=0,
        dtype=dtype,
        tensor="ssm",
    )
    return MambaSpec(block_size=state.block_size, state_parts=(part,), dtype=dtype)


# The function that reads each `mamba_type` of vLLM, by the name of the type. Two types are known
# under two names.
TYPES: dict[str, Callable[[_State], MambaSpec]] = {
    "MAMBA1": _mamba1,
    "MAMBA2": _mamba2,
    "GDN_ATTN": _gated_delta_net,
    "GDN_ATTENTION": _gated_delta_net,
    "SHORT_CONV": _short_conv,
    "LINEAR": _linear,
    "LINEAR_ATTENTION": _linear,
}


def read_state(
    rank_spec: FieldReader,
    parallel: ParallelConfig,
    tp_rank: int,
    conv_layout: str | None,
    n_groups: int | None,
    device: str | None = None,
) -> tuple[MambaSpec, str]:
    """Return the spec of a recurrent state and the order of its conv state.

    Args:
        rank_spec: vLLM's `MambaSpec` on one rank.
        parallel: The parallel sizes of the engine.
        tp_rank: The TP rank of *rank_spec*.
        conv_layout: ``DS`` (dimension first), ``SD`` (row first), or None to try both.
        n_groups: The groups of the model's Mamba2 layers, if the caller knows them.
        device: The type of device whose kernels write the state. CUDA if None.

    Returns:
        The spec in the model, and ``DS`` or ``SD``.

    Raises:
        SpecError: If the type is unknown, the shapes do not fit the type, both orders fit, or
            `n_groups` is required.
    """
    kind = rank_spec.get("mamba_type").value
    name = str(getattr(kind, "name", kind)).upper()
    if name not in TYPES:
        raise SpecError(f"{rank_spec.path}.mamba_type", kind, f"one of {', '.join(TYPES)}")
    whole = rank_spec.get("tp_replicated").flag(default=False)
    # A replicated state has the sizes of the model on each rank, as in an engine without TP.
    own = (ParallelConfig(), 0, None) if whole else (parallel, tp_rank, n_groups)
    state = _state(rank_spec, *own)
    orders = ("DS", "SD") if conv_layout is None else (conv_layout,)
    if TYPES[name] is _linear:  # It has no conv state, so the order has no effect.
        orders = orders[:1]
    specs: dict[str, MambaSpec] = {}
    errors: list[SpecError] = []
    for order in orders:
        try:
            specs[order] = TYPES[name](_ordered(state, name, order))
        except SpecError as error:
            errors.append(error)
    # In an order that fails for `n_groups`, the shapes fit. The other order is just wrong.
    lacking = [error for error in errors if error.field == "n_groups"]
    if not specs:
        raise (lacking or errors)[0]
    # Equal specs are no reason to accept both orders: the channels have other addresses. And an
    # order that lacks only `n_groups` fits with some number of groups.
    if len(specs) > 1 or any(error.value is None for error in lacking):
        wanted = f"'DS' or 'SD': {state.shapes[0]} may be dimension first or row first"
        raise SpecError("conv_layout", None, wanted)
    ((order, spec),) = specs.items()
    # vLLM's shapes are the same on all devices, but its CPU kernels write [keys, values] under the
    # shape [values, keys].
    if TYPES[name] is _gated_delta_net and device not in (None, "cuda"):
        spec = _of_device(spec, device)
    return (_whole(spec) if whole else spec), order


def _state(
    rank_spec: FieldReader, parallel: ParallelConfig, tp_rank: int, n_groups: int | None
) -> _State:
    """Return the shapes of *rank_spec*. The order of the conv state is still open."""
    shapes = tuple(shape.sizes() for shape in rank_spec.get("shapes").members("shapes"))
    dtypes = tuple(dtype.dtype() for dtype in rank_spec.get("dtypes").members("dtypes"))
    if len(dtypes) != len(shapes):
        wanted = f"one for each of the {len(shapes)} shapes"
        raise SpecError(f"{rank_spec.path}.dtypes", dtypes, wanted)
    return _State(
        field=rank_spec.path,
        parallel=parallel,
        tp_rank=tp_rank,
        shapes=shapes,
        dtypes=dtypes,
        channels=0,
        rows=0,
        n_groups=n_groups,
        block_size=rank_spec.get("block_size").size(),
    )


def _ordered(state: _State, name: str, order: str) -> _State:
    """Return *state* with channels and rows, for a conv state in *order*."""
    if TYPES[name] is _linear:
        return state
    shapes = state.shapes
    if not shapes or len(shapes[0]) != 2:  # noqa: PLR2004 - channels and rows
        wanted = f"a conv state of 2 axes ({order}) first"
        raise SpecError(f"{state.field}.shapes", shapes, wanted)
    channels, rows = shapes[0] if order == "DS" else shapes[0][::-1]
    return attrs.evolve(state, channels=channels, rows=rows)


def _of_device(spec: MambaSpec, device: str | None) -> MambaSpec:
    """Return *spec* with a temporal state that is named after the device.

    A part moves only to a part of the same name, so a CPU's state never moves to CUDA.
    """
    names = {"ssm": f"ssm_{device}"}
    parts = [attrs.evolve(part, name=names.get(part.name, part.name)) for part in spec.parts]
    return attrs.evolve(spec, state_parts=parts)


def _whole(spec: MambaSpec) -> MambaSpec:
    """Return *spec* as a state that each TP rank holds whole."""
    # All units together are one granule of the sharding, and one granule is replicated.
    parts = [attrs.evolve(part, granularity=part.units) for part in spec.parts]
    return attrs.evolve(spec, state_parts=parts)
