"""Tickets of held prompts: sent as plain data, and loaded after their producer is connected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvspec
from kvspec.errors import KVSpecError, SpecError, TransferError

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from session_faults import connecting_stops
from two_engines import Side, ended, engine, freed, land, let_nothing_land, quiet, request, until

from kvspec.adapters.sglang.tickets import failed
from kvspec.session import Load, new_remote_id, session
from kvspec.session.remotes import Connection
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.tickets import ContentIdentity, MediaItem, PrefillTicket, content_of

pytestmark = pytest.mark.adapters

BLOCKS = {"full": [1, 2, 3, 4], "window": [4, 3, 2, 1]}


TEXT: dict[str, Any] = {"weights": "", "adapter": "", "media": (), "embeddings": "", "salt": ""}
"""The fields of a prompt of text."""


def content(tokens: Any, count: int | None = None, **changed: Any) -> ContentIdentity:
    """Return the content of a prompt of text, with some fields *changed*."""
    return ContentIdentity.of(tokens, count, **TEXT | changed)


def held(addresses: tuple[str, ...] = ("127.0.0.1:9",), **changed: Any) -> PrefillTicket:
    """Return a ticket of the producer "P"."""
    fields = {"engine_id": "P", "addresses": addresses, "remote_id": new_remote_id("p-1")}
    count = changed.get("computed_tokens", 14)
    fields |= {"computed_tokens": 14, "tables": BLOCKS, "content": content(range(count))}
    return PrefillTicket(**{**fields, **changed})


def test_ticket_is_equal_after_a_router_has_passed_it_on() -> None:
    """A router sends it as JSON, may add fields, and may change their order."""
    ticket = held()
    read = PrefillTicket.from_params(json.loads(json.dumps({**ticket.to_params(), "more": 1})))
    assert ticket == read
    assert ticket.to_params() == read.to_params()
    params = ticket.to_params()
    tables = dict(reversed(params["remote_block_ids"].items()))
    other = dict(reversed((params | {"remote_block_ids": tables}).items()))
    assert ticket == PrefillTicket.from_params(other)


WRONG = [None, 5, "", [], [1], {"group0": [0]}, {"group0": 5}, {"group0": [0, ["x"]]}, -1]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", [*held().to_params()])
def test_ticket_rejects_params_with_a_wrong_field(name: str, value: object) -> None:
    """A content of None is right, but the seal covers it."""
    with pytest.raises(SpecError) as caught:
        PrefillTicket.from_params({**held().to_params(), name: value})
    places = ("remote_", "block_ids", "first_token")
    assert any(part in caught.value.field for part in places)
    sealed = (("remote_seal", value), ("remote_content", None))
    assert ("remote_seal" == caught.value.field) == ((name, value) in sealed)


LEGAL: dict[str, Any] = {
    "remote_engine_id": "Q",
    "remote_addresses": ["127.0.0.1:10"],
    "remote_request_id": new_remote_id("p-1"),
    "remote_block_ids": {"full": [0, [2, 1]], "window": [4, [3]]},
    "remote_content": content(range(14), adapter="sql@1").to_params(),
    "remote_seal": "0" * 64,
}


@pytest.mark.parametrize("secret", [None, b"", b"another secret, as long"])
@pytest.mark.parametrize("name", [*LEGAL])
def test_ticket_rejects_params_with_a_changed_field(name: str, secret: bytes | None) -> None:
    """A legal value breaks the seal, too. Without a secret, the seal is a checksum."""
    good = held().to_params(secret)
    # The count of tokens must be that of the content, so it cannot change alone.
    assert set(LEGAL) | {"remote_num_tokens"} == set(good)
    PrefillTicket.from_params(good, secret)
    for changed in (LEGAL[name], held(remote_id=new_remote_id("q")).to_params(secret)[name]):
        if changed != good[name]:
            params = good | {name: changed}
            with pytest.raises(SpecError) as caught:
                PrefillTicket.from_params(params, secret)
            assert ("remote_seal", params["remote_seal"]) == (
                caught.value.field,
                caught.value.value,
            )


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1 << 63, -(1 << 63)])
    | st.floats()
    | st.text(st.characters(exclude_categories=())),
    lambda some: (
        st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=9), some, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in nested lists and mappings."""
    yield path
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in inside:
            yield from places(each, *path, name)


@given(
    place=st.deferred(lambda: st.sampled_from([*places(held(**SAMPLED).to_params())][1:])),
    value=ANYTHING,
    secret=st.sampled_from([None, b""]),
)
@example(("remote_seal",), "\ud800", None)
@example(("remote_first_logprobs", 0, 1), -(10**400), b"")
def test_ticket_rejects_anything_else_at_any_place(
    place: tuple[Any, ...], value: Any, secret: Any
) -> None:
    """A router may send any JSON. It ends in `SpecError`, or changes nothing that is sealed."""
    ticket = held(**SAMPLED)
    params: Any = ticket.to_params(secret)
    *path, last = place
    where = params
    for name in path:
        where = where[name]
    where[last] = value
    with contextlib.suppress(SpecError):
        assert ticket == PrefillTicket.from_params(params, secret)
    with contextlib.suppress(SpecError):
        failed(5, params | {"remote_failure": "why"}, secret)


