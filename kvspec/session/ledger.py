"""The producer's interface: the requests that this rank holds for consumers, and those that ended.

Invariant: each held request is reported once, as done or as expired. Until then its blocks are
reserved for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import attrs

from kvspec.completion.actions import Action, Free, Refused, Tell
from kvspec.completion.producer import ProducerLedger
from kvspec.descriptors.request import Tables, tables_of
from kvspec.errors import SpecError
from kvspec.inputs import positive_int, sequence
from kvspec.nixl import NixlRank
from kvspec.session.background import SessionLock
from kvspec.session.summing import Summing
from kvspec.wire.messages import MAX_READERS, Message, key_of

MAX_FOREIGN = 256
"""Messages that changed nothing, of which is remembered why."""


@attrs.frozen
class Settled:
    """The requests whose blocks are free again. `Ledger.poll` returns each of them once.

    Attributes:
        done: Ids of requests that all readers have finished.
        expired: Ids of requests whose lease ended, or that were aborted. A later reader receives
            `gone`.
        foreign: The last few messages that changed nothing, each with the reason.
    """

    done: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


class Ledger:
    """The requests that one producer rank holds. `Session.ledger` is the only instance."""

    def __init__(
        self,
        book: ProducerLedger,
        lock: SessionLock,
        now: Callable[[], float],
        tell: Callable[[Message], None],
        step: Callable[[], None],
        foreign: deque[str],
        summing: Summing,
        nixl: NixlRank,
    ) -> None:
        self._book = book
        self._nixl = nixl
        self._lock = lock
        self._now = now
        self._tell = tell
        self._step = step
        self.recorded = deque[Action]()  # of the book, in order; freed requests until `poll`
        self._foreign = foreign
        self._summing = summing
        self._engine = summing.cache.engine

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of the requests whose blocks are not free."""
        return self._book.held

    def hold(
        self,
        remote_id: str,
        *,
        lease: float | None = None,
        readers: int | None = None,
        blocks: Tables | None = None,
    ) -> None:
        """Hold a request until all its readers are done.

        Args:
            remote_id: Name from `new_remote_id`, the same on all ranks.
            lease: Seconds in which the first reader must send a heartbeat. Each heartbeat extends
                it. By default, the lease of the session.
            readers: Number of consumer ranks that will read from this rank, if the engine knows it.
            blocks: The block tables of the request, by group. Loads with `digest` need them.

        Raises:
            SpecError: If the request is held already, or *blocks* do not fit the engine.
        """
        key, tables = key_of(remote_id), tables_of("blocks", {} if blocks is None else blocks)
        if readers is not None:
            positive_int("readers", readers, most=MAX_READERS)
        if strange := sorted(tables.keys() - {group.name for group in self._engine.groups}):
            raise SpecError("blocks", strange[:3], "block tables of the engine's groups")
        with self._lock.held:
            admit = partial(self._book.admit, expected=readers, lease=lease)
            # One line: an interrupt must not come between the call and its record.
            self.recorded.extend(admit(key.request_id, key.nonce, self._now()))
            self.act()
            if tables and self._book.holds(key):
                self._summing.tables[key] = tables

    def record_progress(
        self, remote_id: str, upto: int, layers: Iterable[str] | None = None
    ) -> None:
        """Record that *layers* are written up to position *upto*.

        Loads that follow the request then read so far. For a recurrent state, only `num_tokens`
        counts as written. For encoder tokens, positions count these tokens.

        Args:
            remote_id: A request that is held.
            upto: Number of written tokens.
            layers: Names of layers. All layers by default.

        Raises:
            SpecError: If *upto* is less than before for one of the layers. Then no layer changes.
        """
        key, homes = key_of(remote_id), self._engine.homes
        named = sequence("layers", tuple(homes) if layers is None else layers, "names of layers")
        if strange := [layer for layer in named if layer not in homes]:
            raise SpecError("layers", strange[:3], f"layers of the engine, such as {[*homes][:3]}")
        positive_int("upto", upto, least=0)
        with self._lock.held:
            now = self._now()
            self.recorded.extend(self._book.tick(now))
            self.act()
            if not self._book.holds(key):
                raise SpecError("remote_id", remote_id, "a held request")
            places = [(homes[layer].name, layer) for layer in named]
            for place in places:
                if upto < (before := self._book.written(key.request_id, *place)):
                    raise SpecError("upto", upto, f"at least {before}, the progress of {place[1]}")
            for place in places:
                self.recorded.extend(self._book.record_progress(key.request_id, *place, upto, now))
            self.act()

    def abort(self, remote_id: str) -> None:
        """Give up a request. Its readers receive `gone`.

        Its blocks are free when the readers have stopped, or the lease is over.
        """
        key = key_of(remote_id)
        with self._lock.held:
            if self._book.holds(key):
                self.recorded.extend(self._book.abort(key.request_id, self._now()))
                self.act()

    def poll(self) -> Settled:
        """Make progress on the session. Return the requests that ended since the last call."""
        self._step()
        with self._lock.held:
            self.act()
            freed = [action for action in self.recorded if isinstance(action, Free)]
            settled = Settled(
                tuple(action.request_id for action in freed if action.why == "sent"),
                tuple(action.request_id for action in freed if action.why != "sent"),
                tuple(self._foreign),
            )
            self._foreign.clear()
            self.recorded.clear()
            return settled

    def tick(self) -> None:
        """Process the time. After the rank is closed, no request is confirmed as valid.

        Peers on the same machine can still read the memory, and it may contain other data by then.
        """
        now = self._now()
        if self._book.held and not self._nixl.stats().registrations:
            self._summing.close()
            for name in self._book.held:
                self.recorded.extend(self._book.abort(name, now))
        self.recorded.extend(self._book.tick(now))
        self.act()

    def act(self) -> None:
        """Carry out the recorded actions. Freed requests wait for `poll`."""
        for action in self.recorded:
            if isinstance(action, Tell):
                self._tell(action.message)
            elif isinstance(action, Refused):
                self._foreign.append(refusal(action))
        # One assignment: after an interrupt before it, a message is sent twice, but none is lost.
        self.recorded = deque(action for action in self.recorded if isinstance(action, Free))


def refusal(refused: Refused) -> str:
    """Say what was refused, and why."""
    message = refused.message
    return f"{message.kind} of {message.by} about {message.key.request_id!r:.80}: {refused.why}"
