"""A scheduler learns when the loads of all ranks of an engine agree."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.tickets import RankAgreement, ReleaseAgreement

RANKS = ("tp0", "tp1", "tp2")


class Report(NamedTuple):
    """One call of `report`."""

    rank: str
    start: int
    state: Any
    blocks: dict[str, tuple[int, ...]]


def agreed(reports: list[Report]) -> RankAgreement[str]:
    """Return an agreement that has received *reports*."""
    agreement = RankAgreement(RANKS)
    for rank, start, state, blocks in reports:
        agreement.report(rank, state, start=start, written_blocks=blocks)
    return agreement


def outcome(agreement: RankAgreement[Any]) -> tuple[object, ...]:
    """Return all that an agreement answers."""
    return agreement.state, agreement.to_cancel, agreement.undefined_blocks


def model(reports: list[Report]) -> tuple[object, ...]:
    """Compute the answers from the whole list of reports, without any state."""
    words: dict[str, set[str]] = {}
    blocks: dict[str, set[int]] = {}
    for rank in RANKS:
        own = [report for report in reports if report.rank == rank]
        newest = [each for each in own if each.start == max(other.start for other in own)]
        words[rank] = {report.state for report in newest}
        for report in newest:
            for group, ids in report.blocks.items():
                if report.state != "moving" and ids:
                    blocks.setdefault(group, set()).update(ids)
    failed = any("failed" in word for word in words.values())
    moving = tuple(rank for rank, word in words.items() if not word & {"done", "failed"})
    state = "moving" if moving else "failed" if failed else "done"
    found = {group: tuple(sorted(blocks[group])) for group in sorted(blocks) if failed}
    return state, moving if failed else (), found


REPORTS = st.lists(
    st.builds(
        Report,
        rank=st.sampled_from(RANKS),
        start=st.integers(0, 2),
        state=st.sampled_from(("moving", "done", "done", "failed")),
        blocks=st.dictionaries(
            st.sampled_from(("full", "window")),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            max_size=2,
        ),
    ),
    max_size=12,
)


@given(REPORTS, st.integers(0, 99))
def test_agreement_equals_the_model_in_any_order(reports: list[Report], seed: int) -> None:
    """Reports may be late, repeated or of another start."""
    assert model(reports) == outcome(agreed(reports))
    shuffled = [*reports, *reports[:3]]
    random.Random(seed).shuffle(shuffled)
    assert model(reports) == outcome(agreed(shuffled))


def test_agreement_is_done_after_the_last_rank() -> None:
    """A rank that has reported nothing may still move."""
    agreement = RankAgreement(range(2))
    for rank in (0, 1):
        assert ("moving", (), {}) == outcome(agreement)
        agreement.report(rank, "done")
    assert ("done", (), {}) == outcome(agreement)


def test_agreement_fails_after_the_last_rank_has_stopped() -> None:
    """Until then its blocks may still be written."""
    blocks = {"full": (3,)}
    agreement = agreed([Report("tp0", 0, "failed", blocks), Report("tp1", 0, "done", blocks)])
    assert ("moving", ("tp2",)) == (agreement.state, agreement.to_cancel)
    agreement.report("tp2", "failed", written_blocks={"full": [1, 3]})
    assert ("failed", (), {"full": (1, 3)}) == outcome(agreement)


def test_blocks_of_a_rank_that_is_done_are_undefined_if_another_rank_fails() -> None:
    """The rank has overwritten what a prefix cache may still name."""
    agreement = RankAgreement(range(2))
    agreement.report(0, "done", written_blocks={"full": [7]})
    assert {} == agreement.undefined_blocks
    agreement.report(1, "failed")
    assert ("failed", (), {"full": (7,)}) == outcome(agreement)


def test_agreement_keeps_the_error_of_the_rank_that_failed_first() -> None:
    """A rank that restarts has no error any more."""
    agreement = RankAgreement(range(3))
    assert None is agreement.error
    for rank, error in ((1, "peer_lost"), (2, "cancelled"), (1, "again"), (0, "late")):
        agreement.report(rank, "failed", error=error)
        assert "peer_lost" == agreement.error
    agreement.report(1, "moving", start=1)
    assert "cancelled" == agreement.error


def test_rank_that_restarts_must_report_again() -> None:
    """Its memory is gone, so its earlier "done" counts no more, even if it arrives late."""
    agreement = agreed([Report(rank, 1, "done", {}) for rank in RANKS])
    agreement.report("tp1", "moving", start=2)
    agreement.report("tp1", "done", start=1)
    assert ("moving", (), {}) == outcome(agreement)
    agreement.report("tp1", "done", start=2)
    assert ("done", (), {}) == outcome(agreement)


def test_agreement_rejects_wrong_arguments() -> None:
    """The errors name the argument."""
    for ranks, report, field in (
        ([], {}, "ranks"),
        (RANKS, {"state": "connecting"}, "state"),
        (RANKS[1:], {"state": "done"}, "rank"),
        (RANKS, {"state": "done", "start": -1}, "start"),
        (RANKS, {"state": "done", "start": "1"}, "start"),
        (None, {}, "ranks"),
        ([[]], {}, "ranks"),
        (RANKS, {"rank": [], "state": "done"}, "rank"),
        (RANKS, {"state": "failed", "written_blocks": [1]}, "written_blocks"),
        (RANKS, {"state": "failed", "written_blocks": {"full": None}}, "written_blocks"),
    ):
        with pytest.raises(kvspec.SpecError) as caught:
            RankAgreement(ranks).report(**{"rank": "tp0", **report})
        assert field == caught.value.field


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "report", "report", "report", "restart"]),
        st.sampled_from(RANKS),
        st.lists(st.sampled_from("abcd"), max_size=3),
    ),
    max_size=30,
)


@given(EVENTS)
def test_blocks_are_free_once_and_only_after_all_ranks(events: list[Any]) -> None:
    """The whole list of events decides, without any state."""
    releases, held, free = ReleaseAgreement(RANKS), dict[str, int](), list[str]()
    for at, (what, rank, names) in enumerate(events):
        if what == "hold":
            for name in {*names} - held.keys():
                releases.hold(name)
                held[name] = at
            continue
        found = releases.report(rank, names) if what == "report" else releases.restart(rank)
        free += found
        for name in [*held]:
            since = events[held[name] + 1 : at + 1]
            gone = {
                by
                for kind, by, some in since
                if kind == "restart" or (kind == "report" and name in some)
            }
            assert (name in found) == (gone == {*RANKS})
            if name in found:
                del held[name]
        assert {*releases.held} == {*held}
        assert len(found) == len({*found})


def test_release_agreement_rejects_wrong_arguments() -> None:
    releases = ReleaseAgreement(RANKS)
    releases.hold("a")
    for call, field in (
        (lambda: ReleaseAgreement([]), "ranks"),
        (lambda: ReleaseAgreement([[]]), "ranks"),
        (lambda: releases.report("tp9", []), "rank"),
        (lambda: releases.restart([]), "rank"),
        (lambda: releases.hold("a"), "remote_id"),
    ):
        with pytest.raises(kvspec.SpecError) as caught:
            call()
        assert field == caught.value.field