def test_ticket_rejects_params_of_another_secret() -> None:
    """The default is the secret of the environment. An empty secret differs from it."""
    ticket = held()
    assert ticket == PrefillTicket.from_params(ticket.to_params(), os.environ["KVSPEC_SECRET"])
    for own, other in ((None, b""), (b"", None), (b"another secret, as long", None)):
        with pytest.raises(SpecError) as caught:
            PrefillTicket.from_params(ticket.to_params(own), other)
        assert "remote_seal" == caught.value.field


def test_ticket_rejects_other_tokens_than_its_content() -> None:
    """The first tokens of the prompt must be equal."""
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    own = content(tokens, 7)
    prompt = held(computed_tokens=7, content=own)
    prompt.check(own)
    prompt.check(content([*tokens[:7], 7], 7))
    for wrong in ([0, *tokens[1:]], [*tokens[:6], 0]):
        with pytest.raises(SpecError) as caught:
            prompt.check(content(wrong, 7))
        assert ("remote_content.tokens", own.tokens) == (caught.value.field, caught.value.value)
    with pytest.raises(SpecError) as caught:
        prompt.check(content(tokens, 6))
    assert ("remote_content.num_tokens", 7) == (caught.value.field, caught.value.value)


OTHERS: dict[str, Any] = {
    "weights": "2", "adapter": "sql@1f3a", "media": [MediaItem("cat", 1, 2)],
    "embeddings": "e", "salt": "tenant",
}  # fmt: skip


@pytest.mark.parametrize("name", [*OTHERS])
@pytest.mark.parametrize("side", ["producer", "consumer", "both"])
def test_ticket_of_another_content_is_refused_by_the_name_of_the_field(
    name: str, side: str
) -> None:
    """A field that one side does not state is refused, too, even if neither side does."""
    for other in (OTHERS[name], None):
        changed = content(range(14), **{name: other})
        own, offered = content(range(14)), changed
        if side != "producer":
            own, offered = changed, changed if side == "both" else own
        ticket = held(content=offered)
        if side == "both" and other is not None:
            ticket.check(own)
            continue
        with pytest.raises(SpecError) as caught:
            ticket.check(own)
        assert f"remote_content.{name}" == caught.value.field


def test_ticket_without_content_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        held(content=None).check(content(range(14)))
    assert ("remote_content", None) == (caught.value.field, caught.value.value)


SAMPLED: dict[str, Any] = {
    "first_token": 5, "first_logprobs": ((5, -0.25), (7, -1.5)),
    "tokens_digest": content_of([1, 2, 3]), "sampling": "greedy", "consumer": "D",
}  # fmt: skip


def test_ticket_with_a_sampled_token_is_equal_after_a_router_has_passed_it_on() -> None:
    """Fields that are None are not among the parameters, so older tickets stay valid."""
    ticket = held(**SAMPLED)
    params = json.loads(json.dumps(ticket.to_params()))
    assert ticket == PrefillTicket.from_params(params)
    assert 5 == PrefillTicket.from_params(params).sampled([1, 2, 3], "greedy")
    added = {f"remote_{name}" for name in SAMPLED}
    assert added == set(params) - set(held().to_params())
    assert set(held().to_params()) == set(held(**dict.fromkeys(SAMPLED)).to_params())


@pytest.mark.parametrize("name", [*SAMPLED])
def test_ticket_rejects_a_sampled_field_that_a_router_has_changed(name: str) -> None:
    """Removed, added and changed fields break the seal."""
    key = f"remote_{name}"
    sealed, plain = held(**SAMPLED).to_params(), held().to_params()
    other = {"remote_first_token": 6, "remote_first_logprobs": [[5, -0.5]]}.get(key, "other")
    removed = {known: value for known, value in sealed.items() if known != key}
    for params in (removed, sealed | {key: other}, plain | {key: sealed[key]}):
        with pytest.raises(SpecError) as caught:
            PrefillTicket.from_params(params)
        # Alternatives without their first token are refused before the seal.
        assert caught.value.field in ("remote_seal", "remote_first_logprobs")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_token", -1), ("first_token", True), ("first_token", "5"), ("first_token", 5.0),
        ("first_logprobs", 3), ("first_logprobs", [5]), ("first_logprobs", [[5]]),
        ("first_logprobs", [[5, 0.5]]), ("first_logprobs", [[5, float("nan")]]),
        ("first_logprobs", [[5, -float("inf")]]), ("first_logprobs", [[True, -1.0]]),
        ("first_logprobs", [[-1, -1.0]]), ("tokens_digest", 3), ("consumer", ""), ("consumer", 3),
    ],
)  # fmt: skip
def test_ticket_rejects_wrong_sampled_fields(name: str, value: object) -> None:
    """Each error names the field, of the ticket or of its parameters."""
    with pytest.raises(SpecError) as caught:
        held(**SAMPLED | {name: value})
    assert name == caught.value.field
    with pytest.raises(SpecError) as caught:
        PrefillTicket.from_params(held(**SAMPLED).to_params() | {f"remote_{name}": value})
    assert f"remote_{name}" == caught.value.field


