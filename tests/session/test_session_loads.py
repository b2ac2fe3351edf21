"""Loads of connected sessions: they move the right bytes, and the producer frees the request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from copying_transport import copying
from slotted import Slotted
from two_engines import (
    Side,
    ended,
    engine,
    four_to_two,
    freed,
    land,
    let_nothing_land,
    quiet,
    request,
    until,
)

from kvspec.errors import SpecError
from kvspec.nixl import merging
from kvspec.session import Load, loads, new_remote_id
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight


@pytest.fixture(params=["nixl", "copies"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    """Yield two engines over a fake NIXL, and over a transport that knows no NIXL."""
    with copying() if request.param == "copies" else FakeNixl(), four_to_two() as sides:
        yield sides


@pytest.mark.parametrize(
    "kind", ["fake", "staged", "copies", pytest.param("real", marks=pytest.mark.nixl)]
)
def test_load_moves_each_byte_and_each_rank_frees_the_request_once(kind: str) -> None:
    """The staging area has two slots, so the batches of a load take turns in it."""
    staging = Slotted(buffer=4096, slot_bytes=2048, always=True) if kind == "staged" else None
    if kind == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    kinds: dict[str, Any] = {"real": contextlib.nullcontext, "copies": copying}
    with kinds.get(kind, FakeNixl)(), four_to_two(staging) as (producer, consumer):
        asked, remote_id = request(tokens=14, cached=3), new_remote_id("cmpl-1")
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        loads = consumer.load(asked, remote_id)
        assert ["done", "done"] == ended(loads, producer, consumer)
        assert [] == consumer.wrong(asked)
        assert [(None, {})] * 2 == [(load.error, load.undefined_blocks) for load in loads]
        assert ["cmpl-1"] * 4 == freed(4, producer, consumer)
        quiet(producer, consumer)
        for session in (*producer.sessions.values(), *consumer.sessions.values()):
            stats = session.stats()
            assert 0 == session.nixl.stats().transfers
            assert (0, 0) == (stats.loads, stats.steps)


@pytest.mark.parametrize("wrong", [None, "1", True, -1, float("nan"), float("inf"), 10**400])
def test_load_rejects_a_timeout_that_is_not_a_finite_number(
    pair: tuple[Side, Side], wrong: Any
) -> None:
    """An int that is too large for a float is rejected, too."""
    with pytest.raises(SpecError) as caught:
        pair[1].load(request(), new_remote_id("r"), timeout=wrong)
    assert ("timeout", repr(wrong)) == (caught.value.field, repr(caught.value.value))


def test_unwritten_ranges_cover_the_rest_of_the_blocks(pair: tuple[Side, Side]) -> None:
    """They are the bytes of the request's own blocks that hold older data."""
    producer, consumer = pair
    longer = [6, 5, 4, 3, 2]  # The last block is for tokens 16 to 19.
    asked = request(tokens=14, consumer_blocks={"full": longer, "window": longer})
    remote_id = new_remote_id("cmpl-1")
    producer.hold(remote_id)
    for rank, load in zip(consumer.sessions, consumer.load(asked, remote_id), strict=True):
        ended([load], producer, consumer)
        starts = [flat.ctypes.data for flat in consumer.storage[rank].values()]
        spans = load.unwritten_ranges
        assert (np.uint64, (len(spans), 2)) == (spans.dtype, spans.shape)
        # Tokens 14 to 19 of 2 layers and of 1 layer, and 3 tokens before the window of that layer.
        # Each is K and V of 1 head of 4 bytes.
        assert (6 * (2 + 1) + 3) * 2 * 4 == int(spans[:, 1].sum())
        assert all(any(0 <= int(at) - start < 1 << 20 for start in starts) for at in spans[:, 0])


def test_full_hit_and_decline_free_the_request_without_a_transfer(pair: tuple[Side, Side]) -> None:
    """A load of cached tokens is done at once. All producer ranks learn of both."""
    producer, consumer = pair
    hit, declined = new_remote_id("hit"), new_remote_id("declined")
    producer.hold(hit)
    producer.hold(declined)
    loads = consumer.load(request(tokens=14, cached=14), hit)
    assert ["done", "done"] == [load.state for load in loads]
    for session in consumer.sessions.values():
        session.decline(declined)
    assert ["declined"] * 4 + ["hit"] * 4 == freed(8, producer, consumer)


def test_decline_has_no_name_in_common_with_loads(pair: tuple[Side, Side]) -> None:
    """A client may call its request as a session would call a refusal."""
    producer, consumer = pair
    declined = new_remote_id("declined")
    producer.hold(declined)
    consumer.load(request("decline 0"), new_remote_id("open"))
    for session in consumer.sessions.values():
        session.decline(declined)
    assert ["declined"] * 4 == freed(4, producer, consumer)


def test_load_rejects_wrong_arguments_before_anything_moves(pair: tuple[Side, Side]) -> None:
    """Nothing of a rejected load is left, so the next one can start."""
    session, good, remote_id = pair[1].first, request(), new_remote_id("r")
    outside = attrs.evolve(good, consumer_blocks={"full": [1, 2, 3, 77], "window": [1, 2, 3, 4]})
    for more, field in (
        ({"request": outside}, "consumer_blocks['full']"),
        ({"remote_id": "r"}, "remote_id"),
        ({"remote_id": "r#zz"}, "remote_id"),
        ({"remote_id": b"r"}, "remote_id"),
        ({"engine_id": "Q"}, "engine_id"),
        ({"timeout": float("nan")}, "timeout"),
    ):
        arguments: dict[str, Any] = {"request": good, "remote_id": remote_id, "timeout": 1.0}
        with pytest.raises(SpecError) as caught:
            session.load(**arguments | more)
        assert field == caught.value.field
        assert 0 == session.stats().loads == session.nixl.stats().transfers
    load = session.load(good, remote_id=remote_id, timeout=9.0)
    with pytest.raises(SpecError) as caught:
        session.load(good, remote_id=new_remote_id("r"), timeout=9.0)
    assert ("request_id", "r") == (caught.value.field, caught.value.value)
    load.cancel()


