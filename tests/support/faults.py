"""Faults that tests plant in the package, to show that a check finds them.

Every context manager plants one fault and removes it at its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import attrs
import pytest

import kvspec
from kvspec.check import proof
from kvspec.descriptors.request import BlockTable
from kvspec.engines import engine as engines
from kvspec.ownership import parallel
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.replicas import ReplicaPolicyName
from kvspec.ownership.sharding import Sharding, even_sharding
from kvspec.ownership.slices import UnitRange
from kvspec.ownership.tokens import BlockCyclic


@contextlib.contextmanager
def unit_ranges_in_proof(unit_ranges: Callable[..., list[UnitRange]]) -> Iterator[None]:
    """Let the proof compare the slices of *unit_ranges* instead of the planner's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "consumer_unit_ranges", unit_ranges)
        yield


@contextlib.contextmanager
def rounded_up_sharding_in_proof() -> Iterator[None]:
    """Let the proof shard heads with the cuts between ranks rounded up instead of down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "even_sharding", _rounded_up)
        yield


def faults_of_proof(
    heads: int, max_tp: int, replica_policies: tuple[ReplicaPolicyName, ...] = ("spread",)
) -> list[str]:
    """Return the faults that the proof finds for one number of heads, in this process.

    `prove` starts new processes, which do not inherit a planted fault.
    """
    return proof._prove_heads(heads, max_tp, replica_policies)[1]


@contextlib.contextmanager
def first_live_token_lost(spec: type[kvspec.LayerSpec]) -> Iterator[None]:
    """Let `live_tokens` of *spec* omit the first live token."""
    live_tokens = spec.live_tokens

    def without_first(self: kvspec.LayerSpec, num_tokens: int) -> range:
        return live_tokens(self, num_tokens)[1:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "live_tokens", without_first)
        yield


@contextlib.contextmanager
def context_of_next_rank() -> Iterator[None]:
    """Give every rank the tokens of the next context rank."""
    context = ParallelConfig.context

    def shifted(self: ParallelConfig, rank: RankId) -> BlockCyclic:
        own = context(self, rank)
        return attrs.evolve(own, rank=(own.rank + 1) % own.size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelConfig, "context", shifted)
        yield


@contextlib.contextmanager
def rounded_up_sharding() -> Iterator[None]:
    """Shard heads over ranks with the cuts rounded up instead of down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "even_sharding", _rounded_up)
        yield


@contextlib.contextmanager
def packs_counted_as_units() -> Iterator[None]:
    """Give each rank as many units as it should own packs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "even_sharding", _packs_as_units)
        yield


@contextlib.contextmanager
def state_in_block_before() -> Iterator[None]:
    """Look for a state one block before the block of its last token."""
    state_block = BlockTable.state_block

    def before(self: BlockTable, field: str, block_size: int, token: int) -> int:
        return state_block(self, field, block_size, token) - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockTable, "state_block", before)
        yield


@contextlib.contextmanager
def stages_in_reverse() -> Iterator[None]:
    """Assign the layers to the pipeline stages in reverse order."""
    stages_of = engines.stages_of

    def reverse(layers: list[str], sizes: ParallelConfig) -> dict[str, int]:
        return {layer: sizes.pp_size - 1 - at for layer, at in stages_of(layers, sizes).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "stages_of", reverse)
        yield


def _packs_as_units(units: int, tp_size: int, granularity: int = 1) -> Sharding:
    packs = even_sharding(units // granularity, tp_size)
    return Sharding(units, packs.ranges)


def _rounded_up(units: int, tp_size: int, granularity: int = 1) -> Sharding:
    if units <= tp_size:
        return even_sharding(units, tp_size, granularity)
    cuts = [-(-rank * units // tp_size) for rank in range(tp_size + 1)]
    return Sharding(units, tuple(range(*cuts[rank : rank + 2]) for rank in range(tp_size)))
