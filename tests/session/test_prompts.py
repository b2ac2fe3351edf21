"""Prompts that are held for others: told as plain data, read from who is met when first asked."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import kvspec
from kvspec.errors import KVSpecError, SpecError, TransferError

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from sessions import Side, engine, new_remote_id, request, until

from kvspec.session import PrefillTicket, Prompts, content_of
from kvspec.testing import FakeNixl

BLOCKS = {"full": [1, 2, 3, 4], "window": [4, 3, 2, 1]}


def held(addresses: tuple[str, ...] = ("127.0.0.1:9",), **changed: Any) -> PrefillTicket:
    """Return what a producer's scheduler says."""
    given = {"engine_id": "P", "addresses": addresses, "remote_id": new_remote_id("p-1")}
    return PrefillTicket(**{**given, "computed_tokens": 14, "tables": BLOCKS, **changed})


def test_what_a_router_passes_on_is_what_was_said() -> None:
    """Over JSON, beside whatever else it says; an id is its own."""
    said = held()
    read = PrefillTicket.from_params(json.loads(json.dumps({**said.to_params(), "more": 1})))
    assert said == read
    assert said.to_params() == read.to_params()
    params = said.to_params()
    tables = dict(reversed(params["remote_block_ids"].items()))
    other = dict(reversed((params | {"remote_block_ids": tables}).items()))
    assert said == PrefillTicket.from_params(other), "in another order, which JSON does not keep"


WRONG = [None, 5, "", [], [1], {"group0": [0]}, {"group0": 5}, {"group0": [0, ["x"]]}, -1]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", [*held().to_params()])
def test_what_no_producer_said_is_refused(name: str, value: object) -> None:
    """By the name of what is wrong; a count of 5 is one, and to say nothing of the content."""
    if (name, value) in (("remote_num_tokens", 5), ("remote_content", "")):
        return
    with pytest.raises(SpecError, match=r"remote_|block_ids|first_token") as caught:
        PrefillTicket.from_params({**held().to_params(), name: value})
    assert ("remote_seal" in str(caught.value)) == (name == "remote_seal")


LEGAL: dict[str, Any] = {
    "remote_engine_id": "Q",
    "remote_addresses": ["127.0.0.1:10"],
    "remote_request_id": new_remote_id("p-1"),
    "remote_num_tokens": 15,
    "remote_block_ids": {"full": [0, [2, 1]], "window": [4, [3]]},
    "remote_content": content_of([5]),
    "remote_seal": "0" * 64,
}


@pytest.mark.parametrize("secret", [None, b"", b"another secret, as long"])
@pytest.mark.parametrize("name", [*LEGAL])
def test_what_was_changed_on_the_way_is_refused(name: str, secret: bytes | None) -> None:
    """Another request's blocks, or count, or name, however legal; also where there is no secret."""
    said = held().to_params(secret)
    assert set(LEGAL) == set(said)
    PrefillTicket.from_params(said, secret)
    for changed in (LEGAL[name], held(computed_tokens=9).to_params(secret)[name]):
        if changed != said[name]:
            params = said | {name: changed}
            with pytest.raises(SpecError) as caught:
                PrefillTicket.from_params(params, secret)
            assert ("remote_seal", params["remote_seal"]) == (
                caught.value.field,
                caught.value.value,
            )


def test_who_does_not_know_the_secret_is_not_believed() -> None:
    """Neither who has another, nor who has none; and none is taken for the environment's."""
    said = held()
    assert said == PrefillTicket.from_params(said.to_params(), os.environ["KVSPEC_SECRET"])
    for own, other in ((None, b""), (b"", None), (b"another secret, as long", None)):
        with pytest.raises(SpecError, match="remote_seal"):
            PrefillTicket.from_params(said.to_params(own), other)


def test_another_prompt_is_refused() -> None:
    """The first tokens have to be those that are held; nothing said of them fits any."""
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    prompt = held(computed_tokens=7, content=content_of(tokens[:7]))
    prompt.check(tokens)
    prompt.check([*tokens[:7], 7])
    held().check([])
    for wrong in ([0, *tokens[1:]], [*tokens[:6], 0], tokens[:6], []):
        with pytest.raises(SpecError) as caught:
            prompt.check(wrong)
        assert ("remote_content", prompt.content) == (caught.value.field, caught.value.value)