def test_ticket_rejects_alternatives_without_a_first_token() -> None:
    with pytest.raises(SpecError) as caught:
        held(first_logprobs=((5, -1.0),))
    assert "first_logprobs" == caught.value.field


def test_ticket_without_a_first_token_is_refused_where_the_consumer_needs_it() -> None:
    with pytest.raises(SpecError) as caught:
        held().sampled([1, 2, 3], "greedy")
    assert ("remote_first_token", None) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize(
    ("changed", "asked", "field"),
    [
        ({"sampling": "0" * 32}, "greedy", "remote_sampling"),
        ({"sampling": None}, "greedy", "remote_sampling"),
        ({}, None, "remote_sampling"),
        ({"sampling": None}, None, "remote_sampling"),
        ({"tokens_digest": None}, "greedy", "remote_tokens_digest"),
        ({"tokens_digest": content_of([1, 2])}, "greedy", "remote_tokens_digest"),
    ],
)
def test_first_token_of_another_request_is_refused(
    changed: dict[str, Any], asked: str | None, field: str
) -> None:
    """Equal prompts with other sampling settings, or settings that a side does not state."""
    with pytest.raises(SpecError) as caught:
        held(**SAMPLED | changed).sampled([1, 2, 3], asked)
    assert field == caught.value.field


def test_ticket_rejects_another_last_token_and_another_consumer() -> None:
    """The content ends before the last token. The digest covers the token as well."""
    tokens = [3, 1, 4, 1]
    first: dict[str, Any] = {"computed_tokens": 3, "content": content(tokens, 3)}
    digest = content_of(tokens)
    ticket = held(**first, tokens_digest=digest, consumer="D", first_token=5, sampling="greedy")
    ticket.check(content(tokens, 3))
    ticket.check(content(tokens, 3), "D")
    held(**first).check(content(tokens, 3), "E")
    assert 5 == ticket.sampled(tokens, "greedy")
    for wrong in ([*tokens[:3], 9], [*tokens, 5]):
        with pytest.raises(SpecError) as caught:
            ticket.sampled(wrong, "greedy")
        assert "remote_tokens_digest" == caught.value.field
    with pytest.raises(SpecError) as caught:
        ticket.check(content(tokens, 3), "E")
    assert "remote_consumer" == caught.value.field


def test_ticket_and_its_request_survive_a_pickle() -> None:
    """A scheduler sends them to its workers."""
    ticket = held(**SAMPLED)
    request_ = ticket.request("r", 14, BLOCKS)
    again = pickle.loads(pickle.dumps((ticket, request_)))  # noqa: S301 - our own bytes
    assert (ticket, request_) == again


def test_request_of_a_ticket_has_the_tokens_that_move() -> None:
    """States have seen all tokens of the prompt."""
    tables = {"full": kvspec.BlockTable([9, 8])}
    asked = held().request("d-1", 6, tables, 2)
    assert (6, 2, 14) == (asked.num_tokens, asked.cached_tokens, asked.state_tokens)
    assert (held().tables, tables) == (asked.producer_blocks, asked.consumer_blocks)


def test_ticket_rejects_a_request_for_more_tokens_than_were_computed() -> None:
    """The message contains the number of computed tokens."""
    tables = {"full": kvspec.BlockTable([9, 8])}
    assert 14 == held().request("d-1", 14, tables).num_tokens
    with pytest.raises(SpecError, match="14") as caught:
        held().request("d-1", 15, tables)
    assert ("num_tokens", 15) == (caught.value.field, caught.value.value)


def test_ticket_keeps_its_tables_when_the_mapping_of_the_caller_changes() -> None:
    """It copies the mapping."""
    tables = {"full": kvspec.BlockTable([1, 2], first_token=4)}
    prompt = held(tables=tables)
    params = prompt.to_params()
    tables["full"] = kvspec.BlockTable([7])
    assert params == prompt.to_params()
    assert [1, 2] == prompt.tables["full"].block_ids.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_id", 3), ("engine_id", ""), ("addresses", "127.0.0.1:9"), ("addresses", []),
        ("addresses", [3]), ("remote_id", "p-1"), ("computed_tokens", 0), ("computed_tokens", True),
        ("tables", None), ("tables", {"full": 3}), ("content", 3), ("content", ""),
        ("sampling", 3), ("tokens_digest", 3),
    ],
)  # fmt: skip
def test_ticket_rejects_wrong_fields(name: str, value: object) -> None:
    """A value of a mapping has a field of its own."""
    with pytest.raises(SpecError) as caught:
        held(**{name: value})
    assert ("block_ids" if value == {"full": 3} else name) == caught.value.field.partition("[")[0]


