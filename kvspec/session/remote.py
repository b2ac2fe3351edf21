"""One incarnation of a connected engine: its plan, its tables, and its lists that NIXL has checked.

Invariant: an engine is connected completely or not at all. Introductions, compatibility, plan and
tables are checked first, and errors name the fault. The connection is opened last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cached_property

import attrs

from kvspec.completion.load_plan import LoadPlan, Place
from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.descriptors.tiles import Positions
from kvspec.errors import TransferError
from kvspec.nixl import NixlRank
from kvspec.nixl.transfer_spec import Prepared, Sides
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.plan.plan import TransferPlan
from kvspec.session.introduction import Introduced
from kvspec.wire.handshake import Handshake
from kvspec.wire.messages import key_of


@attrs.frozen(kw_only=True)
class ReadOptions:
    """Which read of a request this is; `LoadPlan` has these fields, and checks them.

    Attributes:
        attempt: Number of the attempt to read the request.
        again: Whether another attempt follows if this one fails.
        sample: Which of the equal requests of one prompt reads.
        samples: How many equal requests the prompt has.
    """

    attempt: int = 0
    again: bool = False
    sample: int = 0
    samples: int = 1


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
        first = nixl.prepare(table.producer_rows, table.producer_memory_type, producer)
        try:
            second = nixl.prepare(table.consumer_rows, table.consumer_memory_type, consumer)
        except BaseException:
            first.release()
            raise
        return Lane(table, first, second)

    def of_layer(self, nixl: NixlRank, layer: str) -> Lane:
        """Return the rows of one layer alone; made once."""
        if layer not in self.layers:
            whole = self.table
            caches = whole.producer, whole.consumer
            table = build_table(
                whole.plan, *caches, layers=[layer], prefix_multiple=whole.prefix_multiple
            )
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
    *unheard*: the session was closed, and hears nothing of it any more.
    """

    role: Role
    plan: TransferPlan
    ranks: dict[RankId, Introduced]
    tables: dict[RankId, DescriptorTable]
    lanes: dict[RankId, Lane] = attrs.field(factory=dict)
    agents: set[str] = attrs.field(factory=set)
    lost: bool = False
    unheard: bool = False

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
        told = [
            (x.ranks, {table.prefix_multiple for table in x.tables.values()}) for x in (self, other)
        ]
        return told[0] == told[1] and not other.lost

    def load_plan(
        self, rank: RankId, remote_id: str, request_id: str, options: ReadOptions
    ) -> LoadPlan:
        """Return what its ranks are told of a request that consumer *rank* reads, or will not."""
        engine_id, epoch = self.start
        return LoadPlan.of(
            self.plan,
            rank,
            {},
            request_id=request_id,
            key=key_of(remote_id),
            engine_id=engine_id,
            epoch=epoch,
            attempt=options.attempt,
            sample=options.sample,
            samples=options.samples,
            again=options.again,
        )

    def connect(self, nixl: NixlRank, timeout: float) -> None:
        """Open a lane to each rank of which there is a table."""
        for rank, table in self.tables.items():
            agent = nixl.connect(self.ranks[rank].handshake.transport, timeout)
            self.agents.add(agent)
            self.lanes[rank] = Lane.open(nixl, table, agent, self.role)

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
            with contextlib.suppress(TransferError):  # of a rank that is closed
                lane.release()
        self.lanes.clear()
