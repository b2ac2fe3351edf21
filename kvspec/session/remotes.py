"""The engines that one rank is connected to: check introductions, connect, find and release them.

Invariant: a NIXL agent stays connected while a connected or connecting engine needs it. An engine
that is disconnected while it is being connected does not become connected.

How it works:
    `judged` checks introductions and computes the plan. The result is a `RemoteEngine`, which
    `Remotes` keeps in one of three places:

        place           contents                                 next
        `_coming`       the engine that is being connected       `_connected` by `replace`
        `_connected`    one engine for each role and name        `_leaving` by `forget`
        `_leaving`      old engines whose lanes still exist      removed by `leave`

    Opening lanes takes long, so `connect` runs without the lock. If `forget` is called meanwhile,
    it clears `_coming`. Then `replace` finds another value there and gives the engine up.

    `leave` closes the lanes of old engines, but only if no bytes move over them. Otherwise the
    engine stays in `_leaving`, and each poll tries again.

    One agent may serve two engines in these places, because a rank can be producer and consumer of
    the same peer. For example, agent a belongs to the producer role P and the consumer role C:

        event                              agents that `leave` disconnects
        P is forgotten                     none: C still needs a
        P failed in flight (`P.lost`)      a, and C becomes lost: its lanes used the same connection
        C is connected again afterwards    C opens new lanes to a
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from kvspec.descriptors.table import build_table
from kvspec.errors import MismatchError, SpecError, TransferError, TransferState
from kvspec.inputs import positive_int, sequence
from kvspec.nixl import NixlRank
from kvspec.ownership.replicas import Role
from kvspec.plan.plan import plan_transfer
from kvspec.session.background import SessionLock
from kvspec.session.introduction import Introduced, introduced
from kvspec.session.remote import RemoteEngine
from kvspec.wire.handshake import disagreements, one_engine


def judged(
    own: Introduced,
    nixl: NixlRank,
    introductions: Iterable[bytes],
    role: Role,
    prefix_multiple: int,
) -> RemoteEngine:
    """Check the introductions of an engine, and return it without connecting it.

    Raises:
        WireError: If an introduction is damaged or was sealed with another secret.
        SpecError: If a rank is missing or occurs twice.
        MismatchError: If engines, models, replica policies or epochs do not fit.
    """
    if not isinstance(role, str) or role not in ("producer", "consumer"):
        raise SpecError("role", role, "'producer' or 'consumer'")
    wanted = "the introductions of all ranks of one engine"
    members = [
        introduced(sealed, nixl.secret)
        for sealed in sequence("introductions", introductions, wanted)
    ]
    ranks = one_engine(member.handshake for member in members)
    remote = next(iter(ranks.values()))
    sides = (remote, own.handshake) if role == "producer" else (own.handshake, remote)
    found = disagreements(*sides)
    if found:
        raise MismatchError(found)
    plan = plan_transfer(sides[0].engine, sides[1].engine, own.handshake.replica_policy)
    partners = plan.sources(own.rank) if role == "producer" else plan.targets(own.rank)
    tables = {}
    for rank in partners:
        caches = ranks[rank].cache, own.handshake.cache
        producer, consumer = caches if role == "producer" else caches[::-1]
        tables[rank] = build_table(plan, producer, consumer, prefix_multiple=prefix_multiple)
    by_rank = {member.rank: member for member in members}
    return RemoteEngine(role=role, plan=plan, ranks={r: by_rank[r] for r in ranks}, tables=tables)


class Remotes:
    """The engines of one rank, by role and name. See the module docstring.

    All methods but `connect` need the lock.
    """

    def __init__(self, nixl: NixlRank, lock: SessionLock) -> None:
        self._nixl, self._lock = nixl, lock
        self._connected: dict[tuple[Role, str], RemoteEngine] = {}
        self._coming: RemoteEngine | None = None
        self._leaving: list[RemoteEngine] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._connected)

    @property
    def leaving(self) -> int:
        """Number of old engines whose lanes still exist, because bytes move over them."""
        return len(self._leaving)

    def known(self, remote: RemoteEngine) -> RemoteEngine | None:
        """Return the connected engine if *remote* has the same introductions, else None."""
        self._check_open()
        old = self._connected.get((remote.role, remote.start[0]))
        return old if old is not None and remote.same(old) else None

    def find(self, role: Role, engine_id: str | None, epoch: object = None) -> RemoteEngine:
        """Return the connected engine of a *role*. Without *engine_id*, it must be the only one.

        *epoch*: the incarnation of a consumer whose blocks the caller knows.
        """
        self._check_open()
        met = sorted(name for other, name in self._connected if other == role)
        name = met[0] if engine_id is None and len(met) == 1 else engine_id
        if not isinstance(name, str) or (role, name) not in self._connected:
            wanted = f"one of the connected {role}s: {', '.join(met) or 'none yet'}"
            raise SpecError("engine_id", engine_id, wanted)
        remote = self._connected[role, name]
        if role == "consumer" and positive_int("epoch", epoch, least=0) != remote.start[1]:
            raise SpecError("epoch", epoch, f"{remote.start[1]}, the connected incarnation")
        return remote

    def connect(self, remote: RemoteEngine, timeout: float) -> None:
        """Open the lanes of *remote*, which takes long. If one fails, all are closed."""
        try:
            remote.connect(self._nixl, timeout)
        except BaseException:
            with self._lock.held:
                self._give_up(remote)
            raise

    def replace(self, remote: RemoteEngine) -> None:
        """Store *remote* as connected. If it was disconnected meanwhile, give it up."""
        if self._coming is not remote:
            self._give_up(remote)
            self._check_open()
            message = f"{remote.start[0]} was disconnected while it was being connected"
            raise TransferError(message, rank=remote.start[0], state=TransferState.STOPPED)
        self._coming = None
        self._connected[remote.role, remote.start[0]] = remote

    def _give_up(self, remote: RemoteEngine) -> None:
        self._coming = None
        self._leaving.append(remote)
        self.leave()

    def forget(self, engine_id: str, new: RemoteEngine | None = None) -> set[tuple[str, int]]:
        """Forget the engine *engine_id*, except the parts that a *new* incarnation leaves valid.

        Returns the incarnations that are gone. Raises `TransferError` "busy" if the same
        incarnation is to be connected again while its bytes still move.
        """
        gone = [
            key
            for key, old in self._connected.items()
            if key[1] == engine_id and (new is None or key[0] == new.role or old.start != new.start)
        ]
        if self._coming is not None and self._coming.start[0] == engine_id:
            self._coming = None
        dropped = [self._connected.pop(key) for key in gone]
        self._leaving += dropped
        self.leave()
        if new is not None and any(old.start == new.start for old in self._leaving):
            message = f"bytes of an earlier load from {engine_id} are still moving: try again"
            raise TransferError(message, rank=engine_id, state=TransferState.BUSY)
        self._coming = self._coming if new is None else new
        return {old.start for old in dropped}

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the session was closed", state=TransferState.CLOSED)

    def close(self) -> None:
        """Forget all engines, and accept no others."""
        self._closed, self._coming = True, None
        for remote in (*self._connected.values(), *self._leaving):
            remote.unheard = True
        for _, engine_id in tuple(self._connected):
            self.forget(engine_id)

    def leave(self) -> None:
        """Close the lanes of old engines if no bytes move over them. See the module docstring."""
        for remote in tuple(self._leaving):
            coming = () if self._coming is None else (self._coming,)
            others = [o for o in (*self._connected.values(), *coming) if o.agents & remote.agents]
            keep = set[str]() if remote.lost else set[str]().union(*(o.agents for o in others))
            for other in others if remote.lost else ():
                other.lost = True
                other.agents -= remote.agents  # which who is met anew connects
            with contextlib.suppress(TransferError):
                remote.leave(self._nixl, keep)
                self._leaving.remove(remote)
