"""The producer's face: which requests this rank holds for readers, and which are free again.

Law: what is expected is told once, as done or as expired, and until then its blocks belong to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import attrs

from kvspec.descriptors.request import Tables, tables_of
from kvspec.errors import SpecError
from kvspec.inputs import positive_int, sequence
from kvspec.nixl import NixlRank
from kvspec.protocol.notices import MAX_READERS, Action, Free, Notice, Refused, Tell
from kvspec.protocol.producer import ProducerLedger
from kvspec.session.background import SessionLock
from kvspec.session.introduction import key_of
from kvspec.session.summing import Summing

MAX_FOREIGN = 256
"""Messages that changed nothing, of which is remembered why."""


@attrs.frozen
class Settled:
    """What `Ledger.poll` returns, each once: requests by id, whose blocks are free again.

    *done*: every reader has what it came for. *expired*: the lease was over, or the request was
    dropped; who reads it later is told that it is void. *foreign*: what was heard and changed
    nothing, and why, the last few.
    """

    done: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


class Ledger:
    """The requests that one producer rank holds; `Session.ledger` is one."""

    def __init__(
        self,
        book: ProducerLedger,
        lock: SessionLock,
        now: Callable[[], float],
        tell: Callable[[Notice], None],
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
        self._done: list[str] = []
        self._expired: list[str] = []
        self._foreign = foreign
        self._summing = summing
        self._engine = summing.cache.engine

    @property
    def held(self) -> tuple[str, ...]:
        """The ids of the requests whose blocks are not free."""
        return self._book.held

    def expect(
        self,
        remote_id: str,
        *,
        lease: float | None = None,
        readers: int | None = None,
        blocks: Tables | None = None,
    ) -> None:
        """Hold a request until all who read it are done.

        *remote_id*: of `new_remote_id`, the same on all ranks. *lease*: seconds within which a
        reader has to come, the session's own unless given; it grows while one reads. *readers*: how
        many ranks will come to this one, if the engine knows. *blocks*: its block tables, by group:
        for readers that compare a digest. `SpecError` where it is held already.
        """
        key, tables = key_of(remote_id), tables_of("blocks", {} if blocks is None else blocks)
        if readers is not None:
            positive_int("readers", readers, most=MAX_READERS)
        if strange := sorted(tables.keys() - {group.name for group in self._engine.groups}):
            raise SpecError("blocks", strange[:3], "block tables of the engine's groups")
        with self._lock.held:
            self.do(
                self._book.admit(
                    key.request_id, key.nonce, self._now(), expected=readers, lease=lease
                )
            )
            if tables and self._book.holds(key):
                self._summing.tables[key] = tables

    def wrote(self, remote_id: str, upto: int, layers: Iterable[str] | None = None) -> None:
        """Say that *layers*, all unless given, are written up to the position *upto*.

        Loads that follow read that far; of a state, `num_tokens` is the only frontier, and of what
        counts an encoder's tokens, their count. `SpecError` where one's frontier goes back;
        then none is moved.
        """
        key, homes = key_of(remote_id), self._engine.homes
        named = sequence("layers", tuple(homes) if layers is None else layers, "names of layers")
        if strange := [layer for layer in named if layer not in homes]:
            raise SpecError("layers", strange[:3], f"layers of the engine, as {[*homes][:3]}")
        positive_int("upto", upto, least=0)
        with self._lock.held:
            now = self._now()
            self.do(self._book.tick(now))
            if not self._book.holds(key):
                raise SpecError("remote_id", remote_id, "a request that is held")
            places = [(homes[layer].name, layer) for layer in named]
            for place in places:
                if upto < (before := self._book.written(key.request_id, *place)):
                    raise SpecError("upto", upto, f"at least {before}, as {place[1]} has it")
            for place in places:
                self.do(self._book.wrote(key.request_id, *place, upto, now))

    def drop(self, remote_id: str) -> None:
        """Give a request up: who reads it is told so. Free once they stop, or its lease is over."""
        key = key_of(remote_id)
        with self._lock.held:
            if self._book.holds(key):
                self.do(self._book.abort(key.request_id, self._now()))

    def poll(self) -> Settled:
        """Move everything of the session on, and return what has happened since the last time."""
        self._step()
        with self._lock.held:
            settled = Settled(tuple(self._done), tuple(self._expired), tuple(self._foreign))
            for told in (self._done, self._expired, self._foreign):
                told.clear()
            return settled

    def tick(self) -> None:
        """Let time pass. What a rank that is closed held, nobody can be told to be valid.

        Peers on its machine reach the memory still, whatever lies there by then.
        """
        now = self._now()
        if self._book.held and not self._nixl.leftovers().registrations:
            self._summing.close()
            for name in self._book.held:
                self.do(self._book.abort(name, now))
        self.do(self._book.tick(now))

    def do(self, actions: Iterable[Action]) -> None:
        """Do what the book wants."""
        for action in actions:
            if isinstance(action, Tell):
                self._tell(action.notice)
            elif isinstance(action, Free):
                (self._done if action.why == "sent" else self._expired).append(action.request_id)
            elif isinstance(action, Refused):
                self._foreign.append(refusal(action))


def refusal(refused: Refused) -> str:
    """Say what was refused, and why."""
    notice = refused.notice
    return f"{notice.kind} of {notice.by} about {notice.key.request_id!r:.80}: {refused.why}"
