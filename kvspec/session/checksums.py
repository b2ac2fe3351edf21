"""Compare the data that a consumer received with the data that its producers hold, by checksums.

Invariant: the checksums of a load cover all that moves, each byte once. Equal contents have equal
checksums on both ranks, whatever their blocks and layouts are. A producer sends a checksum only
while the request is held, and only of the blocks that its own engine passed to `hold`.

How it works:
    An *extent* names contents of one layer: parts, units and tokens. After all data has arrived,
    the consumer (`Audit`) requests the checksum of each extent from its source, and computes its
    own. The producer (`ChecksumAnswers`) computes and answers. If two checksums differ, the load
    fails. Before that, the consumer compares halves until one token of one unit is known to differ,
    or the time is over. For example, layer 2 of source tp0 differs:

        request to tp0                 result
        -----------------------------  --------------------------------------------------
        layer 2, k+v, tokens 0..7      differs: the other layers are not compared any more
        layer 2, k, tokens 0..7        equal
        layer 2, v, tokens 0..7        differs
        layer 2, v, tokens 0..3        differs, and so on until one token

    Both sides compute for a bounded time in each poll. So each extent is small: its checksum is
    computed at once, and a poll ends between two of them. A consumer that gets no answer asks again
    after a heartbeat, with the same number. Numbers are unique across loads, so a late answer to an
    earlier load is never taken for this one's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping

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
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan
from kvspec.session.mailbox import Messages
from kvspec.session.remotes import RemoteEngine
from kvspec.wire.messages import (
    MAX_PART_NAME,
    SUM,
    Checksum,
    ChecksumRequest,
    ChecksumUnavailable,
    Extent,
    RankAddress,
)

# Seconds for which a poll computes checksums. The last one may end later.
CHECKSUM_TURN = 0.02
# Contents in one extent, each of one part of one unit at one token. They have about 4 MiB.
CONTENTS_PER_EXTENT = 1 << 14
# Bytes of the names of the parts in one extent, each with its MessagePack head. One name of any
# length fits, and so does a message with it.
NAME_BYTES_PER_EXTENT = 4 * MAX_PART_NAME + 3
# Requests that wait for an answer. The reader of a request beyond the limit asks again.
MAX_ASKED = 1 << 16
# Checksums that are kept of one held request, so that a repeated question costs nothing.
MAX_KNOWN = 1 << 12
_NUMBERS = itertools.count(1)


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
    asked: dict[ChecksumRequest, None] = attrs.field(factory=dict)
    _closed: bool = False

    def receive(self, message: ChecksumRequest) -> None:
        """Process a request. It gets no answer unless its data is held: the reader asks again."""
        held = self.ledger.find(message.key)
        if self._closed or held is None or message in self.asked:
            return
        if (total := held.checksums.get(message.extent)) is not None:
            self.messages.send(message.answer(Checksum, total=total))
        elif len(self.asked) < MAX_ASKED:
            self.asked[message] = None

    def move(self) -> None:
        """Compute for a bounded time, and answer."""
        end = time.monotonic() + CHECKSUM_TURN
        while self.asked and time.monotonic() < end:
            message = next(iter(self.asked))
            held = self.ledger.find(message.key)
            if held is not None:
                try:
                    own = checksum_of(self.cache, held.blocks, message.extent)
                    total = own.to_bytes(SUM, "little")
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
        own: This rank's own checksum, once it is computed.
        answer: The checksum of the producer, once it arrived.
        again: Time of the next message to the producer.
    """

    rank: RankId
    extent: Extent
    own: int | None = None
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
            return self._compare(self._open, end)
        except SpecError as error:
            return str(error)

    def _compare(self, questions: dict[int, Question], end: float) -> str | None:
        """Compute and compare checksums until the time is *end*. Returns as `move`."""
        tables = self.request.consumer_blocks
        for number, question in list(questions.items()):
            if computes := question.own is None:
                question.own = checksum_of(self.cache, tables, question.extent)
            if question.answer is not None:
                if question.own != question.answer:
                    return self._narrow(question.rank, question.extent)
                del questions[number]
            elif self.differs:
                # Compare the first half completely before the second, so that the first difference
                # is found.
                break
            if computes and time.monotonic() >= end:
                break
        return self._refused or (None if questions else self.differs)

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
        return {next(_NUMBERS): Question(rank, extent) for rank, extent in contents}

    def _narrow(self, rank: RankId, extent: Extent) -> str | None:
        """Compare both halves of an extent that differs. Return its name if it has no halves."""
        self.source, self.differs = rank, f"{extent}: received data differs from that of {rank}"
        self.verdict = TransferState.DIFFERS
        self._open = self._ask((rank, half) for half in extent.halves or ())
        return None if self._open else self.differs


