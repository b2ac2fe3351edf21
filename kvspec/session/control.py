"""What goes over a session's channel: sealed notices, questions who one is, and introductions.

Law: what was not sealed by the secret is noted and changes nothing. A notice may be lost; who said
it says it again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvspec.errors import SpecError, TransferError, WireError
from kvspec.inputs import instance, sequence
from kvspec.protocol.notices import Notice, Party
from kvspec.protocol.seal import Secret
from kvspec.protocol.wire import decode_notice, encode_notice
from kvspec.session.background import SessionLock
from kvspec.session.channel import Channel
from kvspec.session.introduction import INTRODUCTION, Introduced

NOTICE = b"kvspec-notice-1\n"
QUESTION = b"kvspec-question-1\n"
ASK_AGAIN, REST = 0.5, 1e-2  # seconds between questions, and between looks for an answer
MAX_ROUTES = 1 << 16
"""Ranks of which is remembered where they were heard."""


class Control:
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
        self._addresses: dict[tuple[str, int], dict[Party, str]] = {}  # of engines that were met
        self._heard: OrderedDict[Party, str] = OrderedDict()
        self._asked: dict[str, bytes | None] = {}
        self._closed = False

    def close(self) -> None:
        """Close the channel; who waits for an introduction gets none."""
        self._closed = True
        self._channel.close()

    def meet(self, ranks: Iterable[Introduced]) -> None:
        """Know where the *ranks* of one start of an engine are."""
        for each in ranks:
            shake = each.handshake
            start = self._addresses.setdefault((shake.engine_id, shake.epoch), {})
            start[Party(shake.engine_id, shake.epoch, shake.rank)] = each.address

    def part(self, starts: Iterable[tuple[str, int]]) -> None:
        """Forget where the ranks of some starts of engines are."""
        for start in starts:
            self._addresses.pop(start, None)

    def tell(self, notice: Notice) -> None:
        """Send *notice* to whom it is for; lost where nobody knows where that is."""
        to = notice.to
        met = self._addresses.get((to.engine_id, to.epoch), {})
        route = met.get(to) or self._heard.get(to)
        if route is not None:
            self._channel.send(route, self._secret.seal(NOTICE, encode_notice(notice)))

    def receive(self) -> Iterator[Notice]:
        """Yield the notices that came; answer questions, and keep what answers one."""
        for route, came in self._channel.receive():
            try:
                data = _bytes(came)
                if data.startswith(NOTICE):
                    body = self._secret.unseal("notice", NOTICE, data, "a notice, sealed")
                    notice = decode_notice(body)
                    self._remember(notice.by, route)
                    yield notice
                elif data.startswith(INTRODUCTION) and route in self._asked:
                    self._asked[route] = data
                else:
                    self._secret.unseal("question", QUESTION, data, "a notice or a question")
                    self._channel.send(route, self.introduction)
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
                        raise TransferError("the session was closed", state="closed")
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

    def _reached(self, address: str) -> bool:
        """Whether somebody is there, as far as the channel can tell."""
        reaches = getattr(self._channel, "reaches", None)
        return reaches is None or reaches(address)

    def _remember(self, party: Party, route: str) -> None:
        self._heard[party] = route
        self._heard.move_to_end(party)
        if len(self._heard) > MAX_ROUTES:
            self._heard.popitem(last=False)


def _bytes(came: object) -> bytes:
    """Return a message that a channel has received, as whatever buffer it hands it on."""
    if not isinstance(came, bytes | bytearray | memoryview):
        raise WireError("message", type(came).__name__, "bytes, of the channel's `receive`")
    return bytes(came)


def _addresses(value: object) -> tuple[str, ...]:
    found: tuple[str, ...] = sequence("addresses", value, "texts, one for each rank")
    for address in found:
        if found.count(instance("addresses", address, str)) > 1:
            raise SpecError("addresses", address, "each rank's once")
    return found


def _silent(address: str, seconds: float, *, reached: bool) -> TransferError:
    """Return that nobody was introduced at *address*."""
    why = "nobody takes a connection there"
    if reached:
        why = "who is there does not answer: it is stopped, too busy, or of another secret"
    message = f"no introduction from {address} in {seconds} s: {why}"
    return TransferError(message, rank=address, state="timeout")
