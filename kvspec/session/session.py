"""One rank's session: whom it met, what it loads, what it holds, and all that is said about it.

Law: everything is checked before anything moves, and refused by name; what is called done was valid
and is whole; what ended is never written again. A session never waits, but where it says so.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

import attrs

from kvspec.descriptors.request import TransferRequest
from kvspec.inputs import flag, instance, seconds
from kvspec.memory.rank_cache import RankCache
from kvspec.nixl import NixlRank
from kvspec.ownership.replicas import ReplicaPolicy, Role
from kvspec.plan.plan import TransferPlan
from kvspec.protocol.consumer import ConsumerLedger
from kvspec.protocol.handshake import Handshake
from kvspec.protocol.messages import READERS, Message, RankAddress
from kvspec.protocol.producer import ProducerLedger
from kvspec.session.background import BUSY, Background, SessionLock
from kvspec.session.channel import Channel, TcpChannel, check_channel
from kvspec.session.clock import since_boot
from kvspec.session.introduction import Introduced, epoch_of
from kvspec.session.ledger import MAX_FOREIGN, Ledger
from kvspec.session.load import SessionLoad, SessionPush
from kvspec.session.loading import Loading
from kvspec.session.mailbox import Messages
from kvspec.session.pushing import Pushing
from kvspec.session.remote import ReadOptions
from kvspec.session.remotes import Remotes, judged
from kvspec.session.stats import SessionStats, stats_of
from kvspec.session.summing import Summing


class Session:
    """What one rank exchanges with other engines, both as a consumer and as a producer.

    *nixl* moves the bytes of *cache*, whose memory it registers and whose *owner* it keeps.
    *engine_id*: the engine's name, the same at every start; *epoch*: a number that the ranks of one
    start share and that grows with every start, the time in ns by default, if there is one rank.
    *replica_policy*, *model*, *revision*: what both engines must have alike. *channel*: how
    messages travel, a `TcpChannel` of this machine unless given; it is closed with the session.
    *lease*, *longest*: of a `ProducerLedger`; *heartbeat*, *patience*: of a `ConsumerLedger`.

    Something has to move it on several times in a *heartbeat*: any `poll`, or a thread of its own,
    if *background*. Methods may be called from any thread, not in a fork.
    """

    def __init__(
        self,
        nixl: NixlRank,
        cache: RankCache,
        *,
        engine_id: str,
        epoch: int | None = None,
        replica_policy: ReplicaPolicy | None = None,
        model: str | None = None,
        revision: str | None = None,
        channel: Channel | None = None,
        owner: object = None,
        lease: float = 30.0,
        longest: float = 3600.0,
        heartbeat: float = 5.0,
        patience: float = 60.0,
        background: bool = False,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        self.nixl, alone = instance("nixl", nixl, NixlRank), flag("background", background)
        check_channel(channel)
        shake = Handshake(
            engine_id=engine_id,
            epoch=epoch_of(epoch, cache),
            cache=cache,
            replica_policy=ReplicaPolicy() if replica_policy is None else replica_policy,
            model=model,
            revision=revision,
        )
        self.me = RankAddress(shake.engine_id, shake.epoch, shake.rank)
        book = ProducerLedger(self.me, lease=lease, longest=longest)
        reader = ConsumerLedger(self.me, heartbeat=heartbeat, patience=patience)
        nixl.register(cache.memory, owner=owner)
        shake = attrs.evolve(shake, transport=nixl.metadata())
        self.channel: Channel = TcpChannel() if channel is None else channel
        self._own = Introduced(handshake=shake, address=self.channel.address)
        self._lock, self._connecting, self._clock = SessionLock(), SessionLock(), clock
        foreign: deque[str] = deque(maxlen=MAX_FOREIGN)
        self._messages = Messages(self.channel, nixl.secret, self._own, foreign.append)
        tell = self._messages.tell
        self._summing = Summing(book, cache, owner, tell, foreign.append)
        self.ledger = Ledger(book, self._lock, clock, tell, self.poll, foreign, self._summing, nixl)
        self._loading = Loading(reader, nixl, cache, clock, tell, foreign.append)
        self._pushing, self._book = Pushing(book, nixl, clock, tell), book
        self._remotes, self._count = Remotes(nixl, self._lock), itertools.count()
        self._background = Background(self.poll, self._moving, self.channel.wait) if alone else None

    def __repr__(self) -> str:
        return f"<Session {self.me} at {self.channel.address}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def introduction(self) -> bytes:
        """What others `connect` to this rank by: sealed, not secret."""
        return self._messages.introduction

    def fetch(
        self, addresses: Iterable[str], timeout: float = 10.0, *, absent: float | None = None
    ) -> list[bytes]:
        """Return the introductions of the sessions whose channels are at *addresses*.

        Waits *timeout* seconds for who is there to answer, and *absent* seconds, as long unless
        given, for somebody to be there; then `TransferError` "timeout" names who is not.
        """
        with self._connecting.held:
            most = seconds("timeout", timeout)
            least = most if absent is None else seconds("absent", absent)
            return self._messages.fetch(addresses, most, least, self.poll, self._lock)

    def connect(
        self,
        introductions: Iterable[bytes],
        *,
        role: Role = "producer",
        prefix_multiple: int = 1,
        timeout: float = 10.0,
    ) -> TransferPlan:
        """Meet an engine by the introductions of all of its ranks, and return the plan with it.

        *role*: what it is to this rank. *prefix_multiple*: as `build_table` has it. Whatever does
        not fit is refused by name before anything is connected, as `judged` tells; `SpecError` for
        a start before the one that was met. It stays met, with its connections and lists, until
        `disconnect`, or a new start takes its place: loads from it fail then. Connecting waits
        *timeout* seconds at most.
        """
        with self._connecting.held:
            most = seconds("timeout", timeout)
            remote = judged(self._own, self.nixl, introductions, role, prefix_multiple)
            name, epoch = remote.start
            with self._lock.held:
                if (known := self._remotes.known(remote)) is not None:
                    return known.plan
                self._loading.connect(name, epoch)
                self._book.connect(name, epoch)
                self._messages.disconnect(self._remotes.forget(name, remote))
            self._remotes.connect(remote, most)
            with self._lock.held:
                self._remotes.replace(remote)
                self._messages.connect(remote.ranks.values())
            return remote.plan

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine that is no more: what is loaded from it fails."""
        with self._lock.held:
            self._loading.disconnect(engine_id)
            self._book.disconnect(engine_id)
            self._messages.disconnect(self._remotes.forget(engine_id))

    def load(
        self,
        request: TransferRequest,
        *,
        remote_id: str,
        timeout: float,
        engine_id: str | None = None,
        pushed: bool = False,
        follow: bool = False,
        digest: bool = False,
        attempt: int = 0,
        again: bool = False,
        sample: int = 0,
        samples: int = 1,
    ) -> SessionLoad:
        """Start reading *request* from all ranks that hold it; or wait for what they have *pushed*.

        *remote_id*: of `new_remote_id`, made by the producer; *engine_id*: which one, if several
        were met. *follow*: read each layer as far as its producer has written it. *digest*: be done
        only if what arrived has the sums of what producers hold, who `hold` it with `blocks`.
        *attempt*, *again*, *sample*: as a `LoadPlan` has them; *samples*: of the prompt.
        Raises, before anything is posted, `SpecError` and `MismatchError` as
        `DescriptorTable.select` does, and `TransferError` "busy" where a load that is not over is
        to write its blocks. Whatever happens later, the load tells.
        """
        with self._lock.held:
            remote = self._remotes.find("producer", engine_id)
            load = SessionLoad(request, remote_id, remote, self.poll, self._cancel)
            more = ReadOptions(attempt=attempt, again=again, sample=sample, samples=samples)
            try:
                self._loading.begin(
                    load, timeout, more, pushed=pushed, follow=follow, digest=digest
                )
                self._loading.move()
                return load  # noqa: TRY300 - an interrupt outside would leave it to nobody
            except BaseException:
                self._loading.give_up(load)
                raise

    def push(
        self,
        request: TransferRequest,
        *,
        remote_id: str,
        timeout: float,
        epoch: int,
        engine_id: str | None = None,
        attempt: int = 0,
        sample: int = 0,
    ) -> SessionPush:
        """Start writing this rank's part of *request* into the blocks of all that need it.

        The ledger has to expect it. *engine_id*, *epoch*: whose blocks they are, of which start.
        All its ranks load the same request with `pushed`, what they have cached whole too, or
        `decline` it. Raises as `load` does; loads of this attempt fail then.
        """
        with self._lock.held:
            remote = self._remotes.find("consumer", engine_id, epoch)
            push = SessionPush(request, remote_id, remote, self.poll)
            self._pushing.begin(push, seconds("timeout", timeout), attempt, sample)
        return push

    def decline(
        self,
        remote_id: str,
        *,
        engine_id: str | None = None,
        attempt: int = 0,
        sample: int = 0,
        samples: int = 1,
    ) -> None:
        """Tell the producer that this rank will not load a request, before any of it is pushed."""
        with self._lock.held:
            remote = self._remotes.find("producer", engine_id)
            more = ReadOptions(attempt=attempt, sample=sample, samples=samples)
            plan = remote.load_plan(self.me.rank, remote_id, f"decline {next(self._count)}", more)
            self._loading.recorded.extend(self._loading.book.expect(plan, self._clock(), 0.0))
            self._loading.act()

    def poll(self) -> None:
        """Move everything on: what came, what is in flight, and what time brings; never waits."""
        with self._lock.held:
            self.ledger.tick()
            for message in self._messages.receive():
                self._deliver(message)
            self._loading.move()
            self._pushing.move()
            self._summing.move()
            self._loading.recorded.extend(self._loading.book.tick(self._clock()))
            self._loading.act()
            self._remotes.leave()

    def stats(self) -> SessionStats:
        """Count what is not over."""
        with self._lock.held:
            return stats_of(self._loading, self._book, self._pushing, self._remotes, self._summing)

    def close(self, drain: float = 1.0) -> None:
        """Cancel what is loaded, wait *drain* seconds until nothing moves, part from everybody.

        Nothing in a fork. What moves then ends with the NIXL rank, the caller's to close. Requests
        that are held are forgotten. A consumer that still reads one fails, since nobody answers it.
        """
        end = time.monotonic() + seconds("drain", drain)
        if self._lock.forked:
            return
        for name in list(self._loading.loads):
            self._cancel(name)
        self.poll()
        while self._moving() and time.monotonic() < end:
            time.sleep(BUSY)
            self.poll()
        if self._background is not None:
            self._background.stop()
        with self._lock.held:
            self._remotes.close()
            self._summing.close()
            self._messages.close()

    def _deliver(self, message: Message) -> None:
        """Give a message to whom it concerns."""
        if message.to != self.me:
            self._loading.note(f"{message.kind} of {message.by}: it is for {message.to}")
        elif message.kind == "checksum_request":
            self._summing.deliver(message)
        elif message.kind in (*READERS, "stop"):
            self._pushing.deliver(message)
            if message.kind != "stop":
                self.ledger.recorded.extend(self._book.receive(message, self._clock()))
                self.ledger.act()
        else:
            self._loading.receive(message)

    def _moving(self) -> bool:
        with self._lock.held:
            return self._loading.moving or self._pushing.moving or self._summing.waiting > 0

    def _cancel(self, request_id: str) -> None:
        with self._lock.held:
            self._loading.recorded.extend(self._loading.book.cancel(request_id, self._clock()))
            self._loading.act()