def extents_of(
    plan: TransferPlan, request: TransferRequest, producer: RankId, consumer: RankId
) -> Iterator[Extent]:
    """Yield the extents that *request* moves from *producer* to *consumer*."""
    for edge in plan.between(producer, consumer):
        groups = plan.producer.group(edge.producer_group), plan.consumer.group(edge.group)
        block = plan.consumer.virtual_block(groups[1])
        for units in edge.slices:
            parts: dict[tuple[str, Wanted], list[str]] = {}
            for layer, part, want in wanted_of(plan, request, edge, units):
                if part.per_token or units.stripe.holds(want.tokens.start // block):
                    parts.setdefault((layer, want), []).append(part.name)
            for (layer, want), names in parts.items():
                whole = Extent(
                    layer=layer,
                    parts=tuple(names),
                    units=units.global_range,
                    tokens=want.tokens,
                    rows=range(want.rows),
                    producer=plan.producer.context(groups[0], producer),
                    consumer=plan.consumer.context(groups[1], consumer),
                    stripe=units.stripe,
                    block=block,
                )
                yield from _small(whole)


def _small(extent: Extent) -> Iterator[Extent]:
    """Yield *extent* in pieces that each take a short time and fit into a message."""
    rows = len(extent.rows) or len(extent.tokens)
    names = sum(3 + len(name.encode()) for name in extent.parts)
    small = (
        len(extent.parts) * len(extent.units) * rows <= CONTENTS_PER_EXTENT
        and names <= NAME_BYTES_PER_EXTENT
    )
    if small or extent.halves is None:
        yield extent
    else:
        for half in extent.halves:
            yield from _small(half)


def checksum_of(cache: RankCache, tables: Mapping[str, BlockTable], extent: Extent) -> int:
    """Return this rank's checksum of *extent*.

    Args:
        cache: Memory of the rank.
        tables: Block tables of the request, by group of this rank's engine.
        extent: The contents.

    Raises:
        SpecError: If the rank does not hold the contents, or cannot read them.
    """
    total = 0
    placed: dict[tuple[int, int], tuple[Ints, Ints, Ints]] = {}
    for name in extent.parts:
        region = cache.region(extent.layer, name)
        part, units = readable(cache, region)
        if extent.units.start < units.start or units.stop < extent.units.stop:
            raise SpecError("units", extent.units, f"units of the rank: {units}")
        if not part.per_token and part.states < extent.rows.stop:
            wanted = f"rows below {part.states}, the rows of {name}"
            raise SpecError("rows", extent.rows, wanted)
        key = part.tokens_per_state, region.num_blocks
        if key not in placed:
            placed[key] = _placed(cache, part, tables, extent)
        for unit in extent.units:
            total += sum(partial_sums(region, unit - units.start, unit, *placed[key]))
    return total % (1 << 8 * SUM)


def _placed(
    cache: RankCache, part: Part, tables: Mapping[str, BlockTable], extent: Extent
) -> tuple[Ints, Ints, Ints]:
    """Return for each row of *extent*: its block in memory, its row there, and its number."""
    region = cache.region(extent.layer, part.name)
    want = Wanted(extent.tokens, extent.rows.stop)
    block, row, number = rows_of(cache, region, part, tables, want)
    if part.per_token:
        keep = extent.stripe.holds(number // extent.block)
        for context in (extent.producer, extent.consumer):
            keep &= context.owns(number)
    else:
        keep = row >= extent.rows.start
    return block[keep], row[keep], number[keep]
