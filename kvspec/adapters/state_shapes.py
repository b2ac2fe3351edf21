"""The recurrent states of a model, from the shapes that one rank of an engine allocates.

Invariant: the division of a conv state's channels follows from the kind of the state and from the
shape of the temporal state. If the division leaves a remainder, the state is refused.

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
"""

from __future__ import annotations

from math import prod
from typing import Any

import attrs

from kvspec.errors import SpecError
from kvspec.ownership.dtypes import itemsize
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.part import Part
from kvspec.specs import MambaSpec


@attrs.frozen(kw_only=True)
class StateShapes:
    """The shapes of one layer's state on one rank.

    Attributes:
        field: The path to the shapes, for error messages.
        parallel: The parallel sizes of the engine.
        tp_rank: The TP rank.
        shapes: The shape of the conv state, if there is one, and then of the temporal state.
        dtypes: The type of each.
        channels: The channels of the conv state. 0 until its order is known.
        rows: The rows of the conv state, with the same rule.
        n_groups: The groups of the model's Mamba2 layers, if the caller knows them.
        block_size: Tokens of one block.
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


def mamba1(state: StateShapes) -> MambaSpec:
    """Return the state of Mamba1 layers."""
    width, size = state.temporal("intermediate_size", "state_size")
    if state.channels != width:
        raise state.wrong_channels(f"{width}, the temporal state's,")
    total = width * state.tp_size
    return MambaSpec.mamba1(intermediate_size=total, state_size=size, **state.sizes())


def mamba2(state: StateShapes) -> MambaSpec:
    """Return the state of Mamba2 layers."""
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


def gated_delta_net(state: StateShapes) -> MambaSpec:
    """Return the state of gated delta nets, also with a gate for each channel (KDA)."""
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


def short_conv(state: StateShapes) -> MambaSpec:
    """Return the state of short convolutions."""
    if len(state.shapes) != 1:
        raise SpecError(f"{state.field}.shapes", state.shapes, "one conv state of 2 axes")
    return MambaSpec.short_conv(
        conv_dim=state.channels * state.tp_size,
        conv_kernel=state.rows + 1,
        dtype=state.dtypes[0],
        block_size=state.block_size,
    )


def linear_state(state: StateShapes) -> MambaSpec:
    """Return the state of linear attention, which has no conv state."""
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


def with_temporal_name(spec: MambaSpec, name: str) -> MambaSpec:
    """Return *spec* with a temporal state called *name*.

    A part moves only to a part of the same name. So the name stands for the order of the state.
    """
    parts = [attrs.evolve(part, name=name if part.name == "ssm" else part.name)
             for part in spec.parts]  # fmt: skip
    return attrs.evolve(spec, state_parts=parts)
