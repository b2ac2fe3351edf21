"""Seal and open the messages of a session, and fetch introductions.

Invariant: a message with a wrong seal is recorded and changes nothing, and its sender is
disconnected. A message may be lost, and then its sender sends it again. An introduction is sent
once for each answer to a new challenge. It is used only after its seal has proved that a holder of
the secret wrote all of it.

How it works:
    All messages are sealed with the secret. The asker fetches the introduction of the answerer:

    ==========  ============  ====================================================
    from        message       body
    ==========  ============  ====================================================
    asker       QUESTION      the versions that the asker reads
    answerer    CHALLENGE     random bytes, made for this route
    asker       ANSWER        the same bytes
    answerer    INTRODUCTION  the answerer's address, lease, heartbeat and handshake
    ==========  ============  ====================================================

    The question has always the same bytes, so a recorded copy returns only a challenge. An answer
    counts once, and only on the route that was challenged (a connection of `TcpChannel`). So a
    recorded answer returns nothing. The asker answers only the ranks that it is asking at present.
    Otherwise anyone could forward a challenge and use the answer.

    A connection becomes trusted by the right answer, or by a message (`_learn`): one that is newer,
    one of a rank without an open route, or one of a rank whose route was dialled. In the last two
    cases a stranger may have recorded the message. Questions do not count, since anyone can replay
    them.

    A message contains the random start of its sender's session. The first message or introduction
    of a rank decides which session has its name. Messages and introductions of another session with
    that name are refused. Otherwise two live sessions of one name could read one request, and the
    producer would take the end of one for the end of the other:

        first known             then                      result
        ----------------------  ------------------------  --------------------------------
        message with start A    message with start B      refused, noted and logged
        introduction with A     message with start B      refused, noted and logged
        message or introduction introduction with B       `Session.connect` raises `SpecError`
        with start A

    `Session.disconnect` forgets the start. A newer epoch is another name.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, TypeVar

import attrs
from msgspec import Meta

from kvspec.completion.ledger import Refused, Tell
from kvspec.errors import SpecError, TransferError, TransferState, WireError, counted
from kvspec.inputs import instance, sequence
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.session.background import SessionLock
from kvspec.session.channel import Channel
from kvspec.session.stats import Counters
from kvspec.wire.codec import (
    MAX_HANDSHAKE,
    decode_handshake,
    decode_message,
    encode_handshake,
    encode_message,
    sender_of,
)
from kvspec.wire.handshake import MAX_NAME, Handshake, is_name
from kvspec.wire.messages import Message, RankAddress, ReaderStatus
from kvspec.wire.packing import Seconds, WireStruct, decoder_of, pack, unpack
from kvspec.wire.seal import Secret
from kvspec.wire.versions import OLDEST, OWN, RANGED, VERSION, Versions

MESSAGE = b"kvspec-message-1\n"
QUESTION = b"kvspec-question-2\n"
CHALLENGE = b"kvspec-challenge-1\n"
ANSWER = b"kvspec-answer-1\n"
INTRODUCTION = b"kvspec-introduction-2\n"
ASK_AGAIN = 0.5
"""Seconds between two questions to one rank."""
LINGER = 2 * ASK_AGAIN
"""For so many seconds after a connection has ended, the peer counts as reached.

A process with another secret or version closes the connection at each question.
"""
LOOK_AGAIN = 1e-2
"""Seconds between two looks for an introduction."""
CHALLENGE_AGAIN = 0.25
"""Seconds before a route is challenged again.