def test_load_ignores_tables_of_excluded_group() -> None:
    """A draft model moves nothing: its table may be short, and two loads may share its blocks."""
    specs = []
    for tp in (4, 2):
        full, window = engine(tp).groups
        draft = attrs.evolve(window, excluded=window.layers)
        specs.append(attrs.evolve(engine(tp), groups=(full, draft)))
    with (
        FakeNixl(),
        Side("P", specs[0], polled=False, lease=5.0) as producer,
        Side("D", specs[1], polled=True, heartbeat=0.2) as consumer,
    ):
        consumer.connect(producer)
        loads: list[Load] = []
        for name, full_blocks in (("a", [1, 2]), ("b", [3, 4])):
            blocks = {"full": full_blocks, "window": [5]}
            remote_id = new_remote_id(name)
            producer.hold(remote_id)
            asked = request(name, tokens=8, producer_blocks=blocks, consumer_blocks=blocks)
            loads += consumer.load(asked, remote_id)
        assert {"done"} == {*ended(loads, producer, consumer)}


def test_session_holds_a_name_once(pair: tuple[Side, Side]) -> None:
    """An abort of another name of the same request changes nothing."""
    session, remote_id = pair[0].first, new_remote_id("r")
    session.hold(remote_id)
    with pytest.raises(SpecError) as caught:
        session.hold(remote_id)
    assert ("remote_id", remote_id) == (caught.value.field, caught.value.value)
    session.abort(new_remote_id("r"))
    assert (remote_id,) == session.held


@pytest.mark.parametrize("name", ["", "x" * 1025, "\ud800", b"binary", None], ids=range(5))
def test_remote_id_rejects_a_request_id_that_messages_cannot_carry(name: Any) -> None:
    """It must be a text of 1 to 1024 characters that UTF-8 can encode."""
    with pytest.raises(SpecError) as caught:
        new_remote_id(name)
    assert ("request_id", name) == (caught.value.field, caught.value.value)


def test_large_load_has_whole_turns_while_another_waits_for_an_answer(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the other load are there, and its producer is silent, perhaps for long."""
    monkeypatch.setattr(loads, "QUIET", 0.01)
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("Q", engine(1), polled=False) as silent,
        Side("D", engine(1), polled=True) as consumer,
    ):
        session = consumer.first
        for side in (producer, silent):
            session.connect(side.introductions)
        asked = request("s", 4, consumer_blocks={"full": [7], "window": [7]})
        small = session.load(asked, remote_id=new_remote_id("s"), engine_id="Q", timeout=9.0)
        until(lambda: not small.in_flight, consumer)
        time.sleep(0.02)
        monkeypatch.setattr(loads, "POLL_TURN", 5.0)  # A busy machine is slow.
        monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 2)
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        load = session.load(request(), remote_id=remote_id, engine_id="P", timeout=9.0)
        session.poll()
        assert ("moving", {}) == (small.state, load.in_flight)


def test_open_steps_are_counted_beside_loads_that_move_nothing() -> None:
    """It does not matter which load starts first."""
    with FakeNixl() as net, four_to_two() as (_, consumer):
        let_nothing_land(net)
        counts = []
        for number, name in enumerate("abc"):
            asked = request(name, cached=0 if number == 1 else 14)
            consumer.first.load(asked, remote_id=new_remote_id(name), timeout=9.0)
            counts.append(consumer.first.stats().steps)
        assert [0, counts[1], counts[1]] == counts
        assert counts[1] > 0
        land(net)


@pytest.mark.parametrize("rest", ["nothing", "a cancelled load", "a load that waits"])
def test_large_load_has_whole_turns_unless_another_load_moves(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    """A cancelled load whose producer is silent repeats its last message, and needs no turns."""
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("Q", engine(1), polled=False) as silent,
        Side("D", engine(1), polled=True) as consumer,
    ):
        session = consumer.first
        for side in (producer, silent):
            session.connect(side.introductions)
        given: dict[str, Any] = {"timeout": 9.0, "engine_id": "Q"}
        blocks = {"full": [7], "window": [7]}
        if rest == "a load that waits":
            let_nothing_land(net)
        if rest != "nothing":
            small = session.load(
                request("s", 4, consumer_blocks=blocks), remote_id=new_remote_id("s"), **given
            )
            if rest == "a cancelled load":
                small.cancel()
                assert "failed" == small.poll()
        wait = time.monotonic() + 2 * loads.QUIET
        while time.monotonic() < wait:
            session.poll()
        net.fate = FakeFlight.land
        monkeypatch.setattr(loads, "POLL_TURN", 5.0)  # A busy machine is slow.
        monkeypatch.setattr(merging, "MAX_DESCRIPTORS", 2)
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        load = session.load(request(), remote_id=remote_id, engine_id="P", timeout=9.0)
        session.poll()
        assert bool(load.in_flight) == (rest == "a load that waits")
