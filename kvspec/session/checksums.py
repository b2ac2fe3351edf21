"""Compare the data that a consumer received with the data that its producers hold, by checksums.

Invariant: the checksums of a load cover all that moves, each byte once. Equal contents have equal
checksums on both ranks, whatever their blocks and layouts are. A producer sends a checksum only
while the request is held, and only of the blocks that its own engine passed to `hold`.

How it works:
    A checksum is the digest (`kvspec.digests`) of all contents of one layer that move from one
    source (`ChecksumContents`). After all data has arrived, the consumer (`Audit`) requests each
    checksum from its source, and computes its own. The producer (`ChecksumAnswers`) computes and
    answers. If two checksums differ, the load fails, and its error names the layer and the source.
    `kvspec.check.differences` then finds the rows.

    Both sides compute for a bounded time in each poll, and continue in the next poll. A consumer
    that gets no answer asks again after a heartbeat, with the same number. Numbers are unique
    across loads, so a late answer to an earlier load is never taken for this one's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator, Mapping

import attrs
import numpy as np
from msgspec.structs import replace

from kvspec.completion.consumer import LoadPlan
from kvspec.completion.producer import ProducerLedger
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.digests.ranks import Wanted, readable, rows_of, wanted_of
from kvspec.digests.regions import RegionRows, unit_sums
from kvspec.errors import SpecError, TransferState
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.plan.plan import TransferPlan
from kvspec.session.mailbox import Messages
from kvspec.session.remotes import RemoteEngine
from kvspec.session.transport import Transport
from kvspec.wire.messages import (
    MAX_PART_NAME,
    SUM,
    Checksum,
    ChecksumContents,
    ChecksumRequest,
    ChecksumUnavailable,
    RankAddress,
)

# Seconds for which a poll computes checksums. The last one may end later.
CHECKSUM_TURN = 0.02
# Bytes of the names of the parts in one question, each with its MessagePack head. One name of any
# length fits, and so does a message with it.
MAX_NAME_BYTES = 4 * MAX_PART_NAME + 3
# Requests that wait for an answer. The reader of a request beyond the limit asks again.
MAX_ASKED = 1 << 16
# Checksums that are kept of one held request, so that a repeated question costs nothing.
MAX_KNOWN = 1 << 12
_NUMBERS = itertools.count(1)
# A computation of a checksum. It yields after each step, and returns the checksum.
Computation = Generator[None, None, int]


@attrs.define(eq=False)
class ChecksumAnswers:
    """The checksums that readers request of one producer rank.

    Attributes:
        ledger: The held requests, with their blocks and known checksums.
        cache: Memory of the rank.
        owner: Owner of the memory, so that it lives as long as it may be read.
        messages: Sends the answers.
        asked: The requests that wait for an answer, each with its checksum.
    """

    ledger: ProducerLedger
    cache: RankCache
    owner: object
    messages: Messages
    asked: dict[ChecksumRequest, Computation] = attrs.field(factory=dict)
    _closed: bool = False

    def receive(self, message: ChecksumRequest) -> None:
        """Process a request. It gets no answer unless its data is held: the reader asks again."""
        held = self.ledger.find(message.key)
        if self._closed or held is None or message in self.asked:
            return
        if (total := held.checksums.get(message.contents)) is not None:
            self.messages.send(message.answer(Checksum, total=total))
        elif len(self.asked) < MAX_ASKED:
            self.asked[message] = computation_of(self.cache, held.blocks, message.contents)

    def move(self) -> None:
        """Compute for a bounded time, and answer."""
        end = time.monotonic() + CHECKSUM_TURN
        while self.asked:
            message = next(iter(self.asked))
            held = self.ledger.find(message.key)
            if held is not None:
                try:
                    total = advance(self.asked[message], end)
                except Exception as error:  # noqa: BLE001 - other readers wait for their checksums
                    self.messages.note(f"{message}: {str(error) or repr(error)}")
                    self.messages.send(message.answer(ChecksumUnavailable))
                else:
                    if total is None:
                        return
                    known = total.to_bytes(SUM, "little")
                    if len(held.checksums) < MAX_KNOWN:
                        held.checksums[message.contents] = known
                    self.messages.send(message.answer(Checksum, total=known))
            del self.asked[message]
            if time.monotonic() >= end:
                return

    def close(self) -> None:
        """Send no more answers, and keep no reference to the memory."""
        self.asked.clear()
        self._closed, self.owner = True, None


@attrs.define(eq=False)
class Question:
    """One question about contents that are compared.

    Attributes:
        rank: The producer rank that is asked.
        contents: The contents.
        computation: The computation of this rank's own checksum.
        own: The result of the computation.
        answer: The checksum of the producer, once it arrived.
        next_message: Time of the next message to the producer.
    """

    rank: RankId
    contents: ChecksumContents
    computation: Computation
    own: int | None = None
    answer: int | None = None
    next_message: float = 0.0


@attrs.define(eq=False)
class Audit:
    """The comparison of one load.

    Attributes:
        verdict: State of the load's error, if the comparison fails.
        source: The producer rank whose data differs.
    """

    remote: RemoteEngine
    request: TransferRequest
    me: RankAddress
    nixl: Transport
    cache: RankCache
    messages: Messages
    verdict: TransferState = TransferState.UNCOMPARED
    source: RankId | None = None
    _open: dict[int, Question] | None = None
    _refused: str = ""

    def __attrs_post_init__(self) -> None:
        for region in self.cache.regions:
            if region.memory_type != "DRAM":
                rule = f"checksums need host memory, not {region.memory_type}"
                raise SpecError("checksum", True, rule=rule)  # noqa: FBT003

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
            if self._open is None:
                # One expression builds the questions: an interrupt leaves all or none.
                self._open = {next(_NUMBERS): question for question in self._questions()}
            for number, question in self._open.items():
                if question.answer is None and now >= question.next_message:
                    question.next_message = now + heartbeat
                    asked = plan.about(self.me, question.rank, number)
                    self.messages.send(ChecksumRequest(*asked, contents=question.contents))
            return self._compare(self._open, end)
        except Exception as error:  # noqa: BLE001 - it fails this load alone
            return str(error) or repr(error)

    def _questions(self) -> Iterator[Question]:
        """Yield the questions. Together, they cover everything that moves."""
        for rank in self.remote.tables:
            for contents in contents_of(self.remote.plan, self.request, rank, self.cache.rank):
                computation = computation_of(self.cache, self.request.consumer_blocks, contents)
                yield Question(rank, contents, computation)

    def _compare(self, questions: dict[int, Question], end: float) -> str | None:
        """Compute and compare checksums until the time is *end*. Returns as `move`."""
        for number, question in list(questions.items()):
            if question.own is None and time.monotonic() < end:
                question.own = advance(question.computation, end)
            if question.own is None or question.answer is None:
                continue
            if question.own != question.answer:
                return self._differs(question)
            del questions[number]
        return self._refused or (None if questions else "")

    def _differs(self, question: Question) -> str:
        """Return the message of a difference."""
        self.source, self.verdict = question.rank, TransferState.DIFFERS
        return (
            f"{question.contents}: received data differs from that of {question.rank}; "
            "kvspec.check.differences finds the rows"
        )

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


def contents_of(
    plan: TransferPlan, request: TransferRequest, producer: RankId, consumer: RankId
) -> Iterator[ChecksumContents]:
    """Yield the contents that *request* moves from *producer* to *consumer*."""
    for edge in plan.between(producer, consumer):
        groups = plan.producer.group(edge.producer_group), plan.consumer.group(edge.group)
        block = plan.consumer.virtual_block(groups[1])
        for units in edge.slices:
            parts: dict[tuple[str, Wanted], list[str]] = {}
            for layer, part, want in wanted_of(plan, request, edge, units):
                if part.per_token or units.stripe.holds(want.tokens.start // block):
                    parts.setdefault((layer, want), []).append(part.name)
            for (layer, want), names in parts.items():
                whole = ChecksumContents(
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
                yield from _by_names(whole)


def _by_names(contents: ChecksumContents) -> Iterator[ChecksumContents]:
    """Yield *contents*, divided so that the names fit into a message. Nearly always, once."""
    parts, size = list[str](), 0
    for name in contents.parts:
        more = len(name.encode()) + 3
        if parts and size + more > MAX_NAME_BYTES:
            yield replace(contents, parts=tuple(parts))
            parts, size = list[str](), 0
        parts.append(name)
        size += more
    yield replace(contents, parts=tuple(parts))


def computation_of(
    cache: RankCache, tables: Mapping[str, BlockTable], contents: ChecksumContents
) -> Computation:
    """Compute this rank's checksum of *contents* in short steps.

    Args:
        cache: Memory of the rank.
        tables: Block tables of the request, by group of this rank's engine.
        contents: The contents.

    Yields:
        None after each step.

    Returns:
        The checksum.

    Raises:
        SpecError: If the rank does not hold the contents, or cannot read them.
    """
    total = 0
    rows_by_part: dict[tuple[int, int], RegionRows] = {}
    for name in contents.parts:
        region = cache.region(contents.layer, name)
        part, units = readable(cache, region)
        if contents.units.start < units.start or units.stop < contents.units.stop:
            raise SpecError("units", contents.units, f"units of the rank: {units}")
        if not part.per_token and part.states < contents.rows.stop:
            wanted = f"rows below {part.states}, the rows of {name}"
            raise SpecError("rows", contents.rows, wanted)
        key = part.tokens_per_state, region.num_blocks
        if key not in rows_by_part:
            rows_by_part[key] = _rows_of(cache, part, tables, contents)
        own = range(contents.units.start - units.start, contents.units.stop - units.start)
        for sums in unit_sums(region, own, contents.units.start, rows_by_part[key]):
            total += int(sums.sum(dtype=np.uint64))
            yield
    return total % (1 << 8 * SUM)


def advance(computation: Computation, end: float) -> int | None:
    """Compute until the time is *end*. Return the checksum, or None if it is not complete."""
    try:
        next(computation)
        while time.monotonic() < end:
            next(computation)
    except StopIteration as finished:
        total: int = finished.value
        return total
    return None


def _rows_of(
    cache: RankCache, part: Part, tables: Mapping[str, BlockTable], contents: ChecksumContents
) -> RegionRows:
    """Return the rows of *contents*."""
    region = cache.region(contents.layer, part.name)
    want = Wanted(contents.tokens, contents.rows.stop)
    rows = rows_of(cache, region, part, tables, want)
    if part.per_token:
        keep = contents.stripe.holds(rows.number // contents.block)
        for context in (contents.producer, contents.consumer):
            keep &= context.owns(rows.number)
    else:
        keep = rows.row >= contents.rows.start
    return rows[keep]