It is less than `ASK_AGAIN`. So if a challenge is lost, the next question is answered. A replayed
stream of questions is answered this often, so that it fills no queue.
"""
CHALLENGE_BYTES = 16
"""Random bytes of a challenge."""
MAX_CHALLENGES = 1 << 12
"""Challenges that wait for an answer; more than the connections that a `TcpChannel` accepts."""
MAX_ROUTES = 1 << 16
"""Ranks whose route is remembered. The one that was silent longest is forgotten."""
WARN_AGAIN = 60.0
"""Seconds before the same warning is logged again."""
MAX_WARNED = 16
"""Number of different warnings about peers in that time."""
MAX_REFUSED = 256
"""Number of refusal reasons to keep."""
LOG = logging.getLogger("kvspec.session")

_PURPOSES = MESSAGE, QUESTION, CHALLENGE, ANSWER, INTRODUCTION
_WANTED = f"a sealed message of version {OWN}"
_OTHER_VERSION = (
    "a peer at %s speaks version %s of the wire format, and this session %s: upgrade the engine"
    " with the older release"
)
_SEALED = "the complete bytes that Session.introduction returned"

A = TypeVar("A")
K = TypeVar("K")
V = TypeVar("V")


class Introduction(WireStruct, frozen=True):
    """The body of an introduction."""

    address: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    lease: Seconds
    heartbeat: Seconds
    handshake: Annotated[bytes, Meta(max_length=MAX_HANDSHAKE)]


_INTRODUCTIONS = decoder_of(Introduction)
_VERSIONS = decoder_of(Versions)
_QUESTION = pack(OWN)


@attrs.frozen(kw_only=True)
class Introduced:
    """A rank that was introduced.

    Attributes:
        handshake: The handshake of the rank.
        address: The address of its channel.
        lease: Seconds for which it holds a request after a heartbeat.
        heartbeat: Seconds between the heartbeats that it sends.
    """

    handshake: Handshake
    address: str
    lease: float
    heartbeat: float

    @property
    def rank(self) -> RankId:
        """The rank."""
        return self.handshake.rank

    def seal(self, secret: Secret, version: int = VERSION) -> bytes:
        """Return the bytes for peers that read *version*."""
        address = is_name("address", self.address)
        shake = encode_handshake(self.handshake, version)
        body = Introduction(address, self.lease, self.heartbeat, shake)
        return secret.seal(INTRODUCTION, pack(body))


def epoch_of(epoch: int | None, cache: RankCache) -> int:
    """Return *epoch*, or the time in ns if it is None.

    Raises:
        SpecError: If *epoch* is None and the engine has several ranks, which must share one.
    """
    ranks = instance("cache", cache, RankCache).engine.parallel.ranks
    if epoch is None and len(ranks) > 1:
        wanted = f"one number for all {len(ranks)} ranks, larger at each start of the engine"
        raise SpecError("epoch", epoch, wanted)
    return time.time_ns() if epoch is None else epoch


def open_introduction(sealed: object, secret: Secret) -> Introduced:
    """Return the rank that *sealed* introduces. Raises `WireError` for any other bytes."""
    body = secret.unseal("introduction", INTRODUCTION, sealed, _SEALED)
    fields = unpack("introduction", _INTRODUCTIONS, body)
    if not fields.address.isprintable():
        raise WireError("introduction.address", fields.address, "a printable text")
    return Introduced(
        handshake=decode_handshake(fields.handshake),
        address=fields.address,
        lease=fields.lease,
        heartbeat=fields.heartbeat,
    )


def _lacking(_route: str) -> None:
    """Take the place of an optional method that a channel lacks."""


class Messages:
    """The messages of one rank over *channel*.

    Attributes:
        introduction: The sealed introduction of this rank.
        refused: The last few messages that changed nothing, each with the reason.
        counters: The counters of the session.
        unsent: Messages that wait for `flush`.
    """

    def __init__(self, channel: Channel, secret: Secret, own: Introduced) -> None:
        try:
            self.introduction = own.seal(secret)
        except BaseException:
            channel.close()
            raise
        self._own = own
        self.refused: deque[str] = deque(maxlen=MAX_REFUSED)
        shake = own.handshake
        self._me = RankAddress(shake.engine_id, shake.epoch, shake.rank)
        self._channel, self._secret, self.counters = channel, secret, Counters()
        # Methods that a channel may lack.
        self._trust, self._reject, self._resolve = (
            getattr(channel, name, _lacking) for name in ("trust", "reject", "resolve")
        )
        self._refused: Callable[[], list[str]] = getattr(channel, "refused", list)
        self._ended: Callable[[str], int] = getattr(channel, "ended", lambda _: 0)
        # Without `reaches`, a call waits for each peer, and every message names its route.
        self._may_be_reached: Callable[[str], bool] = getattr(channel, "reaches", lambda _: True)
        self._is_connected: Callable[[str], bool] = getattr(channel, "reaches", lambda _: False)
        self._addresses: dict[RankAddress, str] = {}  # those of connected engines
        # By rank: the route of its newest question, and the number of that.
        self._routes: OrderedDict[RankAddress, tuple[str, int]] = OrderedDict()
        # By rank: another route of a message of it, that of a copy or of a new connection.
        self._doubtful: OrderedDict[RankAddress, str] = OrderedDict()
        self.unsent: dict[object, Message] = {}
        # The answers so far, for each `ask` that waits.
        self._asked: dict[object, dict[str, bytes | TransferError | None]] = {}
        # By route: the bytes, when they were sent, and the version of the introduction.
        self._challenges: OrderedDict[str, tuple[bytes, float, int]] = OrderedDict()
        # By rank: the start of its session, and the version that it reads.
        self._introduced: dict[RankAddress, tuple[bytes, int]] = {}  # those of connected engines
        self._heard: OrderedDict[RankAddress, tuple[bytes, int]] = OrderedDict()
        self._warned: set[str] = set()
        self._warned_at: dict[object, float] = {}
        self._closed = False

    def close(self) -> None:
        """Close the channel. A `fetch` that waits raises."""
        self._closed = True
        self._channel.close()

    def resolve(self, addresses: Iterable[str]) -> None:
        """Look up the hosts of *addresses*, if the channel wants that. Waits, so hold no lock."""
        for address in addresses:
            self._resolve(address)

    def connect(self, incarnation: tuple[str, int], ranks: Iterable[Introduced]) -> None:
        """Store the addresses of the *ranks* of one incarnation of an engine."""
        members = {RankAddress(*incarnation, rank.rank): rank for rank in ranks}
        own = {rank: member.address for rank, member in members.items()}
        known = own.items() <= self._addresses.items()
        self._introduced |= {
            rank: (member.handshake.start, OWN.common(member.handshake.versions) or VERSION)
            for rank, member in members.items()
        }
        self._addresses |= own
        if not known:
            LOG.info("connected to %s, epoch %d: %s", *incarnation, counted(len(own), "rank"))

    def check_starts(self, incarnation: tuple[str, int], ranks: Iterable[Introduced]) -> None:
        """Raise `SpecError` if another session is known as one of *ranks* of an incarnation."""
        for member in ranks:
            rank = RankAddress(*incarnation, member.rank)
            start, _ = self._introduced.get(rank) or self._heard.get(rank) or (b"", 0)
            if start not in (b"", member.handshake.start):
                rule = (
                    f"{_twice(rank)} If the other session has ended, call"
                    f" disconnect({rank.engine_id!r:.80}) first"
                )
                raise SpecError("introductions", str(rank), rule=rule)

    def clear_starts(self, engine_id: str) -> None:
        """Forget which sessions the ranks of an engine were that has ended."""
        for rank in [rank for rank in self._heard if rank.engine_id == engine_id]:
            del self._heard[rank]

    def disconnect(self, gone: tuple[str, int]) -> None:
        """Forget the addresses of an incarnation of an engine that was connected."""
        self.flush()  # Its ranks learn which loads have failed.
        kept = {to: at for to, at in self._addresses.items() if (to.engine_id, to.epoch) != gone}
        self._addresses = kept
        self._introduced = {to: known for to, known in self._introduced.items() if to in kept}
        self._warned.intersection_update(kept.values())
        LOG.info("disconnected from %s, epoch %d", *gone)

    def note(self, why: str) -> None:
        """Record why a message changed nothing."""
        self.counters.messages_refused += 1
        self.refused.append(why)

    def act(self, actions: list[A], change: Callable[[A], None] | None = None) -> None:
        """Carry out the *actions* of a ledger. *change* does those without a message."""
        while actions:
            action = actions.pop(0)
            if isinstance(action, Tell):
                self.send(action.message)
            elif isinstance(action, Refused):
                self.note(str(action))
            elif change is not None:
                change(action)

    def send(self, message: Message) -> None:
        """Send *message* to its receiver at the next `flush`.

        A later heartbeat or `done` of a load replaces an unsent one. So a session that is not
        polled keeps few messages.
        """
        name: object = object()
        if isinstance(message, ReaderStatus):
            name = message.to, message.key
            self.unsent.pop(name, None)
        self.unsent[name] = message

    def ended_ranks(self) -> list[RankAddress]:
        """Return the connected ranks whose processes have ended, as refused connections show."""
        refused = {*self._refused()}
        if not refused:
            return []
        return [rank for rank, address in self._addresses.items() if address in refused]

    def flush(self) -> None:
        """Pass all messages since the last call to the channel, those to one peer together.

        Each call of the channel costs as much as sealing ten messages. A message without a known
        route is lost.
        """
        unsent, self.unsent = self.unsent, dict[object, Message]()
        batches: dict[str, list[bytes]] = {}
        for message in unsent.values():
            to = message.to
            route = self._addresses.get(to) or self._routes.get(to, (None, 0))[0]
            LOG.debug("send %s to %s at %s", message, to, route)
            if route is not None:
                self.counters.messages_sent += 1
                _, version = self._introduced.get(to) or self._heard.get(to) or (b"", VERSION)
                data = encode_message(message, self._own.handshake.start, version)
                sealed = self._secret.seal(MESSAGE, data)
                batches.setdefault(route, []).append(sealed)
                if to not in self._addresses and (other := self._doubtful.get(to)) is not None:
                    if self._may_be_reached(other):
                        batches.setdefault(other, []).append(sealed)
                    else:
                        del self._doubtful[to]
        for route, batch in batches.items():
            self._channel.send(route, *batch)

    def receive(self) -> Iterator[Message]:
        """Yield the messages that arrived. Handle questions and their answers."""
        for route, received in self._channel.receive():
            try:
                message = self._open(route, received)
            except WireError as error:
                self._refuse(route, error)
                continue
            if message is not None:
                LOG.debug("received %s", message)
                self.counters.messages_received += 1
                yield message

    def fetch(
        self,
        addresses: Iterable[str],
        timeout: float,
        absent: float,
        poll: Callable[[], None],
        lock: SessionLock,
    ) -> list[bytes]:
        """Ask the ranks at *addresses* for their introductions, and wait for them.

        Waits at most *timeout* seconds while a rank is reached, *absent* seconds while it is not,
        and never more than both together.
        """
        asked = _addresses(addresses)
        self.resolve(asked)
        answers = self.ask(asked, timeout, absent, poll, lock, each=False)
        return [answer for answer in answers.values() if isinstance(answer, bytes)]

    def ask(
        self,
        addresses: tuple[str, ...],
        timeout: float,
        absent: float,
        poll: Callable[[], None],
        lock: SessionLock,
        *,
        each: bool,
    ) -> dict[str, bytes | TransferError]:
        """Do the same as `fetch` for addresses whose hosts were looked up.

        *each*: return the error of each address, instead of raising the first one.
        """
        answers: dict[str, bytes | TransferError | None] = dict.fromkeys(addresses)
        limits = _Limits(self._may_be_reached, self._ended, timeout, absent, addresses)
        next_question, call = 0.0, object()
        self._asked[call] = answers
        try:
            while None in answers.values():
                with lock.held, lock:
                    # Another thread takes introductions while it has the lock.
                    missing = [at for at, answer in answers.items() if answer is None]
                    if self._closed:
                        raise TransferError("the session was closed", state=TransferState.CLOSED)
                    now = time.monotonic()
                    for address in missing:
                        if (error := limits.look(address, now)) is not None and not each:
                            raise error
                        answers[address] = error
                    if now >= next_question:
                        next_question = now + ASK_AGAIN
                        for address in missing:
                            if answers[address] is None:
                                self._channel.send(address, self._secret.seal(QUESTION, _QUESTION))
                self._channel.wait(LOOK_AGAIN)
                poll()
            return {at: answer for at, answer in answers.items() if answer is not None}
        finally:
            del self._asked[call]

    def _open(self, route: str, received: object) -> Message | None:
        """Handle the bytes *received*. Return them if they are a message to this session.

        A channel may return any kind of buffer.

        Raises:
            WireError: If the seal is wrong, or the body of a message has no meaning.
        """
        if not isinstance(received, bytes | bytearray | memoryview):
            kind = type(received).__name__
            raise WireError("message", kind, "bytes from the channel's `receive`")
        data = bytes(received)
        # If the purpose is unknown, unseal with any purpose. It fails with the right error.
        purpose = next((each for each in _PURPOSES if data.startswith(each)), QUESTION)
        kind = purpose.decode().split("-")[1]
        body = self._secret.unseal(kind, purpose, data, _WANTED)
        if purpose == MESSAGE:
            return self._message(body, route)
        expected = True
        if purpose == QUESTION:
            self._challenge(route, body)
        elif purpose == CHALLENGE:
            expected = self._answer(route, body)
        elif purpose == ANSWER:
            expected = self._introduce(route, body)
        else:
            expected = self._keep_introduction(route, data)
        if not expected:
            # Its seal is right: it is a copy, or it comes late. The connection stays, since an
            # introduction may be on its way.
            self.note(f"{kind} from {route}: none is expected")
        return None

    def _message(self, body: bytes, route: str) -> Message | None:
        """Return the message in *body*, unless another session of its sender's name is known."""
        message, (start, version) = decode_message(body), sender_of(body)
        if message.to == self._me:
            by = message.by
            known, _ = self._introduced.get(by) or self._heard.get(by) or (start, version)
            if known != start:
                why = f"{message}: {_twice(by)}"
                self.note(why)
                self._warn(by, "refused %s", why)
                return None
            if by not in self._introduced:
                _keep(self._heard, by, (start, version), MAX_ROUTES)
            self._learn(message, route)
        return message

    def _warn(self, about: object, text: str, *values: object) -> None:
        """Log a warning, about one thing once a minute, and about few things in a minute."""
        now = time.monotonic()
        recent = {key: at for key, at in self._warned_at.items() if now - at < WARN_AGAIN}
        if about not in recent and len(recent) < MAX_WARNED:
            recent[about] = now
            LOG.warning(text, *values)
        self._warned_at = recent

    def _learn(self, message: Message, route: str) -> None:
        """Trust the route of a message, and answer its sender there, unless it may be a copy.

        A rank sends its questions in the order of their numbers. So a message without a newer
        number on another route may be a copy that somebody has recorded. But the rank may also have
        lost its connection, which this side does not notice at once. Then both routes get the
        answers, until a newer question or the end of the first connection decides.
        """
        number = message.number if isinstance(message, ReaderStatus) else 0
        known, newest = self._routes.get(message.by, (route, -1))
        if (
            known == route  # It is the first message, or comes on the route of the one before.
            or number > newest  # No copy has a newer number.
            or not self._is_connected(known)  # The connection of the one before has ended.
            # This side has dialled the rank, so the rank itself may come on any other route.
            or known in self._addresses.values()
        ):
            self._trust(route)
            _keep(self._routes, message.by, (route, max(number, newest)), MAX_ROUTES)
            self._doubtful.pop(message.by, None)
        else:
            _keep(self._doubtful, message.by, route, MAX_ROUTES)

    def _refuse(self, route: str, error: WireError) -> None:
        """Record why a message is refused, and disconnect its sender.

        An older release stays connected if it sends a past kind, such as the progress of a prompt,
        or another attempt than the first.
        """
        self.note(str(error))
        LOG.debug("refused a message from %s: %s", route, error)
        if error.path == "version":
            # The seal was right, so this is a peer.
            self._warn(error.value, _OTHER_VERSION, route, error.value, OWN)
        # Strangers could fill the log, so only peers that this session chose are worth a warning.
        asked = any(route in asked for asked in tuple(self._asked.values()))
        chosen = asked or route in self._addresses.values()
        if chosen and route not in self._warned:
            self._warned.add(route)
            LOG.warning("%s sends messages that are refused: %s", route, error)
        if error.path not in ("message.kind", "message.attempt"):
            self._reject(route)

    def _challenge(self, route: str, body: bytes) -> None:
        """Answer a question with a challenge, unless one was sent just now.

        *body* has the versions of the asker. An asker of version 10 sends none.
        """
        before = Versions(OLDEST, RANGED - 1)
        asker = unpack("question", _VERSIONS, body) if body else before
        version = OWN.common(asker)
        if version is None:
            self._warn(asker, _OTHER_VERSION, route, asker, OWN)
        now = time.monotonic()
        nonce, sent, _ = self._challenges.get(route, (b"", 0.0, 0))
        if nonce and now - sent < CHALLENGE_AGAIN:
            return
        # A repeated challenge keeps its bytes. If each one were new, a slow answer would always be
        # too late: the asker asks again before the answer arrives.
        nonce = nonce or secrets.token_bytes(CHALLENGE_BYTES)
        _keep(self._challenges, route, (nonce, now, version or VERSION), MAX_CHALLENGES)
        self._channel.send(route, self._secret.seal(CHALLENGE, nonce))

    def _answer(self, route: str, challenge: bytes) -> bool:
        """Answer a challenge of a rank that this session asks. Return whether it does."""
        asks = bool(self._waiting(route))
        if asks:
            self._channel.send(route, self._secret.seal(ANSWER, challenge))
        return asks

    def _introduce(self, route: str, answer: bytes) -> bool:
        """Introduce this rank to an asker. Return whether its answer fits the challenge."""
        nonce, _, version = self._challenges.get(route, (b"", 0.0, 0))
        if not nonce or answer != nonce:
            return False
        del self._challenges[route]  # An answer counts once.
        self._trust(route)
        older = version != VERSION
        sealed = self._own.seal(self._secret, version) if older else self.introduction
        self._channel.send(route, sealed)
        return True

    def _keep_introduction(self, route: str, sealed: bytes) -> bool:
        """Pass an introduction to the calls of `ask` that wait for it. Return whether any does."""
        waiting = self._waiting(route)
        for answers in waiting:
            answers[route] = sealed
        return bool(waiting)

    def _waiting(self, route: str) -> list[dict[str, bytes | TransferError | None]]:
        """Return the answers of each `ask` that waits for the rank at *route*."""
        # A copy: other threads, which do not hold the lock, begin and end an `ask` meanwhile.
        every = tuple(self._asked.values())
        return [answers for answers in every if answers.get(route, b"") is None]


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Store an entry as the latest one. Remove the oldest if there are more than *most*."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def _twice(rank: RankAddress) -> str:
    """Return the rule that two sessions of *rank* break."""
    return (
        f"another session is known as {rank!s:.80} of epoch {rank.epoch}. Each start of an engine"
        " needs a larger epoch."
    )