@pytest.mark.parametrize("params", [None, [], "x", 3, [("remote_num_tokens", 3)]], ids=repr)
def test_ticket_rejects_params_that_are_not_a_mapping(params: Any) -> None:
    """A router may pass on any JSON value."""
    with pytest.raises(SpecError) as caught:
        PrefillTicket.from_params(params)
    assert ("remote", params) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("tokens", [[1.5], ["1"], None, 3, [2**70], [[1, 2], [3, 4]], [[1], []]])
def test_content_rejects_values_that_are_not_a_sequence_of_ints(tokens: Any) -> None:
    """Otherwise 1.5 would have the content of 1, and two rows that of one row."""
    for call in (content_of, content):
        with pytest.raises(SpecError) as caught:
            call(tokens)
        assert "token_ids" == caught.value.field.partition("[")[0]


ASKED = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Yield two background engines of two ranks that are not connected."""
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False, lease=5.0, background=True) as producer,
        Side("D", engine(2), polled=True, heartbeat=0.2, background=True) as consumer,
    ):
        yield producer, consumer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions wait only 0.2 seconds for an absent producer."""
    monkeypatch.setattr(session, "TICKET_ABSENT", 0.2)


def of(name: str) -> kvspec.TransferRequest:
    """Return the request that the tests load, under another name."""
    return attrs.evolve(ASKED, request_id=name)


def ticket_of(side: Side, name: str, **changed: Any) -> PrefillTicket:
    """Hold a prompt, and return its ticket."""
    ticket = held((*side.addresses,), remote_id=new_remote_id(name), tables=ASKED.producer_blocks)
    side.hold(ticket.remote_id)
    return attrs.evolve(ticket, engine_id=side.name, **changed)


def connection(load: Load) -> Connection:
    """Return the connection of a load of a ticket."""
    assert load.connection is not None
    return load.connection


def begin(consumer: Side, ticket: PrefillTicket, asked: Any = ASKED, **more: Any) -> list[Load]:
    """Load a ticket on all ranks."""
    options = {"timeout": 10.0, **more}
    sessions = consumer.sessions.values()
    return [session.load(asked, ticket=ticket, **options) for session in sessions]


def error_of(load: Load) -> TransferError:
    """Return the error of a load that has failed."""
    assert "failed" == load.poll()
    with pytest.raises(TransferError) as caught:
        load.wait()
    assert caught.value is load.error
    return caught.value


def test_load_of_a_ticket_connects_its_producer(sides: tuple[Side, Side]) -> None:
    """It connects once, and every byte arrives. A declined request is freed at once."""
    producer, consumer = sides
    read, declined = (ticket_of(producer, name) for name in ("read", "declined"))
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    loads = begin(consumer, read)
    for one in consumer.sessions.values():
        one.decline(ticket=declined)
    until(lambda: all(load.poll() == "done" for load in loads), producer)
    assert [None, None] == [load.error for load in loads]
    assert [] == consumer.wrong(ASKED)
    assert all(load.progress[0] == load.progress[1] > 0 for load in loads)
    assert ["declined", "declined", "read", "read"] == freed(4, producer)


def test_load_can_be_awaited(sides: tuple[Side, Side]) -> None:
    """Several tasks wait in one event loop. Cancelling a task does not cancel its load."""
    producer, consumer = sides
    ticket, never = ticket_of(producer, "read"), held(tables=BLOCKS)
    producer.fill(ASKED)
    consumer.spoil(ASKED)

    async def both() -> list[Load]:
        loads = begin(consumer, ticket)
        for waiting in begin(
            consumer,
            never,
            request("never", consumer_blocks={"full": [5, 6, 7, 0], "window": [5, 6, 7, 0]}),
        ):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.05)
            assert ("moving", None) == (waiting.state, waiting.error)
            waiting.cancel()
            with pytest.raises(TransferError):
                await waiting
        return list(await asyncio.gather(*loads))

    assert ["done", "done"] == [load.state for load in asyncio.run(both())]
    assert [] == consumer.wrong(ASKED)


@pytest.mark.usefixtures("quick")
def test_producer_that_is_absent_fails_only_its_own_loads(sides: tuple[Side, Side]) -> None:
    """A producer that aborts a request stays connected."""
    producer, consumer = sides
    nobody, gone = held(engine_id="nobody"), held((*producer.addresses,), tables=BLOCKS)
    one = consumer.first
    one.decline(ticket=nobody)
    first = one.load(of("first"), ticket=nobody, timeout=9.0)
    assert ("moving", (0, 0), {}) == (first.poll(), first.progress, first.undefined_blocks)
    assert [] == first.unwritten_ranges.tolist()
    until(lambda: first.poll() == "failed")
    assert "no introduction from 127.0.0.1:9" in str(first.error)
    again = one.load(of("again"), ticket=nobody, timeout=9.0)
    assert "moving" == again.poll()
    for other in producer.sessions.values():
        other.hold(gone.remote_id)
        other.abort(gone.remote_id)
    lost = one.load(of("lost"), ticket=gone, timeout=9.0)
    before = connection(lost)
    until(lambda: lost.poll() == again.poll() == "failed", producer)
    assert ("gone", "timeout") == (error_of(lost).state, error_of(again).state)
    back = ticket_of(producer, "back")
    last = one.load(of("last"), ticket=back, timeout=9.0)
    assert connection(last) is before
    until(lambda: last.poll() == "done", producer)
    one.decline(ticket=back)
    next_load = one.load(of("next"), ticket=ticket_of(producer, "next"), timeout=9.0)
    assert connection(last) is connection(next_load)
    until(lambda: next_load.poll() == "done", producer)
    one.disconnect("P")
    once_more = one.load(of("once more"), ticket=ticket_of(producer, "p-2"), timeout=9.0)
    until(lambda: once_more.poll() == "done", producer)


