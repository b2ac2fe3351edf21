"""Seal and open the messages of a session, and fetch introductions.

Invariant: a message with a wrong seal is recorded and changes nothing. A message may be lost, and
then its sender sends it again. An introduction is sent once for each answer to a new challenge.

How it works:
    All messages are sealed with the secret. The asker fetches the introduction of the answerer:

    ==========  ============  ===================================
    from        message       body
    ==========  ============  ===================================
    asker       QUESTION      empty
    answerer    CHALLENGE     random bytes, made for this route
    asker       ANSWER        the same bytes
    answerer    INTRODUCTION  the answerer's handshake and address
    ==========  ============  ===================================

    The question has always the same bytes, so a recorded copy returns only a challenge. An answer
    counts once, and only on the route that was challenged (a connection of `TcpChannel`). So a
    recorded answer returns nothing. The asker answers only the ranks that it is asking at present.
    Otherwise anyone could forward a challenge and use the answer.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvspec.errors import SpecError, TransferError, TransferState, WireError
from kvspec.inputs import instance, sequence
from kvspec.session.background import SessionLock
from kvspec.session.channel import Channel
from kvspec.session.introduction import INTRODUCTION, Introduced
from kvspec.wire.codec import VERSION, decode_message, encode_message
from kvspec.wire.messages import Message, RankAddress
from kvspec.wire.seal import Secret

MESSAGE = b"kvspec-message-1\n"
QUESTION = b"kvspec-question-2\n"
CHALLENGE = b"kvspec-challenge-1\n"
ANSWER = b"kvspec-answer-1\n"
ASK_AGAIN, REST = 0.5, 1e-2  # seconds between questions, and between looks for an answer
CHALLENGE_AGAIN = 0.25
"""Seconds before a route is challenged again; less than `ASK_AGAIN`, since either may be lost.

