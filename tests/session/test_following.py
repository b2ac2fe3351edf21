"""Loads that follow a prompt while it is computed read each layer as far as it is written."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from copying_transport import copying

import kvspec
from kvspec.errors import SpecError, TransferError

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import BLOCKS, Side, ended, engine, request, start_of, until

from kvspec.session import Load, new_remote_id
from kvspec.session.mailbox import MESSAGE
from kvspec.testing import FakeNixl, logical_views
from kvspec.testing.positions import rows_of
from kvspec.wire.codec import encode_message
from kvspec.wire.messages import LayerProgress, key_of

LAYERS = ("l.0", "l.1", "w.0")


@contextlib.contextmanager
def two(heads: int = 2, **sizes: Any) -> Iterator[tuple[Side, Side]]:
    """Yield a producer and a connected consumer of other sizes."""
    with (
        Side("P", engine(4, heads), polled=False, lease=5.0) as producer,
        Side("D", engine(2, heads, **sizes), polled=True, heartbeat=0.2) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


@pytest.fixture(params=["fake", "copies", pytest.param("real", marks=pytest.mark.nixl)])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    """Yield two engines, over a fake NIXL, the real one, and a transport that knows no NIXL."""
    if request.param == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    kinds: dict[str, Any] = {"fake": FakeNixl, "copies": copying, "real": contextlib.nullcontext}
    with kinds[request.param](), two() as sides:
        yield sides


class Prefill:
    """A producer that computes a request layer by layer, token by token."""

    def __init__(self, side: Side, asked: kvspec.TransferRequest, remote_id: str) -> None:
        self.side, self.asked, self.remote_id = side, asked, remote_id
        self.upto = dict.fromkeys(LAYERS, 0)
        side.hold(remote_id)
        side.fill(asked)
        self.true = {
            rank: {name: flat.copy() for name, flat in storage.items()}
            for rank, storage in side.storage.items()
        }
        self.compute(0, *LAYERS)

    def compute(self, upto: int, *layers: str) -> None:
        """Write *layers* up to a position, with wrong bytes after it, and record the progress."""
        self.upto |= dict.fromkeys(layers, upto)
        for rank, storage in self.side.storage.items():
            for name, flat in storage.items():
                flat[:] = self.true[rank][name]
            views = logical_views(self.side.spec, rank, storage, BLOCKS)
            tables = self.asked.producer_blocks
            for rows in rows_of(self.side.spec, rank, tables, self.asked):
                later = rows.token >= self.upto[rows.key[1]]
                views[rows.key][rows.block[later], :, rows.row[later]] ^= 255
        for session in self.side.sessions.values():
            session.record_progress(self.remote_id, upto, layers)


def follow(consumer: Side, prefill: Prefill, **more: Any) -> list[Load]:
    """Follow a request on every rank."""
    return consumer.load(prefill.asked, prefill.remote_id, follow=True, **more)


def some(sides: tuple[Side, Side], turns: int = 30) -> None:
    """Poll both sides *turns* times."""
    for _ in range(turns):
        for side in sides:
            side.poll()


STEPS = [
    [(3, LAYERS), (9, LAYERS), (14, LAYERS)],
    [(14, ["l.0"]), (14, ["l.1"]), (14, ["w.0"])],
    [(5, ["l.0"]), (5, ["l.1", "w.0"]), (14, ["w.0"]), (13, ["l.0", "l.1"]), (14, ["l.0", "l.1"])],
    [(14, LAYERS)],
]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("cached", [0, 6])
def test_load_that_follows_is_done_when_the_last_layer_is_written(
    pair: tuple[Side, Side], steps: list[tuple[int, list[str]]], cached: int
) -> None:
    """Layers and positions come in any order. Each byte is right, and the request is freed once."""
    producer, consumer = pair
    asked = request(tokens=14, cached=cached)
    prefill = Prefill(producer, asked, new_remote_id("r"))
    consumer.spoil(asked)
    loads = follow(consumer, prefill)
    for upto, layers in steps:
        some(pair)
        assert {"moving"} == {load.state for load in loads}
        prefill.compute(upto, *layers)
    assert {"done"} == set(ended(loads, *pair))
    assert [] == consumer.wrong(asked)
    freed: list[str] = []

    def free() -> bool:
        done, expired = producer.settled()
        freed.extend(done)
        return not expired and len(freed) == len(producer.sessions)

    until(free, *pair)
    assert {"r"} == set(freed)


def test_load_that_follows_reads_only_the_written_layer(pair: tuple[Side, Side]) -> None:
    """Another layer of the same group is not written yet."""
    producer, consumer = pair
    asked = request(tokens=14)
    prefill = Prefill(producer, asked, new_remote_id("r"))
    consumer.spoil(asked)
    loads = follow(consumer, prefill)
    prefill.compute(14, "l.0")

    until(lambda: all(load.progress[0] for load in loads), *pair)
    until(lambda: not any(load.in_flight for load in loads), *pair)
    moved = [load.progress for load in loads]
    some(pair)
    # "l.0" has moved: 14 tokens. "l.1" has as many, and 7 of them are in the window.
    assert {(14 * 8, 35 * 8)} == set(moved)
    assert moved == [load.progress for load in loads]
    for rank, storage in consumer.storage.items():
        now, before = (
            logical_views(consumer.spec, rank, each, BLOCKS)
            for each in (storage, consumer.before[rank])
        )
        changed = {key[1] for key in now if not np.array_equal(now[key], before[key])}
        assert {"l.0"} == changed
    prefill.compute(14, "l.1", "w.0")
    assert {"done"} == set(ended(loads, *pair))
    assert [] == consumer.wrong(asked)


def test_load_follows_one_stage_when_the_other_has_nothing_to_read() -> None:
    """The groups of the first stage are cached, and those of the second are not."""
    stages = kvspec.ParallelConfig(pp_size=2, stages=[["l.0", "l.1"], ["w.0"]])
    spec = kvspec.EngineSpec(groups=engine(1).groups, parallel=stages)
    with (
        FakeNixl(),
        Side("P", spec, polled=False) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.2) as consumer,
    ):
        consumer.connect(producer)
        asked = request(tokens=14, cached={"full": 14, "window": 0})
        prefill = Prefill(producer, asked, new_remote_id("r"))
        consumer.spoil(asked)
        loads = follow(consumer, prefill)
        some((producer, consumer))
        assert ["moving"] == [load.state for load in loads]
        prefill.compute(14, *LAYERS)
        assert ["done"] == ended(loads, producer, consumer)
        assert [] == consumer.wrong(asked)


def test_disconnect_releases_the_lists_of_all_layers(pair: tuple[Side, Side]) -> None:
    """They describe whole ranks and single layers, of local and of remote memory."""
    producer, consumer = pair
    for turn in range(2):
        asked = request(f"r-{turn}", tokens=14)
        prefill = Prefill(producer, asked, new_remote_id(f"r-{turn}"))
        loads = follow(consumer, prefill)
        prefill.compute(14, "l.0")
        until(lambda loads=loads: all(load.progress[0] for load in loads), *pair)
        prefill.compute(14, *LAYERS)
        assert {"done"} == set(ended(loads, *pair))
        for session in consumer.sessions.values():
            assert session.nixl.stats().lists > 2
            session.disconnect("P")
            left = session.nixl.stats()
            assert (0, 0, ()) == (left.lists, left.peers, session.nixl.peers)
        consumer.connect(producer)


def test_load_follows_a_prompt_that_was_written_before(pair: tuple[Side, Side]) -> None:
    """The producer sends its progress to a late reader, too."""
    producer, consumer = pair
    asked = request(tokens=14)
    prefill = Prefill(producer, asked, new_remote_id("r"))
    prefill.compute(14, *LAYERS)
    consumer.spoil(asked)
    assert {"done"} == set(ended(follow(consumer, prefill), *pair))
    assert [] == consumer.wrong(asked)


def test_load_that_follows_fails_at_its_timeout(pair: tuple[Side, Side]) -> None:
    """The prompt is never complete. The producer frees the request."""
    producer, consumer = pair
    asked = request(tokens=14)
    prefill = Prefill(producer, asked, new_remote_id("r"))
    consumer.spoil(asked)
    loads = follow(consumer, prefill, timeout=1.5)
    prefill.compute(9, *LAYERS)
    assert {"failed"} == set(ended(loads, *pair))
    assert {"timeout"} == {load.error.state for load in loads if load.error}
    assert all(load.undefined_blocks for load in loads)
    sessions = [*producer.sessions.values(), *consumer.sessions.values()]
    until(lambda: not any(s.stats().held + s.stats().loads for s in sessions), *pair)


def test_cancelled_load_stops_following(pair: tuple[Side, Side]) -> None:
    """Later progress moves nothing."""
    producer, consumer = pair
    asked = request(tokens=14)
    prefill = Prefill(producer, asked, new_remote_id("r"))
    consumer.spoil(asked)
    loads = follow(consumer, prefill)
    prefill.compute(5, *LAYERS)
    some(pair)
    for load in loads:
        load.cancel()
    assert {"failed"} == set(ended(loads, *pair))
    before = {r: {n: f.copy() for n, f in s.items()} for r, s in consumer.storage.items()}
    with contextlib.suppress(SpecError):  # The request may be free by now.
        prefill.compute(14, *LAYERS)
    some(pair)
    for rank, storage in consumer.storage.items():
        for name, flat in storage.items():
            assert np.array_equal(before[rank][name], flat)


def test_load_follows_layers_whose_group_has_another_name() -> None:
    """Each engine chooses the names of its groups, so layers identify them."""
    with FakeNixl():
        spec = engine(2)
        renamed = kvspec.EngineSpec(
            groups=[
                kvspec.KVCacheGroup(name=f"P {g.name}", layers=g.layers, spec=g.spec)
                for g in spec.groups
            ],
            parallel=spec.parallel,
        )
        asked = request(tokens=14)
        tables = {f"P {name}": table for name, table in asked.producer_blocks.items()}
        asked = request(tokens=14, producer_blocks=tables)
        with (
            Side("P", renamed, polled=False) as producer,
            Side("D", engine(1), polled=True, heartbeat=0.2) as consumer,
        ):
            consumer.connect(producer)
            prefill = Prefill(producer, asked, new_remote_id("r"))
            consumer.spoil(asked)
            loads = follow(consumer, prefill)
            prefill.compute(14, *LAYERS)
            assert {"done"} == set(ended(loads, producer, consumer))
            assert [] == consumer.wrong(asked)


def test_progress_of_an_unknown_layer_moves_nothing(pair: tuple[Side, Side]) -> None:
    """The producer may have layers that the consumer lacks."""
    producer, consumer = pair
    prefill = Prefill(producer, request(tokens=14), new_remote_id("r"))
    loads = follow(consumer, prefill)
    some(pair)
    by, key = producer.first, key_of(prefill.remote_id)
    for load, session in zip(loads, consumer.sessions.values(), strict=True):
        before = session.stats().counters.messages_received
        message = LayerProgress(
            key=key, by=by.me, to=session.me, group="full", layer="l.9", upto=14
        )
        sealed = by.nixl.secret.seal(MESSAGE, encode_message(message, start_of(by)))
        by.channel.send(session.channel.address, sealed)
        until(
            lambda session=session, before=before: (
                session.stats().counters.messages_received > before
            ),
            *pair,
        )
        assert ("moving", 0) == (load.poll(), load.progress[0])
    prefill.compute(14, *LAYERS)
    assert {"done"} == set(ended(loads, *pair))


def test_record_progress_rejects_invalid_arguments(pair: tuple[Side, Side]) -> None:
    """A position goes back, a layer is unknown, or a request is not held."""
    producer, consumer = pair
    asked = request(tokens=14)
    prefill = Prefill(producer, asked, new_remote_id("r"))
    session = next(iter(producer.sessions.values()))
    session.record_progress(prefill.remote_id, 9)
    wrong: list[tuple[str, Any, Any, Any]] = [
        ("upto", prefill.remote_id, 4, None),
        ("upto", prefill.remote_id, -1, None),
        ("upto", prefill.remote_id, 1.5, None),
        ("layers", prefill.remote_id, 10, ["l.9"]),
        ("layers", prefill.remote_id, 10, 7),
        ("remote_id", new_remote_id("other"), 10, None),
    ]
    for field, remote_id, upto, layers in wrong:
        with pytest.raises(SpecError) as caught:
            session.record_progress(remote_id, upto, layers)
        assert field == caught.value.field
    short = request(tokens=14, consumer_blocks={"full": [1], "window": [1]})
    with pytest.raises(SpecError) as caught:
        consumer.load(short, prefill.remote_id, follow=True)
    assert "consumer_blocks['full']" == caught.value.field


def test_rejected_progress_advances_none_of_its_layers(pair: tuple[Side, Side]) -> None:
    """One layer would go back, so the readers receive no progress of the others either."""
    producer, consumer = pair
    prefill = Prefill(producer, request(tokens=14), new_remote_id("r"))
    loads = follow(consumer, prefill)
    session = next(iter(producer.sessions.values()))
    session.record_progress(prefill.remote_id, 9, ["w.0"])
    for layers in (["l.0", "w.0"], None):
        with pytest.raises(SpecError, match=r"w\.0") as caught:
            session.record_progress(prefill.remote_id, 8, layers)
        assert ("upto", 8) == (caught.value.field, caught.value.value)
    session.record_progress(prefill.remote_id, 1, ["l.0"])
    for load in loads:
        load.cancel()


def test_load_that_failed_starts_no_further_step() -> None:
    """Its late step may still write, so the load stays in the state "moving"."""
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True, clock=lambda: 0.0) as consumer,
    ):
        consumer.connect(producer)
        prefill = Prefill(producer, request(tokens=14), new_remote_id("r"))
        net.fate = lambda _: None
        (load,) = follow(consumer, prefill, timeout=0.05)
        prefill.compute(4, *LAYERS)
        until(lambda: load.error, producer, consumer)
        assert ("moving", "timeout") == (load.poll(), load.error and load.error.state)
        (late,) = net.moving
        prefill.compute(14, *LAYERS)
        for _ in range(20):
            producer.poll()
            consumer.poll()
        assert [late] == net.moving
        late.land()
        assert ["failed"] == ended([load], producer, consumer)


# Earlier deadlines pass before the producer writes anything.
@pytest.mark.parametrize("timeout", range(8, 40))
def test_load_that_follows_fails_alone_wherever_its_deadline_falls(timeout: int) -> None:
    """The time advances at each call of the clock, so the deadline falls between any two calls.

    The consumer has the first tokens cached, so the steps of these tokens end at once.
    """
    times = itertools.count()
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False) as producer,
        Side(
            "D", engine(1), polled=True, heartbeat=5.0, clock=lambda: float(next(times))
        ) as consumer,
    ):
        consumer.connect(producer)
        prefill = Prefill(producer, request(tokens=14, cached=8), new_remote_id("r"))
        (load,) = follow(consumer, prefill, timeout=float(timeout))
        prefill.compute(8, *LAYERS)
        some((producer, consumer), 3)
        prefill.compute(14, *LAYERS)
        (state,) = ended([load], producer, consumer)
        assert state == "done" or (load.error is not None and load.error.state == "timeout")


def test_load_that_follows_fails_when_its_producer_is_connected_again() -> None:
    """The lists belonged to the first connection. New loads work."""
    with FakeNixl(), two() as sides:
        producer, consumer = sides
        prefill = Prefill(producer, request(tokens=14), new_remote_id("r"))
        loads = follow(consumer, prefill)
        for session in consumer.sessions.values():
            session.connect(producer.other_introductions)
        prefill.compute(14, *LAYERS)
        assert ["failed"] * 2 == ended(loads, *sides)
        assert all("again" in str(load.error) for load in loads)
        again = Prefill(producer, request("again", 14), new_remote_id("again"))
        consumer.spoil(again.asked)
        loads = follow(consumer, again)
        again.compute(14, *LAYERS)
        assert ["done"] * 2 == ended(loads, *sides)
        assert [] == consumer.wrong(again.asked)


def test_step_that_cannot_start_fails_its_load_alone() -> None:
    """Its lists were released meanwhile. The other rank's load is done."""
    with FakeNixl(), two() as sides:
        producer, consumer = sides
        asked = request(tokens=14)
        prefill = Prefill(producer, asked, new_remote_id("r"))
        consumer.spoil(asked)
        loads = follow(consumer, prefill)
        for lane in loads[0].remote.lanes.values():
            lane.release()
        prefill.compute(14, *LAYERS)
        assert ["failed", "done"] == ended(loads, *sides)
        assert isinstance(loads[0].error, TransferError)
        assert "released" in loads[0].error.message
