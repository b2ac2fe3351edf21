"""The metrics of sessions, as Prometheus scrapes them over HTTP."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("prometheus_client", reason="needs the metrics extra")

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families
from two_engines import Side, ended, engine, freed, quiet, request, until

from kvspec.errors import SpecError, TransferState
from kvspec.session import new_remote_id
from kvspec.session.prometheus import METRICS, SessionCollector
from kvspec.testing import FakeNixl

Samples = dict[tuple[str, str, str, tuple[str, ...]], float]


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """A producer of two ranks and a consumer of one, connected over a fake NIXL."""
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False, lease=5.0) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


@pytest.fixture
def scrape(sides: tuple[Side, Side]) -> Iterator[Any]:
    """A function that scrapes the real HTTP endpoint of `prometheus_client`."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(SessionCollector(*(s for side in sides for s in side.sessions.values())))
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    url = f"http://127.0.0.1:{server.server_port}/metrics"

    def samples() -> Samples:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            text = answer.read().decode()
        found: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                place = labels.pop("engine_id"), labels.pop("rank")
                name = sample.name, *place, tuple(labels.values())
                assert name not in found
                found[name] = sample.value
        return found

    yield samples
    server.shutdown()
    server.server_close()
    thread.join()


def held(producer: Side, name: str, **more: Any) -> str:
    remote_id = new_remote_id(name)
    producer.hold(remote_id, **more)
    return remote_id


def test_scrape_counts_loads_and_holds(sides: tuple[Side, Side], scrape: Any) -> None:
    """One load is done, one is cancelled. One request is held, one was aborted."""
    producer, consumer = sides
    moved = request("r-1")
    assert ["done"] == ended(consumer.load(moved, held(producer, "p-1")), producer, consumer)
    assert ["p-1", "p-1"] == freed(2, producer, consumer)
    (cancelled,) = consumer.load(request("r-2"), held(producer, "p-2"))
    cancelled.cancel()
    assert ["failed"] == ended([cancelled], producer, consumer)
    quiet(producer, consumer)
    aborted = held(producer, "p-3")
    for session in producer.sessions.values():
        session.abort(aborted)
    held(producer, "p-4", blocks={"full": [1, 2], "window": [3]})

    samples = scrape()
    own, first = ("D", "tp0"), ("P", "tp0")
    assert 2 == samples["kvspec_loads_started_total", *own, ()]
    assert 1 == samples["kvspec_loads_done_total", *own, ()]
    assert 1 == samples["kvspec_loads_failed_total", *own, ("cancelled",)]
    assert 0 == samples["kvspec_loads_failed_total", *own, ("timeout",)]
    assert (
        consumer.first.stats().counters.bytes_read == samples["kvspec_read_bytes_total", *own, ()]
    )
    assert 0 < samples["kvspec_read_descriptors_total", *own, ()]
    assert 1 == samples["kvspec_load_seconds_count", *own, ()]
    assert 1 == samples["kvspec_load_seconds_bucket", *own, ("100.0",)]
    assert 0 < samples["kvspec_load_seconds_sum", *own, ()] < 100
    assert 4 == samples["kvspec_holds_started_total", *first, ()]
    assert 2 == samples["kvspec_holds_ended_total", *first, ("done",)]
    assert len(producer.first.held) == 2 == samples["kvspec_holds_open", *first, ()]
    assert 3 == samples["kvspec_held_blocks", *first, ()]
    assert 1 == samples["kvspec_connected_engines", *own, ()]
    assert 0 == samples["kvspec_connected_engines", *first, ()]


def test_scrape_counts_expired_and_aborted_holds(sides: tuple[Side, Side], scrape: Any) -> None:
    """Their blocks are free again, so they are not open any more."""
    producer, consumer = sides
    held(producer, "p-1", lease=0.0, blocks={"full": [1, 2, 3]})
    until(lambda: not producer.first.held, producer)
    (load,) = consumer.load(request("r-2"), remote_id := held(producer, "p-2", lease=0.3))
    for session in producer.sessions.values():
        session.abort(remote_id)
    ended([load], producer, consumer)
    until(lambda: not producer.first.held, producer, consumer)
    samples = scrape()
    for outcome, count in (("expired", 1), ("aborted", 1), ("done", 0)):
        assert count == samples["kvspec_holds_ended_total", "P", "tp0", (outcome,)]
    for name in ("kvspec_holds_open", "kvspec_held_blocks"):
        assert 0 == samples[name, "P", "tp0", ()]


def test_counters_stay_after_a_session_is_closed(sides: tuple[Side, Side], scrape: Any) -> None:
    """A counter never decreases."""
    producer, consumer = sides
    ended(consumer.load(request("r-1"), held(producer, "p-1")), producer, consumer)
    assert ["p-1", "p-1"] == freed(2, producer, consumer)
    before = scrape()
    producer.close()
    consumer.close()
    after = scrape()
    for name, value in before.items():
        if name[0].endswith("_total"):
            assert value <= after[name], name
    assert 1 == after["kvspec_holds_ended_total", "P", "tp0", ("done",)]


def test_every_failed_state_has_a_series_before_the_first_failure(
    sides: tuple[Side, Side], scrape: Any
) -> None:
    """Otherwise the first increase of a counter is not seen by `increase`."""
    states = {more for name, *_, more in scrape() if name == "kvspec_loads_failed_total"}
    assert {(state.value,) for state in TransferState} == states


def test_scrape_counts_declines(sides: tuple[Side, Side], scrape: Any) -> None:
    """The producer counts such a request as done."""
    producer, consumer = sides
    consumer.first.decline(held(producer, "p-1"))
    assert ["p-1", "p-1"] == freed(2, producer, consumer)
    samples = scrape()
    assert 1 == samples["kvspec_declines_total", "D", "tp0", ()]
    assert 0 == samples["kvspec_declines_lost_total", "D", "tp0", ()]
    assert 0 == samples["kvspec_tickets_pending", "D", "tp0", ()]
    assert 1 == samples["kvspec_holds_ended_total", "P", "tp0", ("done",)]


def test_scrape_does_not_wait_for_a_poll(sides: tuple[Side, Side], scrape: Any) -> None:
    """A poll holds the lock of its session."""
    with sides[1].first._lock.held:
        assert scrape()


def test_collector_refuses_two_sessions_with_one_label(sides: tuple[Side, Side]) -> None:
    """Prometheus would refuse the whole scrape. One session twice counts once."""
    producer, _ = sides
    SessionCollector(producer.first, producer.first)
    with Side("P", engine(1), polled=False, epoch=2) as other, pytest.raises(SpecError) as caught:
        SessionCollector(producer.first, other.first)
    assert "sessions" == caught.value.field
    with pytest.raises(SpecError, match="sessions"):
        SessionCollector("no session")  # type: ignore[arg-type]


def test_metric_names_are_those_that_prometheus_wants() -> None:
    """A counter does not end in _total here, because the exposition adds it."""
    names = [metric.name for metric in METRICS]
    assert len({*names}) == len(names)
    assert all(name.startswith("kvspec_") and not name.endswith("_total") for name in names)