A replayed stream of questions is answered this often, so that it fills no queue.
"""
NONCE = 16
"""Bytes of a challenge."""
MAX_CHALLENGES = 1 << 12
"""Challenges that wait for an answer; more than the connections that a `TcpChannel` accepts."""
MAX_ROUTES = 1 << 16
"""Ranks of which is remembered where they were heard."""

_WANTED = f"a message or a question, of version {VERSION}"


class Messages:
    """The messages of one rank over *channel*; *note* takes why one changed nothing."""

    def __init__(
        self, channel: Channel, secret: Secret, own: Introduced, note: Callable[[str], None]
    ) -> None:
        try:
            self.introduction = own.seal(secret)
        except BaseException:
            channel.close()
            raise
        self._channel = channel
        self._secret = secret
        self._note = note
        self._addresses: dict[tuple[str, int], dict[RankAddress, str]] = {}  # by start
        self._routes: OrderedDict[RankAddress, str] = OrderedDict()
        self._asked: dict[str, bytes | None] = {}
        self._challenges: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # and when sent
        self._closed = False

    def close(self) -> None:
        """Close the channel; who waits for an introduction gets none."""
        self._closed = True
        self._channel.close()

    def connect(self, ranks: Iterable[Introduced]) -> None:
        """Know where the *ranks* of one start of an engine are."""
        for each in ranks:
            shake = each.handshake
            start = self._addresses.setdefault((shake.engine_id, shake.epoch), {})
            start[RankAddress(shake.engine_id, shake.epoch, shake.rank)] = each.address

    def disconnect(self, starts: Iterable[tuple[str, int]]) -> None:
        """Forget where the ranks of some starts of engines are."""
        for start in starts:
            self._addresses.pop(start, None)

    def tell(self, message: Message) -> None:
        """Send *message* to whom it is for; lost where nobody knows where that is."""
        to = message.to
        met = self._addresses.get((to.engine_id, to.epoch), {})
        route = met.get(to) or self._routes.get(to)
        if route is not None:
            self._channel.send(route, self._secret.seal(MESSAGE, encode_message(message)))

    def receive(self) -> Iterator[Message]:
        """Yield the messages that came; answer questions, and keep what answers one."""
        for route, came in self._channel.receive():
            try:
                data = _bytes(came)
                if data.startswith(MESSAGE):
                    body = self._secret.unseal("message", MESSAGE, data, "a message, sealed")
                    message = decode_message(body)
                    self._remember(message.by, route)
                    yield message
                elif data.startswith(INTRODUCTION) and route in self._asked:
                    self._asked[route] = data
                elif data.startswith(CHALLENGE) and self._waits_for(route):
                    nonce = self._secret.unseal("challenge", CHALLENGE, data, "a challenge, sealed")
                    self._channel.send(route, self._secret.seal(ANSWER, nonce))
                elif data.startswith(ANSWER):
                    nonce = self._secret.unseal("answer", ANSWER, data, "an answer, sealed")
                    self._introduce(route, nonce)
                else:
                    self._secret.unseal("question", QUESTION, data, _WANTED)
                    self._challenge(route)
            except WireError as error:
                self._note(str(error))

    def fetch(
        self,
        addresses: Iterable[str],
        timeout: float,
        absent: float,
        step: Callable[[], None],
        lock: SessionLock,
    ) -> list[bytes]:
        """Ask who is at each of *addresses*, and wait for the introductions.

        At most *timeout* seconds while somebody is reached, *absent* while nobody is, and never
        more than both.
        """
        begun, again = time.monotonic(), 0.0
        asked = _addresses(addresses)
        reached = dict.fromkeys(asked, (False, begun))
        self._asked = dict.fromkeys(asked)
        try:
            while missing := [one for one, answer in self._asked.items() if answer is None]:
                with lock.held:
                    if self._closed:
                        raise TransferError("the session was closed", state=TransferState.CLOSED)
                    now = time.monotonic()
                    for one in missing:
                        there, since = reached[one]
                        if self._reached(one) != there:
                            there, since = reached[one] = not there, now
                        most = timeout if there else absent
                        if now - since >= most or now - begun >= timeout + absent:
                            raise _silent(one, most, reached=there)
                    if now >= again:
                        again = now + ASK_AGAIN
                        for one in missing:
                            self._channel.send(one, self._secret.seal(QUESTION, b""))
                self._channel.wait(REST)
                step()
            return [answer for one in asked if (answer := self._asked[one]) is not None]
        finally:
            self._asked = {}

    def _waits_for(self, route: str) -> bool:
        """Whether a rank was asked there that has not been introduced yet."""
        return route in self._asked and self._asked[route] is None

    def _challenge(self, route: str) -> None:
        """Send a challenge to whoever asked, unless one was sent just now."""
        now = time.monotonic()
        nonce, sent = self._challenges.get(route, (b"", 0.0))
        if nonce and now - sent < CHALLENGE_AGAIN:
            return
        # A challenge that is repeated keeps its bytes. If it changed, an answer that takes longer
        # than the asker waits before it asks again would always be too late.
        nonce = nonce or secrets.token_bytes(NONCE)
        self._challenges[route] = nonce, now
        if len(self._challenges) > MAX_CHALLENGES:
            self._challenges.popitem(last=False)
        self._channel.send(route, self._secret.seal(CHALLENGE, nonce))

    def _introduce(self, route: str, nonce: bytes) -> None:
        """Send the introduction if *nonce* is what this route was challenged with."""
        wanted, _ = self._challenges.get(route, (b"", 0.0))
        if not wanted or nonce != wanted:
            raise WireError("answer", nonce[:NONCE], "the answer to the challenge of this route")
        del self._challenges[route]
        self._channel.send(route, self.introduction)

    def _reached(self, address: str) -> bool:
        """Whether somebody is there, as far as the channel can tell."""
        reaches = getattr(self._channel, "reaches", None)
        return reaches is None or reaches(address)

    def _remember(self, rank: RankAddress, route: str) -> None:
        self._routes[rank] = route
        self._routes.move_to_end(rank)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)


def _bytes(came: object) -> bytes:
    """Return a message that a channel has received, as whatever buffer it hands it on."""
    if not isinstance(came, bytes | bytearray | memoryview):
        raise WireError("message", type(came).__name__, "bytes from the channel's `receive`")
    return bytes(came)


def _addresses(value: object) -> tuple[str, ...]:
    found: tuple[str, ...] = sequence("addresses", value, "texts, one for each rank")
    for address in found:
        if found.count(instance("addresses", address, str)) > 1:
            raise SpecError("addresses", address, "one address for each rank")
    return found


def _silent(address: str, seconds: float, *, reached: bool) -> TransferError:
    """Return that nobody was introduced at *address*."""
    why = "no process accepts connections there"
    if reached:
        why = "the process there is silent: it is stopped or busy, or has another secret or version"
    message = f"no introduction from {address} within {seconds} s: {why}"
    return TransferError(message, rank=address, state=TransferState.TIMEOUT)
