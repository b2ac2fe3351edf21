"""One start of another engine, as a session met it: plan, tables, and lists that NIXL has checked.

Law: a remote engine is met whole or not at all: introductions, agreement, plan and tables first,
refused by name, and only then a connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import attrs

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.descriptors.tables import Positions
from kvspec.errors import MismatchError, SpecError, TransferError
from kvspec.inputs import positive_int, sequence
from kvspec.nixl import NixlRank, Prepared
from kvspec.nixl.order import Sides
from kvspec.ownership.election import Role
from kvspec.ownership.parallel import RankId
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.protocol.handshake import Handshake, disagreements, one_engine
from kvspec.protocol.order import Place, ReadOrder
from kvspec.session.introduction import Introduced, introduced, key_of


@attrs.frozen(eq=False, slots=False)
class Lane:
    """The rows between this rank and one of a remote's, as NIXL's lists of both sides."""

    table: DescriptorTable
    producer: Prepared
    consumer: Prepared
    layers: dict[str, Lane] = attrs.field(factory=dict)

    @staticmethod
    def open(nixl: NixlRank, table: DescriptorTable, agent: str, role: Role) -> Lane:
        """Have NIXL check the rows of *table*: of *agent*, whose *role* it is, and one's own."""
        producer, consumer = (agent, None) if role == "producer" else (None, agent)
        return Lane(
            table,
            nixl.prepare(table.producer_rows, table.producer_memory_type, producer),
            nixl.prepare(table.consumer_rows, table.consumer_memory_type, consumer),
        )

    def of_layer(self, nixl: NixlRank, layer: str) -> Lane:
        """Return the rows of one layer alone; made once."""
        if layer not in self.layers:
            whole = self.table
            caches = whole.producer, whole.consumer
            table = build_table(whole.plan, *caches, layers=[layer], cached_in=whole.cached_in)
            role: Role = "producer" if self.consumer.peer is None else "consumer"
            agent = self.producer.peer or self.consumer.peer or ""
            self.layers[layer] = Lane.open(nixl, table, agent, role)
        return self.layers[layer]

    def release(self) -> None:
        """Give all lists back."""
        for lane in (*self.layers.values(), self):
            lane.producer.release()
            lane.consumer.release()

    @cached_property
    def places(self) -> dict[Place, int]:
        """The groups and layers that it carries, each one thing to a ledger: there, or not."""
        ranks = self.table.producer.rank, self.table.consumer.rank
        edges = self.table.plan.between(*ranks)
        return {(edge.group, layer): 1 for edge in edges for layer in edge.layers}

    def sides(self, request: TransferRequest, tokens: Positions | None = None) -> Sides:
        """Return what *request* moves, local and remote, all or one step of it.

        Raises as `DescriptorTable.select` does.
        """
        selection = self.table.select(request, tokens=tokens)
        if self.consumer.peer is None:
            return self.consumer, selection, self.producer, None
        return self.producer, selection, self.consumer, None


@attrs.define(eq=False)
class RemoteEngine:
    """One start of an engine, of which *role*, and the *lanes* to those of its ranks that matter.

    *agents*: those that are connected. *lost*: a transfer failed, so that they have to be anew.
    """

    role: Role
    plan: TransferPlan
    ranks: dict[RankId, Introduced]
    tables: dict[RankId, DescriptorTable]
    lanes: dict[RankId, Lane] = attrs.field(factory=dict)
    agents: set[str] = attrs.field(factory=set)
    lost: bool = False

    @property
    def handshake(self) -> Handshake:
        """What all of its ranks tell alike."""
        return next(iter(self.ranks.values())).handshake

    @property
    def start(self) -> tuple[str, int]:
        """The engine's name, and which of its starts."""
        return self.handshake.engine_id, self.handshake.epoch

    def same(self, other: RemoteEngine) -> bool:
        """Whether nothing has changed since *other* was met."""
        told = [(x.ranks, {table.cached_in for table in x.tables.values()}) for x in (self, other)]
        return told[0] == told[1] and not other.lost

    def order(
        self,
        rank: RankId,
        remote_id: str,
        request_id: str,
        **more: Any,  # noqa: ANN401
    ) -> ReadOrder:
        """Return what its ranks are told of a request that consumer *rank* reads, or will not."""
        engine_id, epoch = self.start
        return ReadOrder.of(
            self.plan,
            rank,
            {},
            request_id=request_id,
            key=key_of(remote_id),
            engine_id=engine_id,
            epoch=epoch,
            **more,
        )

    def connect(self, nixl: NixlRank, timeout: float) -> None:
        """Open a lane to each rank of which there is a table; all or none."""
        try:
            for rank, table in self.tables.items():
                agent = nixl.connect(self.ranks[rank].handshake.transport, timeout)
                self.agents.add(agent)
                self.lanes[rank] = Lane.open(nixl, table, agent, self.role)
        except BaseException:
            with contextlib.suppress(TransferError):
                self.leave(nixl)
            raise

    def sides(self, request: TransferRequest, ranks: Iterable[RankId]) -> dict[RankId, Sides]:
        """Return what *request* moves between this rank and others, of whom it moves anything.

        Raises as `DescriptorTable.select` does.
        """
        every = {rank: self.lanes[rank].sides(request) for rank in ranks}
        return {rank: sides for rank, sides in every.items() if len(sides[1][0])}

    def leave(self, nixl: NixlRank, keep: Iterable[str] = ()) -> None:
        """Disconnect all agents but those to *keep*; `TransferError` "busy" while bytes move."""
        for agent in self.agents.difference(keep):
            if agent in nixl.peers:
                nixl.disconnect(agent)
        for lane in self.lanes.values():
            lane.release()
        self.lanes.clear()


