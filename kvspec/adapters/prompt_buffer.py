"""Blocks of host memory for engines whose own cache has none, such as transformers.

Invariant: a session reads and writes only the blocks of the buffer, and a block is used again only
when nothing reads or writes it any more.

How it works:
    Such an engine copies its rows into the buffer and out of it. A session registers the buffer
    once. A prompt takes blocks, and gives them back when `Session.settled` returns it, or when its
    load has ended. A window takes only the blocks of the tokens that a query still reads. For a
    prompt of 9 tokens, a window of 4, and blocks of 2, of which the consumer reads all but the last
    token:

        position        0   1   2   3   4   5   6   7   8
        full            | 0     | 1     | 2     | 3     | 4     `BlockTable([0, 1, 2, 3, 4])`
        window                          | 0     | 1     | 2     `BlockTable([0, 1, 2], 4)`

    All tokens of a block must be real, because a consumer may read any token of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.memory.allocation import allocate
from kvspec.ownership.parallel import RankId
from kvspec.session import Load, Session, new_remote_id
from kvspec.specs import AttentionSpec, MLAAttentionSpec
from kvspec.tickets import ContentIdentity, PrefillTicket, content_of

_Spec = TypeVar("_Spec", bound=AttentionSpec)

HeldTables = Mapping[str, BlockTable]
ByteRows = npt.NDArray[np.uint8]


def name_layers(pattern: str, specs: Sequence[_Spec]) -> dict[str, _Spec]:
    """Name layers by *pattern*, which has ``{}`` in place of the number of a layer.

    >>> name_layers("layers.{}", ["first", "second"])
    {'layers.0': 'first', 'layers.1': 'second'}
    """
    if not isinstance(pattern, str) or pattern.count("{}") != 1:
        raise SpecError("layer_name", pattern, "a name with {} for the layer's number")
    return {pattern.replace("{}", str(number)): spec for number, spec in enumerate(specs)}


def groups_of(layers: Mapping[str, AttentionSpec]) -> list[KVCacheGroup]:
    """Make a group of all layers that store the same."""
    return [
        KVCacheGroup(
            name=f"group{number}",
            layers=[name for name, other in layers.items() if other == spec],
            spec=spec,
            # A latent has no planes of keys and values.
            layout="LBNHC" if isinstance(spec, MLAAttentionSpec) else "LKBNHC",
        )
        for number, spec in enumerate(dict.fromkeys(layers.values()))
    ]


class PromptBuffer:
    """Blocks of an engine with one rank. Not for several threads at once.

    Args:
        engine: The engine.
        num_blocks: Number of blocks of each group.

    Attributes:
        engine: The engine.
        cache: The memory of the blocks, for a `Session`. It keeps the memory allocated.

    >>> from kvspec import FullAttentionSpec, KVCacheGroup
    >>> spec = FullAttentionSpec(block_size=2, total_num_kv_heads=3, head_size=4, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    >>> buffer = PromptBuffer(EngineSpec(groups=[group]), num_blocks=8)
    >>> tables = buffer.take(0, 3)
    >>> buffer.write(tables, "layers.0", "k", range(1, 3), np.full((2, 3, 4), 7, np.uint8))
    >>> buffer.read(tables, "layers.0", "k", range(2, 3)).tolist()
    [[[7, 7, 7, 7], [7, 7, 7, 7], [7, 7, 7, 7]]]
    """

    def __init__(self, engine: EngineSpec, num_blocks: int) -> None:
        self.engine = engine
        self.cache, storage = allocate(engine, RankId(), num_blocks)
        # For each part of a layer its rows: [blocks, heads, tokens of a block]. A row is one
        # element of numpy, because copying single bytes takes twice as long.
        self._views: dict[tuple[str, str], npt.NDArray[np.void]] = {}
        for region in self.cache.regions:
            memory = storage[region.group]
            self._views[region.layer, region.part] = np.ndarray(
                (region.num_blocks, region.units, region.states),
                f"V{region.content_bytes}",
                memory,
                region.base - memory.ctypes.data,
                (region.block_stride, region.unit_stride, region.state_stride),
            )
        self._free = {group.name: [*range(num_blocks)] for group in engine.groups}
        self._held: dict[str, tuple[Session, HeldTables]] = {}
        self._loads: list[tuple[Load, HeldTables]] = []

    def take(self, num_tokens: int, computed_tokens: int) -> HeldTables:
        """Take free blocks for a prompt.

        Args:
            num_tokens: The least number of tokens after which a query reads the blocks.
            computed_tokens: The largest one.

        Raises:
            SpecError: If too few blocks are free.
        """
        tables: dict[str, BlockTable] = {}
        for group in self.engine.groups:
            size, free = group.spec.block_size, self._free[group.name]
            first = group.spec.live_tokens(num_tokens).start // size * size
            count = -(-(computed_tokens - first) // size)
            if count > len(free):
                self.give(tables)
                rule = f"{count} blocks of {group.name!r} are needed, but {len(free)} are free"
                raise SpecError("num_blocks", len(free), rule=rule)
            tables[group.name] = BlockTable([free.pop() for _ in range(count)], first)
        return tables

    def give(self, tables: HeldTables) -> None:
        """Give blocks back that nothing reads or writes. Those of a held prompt stay taken."""
        if any(tables is held for _, held in self._held.values()):
            return
        for group, table in tables.items():
            self._free[group] += table.block_ids.tolist()

    def write(
        self, tables: HeldTables, layer: str, part: str, tokens: range, rows: ByteRows
    ) -> None:
        """Write *rows* [tokens, heads, bytes] into the blocks of *tables*."""
        block, row = self._places(tables, layer, tokens)
        view = self._views[layer, part]
        view[block, :, row] = np.ascontiguousarray(rows).view(view.dtype)[..., 0]

    def read(self, tables: HeldTables, layer: str, part: str, tokens: range) -> ByteRows:
        """Return a copy of the rows of *tokens*, [tokens, heads, bytes]."""
        block, row = self._places(tables, layer, tokens)
        return self._views[layer, part][block, :, row][..., None].view(np.uint8)

    def _places(self, tables: HeldTables, layer: str, tokens: range) -> tuple[Any, Any]:
        """Return the block of each token, and its row in the block."""
        group = self.engine.homes[layer]
        table = tables[group.name]
        place, row = np.divmod(np.asarray(tokens) - table.first_token, group.spec.block_size)
        return table.block_ids[place], row

    def hold(
        self,
        session: Session,
        request_id: str,
        tokens: Sequence[int],
        tables: HeldTables,
        sampled: Mapping[str, Any] | None = None,
        *,
        adapter: str | None = "",
        lease: float | None = None,
    ) -> PrefillTicket:
        """Hold a prompt whose rows lie in the blocks of *tables*, and return its ticket.

        Args:
            session: The session that has registered `cache`.
            request_id: Name of the request.
            tokens: All tokens of the prompt.
            tables: Tables from `take`. `reclaim` gives them back.
            sampled: The fields of the ticket that may be None, by name.
            adapter: As in `ContentIdentity`.
            lease: As in `Session.hold`.
        """
        ticket = PrefillTicket(
            engine_id=session.me.engine_id,
            addresses=[session.channel.address],
            remote_id=new_remote_id(request_id),
            computed_tokens=len(tokens),
            tables=tables,
            content=ContentIdentity.of_text(tokens, adapter=adapter),
            tokens_digest=content_of(tokens),
            **(sampled or {}),
        )
        # Before the session holds the request: an interrupt may come at any line.
        self._held[ticket.remote_id] = session, tables
        session.hold(ticket.remote_id, lease=lease, blocks=tables)
        return ticket

    @contextmanager
    def loaded(
        self, session: Session, ticket: PrefillTicket, num_tokens: int, timeout: float
    ) -> Iterator[HeldTables]:
        """Load a prompt into free blocks for the duration of a ``with`` block. Waits.

        Args:
            session: The session that has registered `cache`.
            ticket: The ticket of the producer.
            num_tokens: Number of tokens to load.
            timeout: As in `Session.load`.

        Yields:
            The tables of the blocks.

        Raises:
            SpecError: If too few blocks are free, or the ticket has fewer tokens.
            TransferError: If the load fails.
        """
        self.reclaim(session)
        tables = self.take(num_tokens, num_tokens)
        try:
            request = ticket.request(new_remote_id("load"), num_tokens, tables)
            load = session.load(request, ticket=ticket, timeout=timeout)
        except Exception:
            # After an interrupt bytes may still arrive. Then the blocks stay taken.
            self.give(tables)
            raise
        self._loads.append((load, tables))
        try:
            load.wait()
            yield tables
        finally:
            # After an interrupt bytes may still arrive. A later `reclaim` gives the blocks back.
            if load.state == "moving":
                load.cancel()
            self.reclaim(session)

    def reclaim(self, session: Session) -> None:
        """Give back the blocks of prompts that no consumer reads any more, and of ended loads.

        It takes the results of `Session.settled`.

        Raises:
            SpecError: If *session* has registered other memory.
        """
        if session.cache is not self.cache:
            wanted = "the session that was opened with the `cache` of this object"
            raise SpecError("session", session, wanted)
        session.settled()
        for remote_id, (holder, tables) in [*self._held.items()]:
            # A closed session holds nothing.
            if remote_id not in holder.held:
                del self._held[remote_id]
                self.give(tables)
        for load, tables in self._loads.copy():
            if load.state != "moving":
                self._loads.remove((load, tables))
                self.give(tables)
