"""Ask running engines who they are, and judge whether a producer and a consumer fit together.

Invariant: a probe changes nothing in the engines that it asks. It is no engine itself, so nobody
connects to it. Every question ends: with an introduction, or with a sentence that says why not.

How it works:
    `ask` sends the questions of `Session.fetch` to all addresses, over one channel. `read_engine`
    checks that the answers are those of all ranks of one engine. `Deployment.of` compares two
    engines as `Session.connect` does, but for all pairs of ranks. `move` reads memory of producer
    ranks over NIXL.
"""

from __future__ import annotations

import ipaddress
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import KVSpecError, MismatchError, SpecError, TransferError, TransferState
from kvspec.memory.allocation import plan_memory
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Memory
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.session.background import BUSY, SessionLock
from kvspec.session.channel import TcpChannel
from kvspec.session.mailbox import Introduced, Messages, open_introduction
from kvspec.session.remotes import slow_heartbeat
from kvspec.specs.attention import FullAttentionSpec
from kvspec.wire.handshake import Handshake, disagreements, one_engine
from kvspec.wire.seal import Secret

if TYPE_CHECKING:
    from kvspec.nixl import NixlRank

PROBE_ABSENT = 2.0
"""Seconds to wait for a process to accept the connection, at most."""
MOVED = 64 << 10
"""Bytes that `move` reads from each memory of a rank, at most."""

Answer = Introduced | KVSpecError
"""The rank at an address, or why there is none."""


def _nobody() -> Introduced:
    """Return the introduction that the protocol requires of an asker. It is never sent."""
    spec = FullAttentionSpec(block_size=1, total_num_kv_heads=1, head_size=1, dtype="uint8")
    engine = EngineSpec(groups=[KVCacheGroup(name="probe", layers=["probe"], spec=spec)])
    cache = plan_memory(engine, RankId(), num_blocks=1)
    shake = Handshake(engine_id="probe", epoch=0, cache=cache)
    return Introduced(handshake=shake, address="probe", lease=30.0, heartbeat=5.0)


def ask(addresses: Iterable[str], secret: Secret, timeout: float) -> dict[str, Answer]:
    """Ask the ranks at *addresses*, all at once.

    Args:
        addresses: Addresses of channels.
        secret: The secret of the ranks.
        timeout: Seconds to look all host names up, and then to wait for the answers.

    Returns:
        For each address, the rank there, or the error.
    """
    asked = tuple(dict.fromkeys(addresses))
    channel = TcpChannel()
    messages = Messages(channel, secret, _nobody())

    def poll() -> None:
        for _ in messages.receive():
            pass

    try:
        known = _looked_up(asked, messages, timeout)
        sealed = messages.ask(
            tuple(at for at in asked if at in known),
            timeout, min(PROBE_ABSENT, timeout), poll, SessionLock(), each=True,
        )  # fmt: skip
        return {address: _answer_at(address, sealed, secret, timeout) for address in asked}
    finally:
        messages.close()


def _answer_at(
    address: str, sealed: Mapping[str, bytes | TransferError], secret: Secret, timeout: float
) -> Answer:
    """Return the rank that answered at an address, or the error."""
    answer = sealed.get(address)
    if answer is None:
        why = f"the look-up of its host name takes longer than {timeout:g} s"
        return TransferError(why, rank=address, state=TransferState.OVERDUE)
    if isinstance(answer, TransferError):
        return answer
    try:
        return open_introduction(answer, secret)
    except KVSpecError as error:
        return error


def _looked_up(addresses: Iterable[str], messages: Messages, timeout: float) -> set[str]:
    """Look the hosts of *addresses* up, and return those that were looked up in time.

    Only here is a time limit around other work. The questions limit their own time. A limit around
    them would end first on a busy machine, and hide what each address has answered.
    """
    by_host: dict[str, list[str]] = {}
    for address in addresses:
        by_host.setdefault(address.rpartition(":")[0], []).append(address)
    ready = queue.SimpleQueue[str]()

    def look_up(host: str) -> None:
        try:
            messages.resolve(by_host[host])
        finally:
            ready.put(host)

    # Threads that the interpreter does not wait for: a look-up of a name cannot be interrupted.
    waiting = {host for host in by_host if not _is_ip(host)}
    for host in waiting:
        threading.Thread(target=look_up, args=(host,), daemon=True).start()
    known, end = by_host.keys() - waiting, time.monotonic() + timeout
    while len(known) < len(by_host):
        try:
            known.add(ready.get(timeout=max(0.0, end - time.monotonic())))
        except queue.Empty:
            break
    return {address for host in known for address in by_host[host]}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def read_engine(answers: Iterable[Introduced]) -> tuple[Introduced, ...]:
    """Return the ranks of one engine in ascending order.

    Raises:
        SpecError: If a rank is missing or occurs twice.
        MismatchError: If the ranks belong to several engines, or to several starts of one.
    """
    members = tuple(answers)
    order = one_engine(member.handshake for member in members)
    by_rank = {member.rank: member for member in members}
    return tuple(by_rank[rank] for rank in order)