def test_a_request_names_what_moves() -> None:
    """The first tokens of the prompt, less what is cached; its states have seen all of it."""
    tables = {"full": kvspec.BlockTable([9, 8])}
    asked = held().request("d-1", 6, tables, 2)
    assert (6, 2, 14) == (asked.num_tokens, asked.cached_tokens, asked.state_tokens)
    assert (held().tables, tables) == (asked.producer_blocks, asked.consumer_blocks)


def test_no_more_is_asked_for_than_is_held() -> None:
    """What lies behind a prompt's last token was never computed."""
    tables = {"full": kvspec.BlockTable([9, 8])}
    assert 14 == held().request("d-1", 14, tables).num_tokens
    with pytest.raises(SpecError, match="14") as caught:
        held().request("d-1", 15, tables)
    assert ("num_tokens", 15) == (caught.value.field, caught.value.value)


def test_what_is_held_does_not_change() -> None:
    """Nor is it told otherwise, whatever becomes of the mapping that it was made of."""
    tables = {"full": kvspec.BlockTable([1, 2], first_token=4)}
    prompt = held(tables=tables)
    said = prompt.to_params()
    tables["full"] = kvspec.BlockTable([7])
    assert said == prompt.to_params()
    assert [1, 2] == prompt.tables["full"].block_ids.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_id", 3), ("engine_id", ""), ("addresses", "127.0.0.1:9"), ("addresses", []),
        ("addresses", [3]), ("remote_id", "p-1"), ("computed_tokens", 0), ("computed_tokens", True),
        ("tables", None), ("tables", {"full": 3}), ("content", None),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(name: str, value: object) -> None:
    """By name, before it is told to anybody."""
    with pytest.raises(SpecError, match="block_ids=3" if value == {"full": 3} else f"^{name}="):
        held(**{name: value})


@pytest.mark.parametrize("given", [None, [], "x", 3, [("remote_num_tokens", 3)]], ids=repr)
def test_what_is_no_mapping_was_said_by_nobody(given: Any) -> None:
    """Whatever a router passes on."""
    with pytest.raises(SpecError, match="mapping") as caught:
        PrefillTicket.from_params(given)
    assert ("remote", given) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("tokens", [[1.5], ["1"], None, 3, [2**70], [[1, 2], [3, 4]], [[1], []]])