@pytest.mark.usefixtures("quick")
def test_session_that_closes_ends_loads_that_wait_for_a_connection(
    sides: tuple[Side, Side],
) -> None:
    """A load behind a producer that does not answer fails at once, and no other begins."""
    one = sides[1].first
    loads = [
        one.load(
            of(f"{port}"), ticket=held((f"127.0.0.1:{port}",), engine_id=f"{port}"), timeout=9.0
        )
        for port in (9, 7)
    ]
    one.close()
    for load in loads:
        error = error_of(load)
        assert (load.request.request_id, "closed") == (error.request, error.state)
    for call in (
        lambda: one.load(ASKED, ticket=held(), timeout=1.0),
        lambda: one.decline(ticket=held()),
    ):
        with pytest.raises(TransferError) as caught:
            call()
        assert "closed" == caught.value.state


def test_least_recently_used_producer_is_disconnected() -> None:
    """So engines that have ended do not accumulate. An engine can be connected again."""
    with FakeNixl(), contextlib.ExitStack() as stack:
        enter = stack.enter_context
        producers = [enter(Side(name, engine(1), polled=False, background=True)) for name in "PQR"]
        given: dict[str, Any] = {"heartbeat": 0.2, "background": True, "max_producers": 2}
        consumer = enter(Side("D", engine(1), polled=True, **given))
        (session,) = consumer.sessions.values()

        def read(number: int, name: str) -> None:
            ticket = ticket_of(producers[number], name)
            session.load(of(name), ticket=ticket, timeout=9.0).wait()

        def connected() -> set[str]:
            return {peer[0] for peer in session.nixl.peers}

        for turn, number in enumerate((0, 1, 0, 2)):
            read(number, f"first {number}.{turn}")
        until(lambda: {"P", "R"} == connected())
        read(0, "second")
        read(1, "again")
        until(lambda: {"P", "Q"} == connected())
        (first,) = producers[0].sessions.values()
        until(lambda: not first.stats().held)
        gone = held((*producers[0].addresses,), engine_id="P", remote_id=new_remote_id("gone"))
        lost = session.load(request("lost"), ticket=gone, timeout=9.0)
        lost.cancel()
        until(lambda: lost.poll() == "failed")
        # Declining the ticket uses its producer, so it comes before the other loads.
        records = session._loads.ledger.records
        until(lambda: "gone" in {one.plan.key.request_id for one in list(records.values())})
        read(1, "once more")
        read(2, "and again")
        until(lambda: {"Q", "R"} == connected())


@pytest.fixture
def three(net: FakeNixl) -> Iterator[tuple[Side, Side, Side]]:
    """Yield the producers P and Q, and a consumer that keeps one producer of tickets connected."""
    with (
        Side("P", engine(1), polled=False, lease=5.0) as one,
        Side("Q", engine(1), polled=False, lease=5.0) as other,
        Side("D", engine(1), polled=False, heartbeat=0.05, max_producers=1) as consumer,
    ):
        yield one, other, consumer


def small_load(side: Side, consumer: Side) -> Load:
    """Load a ticket of one block of *side*."""
    name = f"of {side.name}"
    asked = request(name, tokens=4, consumer_blocks={"full": [7], "window": [7]})
    ticket = ticket_of(side, name, tables=asked.producer_blocks, computed_tokens=4, content=None)
    return consumer.first.load(asked, ticket=ticket, timeout=9.0)


def engines_of(side: Side) -> set[str]:
    """Return the names of the engines that are connected."""
    return set(side.first._remotes._connected)


def test_producer_of_an_open_load_is_not_evicted(
    net: FakeNixl, three: tuple[Side, Side, Side]
) -> None:
    """Its bytes would land after the blocks were free. A later one is evicted instead."""
    one, other, consumer = three
    one.fill(ASKED)
    net.fate = lambda flight: flight.land() if len(flight.copies) == 1 else None
    slow = consumer.first.load(ASKED, timeout=20.0, ticket=ticket_of(one, "slow"))
    until(lambda: slow.in_flight, *three)
    until(lambda: net.moving, *three)
    net.fate = FakeFlight.land
    assert ["done"] == ended([small_load(other, consumer)], *three)
    until(lambda: {"P"} == engines_of(consumer), *three)
    assert ("moving", None) == (slow.poll(), slow.error)
    consumer.spoil(ASKED)
    land(net)
    assert ["done"] == ended([slow], *three)
    assert [] == consumer.wrong(ASKED)
    quiet(*three)
    assert ["done"] == ended([small_load(other, consumer)], *three)
    until(lambda: {"Q"} == engines_of(consumer), *three)


