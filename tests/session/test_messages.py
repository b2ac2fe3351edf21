"""Whatever comes over a session's channel: nothing raises, and nothing is done because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import Direct, Side, engine, new_remote_id, request

import kvspec
from kvspec.protocol import Key, Notice, Party, Pushed, encode_notice
from kvspec.protocol.extent import Extent
from kvspec.protocol.notices import NOTICES
from kvspec.protocol.seal import Secret
from kvspec.session.control import NOTICE, QUESTION
from kvspec.session.introduction import INTRODUCTION, key_of
from kvspec.session.ledger import MAX_FOREIGN
from kvspec.testing import FakeNixl

if TYPE_CHECKING:
    import pytest

REMOTE_ID = new_remote_id("r")
RANK = kvspec.RankId()
RANKS = (RANK, kvspec.RankId(tp=7))
PARTIES = st.builds(
    Party, st.sampled_from("PDX"), st.sampled_from((0, 1)), st.sampled_from(RANKS)
)  # fmt: skip
KEYS = st.sampled_from((key_of(REMOTE_ID), Key("r", b"another nonce"), Key("\0", bytes(8))))
SMALL = st.sampled_from((0, 1, 2, 3, 2**62, 2**63 - 1))


@st.composite
def notices(draw: st.DrawFn) -> bytes:
    """Draw a notice that anybody who knows the secret could send, much like a true one."""
    kind = draw(st.sampled_from(sorted(NOTICES)))
    more: dict[str, Any] = {}
    if kind in ("beat", "done"):
        more["expected"] = draw(st.integers(1, 3))
    if kind == "grant":
        more["lease"] = draw(st.sampled_from((0.0, 1.0, 1e6)))
    if kind == "wrote":
        more |= {"group": "full", "layer": "l.0", "upto": draw(SMALL)}
    if kind == "sum":
        units, tokens = (range(draw(SMALL), draw(SMALL)) for _ in range(2))
        try:
            more["extent"] = Extent(
                layers=("l.0",), parts=("k",), units=units, tokens=tokens, rows=range(draw(SMALL))
            )
        except kvspec.SpecError:
            more["extent"] = Extent(
                layers=("l.0", "w.0"), parts=("k",), units=range(1), tokens=range(1)
            )
    if kind == "pushed":
        more["pushed"] = Pushed(draw(SMALL) % 2**62, 0, 0, bytes(16), bytes(16))
    if kind == "summed":
        more["total"] = draw(st.binary(min_size=8, max_size=8))
    notice = Notice(
        kind=kind,
        key=draw(KEYS),
        by=draw(PARTIES),
        to=draw(PARTIES),
        attempt=draw(SMALL),
        number=draw(SMALL),
        sample=draw(st.sampled_from((0, 1))),
        **more,
    )  # fmt: skip
    return encode_notice(notice)


PURPOSES = st.sampled_from((NOTICE, QUESTION, INTRODUCTION, b"kvspec-nixl-2\n"))
MESSAGES = st.one_of(
    st.binary(max_size=200),
    st.tuples(PURPOSES, st.binary(max_size=200)).map(b"".join),
    st.tuples(PURPOSES, st.binary(max_size=200) | notices()),
    st.tuples(st.just(NOTICE), notices()),
)


@given(st.lists(st.tuples(st.sampled_from("PD"), MESSAGES), max_size=40))
@settings(max_examples=50)
def test_anything_may_come(messages: list[tuple[str, Any]]) -> None:
    """Rubbish, sealed or not, and notices about anything, from and to anybody."""
    with (
        FakeNixl(lambda flight: flight.land() if flight.copies[0][2] == 1 else None),
        Side("P", engine(1), polled=False, channel=Direct("P")) as producer,
        Side("D", engine(1), polled=True, channel=Direct("D")) as consumer,
    ):
        consumer.meet(producer)
        producer.expect(REMOTE_ID, blocks=request().producer_blocks)
        (load,) = consumer.load(request(), REMOTE_ID, timeout=1e9)
        stranger, secret = Direct("stranger"), producer.sessions[RANK].nixl.secret
        for to, message in messages:
            data = message if isinstance(message, bytes) else secret.seal(*message)
            stranger.send(to, data)
            producer.poll()
            assert load.poll() != "done"
        answers = {data[:20] for _, data in stranger.receive()}
        assert all(each.startswith((NOTICE, INTRODUCTION[:20])) for each in answers)


def test_who_does_not_know_the_secret_learns_nothing() -> None:
    """A question of another secret is not answered, however well it is put."""
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        stranger = Direct("stranger")
        stranger.send("P", Secret(b"another secret, as long").seal(QUESTION, b""))
        stranger.send("P", Secret(b"").seal(QUESTION, b""))
        foreign = producer.sessions[RANK].ledger.poll().foreign
        assert 2 == len([each for each in foreign if "damaged or of another secret" in each])
        assert [] == stranger.receive()
        stranger.send("P", producer.sessions[RANK].nixl.secret.seal(QUESTION, b""))
        producer.poll()
        assert producer.introductions == [data for _, data in stranger.receive()]


def test_of_what_changed_nothing_the_last_is_remembered() -> None:
    """So many, and each is told once."""
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        stranger, ledger = Direct("stranger"), producer.sessions[RANK].ledger
        for number in range(MAX_FOREIGN + 9):
            stranger.send("P", bytes(number))
        producer.poll()
        foreign = ledger.poll().foreign
        assert (MAX_FOREIGN, ()) == (len(foreign), ledger.poll().foreign)
        assert f"{MAX_FOREIGN + 8} bytes" in foreign[-1]


def test_routes_are_remembered_of_who_was_heard_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many; who is heard again is the last, and who is forgotten is not answered."""
    monkeypatch.setattr("kvspec.session.control.MAX_ROUTES", 2)
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        (session,) = producer.sessions.values()
        producer.expect(REMOTE_ID)
        ranks = [Direct(name) for name in "abc"]

        def beat(at: int) -> None:
            """Let one rank say that it lives, and not look for the answer."""
            by = Party("D", 1, kvspec.RankId(tp=at))
            notice = Notice(kind="beat", key=key_of(REMOTE_ID), by=by, to=session.me, expected=3)
            ranks[at].send("P", session.nixl.secret.seal(NOTICE, encode_notice(notice)))
            session.poll()

        for at in (0, 1, 0, 2):
            beat(at)
        for rank in ranks:
            rank.receive()
        session.ledger.wrote(REMOTE_ID, 1, ["l.0"])
        assert [1, 0, 1] == [len(rank.receive()) for rank in ranks]
