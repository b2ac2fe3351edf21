"""Move the request of a `World` with two ranks of one process, over any bindings of NIXL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs

from kvspec import DescriptorTable
from kvspec.nixl import NixlRank, Transfer
from kvspec.nixl.merging import Operation
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.testing.world import World, prepared


def keep(_: FakeFlight) -> None:
    """Leave the posted handle in flight: a value for `FakeNixl.fate`."""


@attrs.frozen
class Moving:
    """Two ranks of one world: *local* starts transfers, and *remote* serves.

    The consumer is *local* if *operation* is "READ", else *remote*.
    """

    here: World
    operation: Operation
    local: NixlRank
    remote: NixlRank
    peer: str

    def start(
        self, table: DescriptorTable, *, plain: bool = False, timeout: float = 10
    ) -> Transfer:
        """Start the part of the request that a table moves, by a selection or by *plain* ids."""
        pulled = self.operation == "READ"
        selection = table.select(self.here.case.request)
        lists = prepared(table, self.here.case.request) if plain else selection
        consumer = self.local.prepare(lists.consumer_rows, peer=None if pulled else self.peer)
        producer = self.local.prepare(lists.producer_rows, peer=self.peer if pulled else None)
        more: dict[str, Any] = {"request": "r", "timeout": timeout}
        if not plain:
            sides = (consumer, selection, producer) if pulled else (producer, selection, consumer)
            move = self.local.read if pulled else self.local.write
            return move(*sides, **more)
        if pulled:
            return self.local.read(
                consumer, lists.consumer_ids, producer, lists.producer_ids, **more
            )
        return self.local.write(producer, lists.producer_ids, consumer, lists.consumer_ids, **more)

    def start_all(self, **more: Any) -> list[Transfer]:
        """Start the whole request between all pairs of ranks."""
        return [self.start(table, **more) for _, _, table in self.here.tables()]


@contextlib.contextmanager
def moving(here: World, operation: Operation, **options: Any) -> Iterator[Moving]:
    """Connect two ranks that share all memory of a world. The local rank has the *options*."""
    pulled = operation == "READ"
    with NixlRank(secret=b"") as remote, NixlRank(secret=b"", **options) as local:
        consumer, producer = (local, remote) if pulled else (remote, local)
        for side, ranks in ((producer, here.producers), (consumer, here.consumers)):
            for cache, storage in ranks.values():
                side.register(cache.memory, owner=storage)
        peer = local.connect(remote.metadata())
        yield Moving(here, operation, local, remote, peer)