def test_what_are_no_tokens_have_no_sum(tokens: Any) -> None:
    """1.5 would have that of 1, and two rows that of one."""
    with pytest.raises(SpecError, match=r"token_ids=.*expected a sequence of ints"):
        content_of(tokens)
    with pytest.raises(SpecError, match="token_ids="):
        held().check(tokens)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Return two engines of two ranks, over memory, that have not met; the producer serves."""
    with (
        FakeNixl(),
        Side("P", engine(2), polled=False, lease=5.0, background=True) as producer,
        Side("D", engine(2), polled=True, heartbeat=0.2, background=True) as consumer,
    ):
        yield producer, consumer


def test_who_holds_a_prompt_is_met_when_it_is_asked_for(sides: tuple[Side, Side]) -> None:
    """Once; every byte arrives, and what is released is free at once."""
    producer, consumer = sides
    asked = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
    prompts = [
        held((*producer.addresses,), remote_id=new_remote_id(name), tables=asked.producer_blocks)
        for name in ("read", "released")
    ]
    producer.fill(asked)
    consumer.spoil(asked)
    readers = [Prompts(session, timeout=10.0) for session in consumer.sessions.values()]
    for prompt in prompts:
        producer.hold(prompt.remote_id)
    loads = [reader.load(prompts[0], asked) for reader in readers]
    for reader in readers:
        reader.decline(prompts[1])
    until(lambda: all(load.poll() == "done" for load in loads), producer)
    assert [None, None] == [load.error for load in loads]
    assert [] == consumer.wrong(asked)
    assert loads[0].load is not None
    assert loads[0].unwritten_ranges.tolist() == loads[0].load.unwritten_ranges.tolist()
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 4)
    assert ["read", "read", "released", "released"] == sorted(done)


def test_who_is_not_there_fails_its_own_prompts(sides: tuple[Side, Side]) -> None:
    """They wait for nobody else; one who comes back, or is lost, is met anew."""
    producer, consumer = sides
    asked = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
    session = next(iter(consumer.sessions.values()))
    nobody = held(engine_id="nobody")
    there = held((*producer.addresses,), tables=asked.producer_blocks)
    with Prompts(session, timeout=1.0) as prompts:
        prompts.decline(nobody)
        until(prompts._connections["nobody"].connected.done)
        first = prompts.load(nobody, asked)
        assert "moving" == first.poll()
        assert [] == first.unwritten_ranges.tolist()
        until(lambda: first.poll() == "failed")
        assert "no introduction from 127.0.0.1:9" in str(first.error)
        again = prompts.load(nobody, asked)
        assert "moving" == again.poll()
        lost = prompts.load(there, asked)  # it is not held any more
        met = prompts._connections["P"]
        until(lambda: lost.poll() == "failed", producer)
        assert "failed" == again.poll()
        assert met.over
        back = attrs.evolve(there, remote_id=new_remote_id("p-1"))
        producer.hold(back.remote_id)
        last = prompts.load(back, attrs.evolve(asked, request_id="r-1"))
        anew = prompts._connections["P"]
        assert anew is not met
        until(lambda: last.poll() == "done", producer)
        prompts.decline(back)
        assert anew is prompts._connections["P"]
        session.disconnect("P")
        refused = prompts.load(there, attrs.evolve(asked, request_id="r-2"))
        assert "failed" == refused.poll()
        assert "connected producers" in str(refused.error)
        after = attrs.evolve(there, remote_id=new_remote_id("p-2"))
        producer.hold(after.remote_id)
        once_more = prompts.load(after, attrs.evolve(asked, request_id="r-3"))
        until(lambda: once_more.poll() == "done", producer)


def test_who_was_not_met_yet_is_not_met_after_the_end(sides: tuple[Side, Side]) -> None:
    """What waited behind somebody who does not answer fails at once."""
    asked = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
    with Prompts(next(iter(sides[1].sessions.values())), timeout=0.3) as prompts:
        first, second = (prompts.load(held((f"127.0.0.1:{n}",)), asked) for n in (9, 7))
    third = prompts.load(held(), asked)
    for late in (second, third):
        assert "failed" == late.poll()
        with pytest.raises(TransferError) as caught:
            late.wait()
        assert ("r", "closed") == (caught.value.request, caught.value.state)
    until(lambda: first.poll() == "failed")


def test_who_was_not_asked_for_the_longest_is_parted_from() -> None:
    """Engines that are gone for good do not add up; one that is asked for again is met again."""
    with FakeNixl(), contextlib.ExitStack() as stack:
        enter = stack.enter_context
        producers = [enter(Side(name, engine(1), polled=False, background=True)) for name in "PQR"]
        consumer = enter(Side("D", engine(1), polled=True, heartbeat=0.2, background=True))
        (session,) = consumer.sessions.values()
        prompts = enter(Prompts(session, timeout=10.0, most=2))

        def read(number: int, name: str) -> None:
            producer = producers[number]
            remote_id = new_remote_id(name)
            asked = request(name, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
            producer.hold(remote_id)
            address = (*producer.addresses,)
            prompts.load(held(address, engine_id="PQR"[number], remote_id=remote_id), asked).wait()

        def met() -> set[str]:
            until(lambda: prompts._submit(lambda _: None, None).result() or True)
            return {engine_id for _, engine_id in session._remotes._connected}

        for number in (0, 1, 0, 2):
            read(number, f"first {number}")
        assert {"P", "R"} == met()
        read(0, "second")
        read(1, "again")
        assert {"P", "Q"} == met()
        (first,) = producers[0].sessions.values()
        until(lambda: not first.stats().held)
        assert {"P", "Q"} == {*prompts._connections}
        gone = held((*producers[0].addresses,), engine_id="P", remote_id=new_remote_id("gone"))
        lost = prompts.load(gone, request("lost", producer_blocks=BLOCKS, consumer_blocks=BLOCKS))
        lost.cancel()
        until(lambda: lost.poll() == "failed")
        read(1, "once more")
        read(2, "and again")
        assert {"Q", "R"} == met()


def test_a_producer_that_moved_is_met_where_it_is(sides: tuple[Side, Side]) -> None:
    """Its name is the same, its addresses are others; where it was takes nothing any more."""
    producer, consumer = sides
    asked = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
    with Prompts(next(iter(consumer.sessions.values())), timeout=1.0) as prompts:
        before = prompts.load(held(), asked)
        prompt = held((*producer.addresses,))
        producer.hold(prompt.remote_id)
        now = prompts.load(prompt, asked)
        until(lambda: now.poll() == "done", producer)
        assert ("failed", ["P"]) == (before.poll(), [*prompts._connections])


def test_nobody_is_waited_for_by_a_session_that_is_closed() -> None:
    """The thread that meets ends, however patient it is: else its process would not."""
    with FakeNixl(), Side("D", engine(1), polled=True, background=True) as consumer:
        (session,) = consumer.sessions.values()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            prompts = Prompts(session, timeout=60.0)
            load = prompts.load(held((address,)), request())
            until(lambda: session.channel.reaches(address))  # type: ignore[attr-defined]
            prompts.close()
            session.close()
            until(lambda: load.poll() == "failed", seconds=5.0)
        assert "the session was closed" in str(load.error)


def test_prompt_wait_raises_when_the_session_is_closed() -> None:
    """Nothing moves the load on any more, so that it would be waited for without an end."""
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=False) as consumer,
    ):
        (session,) = consumer.sessions.values()
        asked = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
        prompt = held((*producer.addresses,), tables=asked.producer_blocks)
        with Prompts(session, timeout=30.0) as prompts:
            until(prompts._connection(prompt).connected.done)
            net.fate = lambda _: None  # no byte arrives
            load = prompts.load(prompt, asked)
            assert load.load is not None
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
            for flight in net.moving:
                flight.land()


def test_a_prompt_is_waited_for_or_given_up(sides: tuple[Side, Side]) -> None:
    """As a load: waited for until it is done, cancelled before its producer is met and after."""
    producer, consumer = sides
    asked = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
    prompts = [
        held((*producer.addresses,), remote_id=new_remote_id(name), tables=asked.producer_blocks)
        for name in ("early", "read", "late")
    ]
    for prompt in prompts:
        producer.hold(prompt.remote_id)
    readers = [Prompts(session, timeout=10.0) for session in consumer.sessions.values()]
    wait = threading.Event()
    for reader in readers:
        reader._thread.submit(wait.wait, 20.0)
    early = [reader.load(prompts[0], asked) for reader in readers]
    for load in early:
        load.cancel()
        load.cancel()
        assert ("failed", {}) == (load.poll(), load.undefined_blocks)
        with pytest.raises(TransferError, match=r"cancelled.*state=stopped"):
            load.wait()
    wait.set()
    for load in [reader.load(prompts[1], asked) for reader in readers]:
        load.wait()
        assert ("done", None, {}) == (load.poll(), load.error, load.undefined_blocks)
    late = [reader.load(prompts[2], asked) for reader in readers]
    for load in late:
        load.cancel()
        until(lambda load=load: load.poll() != "moving")
        assert load.load is None or load.undefined_blocks == load.load.undefined_blocks
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 6)
    assert ["early", "early", "late", "late", "read", "read"] == sorted(done)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"producer_blocks": BLOCKS | {"full": [1, 2, 3, 5]}}, "producer_blocks['full']"),
        ({"num_tokens": 15}, "num_tokens"),
    ],
)
def test_a_request_of_another_prompt_is_not_read(
    sides: tuple[Side, Side], changed: dict[str, Any], field: str
) -> None:
    """It would be done, with another prompt's bytes; the producer is told that none is read."""
    producer, consumer = sides
    asked = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
    tables = asked.producer_blocks
    prompt = held((*producer.addresses,), tables=tables, remote_id=new_remote_id("p-1"))
    producer.hold(prompt.remote_id)
    consumer.spoil(asked)
    readers = [Prompts(session, timeout=10.0) for session in consumer.sessions.values()]
    loads = [reader.load(prompt, attrs.evolve(asked, **changed)) for reader in readers]
    until(lambda: all(load.poll() == "failed" for load in loads), producer)
    for load in loads:
        with pytest.raises(SpecError) as caught:
            load.wait()
        assert field == caught.value.field
    for rank, storage in consumer.storage.items():
        for name, flat in storage.items():
            assert consumer.before[rank][name].tobytes() == flat.tobytes()
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 2)


