"""Compare the data that a consumer received with the data that its producers hold, by checksums.

Invariant: the checksums of a load cover all that moves, each byte once. Equal contents have equal
checksums on both ranks, whatever their blocks and layouts are. A producer sends a checksum only
while the request is held, and only of the blocks that its own engine passed to `hold`.

How it works:
    An *extent* names contents: layers, parts, units and tokens. After all data has arrived, the
    consumer (`Audit`) requests the checksum of each extent from its source, and computes its own.
    The producer (`ChecksumAnswers`) computes and answers. If two checksums differ, the load fails.
    Before that, the consumer compares halves until one token of one unit is known to differ, or the
    time is over. For example, layers 0 to 3 of source tp0 differ:

        request to tp0              result
        --------------------------  --------------------------------------
        layers 0 to 3, tokens 0..7  differs
        layers 0 to 1, tokens 0..7  equal
        layers 2 to 3, tokens 0..7  differs
        layer 2, tokens 0..7        differs: layer 3 is not compared any more
        layer 2, tokens 0..3        differs, and so on until one token

    Both sides compute for a bounded time in each poll. A consumer that gets no answer asks again
    after a heartbeat, with the same number. Numbers are unique across loads, so a late answer to an
    earlier load is never taken for this one's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import attrs

from kvspec.check.digests import Wanted, partial_sums, readable, rows_of, wanted_of
from kvspec.completion.consumer import LoadPlan
from kvspec.completion.producer import ProducerLedger
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.errors import SpecError, TransferState
from kvspec.memory.rank_cache import RankCache
from kvspec.nixl import NixlRank
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan
from kvspec.session.mailbox import Messages
from kvspec.session.remotes import RemoteEngine
from kvspec.wire.messages import (
    MAX_NAMES,
    SUM,
    Checksum,
    ChecksumRequest,
    ChecksumUnavailable,
    Extent,
    RankAddress,
)

# Seconds for which a poll computes checksums. The last step, some hundred kilobytes, may end later.
TURN = 0.02
# Requests that wait for an answer. The reader of a request beyond the limit asks again.
MAX_ASKED = 4096
# Checksums that are kept of one held request, so that a repeated question costs nothing.
MAX_KNOWN = 512
_NUMBERS = itertools.count(1)
Names = tuple[str, ...]


@attrs.define(eq=False)
class Work:
    """A checksum that is being computed.

    Attributes:
        begin: Returns the sums to add, from the first one.
        total: The sum so far.
    """

    begin: Callable[[], Iterator[int]]
    total: int = 0
    _left: Iterator[int] | None = None

    def go_on(self, end: float) -> bool:
        """Compute until the time is *end*. Return whether the checksum is complete.

        If a call raises, the next one begins again. An interrupt ends a generator, so the sums that
        are left would be missing.
        """
        left, self._left = self._left, None
        if left is None:
            left, self.total = self.begin(), 0
        for partial_sum in left:
            self.total = (self.total + partial_sum) % 2 ** (8 * SUM)
            if time.monotonic() >= end:
                self._left = left
                return False
        self._left = left
        return True


@attrs.define(eq=False)
class ChecksumAnswers:
    """The checksums that readers request of one producer rank.

    Attributes:
        ledger: The held requests, with their blocks and known checksums.
        cache: Memory of the rank.
        owner: Owner of the memory, so that it lives as long as it may be read.
        messages: Sends the answers.
        asked: The requests that wait for an answer.
    """

    ledger: ProducerLedger
    cache: RankCache
    owner: object
    messages: Messages
    asked: dict[ChecksumRequest, Work] = attrs.field(factory=dict)
    _closed: bool = False

    def receive(self, message: ChecksumRequest) -> None:
        """Process a request. It gets no answer unless its data is held: the reader asks again."""
        held = self.ledger.find(message.key)
        if self._closed or held is None or message in self.asked:
            return
        if (total := held.checksums.get(message.extent)) is not None:
            self.messages.send(message.answer(Checksum, total=total))
        elif len(self.asked) < MAX_ASKED:
            sums = partial(sums_of, self.cache, held.blocks, message.extent)
            self.asked[message] = Work(sums)

    def move(self) -> None:
        """Compute for a bounded time, and answer."""
        end = time.monotonic() + TURN
        while self.asked and time.monotonic() < end:
            message, work = next(iter(self.asked.items()))
            held = self.ledger.find(message.key)
            if held is not None:
                try:
                    if not work.go_on(end):
                        return
                    total = work.total.to_bytes(SUM, "little")
                    if len(held.checksums) < MAX_KNOWN:
                        held.checksums[message.extent] = total
                    self.messages.send(message.answer(Checksum, total=total))
                except SpecError as error:
                    self.messages.note(f"{message}: {error}")
                    self.messages.send(message.answer(ChecksumUnavailable))
            del self.asked[message]

    def close(self) -> None:
        """Stop answering, and drop the reference to the memory."""
        self.asked.clear()
        self._closed, self.owner = True, None


@attrs.define(eq=False)
class Question:
    """One extent that is compared.

    Attributes:
        rank: The producer rank that is asked.
        extent: The contents.
        work: This rank's own checksum.
        answer: The checksum of the producer, once it arrived.
        again: Time of the next message to the producer.
    """

    rank: RankId
    extent: Extent
    work: Work
    answer: int | None = None
    again: float = 0.0


@attrs.define(eq=False)
class Audit:
    """The comparison of one load.

    Attributes:
        differs: The difference that is known so far, or "".
        verdict: State of the load's error, if the comparison fails.
        source: The producer rank whose data differs.
    """

    remote: RemoteEngine
    request: TransferRequest
    me: RankAddress
    nixl: NixlRank
    cache: RankCache
    messages: Messages
    differs: str = ""
    verdict: TransferState = TransferState.UNVERIFIED
    source: RankId | None = None
    _open: dict[int, Question] | None = None
    _refused: str = ""

    def __attrs_post_init__(self) -> None:
        for region in self.cache.regions:
            if region.memory_type != "DRAM":
                rule = f"checksums need host memory, not {region.memory_type}"
                raise SpecError("verify", True, rule=rule)  # noqa: FBT003

    def cancel(self) -> None:
        """Compare nothing any more. Later answers are not expected."""
        self._open = dict[int, Question]()

    def move(self, plan: LoadPlan, now: float, heartbeat: float, end: float) -> str | None:
        """Send questions and compare answers, until the time is *end*.

        Args:
            plan: The load.
            now: Time of the session's clock.
            heartbeat: Seconds after which an unanswered question is sent again.
            end: Time of `time.monotonic` at which to stop.

        Returns:
            "" if everything is equal, the difference or fault if it is known, or None.
        """
        if self.nixl.closed:
            self.verdict = TransferState.CLOSED
            return "the rank was closed before the received data could be compared"
        try:
            if self._open is None:  # The first questions cover everything that moves.
                which = self.remote.plan, self.request
                self._open = self._ask(
                    (rank, extent)
                    for rank in self.remote.tables
                    for extent in extents_of(*which, rank, self.cache.rank)
                )
            for number, question in self._open.items():
                if question.answer is None and now >= question.again:
                    question.again = now + heartbeat
                    asked = plan.about(self.me, question.rank, number)
                    self.messages.send(ChecksumRequest(*asked, extent=question.extent))
            for number, question in list(self._open.items()):
                complete = question.work.go_on(end)
                if complete and question.answer is not None:
                    if question.work.total != question.answer:
                        return self._narrow(question.rank, question.extent)
                    del self._open[number]
                elif not complete or self.differs:
                    # Compare the first half completely before the second, so that the first
                    # difference is found.
                    break
        except SpecError as error:
            return str(error)
        return self._refused or (None if self._open else self.differs)

    def deliver(self, message: Checksum | ChecksumUnavailable) -> bool:
        """Process an answer. Return whether it was expected."""
        question = (self._open or {}).get(message.number)
        if question is None or question.rank != message.by.rank:
            return False
        if isinstance(message, Checksum):
            question.answer = int.from_bytes(message.total, "little")
        else:
            self._refused = (
                f"{message.by} cannot compute the checksum: pass the request's `blocks` to `hold` "
                "there, and keep the cache in host memory"
            )
        return True

    def _ask(self, contents: Iterable[tuple[RankId, Extent]]) -> dict[int, Question]:
        """Return new questions. One expression builds them: an interrupt leaves all or none."""
        tables = self.request.consumer_blocks
        return {
            next(_NUMBERS): Question(
                rank, extent, Work(partial(sums_of, self.cache, tables, extent))
            )
            for rank, extent in contents
        }

    def _narrow(self, rank: RankId, extent: Extent) -> str | None:
        """Compare both halves of an extent that differs. Return its name if it has no halves."""
        self.source, self.differs = rank, f"{extent}: received data differs from that of {rank}"
        self.verdict = TransferState.DIFFERS
        self._open = self._ask((rank, half) for half in extent.halves or ())
        return None if self._open else self.differs


def extents_of(
    plan: TransferPlan, request: TransferRequest, producer: RankId, consumer: RankId
) -> Iterator[Extent]:
    """Yield the extents that *request* moves from *producer* to *consumer*.

    Each extent fits into one message.
    """
    for edge in plan.between(producer, consumer):
        groups = plan.producer.group(edge.producer_group), plan.consumer.group(edge.group)
        block = plan.consumer.virtual_block(groups[1])
        for part_slice in edge.slices:
            same = _same_extents(plan, request, edge, part_slice, block)
            for (parts, want), layers in same.items():
                # So many layers that their names fit into a message.
                longest = max(len(layer.encode()) for layer in layers)
                most = max(1, (MAX_NAMES - sum(len(part.encode()) for part in parts)) // longest)
                for first in range(0, len(layers), most):
                    yield Extent(
                        layers=tuple(layers[first : first + most]),
                        parts=parts,
                        units=part_slice.global_range,
                        tokens=want.tokens,
                        rows=range(want.rows),
                        producer=plan.producer.context(groups[0], producer),
                        consumer=plan.consumer.context(groups[1], consumer),
                        stripe=part_slice.stripe,
                        block=block,
                    )


def _same_extents(
    plan: TransferPlan, request: TransferRequest, edge: Edge, units: TPTransferSlice, block: int
) -> dict[tuple[Names, Wanted], list[str]]:
    """Return the layers of a slice that move the same rows of the same parts."""
    parts: dict[tuple[str, Wanted], list[str]] = {}
    for layer, part, want in wanted_of(plan, request, edge, units):
        if part.per_token or units.stripe.holds(want.tokens.start // block):
            parts.setdefault((layer, want), []).append(part.name)
    layers: dict[tuple[Names, Wanted], list[str]] = {}
    for (layer, want), names in parts.items():
        layers.setdefault((tuple(names), want), []).append(layer)
    return layers


def sums_of(cache: RankCache, tables: Mapping[str, BlockTable], extent: Extent) -> Iterator[int]:
    """Yield sums that add up, modulo 2**64, to this rank's checksum of *extent*.

    Each sum takes a short time, so a caller may pause between two of them.

    Args:
        cache: Memory of the rank.
        tables: Block tables of the request, by group of this rank's engine.
        extent: The contents.

    Raises:
        SpecError: If the rank does not hold the contents, or cannot read them.
    """
    placed: dict[tuple[str, int, int], tuple[Ints, Ints, Ints]] = {}
    for layer, name in itertools.product(extent.layers, extent.parts):
        region = cache.region(layer, name)
        part, units = readable(cache, region)
        if extent.units.start < units.start or units.stop < extent.units.stop:
            raise SpecError("units", extent.units, f"units of the rank: {units}")
        if not part.per_token and part.states < extent.rows.stop:
            wanted = f"rows below {part.states}, the rows of {name}"
            raise SpecError("rows", extent.rows, wanted)
        key = region.group, part.tokens_per_state, region.num_blocks
        if key not in placed:
            placed[key] = _placed(cache, layer, part, tables, extent)
        for unit in extent.units:
            yield from partial_sums(region, unit - units.start, unit, *placed[key])


def _placed(
    cache: RankCache, layer: str, part: Part, tables: Mapping[str, BlockTable], extent: Extent
) -> tuple[Ints, Ints, Ints]:
    """Return for each row of *extent*: its block in memory, its row there, and its number."""
    region = cache.region(layer, part.name)
    want = Wanted(extent.tokens, extent.rows.stop)
    block, row, number = rows_of(cache, region, part, tables, want)
    if part.per_token:
        keep = extent.stripe.holds(number // extent.block)
        for context in (extent.producer, extent.consumer):
            keep &= context.owns(number)
    else:
        keep = row >= extent.rows.start
    return block[keep], row[keep], number[keep]