@pytest.mark.parametrize(
    ("state", "again"),
    [
        ("gone", False), ("cancelled", False), ("refused", False), ("timeout", True),
        ("peer_lost", True),
    ],
)  # fmt: skip
def test_load_that_fails_leaves_a_live_producer_connected(
    net: FakeNixl, three: tuple[Side, Side, Side], state: str, *, again: bool
) -> None:
    """The next load would wait behind the connections of other producers."""
    one, _, consumer = three
    session, ticket = consumer.first, ticket_of(one, "p")
    if state == "gone":
        one.first.abort(ticket.remote_id)
    asked = attrs.evolve(ASKED, num_tokens=15 if state == "refused" else 14)
    if state in ("cancelled", "timeout", "peer_lost"):
        let_nothing_land(net)
    most = 0.3 if state == "timeout" else 9.0
    load = session.load(asked, ticket=ticket, timeout=most)
    if state in ("cancelled", "peer_lost"):
        until(lambda: load.in_flight, *three)
    if state == "cancelled":
        load.cancel()
    elif state == "peer_lost":
        net.moving[0].fail()
    until(lambda: load.error, *three)
    assert state == load.error.state
    net.fate = FakeFlight.land
    land(net)
    quiet(*three)
    after = small_load(one, consumer)
    assert again == (connection(after) is not connection(load))
    assert ["done"] == ended([after], *three)


def test_ticket_connects_its_producer_again_after_a_failed_connect(
    net: FakeNixl, three: tuple[Side, Side, Side]
) -> None:
    """The engine is forgotten before it is connected in another way, which may fail."""
    one, _, consumer = three
    assert ["done"] == ended([small_load(one, consumer)], *three)
    quiet(*three)
    agent = net.agents[one.first.nixl.name]
    agent.alive = False
    with pytest.raises(TransferError):
        consumer.first.connect(one.other_introductions)
    agent.alive = True
    assert set() == engines_of(consumer)
    assert ["done"] == ended([small_load(one, consumer)], *three)


@pytest.mark.parametrize("fetched", [False, True])
def test_disconnect_ends_loads_that_wait_for_the_producer(
    three: tuple[Side, Side, Side], monkeypatch: pytest.MonkeyPatch, *, fetched: bool
) -> None:
    """The attempt to connect it ends too. A later ticket connects it again."""
    one, _, consumer = three
    session, go_on = consumer.first, threading.Event()
    fetch, asked = session.fetch, threading.Event()

    def slow(*given: Any, **options: Any) -> list[bytes]:
        found = fetch(*given, **options)
        asked.set()
        go_on.wait(20.0)
        return found

    monkeypatch.setattr(session, "fetch", slow)
    if not fetched:
        connecting_stops(session, go_on)
    load = session.load(ASKED, ticket=ticket_of(one, "p"), timeout=20.0)
    until(lambda: asked.is_set() or not fetched, *three)
    attempt = connection(load).future
    session.disconnect("P")
    assert ("failed", "gone") == (load.poll(), error_of(load).state)
    go_on.set()
    until(attempt.done, *three)
    assert isinstance(attempt.exception(), TransferError)
    assert fetched == asked.is_set()
    until(lambda: not session._loads.waiting, *three)
    assert 0 == session.stats().errands  # A refusal would connect it again.
    assert ((), 0) == (session.nixl.peers, session.stats().engines)
    assert ["done"] == ended([small_load(one, consumer)], *three)


def test_ticket_connects_no_engine_of_another_name(three: tuple[Side, Side, Side]) -> None:
    """Nobody would disconnect it, because no ticket has its name."""
    one, _, consumer = three
    ticket = attrs.evolve(ticket_of(one, "p"), engine_id="old")
    load = consumer.first.load(ASKED, ticket=ticket, timeout=9.0)
    assert ["failed"] == ended([load], *three)
    cause = error_of(load).__cause__
    assert isinstance(cause, SpecError)
    assert ("engine_id", "old", "refused") == (cause.field, cause.value, error_of(load).state)
    assert set() == engines_of(consumer)


def test_eviction_spares_what_the_caller_has_connected(three: tuple[Side, Side, Side]) -> None:
    """A ticket that connects it again, because it was lost, changes nothing of that."""
    one, other, consumer = three

    def load(side: Side) -> None:
        assert ["done"] == ended([small_load(side, consumer)], *three)
        quiet(*three)
        consumer.poll()

    load(one)
    consumer.connect(one)
    load(other)
    consumer.first._remotes.find("P").must_reconnect = True
    for side in (one, other, one, other):
        load(side)
    assert {"P", "Q"} == engines_of(consumer)
    consumer.first.disconnect("P")
    for side in (one, other):
        load(side)
    assert {"Q"} == engines_of(consumer)
    assert 1 == len(consumer.first.nixl.peers)