def judged(
    own: Introduced, nixl: NixlRank, introductions: Iterable[bytes], role: Role, cached_in: int
) -> RemoteEngine:
    """Return who is introduced, not connected yet; each thing that does not fit is refused.

    `WireError`: what was not sealed by the secret, or is damaged. `SpecError`: ranks missing or
    twice. `MismatchError`: engines, models, elections or starts that differ.
    """
    if not isinstance(role, str) or role not in ("producer", "consumer"):
        raise SpecError("role", role, "'producer' or 'consumer'")
    wanted = "introductions, one of each rank of an engine"
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
    plan = plan_transfer(sides[0].engine, sides[1].engine, own.handshake.election)
    partners = plan.sources(own.rank) if role == "producer" else plan.targets(own.rank)
    tables = {}
    for rank in partners:
        caches = ranks[rank].cache, own.handshake.cache
        producer, consumer = caches if role == "producer" else caches[::-1]
        tables[rank] = build_table(plan, producer, consumer, cached_in=cached_in)
    by_rank = {member.rank: member for member in members}
    return RemoteEngine(role=role, plan=plan, ranks={r: by_rank[r] for r in ranks}, tables=tables)


class Remotes:
    """The engines that one rank met, by role and name, and those whose lanes still have to go."""

    def __init__(self, nixl: NixlRank) -> None:
        self._nixl = nixl
        self._met: dict[tuple[Role, str], RemoteEngine] = {}
        self._leaving: list[RemoteEngine] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._met)

    @property
    def leaving(self) -> int:
        """How many starts are given up whose lanes are still there, since bytes move over them."""
        return len(self._leaving)

    def known(self, remote: RemoteEngine) -> RemoteEngine | None:
        """Return the one that was met, if *remote* tells nothing new."""
        self._check_open()
        old = self._met.get((remote.role, remote.start[0]))
        return old if old is not None and remote.same(old) else None

    def find(self, role: Role, engine_id: str | None, epoch: object = None) -> RemoteEngine:
        """Return the engine of a *role* that was met, the only one unless named.

        *epoch*: of a consumer, the start whose blocks the caller knows.
        """
        self._check_open()
        met = sorted(name for other, name in self._met if other == role)
        name = met[0] if engine_id is None and len(met) == 1 else engine_id
        if not isinstance(name, str) or (role, name) not in self._met:
            wanted = f"one of the {role}s that were met: {', '.join(met) or 'none yet'}"
            raise SpecError("engine_id", engine_id, wanted)
        remote = self._met[role, name]
        if role == "consumer" and positive_int("epoch", epoch, least=0) != remote.start[1]:
            raise SpecError("epoch", epoch, f"{remote.start[1]}, the start that was met")
        return remote

    def replace(self, remote: RemoteEngine) -> None:
        """Keep *remote*; let it go where the session was closed meanwhile."""
        if self._closed:
            self._leaving.append(remote)
            self.leave()
        self._check_open()
        self._met[remote.role, remote.start[0]] = remote

    def drop(self, engine_id: str, new: RemoteEngine | None = None) -> set[tuple[str, int]]:
        """Forget an engine, but for what a *new* start leaves as it is; return the starts gone.

        `TransferError` "busy" where a start is to be connected anew while its bytes still move.
        """
        gone = [
            key
            for key, old in self._met.items()
            if key[1] == engine_id and (new is None or key[0] == new.role or old.start != new.start)
        ]
        dropped = [self._met.pop(key) for key in gone]
        self._leaving += dropped
        self.leave()
        if new is not None and any(old.start == new.start for old in self._leaving):
            message = f"bytes of an earlier load from {engine_id} move still: try again"
            raise TransferError(message, rank=engine_id, state="busy")
        return {old.start for old in dropped}

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the session was closed", state="closed")

    def close(self) -> None:
        """Forget every engine, and know none any more."""
        self._closed = True
        for _, engine_id in tuple(self._met):
            self.drop(engine_id)

    def leave(self) -> None:
        """Give up the lanes of engines that are gone, where nothing moves over them.

        One agent may be met in both roles: it stays while the other needs it, or both are lost.
        """
        for remote in tuple(self._leaving):
            others = [other for other in self._met.values() if other.agents & remote.agents]
            keep = set[str]() if remote.lost else set[str]().union(*(o.agents for o in others))
            for other in others if remote.lost else ():
                other.lost = True
                other.agents -= remote.agents  # which who is met anew connects
            with contextlib.suppress(TransferError):
                remote.leave(self._nixl, keep)
                self._leaving.remove(remote)
