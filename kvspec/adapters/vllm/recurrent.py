"""Read the shapes of vLLM's recurrent states on one rank as the parts of the model's state.

Invariant: vLLM keeps a conv state as one tensor of channels. If the shapes leave its order open,
the state is refused.

How it works:
    `kvspec.adapters.state_shapes` divides the channels of a conv state.

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

import attrs

from kvspec.adapters.field_reader import FieldReader
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
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import MambaSpec

# The function that reads each `mamba_type` of vLLM, by the name of the type. Two types are known
# under two names.
TYPES: dict[str, Callable[[StateShapes], MambaSpec]] = {
    "MAMBA1": mamba1,
    "MAMBA2": mamba2,
    "GDN_ATTN": gated_delta_net,
    "GDN_ATTENTION": gated_delta_net,
    "SHORT_CONV": short_conv,
    "LINEAR": linear_state,
    "LINEAR_ATTENTION": linear_state,
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
    if TYPES[name] is linear_state:  # It has no conv state, so the order has no effect.
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
    if TYPES[name] is gated_delta_net and device not in (None, "cuda"):
        # So a CPU's state never moves to CUDA.
        spec = with_temporal_name(spec, f"ssm_{device}")
    return (_whole(spec) if whole else spec), order


def _state(
    rank_spec: FieldReader, parallel: ParallelConfig, tp_rank: int, n_groups: int | None
) -> StateShapes:
    """Return the shapes of *rank_spec*. The order of the conv state is still open."""
    shapes = tuple(shape.sizes() for shape in rank_spec.get("shapes").members("shapes"))
    dtypes = tuple(dtype.dtype() for dtype in rank_spec.get("dtypes").members("dtypes"))
    if len(dtypes) != len(shapes):
        wanted = f"one for each of the {len(shapes)} shapes"
        raise SpecError(f"{rank_spec.path}.dtypes", dtypes, wanted)
    return StateShapes(
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


def _ordered(state: StateShapes, name: str, order: str) -> StateShapes:
    """Return *state* with channels and rows, for a conv state in *order*."""
    if TYPES[name] is linear_state:
        return state
    shapes = state.shapes
    if not shapes or len(shapes[0]) != 2:  # noqa: PLR2004 - channels and rows
        wanted = f"a conv state of 2 axes ({order}) first"
        raise SpecError(f"{state.field}.shapes", shapes, wanted)
    channels, rows = shapes[0] if order == "DS" else shapes[0][::-1]
    return attrs.evolve(state, channels=channels, rows=rows)


def _whole(spec: MambaSpec) -> MambaSpec:
    """Return *spec* as a state that each TP rank holds whole."""
    # All units together are one granule of the sharding, and one granule is replicated.
    parts = [attrs.evolve(part, granularity=part.units) for part in spec.parts]
    return attrs.evolve(spec, state_parts=parts)
