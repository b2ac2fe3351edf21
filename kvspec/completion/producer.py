"""The producer's ledger: the requests that a producer rank holds, and when their blocks are free.

Invariant: each request is freed exactly once, when all its readers are done or its lease is over.
An abort frees nothing earlier. Later readers learn that their data is void. The ledger has no clock
and no socket: time is an argument. Its memory is bounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvspec.completion.actions import Action, Free, Present, Refused, Tell
from kvspec.completion.held import Request, Seen
from kvspec.completion.states import PRODUCER
from kvspec.errors import SpecError
from kvspec.inputs import positive_int, seconds
from kvspec.wire.messages import (
    MAX_READERS,
    Gone,
    Key,
    LayerProgress,
    Lease,
    Message,
    RankAddress,
    ReaderStatus,
    Valid,
)


class ProducerLedger:
    """The requests that one producer rank holds. Methods receive events and return actions.

    Args:
        me: Address of this rank.
        lease: Seconds that a request is held after its admission, or after the last heartbeat of a
            reader. A freed or unknown request is remembered as long.
        longest: Seconds after which heartbeats no longer extend the lease.
        most_early: Number of messages to keep for requests that are not admitted yet.
    """

    def __init__(
        self,
        me: RankAddress,
        *,
        lease: float = 30.0,
        longest: float = 3600.0,
        most_early: int = 4096,
    ) -> None:
        self.me = me
        self.lease = seconds("lease", lease)
        self.longest = seconds("longest", longest)
        self._most_early = positive_int("most_early", most_early)
        self._now = 0.0
        self._requests: dict[Key, Request] = {}
        self._open: dict[str, Key] = {}
        self._kept = 0
        self._present = Present()
        self._wake: list[tuple[float, int, Key]] = []
        self._pushed = 0

    @property
    def held(self) -> tuple[str, ...]:
        """The ids of the requests whose blocks are not free."""
        return tuple(self._open)

    def holds(self, key: Key) -> bool:
        """Return whether the blocks of exactly this request are not free."""
        return self._open.get(key.request_id) == key

    def finished(self, key: Key, attempt: int, sample: int, reader: RankAddress) -> bool:
        """Return whether *reader* is done with a request in this attempt, or in a later one."""
        request = self._requests.get(key)
        start = request.starts.get((reader.engine_id, reader.epoch)) if request else None
        seen = start.readers.get((reader, sample)) if start else None
        last = seen.message.attempt if seen else -1
        return last > attempt or (last == attempt and seen is not None and seen.done)

    @property
    def remembered(self) -> int:
        """Number of requests that are held, were freed lately, or are not admitted yet."""
        return len(self._requests)

    @property
    def due(self) -> float | None:
        """Time of the next call of `tick`, or None."""
        return self._wake[0][0] if self._wake else None

    def admit(
        self,
        request_id: str,
        nonce: bytes,
        now: float,
        *,
        expected: int | None = None,
        lease: float | None = None,
    ) -> list[Action]:
        """Hold a request, and return actions.

        Args:
            request_id: Id of the request.
            nonce: Its nonce, which no other request of this id had.
            now: Time in seconds.
            expected: Number of readers that will come, if the engine knows it.
            lease: Seconds to wait for the first reader. By default, the lease of the ledger.

        Raises:
            SpecError: If the id is held already, or the nonce was used before.
        """
        actions = self.tick(now)
        key = Key(request_id, nonce)
        first = self.lease if lease is None else seconds("lease", lease)
        if expected is not None:
            positive_int("expected", expected, most=MAX_READERS)
        request = self._requests.get(key)
        if request_id in self._open or (request is not None and request.state != "unknown"):
            raise SpecError("request_id", request_id, "an id that is not held, with a new nonce")
        if request is None:
            request = self._remember(key, first)
        request.expires = self._now + first
        request.latest = self._now + max(self.longest, self.lease, first)
        request.expected = expected
        self._open[request_id] = key
        return actions + self._step(request, "admit")

    def receive(self, message: Message, now: float) -> list[Action]:
        """Process a message of a reader. Return actions."""
        actions = self.tick(now)
        if not isinstance(message, ReaderStatus) or message.to != self.me:
            return [*actions, Refused(message, f"it is not a reader's message to {self.me}")]
        if self._present.past(message.by.engine_id, message.by.epoch):
            return [*actions, Refused(message, "it is from another incarnation of that engine")]
        request = self._requests.get(message.key)
        if request is None and self._kept == self._most_early:
            return [
                *actions,
                Refused(message, f"the request is unknown, and {self._kept} messages wait already"),
            ]
        request = request or self._remember(message.key, self.lease)
        return actions + self._deliver(request, message)

    def record_progress(
        self, request_id: str, group: str, layer: str, upto: int, now: float
    ) -> list[Action]:
        """Say that a layer of a group is written up to position *upto*; readers are told."""
        actions = self.tick(now)
        key = self._open.get(request_id)
        if key is None:
            raise SpecError("request_id", request_id, "the id of a held request")
        request = self._requests[key]
        if upto < self.written(request_id, group, layer):
            raise SpecError("upto", upto, "at least the earlier progress")
        request.written[group, layer] = upto
        told = (
            n.answer(LayerProgress, group=group, layer=layer, upto=upto) for n in request.reading()
        )
        return actions + [Tell(message) for message in told]

    def written(self, request_id: str, group: str, layer: str) -> int:
        """Return up to where a layer of a group is written, as far as was said."""
        key = self._open.get(request_id)
        return self._requests[key].written.get((group, layer), 0) if key is not None else 0

    def abort(self, request_id: str, now: float) -> list[Action]:
        """Fence a request: whoever reads it is told so; what may be read is not freed yet."""
        actions = self.tick(now)
        key = self._open.get(request_id)
        return actions + (self._step(self._requests[key], "abort") if key is not None else [])

    def connect(self, engine_id: str, epoch: int) -> None:
        """Record the current incarnation of an engine. Messages of others are refused.

        Requests that an earlier incarnation reads are held until their lease is over, because no
        one knows whether it still reads.

        Raises:
            SpecError: If *epoch* is less than before.
        """
        self._present.connect(engine_id, epoch)

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine."""
        self._present.disconnect(engine_id)

    def tick(self, now: float) -> list[Action]:
        """Process the time, which never goes back. Return actions."""
        self._now = max(self._now, seconds("now", now))
        actions: list[Action] = []
        while self._wake and self._wake[0][0] <= self._now:
            request = self._requests[heapq.heappop(self._wake)[2]]
            if request.expires <= self._now:
                actions += self._step(request, "time")
            if request.state != "forgotten":
                self._push(request)
        return actions

    def _remember(self, key: Key, lease: float) -> Request:
        """Return a request that nobody knew of; a *lease* later it is forgotten again."""
        request = self._requests[key] = Request(key, self._now + lease, self._now)
        self._push(request)
        return request

    def _push(self, request: Request) -> None:
        """Wake for a request when it expires; each has one entry, that may be too early."""
        self._pushed += 1
        heapq.heappush(self._wake, (request.expires, self._pushed, request.key))

    def _deliver(self, request: Request, message: ReaderStatus) -> list[Action]:
        """Take a message about a request: count it, answer it, or refuse it."""
        if request.state == "unknown":
            return self._step(request, message.kind, message)
        seen = request.seen(message)
        if request.state == "freed":
            return self._step(request, "again" if _again(seen, message) else message.kind, message)
        why = request.contradicts(message)
        if why is not None:
            return [Refused(message, why)]
        actions = self._step(request, "again" if _again(seen, message) else message.kind, message)
        return actions + (self._step(request, "complete") if request.complete else [])

    def _step(
        self, request: Request, event: str, message: ReaderStatus | None = None
    ) -> list[Action]:
        """Take the row of the table for *event*, and do what it says."""
        row = PRODUCER[request.state, event]
        before, request.state = request.state, row.state
        act = _ACTS.get(row.done)
        actions = act(self, request, message, before) if act else []
        if row.state == "forgotten":
            self._kept -= len(request.early)
            del self._requests[request.key]
        return actions

    def _keep(self, request: Request, message: ReaderStatus, _: str) -> list[Action]:
        """Keep an early message; of one reader, the last: it is done, or of a later attempt."""
        reader = (message.by, message.sample)
        old = request.early.get(reader)
        if old is None:
            if self._kept == self._most_early:
                return [
                    Refused(
                        message, f"the request is unknown, and {self._kept} messages wait already"
                    )
                ]
            self._kept += 1
        if old is None or _order(message) > _order(old):
            request.early[reader] = message
        return []

    def _replay(self, request: Request, _: ReaderStatus | None, __: str) -> list[Action]:
        """Take the early messages of a request that is admitted now."""
        early = list(request.early.values())
        request.early.clear()
        self._kept -= len(early)
        return [action for message in early for action in self._deliver(request, message)]

    def _lease(self, request: Request, message: ReaderStatus, _: str) -> list[Action]:
        """Give a reader time, and tell it what it can read."""
        request.note(message, Lease)
        request.expires = max(request.expires, min(self._now + self.lease, request.latest))
        told = (
            Tell(message.answer(LayerProgress, group=group, layer=layer, upto=upto))
            for (group, layer), upto in request.written.items()
        )
        return [Tell(message.answer(Lease, lease=request.expires - self._now)), *told]

    def _valid(self, request: Request, message: ReaderStatus, _: str) -> list[Action]:
        request.note(message, Valid)
        return [Tell(message.answer(Valid))]

    def _gone(self, request: Request, message: ReaderStatus | None, before: str) -> list[Action]:
        """Tell whoever asked that nothing is held; of an unknown request, all who asked."""
        if message is None:
            return [Tell(early.answer(Gone)) for early in request.early.values()]
        if before == "fenced":
            request.note(message, Gone)
        return [Tell(message.answer(Gone))]

    def _repeat(self, request: Request, message: ReaderStatus, _: str) -> list[Action]:
        seen = request.seen(message)
        return [Tell(message.answer(seen.answer if seen else Gone))]

    def _free(self, request: Request, _: ReaderStatus | None, before: str) -> list[Action]:
        """Free a request, and remember its readers as long as a lease, for those who ask again."""
        del self._open[request.key.request_id]
        why = "sent" if request.complete else "expired"
        request.expires = self._now + self.lease
        return [Free(request.key.request_id, "aborted" if before == "fenced" else why)]


def _again(seen: Seen | None, message: ReaderStatus) -> bool:
    """Return whether the reader said this before, or before it was done with this attempt.

    What it says after that, it says of another load: what was valid for the first may be gone.
    """
    if seen is None or not seen.done:
        return False
    return seen.message.attempt == message.attempt and message.number <= seen.message.number


def _order(message: ReaderStatus) -> tuple[int, int]:
    return message.attempt, message.number


_ACTS: dict[str, Callable[..., list[Action]]] = {
    "keep": ProducerLedger._keep,  # noqa: SLF001
    "replay": ProducerLedger._replay,  # noqa: SLF001
    "lease": ProducerLedger._lease,  # noqa: SLF001
    "valid": ProducerLedger._valid,  # noqa: SLF001
    "gone": ProducerLedger._gone,  # noqa: SLF001
    "repeat": ProducerLedger._repeat,  # noqa: SLF001
    "free": ProducerLedger._free,  # noqa: SLF001
}