@pytest.mark.usefixtures("quick")
def test_producer_that_moved_is_connected_at_its_new_addresses(sides: tuple[Side, Side]) -> None:
    """Its name is the same. Loads from the old addresses fail."""
    producer, consumer = sides
    one = consumer.first
    before = one.load(of("before"), ticket=held(), timeout=9.0)
    now = one.load(ASKED, ticket=ticket_of(producer, "p-1"), timeout=9.0)
    until(lambda: now.poll() == "done" and before.poll() != "moving", producer)
    assert ("failed", 1) == (before.poll(), one.stats().engines)


def test_closed_session_stops_connecting_to_a_silent_producer() -> None:
    """Otherwise the thread would keep the process alive for half a minute."""
    with FakeNixl(), Side("D", engine(1), polled=True, background=True) as consumer:
        (session,) = consumer.sessions.values()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            load = session.load(request(), ticket=held((address,)), timeout=60.0)
            until(lambda: session.channel.reaches(address))  # type: ignore[attr-defined]
            attempt = connection(load).future
            session.close()
            assert "closed" == error_of(load).state
            until(attempt.done, seconds=5.0)


def test_wait_raises_when_the_session_is_closed() -> None:
    """Nothing moves the load any more, so the wait would not end."""
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.2, background=True) as consumer,
    ):
        (session,) = consumer.sessions.values()
        ticket = ticket_of(producer, "p-1")
        session.load(of("first"), ticket=ticket_of(producer, "first"), timeout=9.0).wait()
        let_nothing_land(net)
        load = session.load(ASKED, ticket=ticket, timeout=30.0)
        until(lambda: load.in_flight)
        errors: list[TransferError] = []

        def wait() -> None:
            try:
                load.wait()
            except TransferError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        session.close(drain=0.0)
        waiter.join(5.0)
        assert ["closed"] == [error.state for error in errors]

        async def awaited() -> None:
            await load

        with pytest.raises(TransferError) as caught:
            asyncio.run(awaited())
        assert "closed" == caught.value.state
        land(net)


def test_load_of_a_ticket_can_be_cancelled(sides: tuple[Side, Side]) -> None:
    """Before its producer is connected, and after. The producer frees the prompt in both cases."""
    producer, consumer = sides
    tickets = [ticket_of(producer, name) for name in ("early", "read", "late")]
    wait = threading.Event()
    for one in consumer.sessions.values():
        connecting_stops(one, wait)
    for load in (early := begin(consumer, tickets[0], of("early"))):
        load.cancel()
        load.cancel()
        assert ("cancelled", {}) == (error_of(load).state, load.undefined_blocks)
    wait.set()
    for load in begin(consumer, tickets[1]):
        load.wait()
        assert ("done", None, {}) == (load.poll(), load.error, load.undefined_blocks)
    for load in begin(consumer, tickets[2], of("late")):
        load.cancel()
        until(lambda load=load: load.poll() != "moving")
    assert ["early", "early", "late", "late", "read", "read"] == freed(6, producer)
    assert {"failed"} == {load.state for load in early}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"producer_blocks": BLOCKS | {"full": [1, 2, 3, 5]}}, "producer_blocks['full']"),
        ({"num_tokens": 15}, "num_tokens"),
    ],
)
def test_request_that_does_not_fit_its_ticket_fails(
    sides: tuple[Side, Side], changed: dict[str, Any], field: str
) -> None:
    """It would read another prompt's bytes. The producer learns that nothing is read."""
    producer, consumer = sides
    ticket = ticket_of(producer, "p-1")
    consumer.spoil(ASKED)
    loads = begin(consumer, ticket, attrs.evolve(ASKED, **changed))
    until(lambda: all(load.poll() == "failed" for load in loads), producer)
    for load in loads:
        error = error_of(load)
        assert isinstance(error.__cause__, SpecError)
        assert (field, "refused") == (error.__cause__.field, error.state)
    for rank, storage in consumer.storage.items():
        for name, flat in storage.items():
            assert consumer.before[rank][name].tobytes() == flat.tobytes()
    assert ["p-1", "p-1"] == freed(2, producer)


def test_ticket_states_how_many_tokens_a_recurrent_state_has_seen() -> None:
    """A state cannot be rewound, so a request with fewer tokens is refused."""
    blocks = {"full": [1, 2, 3, 4], "window": [1, 2, 3, 4], "state": [1]}
    own = attrs.evolve(ASKED, num_tokens=13, producer_blocks=blocks, consumer_blocks=blocks)
    with (
        FakeNixl(),
        Side("P", engine(1, state=True), polled=False) as producer,
        Side("D", engine(1, state=True), polled=False) as consumer,
    ):
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        ticket = attrs.evolve(
            held((*producer.addresses,), remote_id=remote_id, tables=blocks), engine_id="P"
        )
        (load,) = begin(consumer, ticket, own)
        until(lambda: load.poll() != "moving", producer)
        assert "state_tokens" in error_of(load).message
        rewound = attrs.evolve(own, request_id="other", state_tokens=13)
        (load,) = begin(consumer, ticket, rewound)
        until(lambda: load.poll() != "moving", producer)
        assert "state_tokens" in error_of(load).message