def _addresses(value: object) -> tuple[str, ...]:
    found: tuple[str, ...] = sequence("addresses", value, "texts, one for each rank")
    for address in found:
        if found.count(instance("addresses", address, str)) > 1:
            raise SpecError("addresses", address, "one address for each rank")
    return found


class _Limits:
    """The time limits of some questions. They run from the first question.

    Another call may hold the lock of the session before.

    Args:
        reaches: As in `Channel`.
        ended: As in `Channel`.
        timeout: Seconds to wait while a rank is reached.
        absent: Seconds to wait while it is not.
        addresses: The addresses of the ranks.
    """

    def __init__(
        self,
        reaches: Callable[[str], bool],
        ended: Callable[[str], int],
        timeout: float,
        absent: float,
        addresses: Iterable[str],
    ) -> None:
        self._reaches, self._ended = reaches, ended
        self._timeout, self._absent = timeout, absent
        self._begun = math.inf
        self._since = dict.fromkeys(addresses, math.inf)  # since when each one is reached
        self._last = dict.fromkeys(addresses, -math.inf)  # when each one was reached last
        self._ends = {address: ended(address) for address in addresses}

    def look(self, address: str, now: float) -> TransferError | None:
        """Return the error of a question whose time is over, or None."""
        self._begun = min(self._begun, now)
        if self._reaches(address):
            if now - self._last[address] > LINGER:
                self._since[address] = now
            self._last[address] = now
        reached = now - self._last[address] <= LINGER
        start = self._since[address] if reached else max(self._begun, self._last[address])
        most = self._timeout if reached else self._absent
        if now - start < most and now - self._begun < self._timeout + self._absent:
            return None
        why = "no process accepts connections there"
        if self._ended(address) > self._ends[address]:
            why = (
                "the connection is closed by the process there: it has another secret or version,"
                " is no session, or has ended"
            )
        elif reached:
            why = "the process there is silent: it is stopped or busy"
        message = f"no introduction from {address} within {most} s: {why}"
        return TransferError(message, rank=address, state=TransferState.TIMEOUT)
