"""Any bytes are a message that can be written again, or a `WireError`; no message breaks a ledger.

Inputs are valid messages with values changed at any place, messages with bytes changed, and random
bytes. Each decoded message is given to both ledgers. The ledgers never raise, and they keep a
bounded number of entries.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.completion.consumer import ConsumerLedger, LoadPlan
from kvspec.completion.ledger import Tell
from kvspec.completion.producer import ProducerLedger
from kvspec.wire.codec import decode_message, encode_message
from kvspec.wire.messages import (
    MESSAGES,
    Checksum,
    ChecksumContents,
    ChecksumRequest,
    Key,
    Lease,
    Message,
    RankAddress,
    ReaderStatus,
    Valid,
)
from kvspec.wire.versions import START

DRAWN = st.randoms(use_true_random=False)
RANKS = [kvspec.RankId(tp=tp) for tp in range(3)]
P, D = ([RankAddress(name, 1, rank) for rank in RANKS] for name in ("prefill", "decode"))
KEYS = [Key(f"request {n % 2}", bytes([n] * 8)) for n in range(4)]
CONTENTS = ChecksumContents(layer="layers.0", parts=("k", "v"), units=range(2), tokens=range(3, 9))
ONE_ROW = ChecksumContents(layer="layers.0", parts=("v",), units=range(1, 2), tokens=range(8, 9))
TRUE = Valid(key=KEYS[0], by=P[0], to=D[0])
# The magic string, two bytes of the wire version, and the start. Every message begins with them.
HEAD = encode_message(TRUE)[: len(b"kvspec-message\n") + 2 + START]
# Values at the edges of each wire type, and words that are valid in another field.
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 9, 2**20, 2**31, 2**63 - 1, 2**64 - 1, 0.0, 1e9, -1.0, float("nan"),
    float("inf"), None, True, "", "x", "heartbeat", "done", "lease", "valid", "gone",
    "full",
    "layers.0", b"", bytes(8), bytes(65), [], {}, [0, 0, 0], "x" * 2000, "prefill", "decode",
)  # fmt: skip


def true_message(rng: random.Random) -> Message:
    """Return a valid message that a session could send."""
    kind = rng.choice(list(MESSAGES.values()))
    reads = issubclass(kind, ReaderStatus | ChecksumRequest)
    by, to = (D, P) if reads else (P, D)
    own: dict[str, Any] = {}
    if issubclass(kind, ReaderStatus):
        own["expected"] = rng.choice((1, 2, 3))
    if kind is ChecksumRequest:
        own["contents"] = rng.choice((CONTENTS, ONE_ROW))
    if kind is Checksum:
        own["total"] = bytes(8)
    if kind is Lease:
        own["lease"] = rng.choice((0.0, 5.0, 10.0))
    return kind(
        key=rng.choice(KEYS), by=rng.choice(by), to=rng.choice(to[:1] * 3 + to),
        number=rng.randrange(9),
        **own,
    )  # fmt: skip


def message_bytes(rng: random.Random) -> bytes:
    """Return the bytes of a message, with values or bytes changed, or random bytes."""
    data = encode_message(true_message(rng))
    # 2 of 8 inputs are valid, 3 have other values, 2 have other bytes and 1 is random. Random bytes
    # rarely pass the first check of the decoder, so they are the rarest.
    sort = rng.randrange(8)
    if sort < 2:  # noqa: PLR2004
        return data
    if sort < 5:  # noqa: PLR2004
        fields = msgspec.msgpack.decode(data[len(HEAD) :])
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(fields))
            holder, key = fields, at
            while isinstance(holder[key], list | dict) and holder[key] and rng.randrange(4):
                holder = holder[key]
                key = rng.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
            holder[key] = deepcopy(rng.choice(VALUES))
        return HEAD + msgspec.msgpack.encode(fields)
    if sort < 7:  # noqa: PLR2004
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed[: rng.choice((None, None, len(changed) - 3))])
    return HEAD + bytes(rng.randrange(256) for _ in range(rng.randrange(40)))


class Pair:
    """One producer rank and one consumer rank, with requests that are held and loaded."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.producer = ProducerLedger(P[0], lease=10.0, longest=30.0)
        self.producer.most_early = 20
        self.consumer = ConsumerLedger(D[0], heartbeat=3.0, patience=9.0)
        self.started = 0
        # The producer ranks that each load has not read yet.
        self.unread: dict[str, tuple[kvspec.RankId, ...]] = {}

    def step(self) -> None:
        """Perform one legal event: begin, read, write or abort a request, or advance the clock."""
        rng, self.now = self.rng, self.now + self.rng.choice((0.0, 0.1, 4.0))
        key = rng.choice(KEYS)
        # Beginning is twice as likely as aborting, so that requests stay in progress.
        if rng.random() < 0.2:  # noqa: PLR2004
            self.begin(key)
        if rng.random() < 0.1:  # noqa: PLR2004
            self.producer.abort(key, self.now)
        for name in list(self.consumer.open)[:1]:
            for rank in self.unread.pop(name, ()):
                if self.consumer.open.get(name) != "moving":
                    break
                self.answered(self.consumer.finish(self.consumer.start(name, rank), self.now))

    def begin(self, key: Key) -> None:
        """Begin a request on both sides unless it is already in progress."""
        try:
            self.producer.hold(key, self.now)
        except kvspec.SpecError:
            return
        self.started += 1
        load_plan = LoadPlan(
            request_id=f"{self.started}", key=key, engine_id="prefill", epoch=1,
            expected=dict.fromkeys(RANKS, 2), sources=(RANKS[0], RANKS[1]),
        )  # fmt: skip
        name = load_plan.request_id
        self.unread[name] = load_plan.sources
        self.answered(self.consumer.begin(name, self.now, 20.0))
        try:
            self.consumer.assign(load_plan)
        except kvspec.SpecError:
            self.answered(self.consumer.cancel(name, self.now))
            return
        self.answered(self.consumer.queued(name, self.now))

    def answered(self, actions: list[Any]) -> None:
        """Deliver 70 % of the messages that a ledger sends; the others are lost."""
        for action in actions:
            if isinstance(action, Tell) and self.rng.random() < 0.7:  # noqa: PLR2004
                message = decode_message(encode_message(action.message))
                self.give(message)

    def give(self, message: Message) -> None:
        """Give a message to both ledgers, whichever rank it is addressed to."""
        for actions in (
            self.producer.receive(message, self.now), self.consumer.receive(message, self.now)
        ):  # fmt: skip
            self.answered(actions)
        assert len(self.producer.held) <= len(KEYS)
        assert len(self.producer.records) <= len(KEYS) + self.producer.most_early
        assert len(self.consumer.open) <= self.started

    def end(self) -> None:
        """Advance the clock beyond all leases, and check that both ledgers are empty."""
        # 40 s exceed `longest` of the producer and the patience of the consumer.
        for _ in range(2):
            self.now += 40.0
            self.producer.tick(self.now)
            self.consumer.tick(self.now)
        self.now += 40.0
        self.consumer.tick(self.now)
        assert (self.producer.held, len(self.producer.records)) == ((), 0)
        assert (self.consumer.open, self.consumer.steps) == ({}, 0)