def test_load_rejects_wrong_tickets(sides: tuple[Side, Side]) -> None:
    """It raises at once, because no producer could be informed."""
    one, wrong = sides[1].first, new_remote_id("r")
    given: dict[str, Any] = {"request": ASKED, "ticket": held(), "timeout": 1.0}
    for more, field in (
        ({"ticket": 7}, "ticket"),
        ({"ticket": None}, "remote_id"),
        ({"remote_id": wrong}, "ticket"),
        ({"engine_id": "P"}, "ticket"),
        ({"request": None}, "request"),
        ({"timeout": None}, "timeout"),
    ):
        with pytest.raises(SpecError) as caught:
            one.load(**given | more)
        assert field == caught.value.field
    assert 0 == one.stats().loads
    for most in (0, None, 1.5):
        with pytest.raises(SpecError) as caught:
            Side("Q", engine(1), polled=True, max_producers=most)
        assert "max_producers" == caught.value.field


def test_load_that_moves_fails_when_nothing_writes_it() -> None:
    """After it was cancelled, its state is still "moving" until the last byte has landed."""
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.2, background=True) as consumer,
    ):
        (session,) = consumer.sessions.values()
        session.load(of("first"), ticket=ticket_of(producer, "first"), timeout=9.0).wait()
        let_nothing_land(net)
        load = session.load(ASKED, ticket=ticket_of(producer, "p-1"), timeout=10.0)
        until(lambda: net.moving)
        assert ("moving", "<Load 'r': moving>") == (load.poll(), repr(load))
        load.cancel()
        assert ("moving", "cancelled") == (load.poll(), load.error and load.error.state)
        land(net)
        until(lambda: load.poll() == "failed")
        assert {"full", "window"} == set(load.undefined_blocks)


def test_load_waits_for_a_silent_producer_until_its_timeout() -> None:
    """No longer, although the producer may have more time to answer others."""
    with FakeNixl(), Side("D", engine(1), polled=True, background=True) as consumer:
        (session,) = consumer.sessions.values()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            load = session.load(request(), ticket=held((address,)), timeout=0.1)
            until(lambda: load.poll() == "failed", seconds=5.0)
            session.close()
        load.cancel()
        assert ("timeout", True) == (error_of(load).state, "connected" in error_of(load).message)


def test_load_that_does_not_fit_the_engine_fails_and_is_declined(sides: tuple[Side, Side]) -> None:
    """A request whose tables are short is the load's error; the producer's ranks are free."""
    producer, consumer = sides
    ticket = ticket_of(producer, "p-1", tables={"full": [1, 2], "window": [3, 4]})
    short = ticket.request("d-1", 14, BLOCKS)
    loads = begin(consumer, ticket, short)
    until(lambda: all(load.poll() == "failed" for load in loads), producer)
    assert all(isinstance(error_of(load).__cause__, KVSpecError) for load in loads), loads
    assert ["p-1", "p-1"] == freed(2, producer)


def test_counters_of_a_session_count_loads_and_messages(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be read at any time, also while another thread holds the lock of the session."""
    producer, consumer = sides
    one, polled, go_on = consumer.first, threading.Event(), threading.Event()
    for load in begin(consumer, ticket_of(producer, "p-1")):
        load.wait()
    cancelled = one.load(of("r-2"), ticket=held(), timeout=9.0)
    cancelled.cancel()
    until(lambda: cancelled.poll() == "failed")

    def receive() -> list[tuple[str, bytes]]:
        """Stop the poll in progress, which holds the lock, until the test goes on."""
        polled.set()
        go_on.wait(20.0)
        return []

    monkeypatch.setattr(one.channel, "receive", receive)
    poller = threading.Thread(target=one.poll)
    poller.start()
    assert polled.wait(5.0)
    counters = one.stats().counters
    go_on.set()
    poller.join(5.0)
    assert (2, 1, 1) == (counters.loads_started, counters.loads_done, counters.loads_failed)
    assert min(counters.load_seconds, counters.bytes_read) > 0
    assert min(counters.messages_sent, counters.messages_received) > 0


def test_failed_load_is_logged(sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture) -> None:
    """One line at INFO, with the request and the reason."""
    one = sides[1].first
    with caplog.at_level("INFO", logger="kvspec.session"):
        load = one.load(of("unlucky"), ticket=held(), timeout=9.0)
        load.cancel()
        until(lambda: load.poll() == "failed")
    (line,) = [record for record in caplog.records if "unlucky" in record.getMessage()]
    assert "cancelled" in line.getMessage()