@attrs.frozen(eq=False)
class Deployment:
    """A producer and a consumer that run now.

    Attributes:
        producer: The ranks of the producer.
        consumer: The ranks of the consumer.
        plan: The plan between the two engines.
        tables: The rows between each two ranks that exchange anything, in their real memory.
    """

    producer: tuple[Introduced, ...]
    consumer: tuple[Introduced, ...]
    plan: TransferPlan
    tables: Mapping[tuple[RankId, RankId], DescriptorTable]

    @staticmethod
    def of(producer: Sequence[Introduced], consumer: Sequence[Introduced]) -> Deployment:
        """Compare two engines as `Session.connect` does, for all pairs of ranks.

        Raises:
            MismatchError: If they do not fit together. It has all differences.
        """
        first, other = producer[0].handshake, consumer[0].handshake
        times = {slow_heartbeat(one, two) for one in producer for two in consumer} - {None}
        if found := (*disagreements(first, other), *(each for each in times if each is not None)):
            raise MismatchError(found)
        plan = plan_transfer(first.engine, other.engine, other.replica_policy)
        caches = {member.rank: member.handshake.cache for member in producer}
        tables = {
            (source, member.rank): build_table(plan, caches[source], member.handshake.cache)
            for member in consumer
            for source in plan.sources(member.rank)
        }
        return Deployment(tuple(producer), tuple(consumer), plan, tables)

    def caches(self, side: Role) -> dict[RankId, RankCache]:
        """Return the caches of the ranks of one side."""
        members = self.producer if side == "producer" else self.consumer
        return {member.rank: member.handshake.cache for member in members}

    def request(self, tokens: int, seed: int = 0) -> TransferRequest:
        """Return a request of *tokens* in blocks of the real memories, drawn with *seed*.

        Fewer tokens if the memory of one side has too few blocks. Nobody has computed the request:
        it only shows which bytes would move.

        Raises:
            SpecError: If the memory of one side has no room for one token.
        """
        while True:
            tables = [
                _tables(engine, self.caches(side), tokens, seed)
                for side, engine in _sides(self.plan)
            ]
            if all(table is not None for table in tables):
                break
            if tokens <= 1:
                raise SpecError("tokens", tokens, rule="the caches have no room for one token")
            tokens //= 2
        return TransferRequest(
            request_id="probe",
            num_tokens=tokens,
            encoder_tokens=tokens,
            producer_blocks=tables[0] or {},
            consumer_blocks=tables[1] or {},
        )


def _sides(plan: TransferPlan) -> tuple[tuple[Role, EngineSpec], ...]:
    return ("producer", plan.producer), ("consumer", plan.consumer)


def _tables(
    engine: EngineSpec, caches: Mapping[RankId, RankCache], tokens: int, seed: int
) -> dict[str, BlockTable] | None:
    """Return block tables for *tokens*, or None if the caches have too few blocks.

    Groups may share memory, so no id occurs in two tables.
    """
    pools: dict[str, int] = {}
    for cache in caches.values():
        for region in cache.regions:
            split = engine.group(region.group).kernel_blocks_per_block
            count = region.num_blocks // split
            pools[region.group] = min(count, pools.get(region.group, count))
    free = np.random.default_rng(seed).permutation(min(pools.values(), default=0))
    free = free[free != engine.null_block] if engine.null_block is not None else free
    tables, used = dict[str, BlockTable](), 0
    for group in engine.groups:
        states = not any(part.per_token for part in group.spec.parts)
        count = 1 if states else -(-tokens // engine.virtual_block(group)) or 1
        if used + count > len(free):
            return None
        tables[group.name] = BlockTable(free[used : used + count])
        used += count
    return tables


def move(
    ranks: Iterable[Introduced],
    nixl: NixlRank,
    timeout: float,
    report: Callable[[Introduced, int | KVSpecError], object],
) -> None:
    """Read the first bytes of each memory of *ranks* into memory of this process.

    All ranks are connected and read at the same time, so a silent one delays no other. The contents
    are ignored. A rank that computes at the same time is not disturbed.

    Args:
        ranks: Ranks of producers.
        nixl: The NIXL rank that reads. It must have a progress thread, so that no connection waits
            for another one.
        timeout: Seconds for all ranks together.
        report: Called with each rank and the bytes that were read, or the error.
    """
    members = tuple(ranks)
    scratch = np.zeros((len(members), MOVED), np.uint8)
    nixl.register([Memory(scratch.ctypes.data, scratch.nbytes)], owner=scratch)
    end = time.monotonic() + timeout
    moving = [
        (member, _read_memories(member, nixl, own.ctypes.data, end))
        for member, own in zip(members, scratch, strict=True)
    ]
    while moving:
        for each in tuple(moving):
            member, reads = each
            try:
                next(reads)
                continue
            except StopIteration as done:
                report(member, done.value)
            except KVSpecError as error:
                report(member, error)
            moving.remove(each)
        time.sleep(BUSY)


def _read_memories(
    member: Introduced, nixl: NixlRank, address: int, end: float
) -> Generator[None, None, int]:
    """Read the memories of a rank one after the other to *address*. Return the bytes.

    Yields while bytes move.
    """
    agent, read, first = nixl.connect(member.handshake.transport), 0, np.zeros(1, np.int64)
    for memory in member.handshake.cache.memory:
        size = min(MOVED, memory.length)
        local = nixl.prepare(np.array([[address, size, 0, size, 1]], np.uint64))
        row = np.array([[memory.address, size, memory.device, size, 1]], np.uint64)
        remote = nixl.prepare(row, memory.memory_type, agent)
        left = max(0.0, end - time.monotonic())
        transfer = nixl.read(local, first, remote, first, request="probe", timeout=left)
        while transfer.poll() == "PROC":
            yield
        read += size
    return read