def check(data: bytes, pair: Pair | None = None) -> bool:
    """Decode *data* and give it to the ledgers; return whether it is a message."""
    try:
        message = decode_message(data)
    except kvspec.WireError as error:
        if not error.path:
            raise AssertionError("an error without a path") from error
        return False
    assert message == decode_message(encode_message(message))
    if pair is not None:
        pair.give(message)
    return True


@given(DRAWN)
def test_ledgers_survive_changed_messages(rng: random.Random) -> None:
    """Changed messages arrive one after the other, with legal events between them."""
    pair = Pair(rng)
    for _ in range(rng.randrange(1, 12)):
        pair.step()
        check(message_bytes(rng), pair)
    pair.end()


@given(st.binary(max_size=60))
def test_ledgers_survive_random_bytes(data: bytes) -> None:
    """The bytes are random, with and without a valid head."""
    check(data)
    check(HEAD + data)


def flood(rng: random.Random) -> Iterator[tuple[bytes, Pair]]:
    """Yield inputs for the ledgers, with legal events between them."""
    while True:
        pair = Pair(rng)
        for _ in range(100):
            if not rng.randrange(3):
                pair.step()
            yield message_bytes(rng), pair
        pair.end()


def decode(rng: random.Random) -> Iterator[tuple[bytes]]:
    """Yield valid messages with a few bytes changed or cut, for the decoder alone."""
    # 4,096 messages contain each kind and optional field many times, and are encoded only once.
    true = [encode_message(true_message(rng)) for _ in range(4096)]
    chance = rng.random
    while True:
        for kept in true:
            changed = bytearray(kept)
            for _ in range(1 + int(3 * chance())):
                at = len(HEAD) + int(chance() * (len(kept) - len(HEAD)))
                changed[at] = int(256 * chance())
            yield (bytes(changed if chance() < 0.9 else changed[: int(chance() * len(kept))]),)  # noqa: PLR2004


FLOODS = {"any": flood, "decode": decode}
