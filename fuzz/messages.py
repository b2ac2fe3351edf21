"""Any bytes are a message that can be written again, or a `WireError`; no message breaks a ledger.

Messages are true ones with values changed at any place, bytes flipped, or no messages at all. What
decodes is given to both ledgers, which never raise, and keep no more than what they were told of.
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
from kvspec.protocol.consumer import ConsumerLedger
from kvspec.protocol.extent import Extent
from kvspec.protocol.load_plan import LoadPlan
from kvspec.protocol.messages import Key, Message, RankAddress, Tell
from kvspec.protocol.producer import ProducerLedger
from kvspec.protocol.pushed import Pushed
from kvspec.protocol.wire import decode_message, encode_message

DRAWN = st.randoms(use_true_random=False)
RANKS = [kvspec.RankId(tp=tp) for tp in range(3)]
P, D = ([RankAddress(name, 1, rank) for rank in RANKS] for name in ("prefill", "decode"))
KEYS = [Key(f"request {n % 2}", bytes([n] * 8)) for n in range(4)]
PLACE = ("full", "layers.0")
EXTENT = Extent(layers=PLACE[1:], parts=("k", "v"), units=range(2), tokens=range(3, 9))
TRUE = Message(kind="valid", key=KEYS[0], by=P[0], to=D[0])
HEAD = encode_message(TRUE)[: len(b"kvspec-message\n") + 2]
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 9, 2**20, 2**31, 2**63 - 1, 2**64 - 1, 0.0, 1e9, -1.0, float("nan"),
    float("inf"), None, True, "", "x", "heartbeat", "done", "lease", "valid", "gone", "progress",
    "full",
    "layers.0", b"", bytes(8), bytes(65), [], {}, [0, 0, 0], "x" * 2000, "prefill", "decode",
)  # fmt: skip


def true_message(drawn: random.Random) -> Message:
    """Return a message that may well be sent."""
    kind = drawn.choice(
        (
            "heartbeat",
            "done",
            "lease",
            "valid",
            "gone",
            "progress",
            "checksum_request",
            "checksum",
            "pushed",
        )
    )
    by, to = (D, P) if kind in ("heartbeat", "done", "checksum_request") else (P, D)
    more: dict[str, Any] = {}
    if kind in ("heartbeat", "done"):
        more["expected"] = drawn.choice((1, 2, 3))
    if kind == "checksum_request":
        more["extent"] = drawn.choice((EXTENT, *(EXTENT.halves or ())))
    if kind == "pushed":
        more["pushed"] = Pushed(drawn.randrange(9), 0, drawn.randrange(2), bytes(16), bytes(16))
    if kind == "checksum":
        more["total"] = bytes(8)
    if kind == "lease":
        more["lease"] = drawn.choice((0.0, 5.0, 10.0))
    if kind == "progress":
        more = {"group": PLACE[0], "layer": PLACE[1], "upto": drawn.randrange(9)}
    return Message(
        kind=kind, key=drawn.choice(KEYS), by=drawn.choice(by), to=drawn.choice(to[:1] * 3 + to),
        attempt=drawn.choice((0, 0, 1)), number=drawn.randrange(9), sample=drawn.choice((0, 0, 1)),
        **more,
    )  # fmt: skip


def message_bytes(drawn: random.Random) -> bytes:
    """Return a message's bytes, with values or bytes changed, or any bytes."""
    data = encode_message(true_message(drawn))
    sort = drawn.randrange(8)
    if sort < 2:  # noqa: PLR2004
        return data
    if sort < 5:  # noqa: PLR2004
        fields = msgspec.msgpack.decode(data[len(HEAD) :])
        for _ in range(drawn.choice((1, 1, 2))):
            at = drawn.randrange(len(fields))
            holder, key = fields, at
            while isinstance(holder[key], list) and holder[key] and drawn.randrange(4):
                holder, key = holder[key], drawn.randrange(len(holder[key]))
            holder[key] = deepcopy(drawn.choice(VALUES))
        return HEAD + msgspec.msgpack.encode(fields)
    if sort < 7:  # noqa: PLR2004
        changed = bytearray(data)
        for _ in range(drawn.choice((1, 1, 2, 4))):
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        return bytes(changed[: drawn.choice((None, None, len(changed) - 3))])
    return HEAD + bytes(drawn.randrange(256) for _ in range(drawn.randrange(40)))


