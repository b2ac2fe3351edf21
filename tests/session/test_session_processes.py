"""Sessions in separate processes over NIXL, which are killed, stopped, restarted and late."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

pytest.importorskip("nixl_cu13", reason="needs nixl")

from faulty_ranks import FaultyEngine, go_on, stop
from session_soak import soak
from two_engines import engine

import kvspec
from kvspec.run.rank_client import until
from kvspec.run.rank_server import Launch
from kvspec.session import new_remote_id

pytestmark = pytest.mark.nixl
TIMES = {"lease": 2.0, "heartbeat": 0.3, "patience": 2.0}


def started(
    name: str, spec: kvspec.EngineSpec, epoch: int, *, tls: str = "all", **more: Any
) -> FaultyEngine:
    """Start an engine. Ranks of the producer "P" start no transfers."""
    options = {"blocks": 12} | more
    return FaultyEngine(spec, Launch(name=name, epoch=epoch, polled=name != "P", **options), tls)


def asked(name: str, tokens: int = 14, block: int = 4, first: int = 1) -> kvspec.TransferRequest:
    """Return a request of *tokens*, in blocks from *first* on."""
    ids = list(range(first, first + -(-tokens // block)))
    tables = {"full": ids, "window": ids}
    return kvspec.TransferRequest(
        request_id=name, num_tokens=tokens, producer_blocks=tables, consumer_blocks=tables
    )


def load(
    producer: FaultyEngine, consumer: FaultyEngine, name: str, timeout: float = 10.0, **more: Any
) -> list[Any]:
    """Hold and load a request. Return the outcome on each rank of the consumer."""
    remote_id = new_remote_id(name)
    producer.ask("hold", remote_id, asked(name), 7)
    consumer.ask("load", asked(name), remote_id, 7, timeout, **more)
    return consumer.ended(name)


DONE = ("done", "", {}, 0)


def test_producer_frees_requests_of_a_killed_consumer_and_serves_the_next() -> None:
    """The blocks are free after the lease.

    It runs over shared memory, because over tcp UCX may end the process that is read from.
    """
    spec = engine(1, heads=1, block=16, size=8192)
    tokens, sizes = 16 * 60, dict[str, Any]({"blocks": 64, **TIMES})
    with started("P", spec, 1, **sizes) as producer:
        names = [f"r{epoch}" for epoch in (1, 2)]
        for epoch, name in enumerate(names, 1):
            with started("D", spec, epoch, **sizes) as consumer:
                consumer.connect(producer)
                remote_id, request = new_remote_id(name), asked(name, tokens, 16)
                producer.ask("hold", remote_id, request, 7)
                consumer.ranks[0].send("load", request, remote_id, 7, 20.0)
                time.sleep(2e-3 * epoch)
        producer.settled(*names)  # Once on every rank, whether or not it was read in time.
        with started("D", spec, 3, **sizes) as consumer:
            consumer.connect(producer)
            remote_id, request = new_remote_id("again"), asked("again", tokens, 16)
            producer.ask("hold", remote_id, request, 7, lease=20.0)
            consumer.ask("load", request, remote_id, 7, 20.0)
            assert [DONE] == consumer.ended("again")
            assert [{"done"}] == producer.settled("again")
            consumer.quiet()
            producer.quiet()


@pytest.mark.parametrize("end", ["kill", "close"])
def test_reader_that_ends_over_tcp_ends_at_most_the_process_of_its_producer(end: str) -> None:
    """If a reader is killed during a read, UCX may end the producer. A closed reader never does.

    Loads of the other reader are done or fail, and the next incarnation of the producer serves it.
    """
    spec = engine(1, heads=2, block=16, size=512)
    tokens, sizes = 16 * 800, dict[str, Any]({"blocks": 804, "tls": "tcp", **TIMES})
    scattered = {name: [*range(1, 801, 2), *range(2, 801, 2)] for name in ("full", "window")}
    ordered = {name: [*range(1, 801)] for name in ("full", "window")}
    with started("E", spec, 1, **sizes) as other:
        producer = started("P", spec, 1, **sizes)
        for turn in (1, 2):
            other.connect(producer)
            with started("D", spec, turn, **sizes) as consumer:
                consumer.connect(producer)
                for reader in (consumer, other):
                    name = f"{turn} {reader.ranks[0].name}"
                    request = kvspec.TransferRequest(
                        request_id=name, num_tokens=tokens, producer_blocks=scattered,
                        consumer_blocks=ordered,
                    )  # fmt: skip
                    remote_id = new_remote_id(name)
                    producer.ask("hold", remote_id, request, 7, lease=60.0)
                    reader.ask("load", request, remote_id, 7, 60.0)
                time.sleep(2e-2 * turn)
                if end == "close":
                    consumer.ask("close", 20.0)
            ((state, error, _, wrong),) = other.ended(f"{turn} E tp0")
            assert 0 == wrong
            process = producer.ranks[0].process
            if state == "failed":
                assert "kill" == end
                assert "state=peer_lost" in error
                assert process.wait(10.0) in {-signal.SIGSEGV, -signal.SIGABRT}
            if process.poll() is not None:
                producer.kill()
                producer = started("P", spec, turn + 1, **sizes)
        with producer:
            other.connect(producer)
            assert [DONE] == load(producer, other, "last")
            other.quiet()


def test_load_fails_when_its_producer_dies_before_or_during_it() -> None:
    """A load that ended before is done. The next incarnation has the same names."""
    spec = engine(1, heads=1, block=16, size=8192)
    tokens, sizes = 16 * 60, dict[str, Any]({"blocks": 64, **TIMES, "tls": "tcp"})
    with started("D", spec, 1, **sizes) as consumer:
        for epoch, moment in enumerate(("before", "during", "after"), 1):
            with started("P", spec, epoch, nixl="the same agent", **sizes) as producer:
                consumer.connect(producer)
                remote_id, request = new_remote_id(moment), asked(moment, tokens, 16)
                producer.ask("hold", remote_id, request, 7, lease=20.0)
                if moment == "before":
                    producer.kill()
                if moment == "during":
                    stop(producer.ranks[0])
                consumer.ask("load", request, remote_id, 7, 5.0)
                if moment == "during":
                    assert "moving" == consumer.ranks[0].ask("state", moment)[0]
                    producer.kill()
                ((state, error, undefined_blocks, wrong),) = consumer.ended(moment)
                if moment == "after":
                    assert DONE == (state, error, undefined_blocks, wrong)
                    continue
                assert ("failed", 0) == (state, wrong)
                assert "rank=P tp0" in error
                assert "state=peer_lost" in error
                assert (moment == "during") <= bool(undefined_blocks)
        with started("P", spec, 9, nixl="the same agent", **sizes) as producer:
            consumer.connect(producer)
            assert [DONE] == load(producer, consumer, "last")
            consumer.quiet()
            producer.quiet()
            (_, nixl, threads) = consumer.ask("left")[0]
            assert (1, 2) == (nixl.peers, threads)


def test_load_fails_when_a_process_is_stopped_longer_than_the_lease() -> None:
    """The consumer is stopped first, then a rank of the producer. Both continue to work."""
    with (
        started("P", engine(2), 1, **TIMES) as producer,
        started("D", engine(1), 1, **TIMES) as consumer,
    ):
        consumer.connect(producer)
        assert [DONE] == load(producer, consumer, "warm")
        remote_id = new_remote_id("slow")
        producer.ask("hold", remote_id, asked("slow", first=5), 7, lease=0.5)
        stop(consumer.ranks[0])
        assert [{"done"}, {"expired"}] == producer.settled(
            "warm", "slow"
        )  # Its blocks are overwritten.
        go_on(consumer.ranks[0])
        consumer.ask("load", asked("slow", first=5), remote_id, 7, 5.0)
        ((state, error, undefined_blocks, _),) = consumer.ended("slow")
        assert "failed" == state
        assert "before it was read" in error
        assert {"full": (5, 6, 7, 8), "window": (6, 7, 8)} == undefined_blocks
        stop(producer.ranks[1])
        remote_id = new_remote_id("stopped")
        producer.ranks[0].ask("hold", remote_id, asked("stopped"), 7)
        consumer.ask("load", asked("stopped"), remote_id, 7, 1.0)
        time.sleep(1.2)
        go_on(producer.ranks[1])
        ((state, error, _, _),) = consumer.ended("stopped")
        assert "failed" == state
        assert "state=timeout" in error
        producer.ranks[1].ask("hold", remote_id, asked("stopped"), 7)
        producer.settled("stopped")
        consumer.quiet()
        producer.quiet()
        assert [DONE] == load(producer, consumer, "last")


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_load_fails_when_a_rank_of_its_producer_is_closed(tls: str) -> None:
    """The rank is closed before a load, or during one. Its session answers that the data is gone.

    Over shared memory the bytes are read all the same. The other rank and the next incarnation
    continue to work.
    """
    spec = engine(2, block=16, size=4096)
    tokens, sizes = 16 * 60, dict[str, Any]({"blocks": 64, "tls": tls, **TIMES})
    with started("D", spec, 1, **sizes) as consumer:
        for epoch, moment in enumerate(("before", "during"), 1):
            with started("P", spec, epoch, **sizes) as producer:
                consumer.connect(producer)
                assert [DONE] * 2 == load(producer, consumer, f"well {epoch}")
                remote_id, request = new_remote_id(moment), asked(moment, tokens, 16)
                producer.ask("hold", remote_id, request, 7, lease=20.0)
                closed = producer.ranks[0]
                if moment == "before":
                    closed.ask("shut")
                else:
                    stop(closed)
                consumer.ask("load", request, remote_id, 7, 5.0)
                if moment == "during":
                    go_on(closed)
                    closed.ask("shut")
                (state, error, undefined_blocks, wrong), other = consumer.ended(moment)
                assert (DONE, 0) == (other, wrong)
                if moment == "before" or state == "failed":
                    assert ("failed", {"full", "window"}) == (state, set(undefined_blocks))
                    assert "P tp0" in error
                    assert "before it was read" in error or "peer_lost" in error
                how = {"failed": {"done", "expired"}, "done": {"done"}}
                assert [{"done"}, how[state]] == producer.settled(f"well {epoch}", moment)
                consumer.quiet()
                producer.quiet()


def test_late_load_of_reused_blocks_fails() -> None:
    """It reads the bytes of another request, and the producer answers `gone` each time."""
    with (
        started("P", engine(1), 1, **TIMES) as producer,
        started("D", engine(2, block=2), 1, **TIMES) as consumer,
    ):
        consumer.connect(producer)
        for turn in range(5):
            first, second = f"first {turn}", f"second {turn}"
            remote_id = new_remote_id(first)
            ids = {"full": [1, 2], "window": [1, 2]}
            request = kvspec.TransferRequest(
                request_id=first, num_tokens=8, producer_blocks=ids,
                consumer_blocks={"full": [1, 2, 3, 4], "window": [1, 2, 3, 4]},
            )  # fmt: skip
            producer.ask("hold", remote_id, request, 7, lease=0.01)
            assert [{"expired"}] == producer.settled(first)
            producer.ask("hold", new_remote_id(second), request, 8, lease=0.1)
            consumer.ask("load", request, remote_id, 7, 5.0)
            assert ["failed"] * 2 == [state for state, *_ in consumer.ended(first)]
            assert [{"expired"}] == producer.settled(second)
        consumer.quiet()
        producer.quiet()
        until(lambda: producer.ask("left")[0][0].remembered == 0)


@pytest.mark.parametrize("pushed", [False, True], ids=["pull", "push"])
def test_soak_with_every_fault_loses_no_request(pushed: bool) -> None:
    """Six processes move 40 requests. One message in ten is lost or sent twice."""
    figures = soak(requests=40, faults=8, pushed=pushed)
    print(figures)  # noqa: T201
    assert (40, 8) == (figures.requests, figures.faults)
    assert (0, 0, 0) == (figures.lost, figures.wrong, figures.leaked)
    assert 40 * 2 == figures.done + figures.failed + figures.gone
    assert figures.done > figures.failed > 0
