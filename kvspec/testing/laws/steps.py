"""The law of steps: a request that moves while its tokens are still being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING

from kvspec.testing.carve import logical_views
from kvspec.testing.laws.system import ints
from kvspec.testing.positions import rows_of
from kvspec.testing.world import snapshot

if TYPE_CHECKING:
    from kvspec.ownership.parallel import RankId
    from kvspec.testing.case import Case
    from kvspec.testing.laws.system import Trial
    from kvspec.testing.world import Storage, World

Schedule = Sequence[tuple[frozenset[str], range]]
"""Layers, and the positions by which they move on, step by step."""


def steps(trial: Trial) -> Iterator[str]:
    """Yield what is wrong after steps of half the layers each, at uneven frontiers."""
    return scheduled(trial, schedule_of(trial.case))


def schedule_of(case: Case) -> Schedule:
    """Return steps of every other layer: of the first half in three, of the second in two."""
    names = sorted(layer for group in case.consumer.groups for layer in group.layers)
    total = case.request.num_tokens
    found: list[tuple[frozenset[str], range]] = []
    for layers, cuts in ((names[::2], (total // 3, total - 1)), (names[1::2], (total // 2,))):
        ends = sorted({0, *(max(cut, 0) for cut in cuts), total}) if total else [0, 0]
        found += [(frozenset(layers), range(*pair)) for pair in pairwise(ends) if layers]
    return sorted(found, key=lambda step: step[1].stop)


def scheduled(trial: Trial, schedule: Schedule) -> Iterator[str]:
    """Yield what is wrong after *schedule*: each step reads what is written by then, no more.

    Whatever a producer writes later is wrong until then; all must be right at the end, and no byte
    written twice, so that steps may be in flight together.
    """
    ask = trial.system.steps
    if ask is None:
        return
    here = trial.world
    here.restore()
    true = snapshot(here.producers)
    written: dict[RankId, list[tuple[int, int]]] = {rank: [] for rank in here.consumers}
    frontier = dict.fromkeys({layer for layers, _ in schedule for layer in layers}, 0)
    for layers, tokens in schedule:
        frontier |= dict.fromkeys(layers, tokens.stop)
        for rank in here.producers:
            _hide(here, rank, true[rank], frontier)
        for pair in product(here.producers, here.consumers):
            copies = [ints(copy) for copy in ask(here, *pair, layers, tokens)]
            here.copy(pair, copies)
            written[pair[1]] += [(place, place + length) for _, place, length in copies]
    for rank, (_, storage) in here.producers.items():
        _overwrite(storage, true[rank])
    yield from here.differences()
    for rank, spans in written.items():
        if any(start < end for (_, end), (start, _) in pairwise(sorted(spans))):
            yield f"consumer {rank}: a byte is written in two steps"


def _hide(here: World, rank: RankId, true: Storage, frontier: dict[str, int]) -> None:
    """Give a producer what it has written so far: each layer up to its *frontier*."""
    case, storage = here.case, here.producers[rank][1]
    _overwrite(storage, true)
    views = logical_views(case.producer, rank, storage, case.producer_pool)
    for rows in rows_of(case.producer, rank, case.request.producer_blocks, case.request):
        upto = frontier.get(rows.key[1], 0)
        if upto >= case.request.num_tokens:
            continue
        counted = rows.part.per_token and case.producer.group(rows.key[0]).spec.counts_prompt
        ends = rows.token + rows.part.tokens_per_state
        later = ends > upto if counted else rows.row >= 0
        views[rows.key][rows.block[later], :, rows.row[later]] ^= 255


def _overwrite(storage: Storage, true: Storage) -> None:
    for name, flat in storage.items():
        flat[:] = true[name]