class Pair:
    """One rank of each side, with requests that are held and read."""

    def __init__(self, drawn: random.Random) -> None:
        self.drawn, self.now = drawn, 0.0
        self.producer = ProducerLedger(P[0], lease=10.0, longest=30.0, most_early=20)
        self.consumer = ConsumerLedger(D[0], heartbeat=3.0, patience=9.0)
        self.started = 0

    def step(self) -> None:
        """Let something true happen: a request begins, is read, written, aborted; time passes."""
        drawn, self.now = self.drawn, self.now + self.drawn.choice((0.0, 0.1, 4.0))
        key = drawn.choice(KEYS)
        if drawn.random() < 0.2:  # noqa: PLR2004
            self.begin(key)
        if drawn.random() < 0.1:  # noqa: PLR2004
            self.producer.abort(key.request_id, self.now)
        for name in list(self.consumer.open)[:1]:
            for rank, places in self.consumer.readable(name).items():
                if self.consumer.open.get(name) != "moving":
                    break
                (group, layer), upto = next(iter(places.items()))
                step = self.consumer.start(name, rank, group, [layer], upto)
                self.answered(self.consumer.finish(step, self.now))

    def begin(self, key: Key) -> None:
        """Begin a request on both sides, where it is not under way."""
        try:
            self.producer.admit(key.request_id, key.nonce, self.now)
            self.producer.record_progress(key.request_id, *PLACE, 8, self.now)
        except kvspec.SpecError:
            return
        self.started += 1
        load_plan = LoadPlan(
            request_id=f"{self.started}", key=key, engine_id="prefill", epoch=1, partial=True,
            expected=dict.fromkeys(RANKS, 2), sources={RANKS[0]: {PLACE: 8}, RANKS[1]: {PLACE: 8}},
        )  # fmt: skip
        try:
            self.answered(self.consumer.expect(load_plan, self.now, 20.0))
        except kvspec.SpecError:
            return

    def answered(self, actions: list[Any]) -> None:
        """Give each ledger what the other tells it, now and then."""
        for action in actions:
            if isinstance(action, Tell) and self.drawn.random() < 0.7:  # noqa: PLR2004
                message = decode_message(encode_message(action.message))
                self.give(message)

    def give(self, message: Message) -> None:
        """Give a message to both ledgers, whomever it is for."""
        for actions in (
            self.producer.receive(message, self.now), self.consumer.receive(message, self.now)
        ):  # fmt: skip
            self.answered(actions)
        assert len(self.producer.held) <= len(KEYS)
        assert self.producer.remembered <= len(KEYS) + 20
        assert len(self.consumer.open) <= self.started

    def end(self) -> None:
        """Let time pass: nothing is left."""
        for _ in range(2):
            self.now += 40.0
            self.producer.tick(self.now)
            self.consumer.tick(self.now)
        self.now += 40.0
        self.consumer.tick(self.now)
        assert (self.producer.held, self.producer.remembered) == ((), 0)
        assert (self.consumer.open, self.consumer.steps) == ({}, 0)


def check(data: bytes, pair: Pair | None = None) -> bool:
    """Decode *data*, and give it to the ledgers; say if it is a message."""
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
def test_any_message(drawn: random.Random) -> None:
    """One after the other, with what is true between them."""
    pair = Pair(drawn)
    for _ in range(drawn.randrange(1, 12)):
        pair.step()
        check(message_bytes(drawn), pair)
    pair.end()


@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    """Bytes that nobody wrote."""
    check(data)
    check(HEAD + data)


def flood(drawn: random.Random) -> Iterator[tuple[bytes, Pair]]:
    """Yield inputs for the ledgers, with what is true between them."""
    while True:
        pair = Pair(drawn)
        for _ in range(100):
            if not drawn.randrange(3):
                pair.step()
            yield message_bytes(drawn), pair
        pair.end()


def decode(drawn: random.Random) -> Iterator[tuple[bytes]]:
    """Yield true messages with a few bytes changed or cut, for the decoder alone."""
    true = [encode_message(true_message(drawn)) for _ in range(4096)]
    chance = drawn.random
    while True:
        for kept in true:
            changed = bytearray(kept)
            for _ in range(1 + int(3 * chance())):
                at = len(HEAD) + int(chance() * (len(kept) - len(HEAD)))
                changed[at] = int(256 * chance())
            yield (bytes(changed if chance() < 0.9 else changed[: int(chance() * len(kept))]),)  # noqa: PLR2004


FLOODS = {"any": flood, "decode": decode}