def test_what_is_no_request_is_refused(sides: tuple[Side, Side]) -> None:
    """A prompt at once, since nobody can be told; a request as the load's error."""
    wrong: Any = None
    with Prompts(next(iter(sides[1].sessions.values())), timeout=1.0) as prompts:
        with pytest.raises(SpecError, match="prompt=None: expected a PrefillTicket"):
            prompts.load(wrong, request())
        load = prompts.load(held((*sides[0].addresses,)), wrong)
        until(lambda: load.poll() == "failed")
    assert "request=None: expected a TransferRequest" in str(load.error)
    with pytest.raises(SpecError, match="session=None: expected a Session"):
        Prompts(wrong, timeout=1.0)


def test_a_load_that_moves_is_given_up_when_nothing_writes_it() -> None:
    """The cancelled one tells what its session's load does, also that it failed."""
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.2, background=True) as consumer,
    ):
        (session,) = consumer.sessions.values()
        asked = request(producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
        prompt = held((*producer.addresses,), tables=asked.producer_blocks)
        producer.hold(prompt.remote_id)
        with Prompts(session, timeout=10.0) as prompts:
            until(prompts._connection(prompt).connected.done)
            net.fate = lambda _: None
            load = prompts.load(prompt, asked)
            assert ("moving", "<PromptLoad 'r': <Load 'r': moving>>") == (
                load.poll(),
                repr(load),
            )
            load.cancel()
            assert ("moving", True) == (load.poll(), "cancelled" in str(load.error))
            for flight in net.moving:
                flight.land()
            until(lambda: load.poll() == "failed")
            assert {"full", "window"} == set(load.undefined_blocks)


def test_who_takes_connections_and_says_nothing_is_waited_for_as_long_as_a_load() -> None:
    """No longer than *timeout*, however patient; what failed so is not cancelled afterwards."""
    with FakeNixl(), Side("D", engine(1), polled=True, background=True) as consumer:
        (session,) = consumer.sessions.values()
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            Prompts(session, timeout=0.1, patience=9.0) as prompts,
        ):
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            load = prompts.load(held((address,)), request())
            until(lambda: load.poll() == "failed", seconds=5.0)
        load.cancel()
        told = f"no introduction from {address} within 0.1 s: the process there is silent"
        assert told in str(load.error)


def test_what_does_not_fit_fails_and_is_released(sides: tuple[Side, Side]) -> None:
    """A request whose tables are short is the load's error; the producer's rank is free."""
    producer, consumer = sides
    prompt = held((*producer.addresses,), tables={"full": [1, 2], "window": [3, 4]})
    short = prompt.request("d-1", 14, BLOCKS)
    producer.hold(prompt.remote_id)
    readers = [Prompts(session, timeout=10.0) for session in consumer.sessions.values()]
    loads = [reader.load(prompt, short) for reader in readers]
    until(lambda: all(load.poll() == "failed" for load in loads), producer)
    assert all(isinstance(load.error, KVSpecError) for load in loads), loads
    assert "d-1" in repr(loads[0])
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 2)
