"""The law of steps, law 13: a request moves while the producer still computes its tokens.

How it works:
    A schedule is a list of steps. Each step names some layers and the range of tokens by which
    these layers advance. For two layers a and b and 6 tokens, `schedule_of` returns:

        layers    tokens    the producer has written
        a         0-1       a: 2 tokens
        b         0-2       a: 2 tokens, b: 3 tokens
        a         2-4       a: 5 tokens, b: 3 tokens
        a         5         a: 6 tokens, b: 3 tokens
        b         3-5       all

    Before each step, the law inverts all bytes of the producer that are not written yet. So a step
    that reads too early delivers a wrong byte, and the oracle finds it at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING

from kvspec.testing.carve import logical_views
from kvspec.testing.laws.system import copies_of
from kvspec.testing.positions import rows_of
from kvspec.testing.world import snapshot

if TYPE_CHECKING:
    from kvspec.ownership.parallel import RankId
    from kvspec.testing.case import Case
    from kvspec.testing.laws.system import Trial
    from kvspec.testing.world import Storage, World

# Steps of (layers, positions by which these layers advance).
Schedule = Sequence[tuple[frozenset[str], range]]


def steps(trial: Trial) -> Iterator[str]:
    """Yield each wrong byte after the steps of `schedule_of`."""
    return scheduled(trial, schedule_of(trial.case))


def schedule_of(case: Case) -> Schedule:
    """Return a schedule: every other layer advances in three steps, and the rest in two.

    For one in five lengths of the prompt, each layer advances in one step, as in an engine that
    computes the whole prompt at once.
    """
    names = sorted(layer for group in case.consumer.groups for layer in group.layers)
    total = case.request.num_tokens
    schedule: list[tuple[frozenset[str], range]] = []
    for layers, cuts in ((names[::2], (total // 3, total - 1)), (names[1::2], (total // 2,))):
        inner = {max(cut, 0) for cut in cuts if total % 5 != 3}  # noqa: PLR2004
        ends = sorted({0, *inner, total}) if total else [0, 0]
        schedule += [(frozenset(layers), range(*pair)) for pair in pairwise(ends) if layers]
    return sorted(schedule, key=lambda step: step[1].stop)


def scheduled(trial: Trial, schedule: Schedule) -> Iterator[str]:
    """Yield each wrong byte after *schedule*, and each consumer rank with a byte written twice.

    No byte may be written twice, because several steps may be in flight together.
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
            copies = copies_of("steps", ask(here, *pair, layers, tokens), *pair)
            here.copy(pair, copies)
            written[pair[1]] += [(place, place + length) for _, place, length in copies]
    for rank, (_, storage) in here.producers.items():
        _overwrite(storage, true[rank])
    yield from here.differences()
    for rank, ranges in written.items():
        if any(start < end for (_, end), (start, _) in pairwise(sorted(ranges))):
            yield f"consumer {rank}: expected 1 write to each byte, got 2 in different steps"


def _hide(here: World, rank: RankId, true: Storage, frontier: dict[str, int]) -> None:
    """Invert all bytes of a producer rank that lie at or after the *frontier* of their layer."""
    case, storage = here.case, here.producers[rank][1]
    _overwrite(storage, true)
    views = logical_views(case.producer, rank, storage, case.producer_pool)
    for rows in rows_of(case.producer, rank, case.request.producer_blocks, case.request):
        upto = frontier.get(rows.key[1], 0)
        if upto >= case.request.num_tokens:
            continue
        # A state, and the keys of an encoder, are complete only after the last token.
        counted = rows.part.per_token and case.producer.group(rows.key[0]).spec.counts_prompt
        ends = rows.token + rows.part.tokens_per_state
        later = ends > upto if counted else rows.row >= 0
        views[rows.key][rows.block[later], :, rows.row[later]] ^= 255


def _overwrite(storage: Storage, true: Storage) -> None:
    for name, flat in storage.items():
        flat[:] = true[name]
