"""SGLang's transfer backend over a `Session`: the manager of one rank, and what transfers share.

SGLang's scheduler calls the methods, and their names are SGLang's. The classes here import nothing
of SGLang. `kvspec.adapters.sglang.plugin` combines them with SGLang's base classes. `Sender` is in
`sending`, and `Receiver` in `receiving`.

Invariant: no method waits for a peer. An error fails one request. The memory of a request on a
decode engine is not freed before nothing can write it any more, on no rank.

How it works:
    A request has one sender on each rank of the prefill engine, and one receiver on each rank of
    the decode engine. SGLang polls both, and takes the lowest state of all ranks of an engine:

        prefill                                         decode
        sender waits for input                          receiver is bootstrapping
        each chunk: hold it, publish its ticket    ->   first ticket found: waiting for input
                                                        SGLang allocates memory, `send_metadata`
                                                        load of the newest chunks: transferring
        last chunk: hold, and publish the ticket   ->   load of the rest
        transferring
        settled: success                           <-   that load is done: success

    Each ticket covers the prompt from its beginning. A load starts where the one before has ended.
    The last ticket alone decides about the request: if a load of chunks fails, the next one begins
    where that one began. Without the setting `overlap`, chunks have no tickets. They have none
    either if the model has recurrent states, which the next chunk overwrites.

    SGLang names the slot of a recurrent state in `state_indices`: with the last chunk, and in
    `send_metadata`. The pages of an indexer are those of the tokens.

    A decode engine keeps a prompt with its first token, which the last ticket contains.
"""

# ruff: noqa: ANN401 - requests, buffers and settings are of SGLang's classes, not imported
from __future__ import annotations

import hashlib
import logging
import math
import queue
import threading
import time
import uuid
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvspec.adapters.sglang import tickets
from kvspec.adapters.sglang.describing import (
    BackendSettings,
    Surroundings,
    check_supported,
    describe,
)
from kvspec.adapters.sglang.lookups import Lookups
from kvspec.adapters.sglang.pools import STATE
from kvspec.adapters.sglang.request_identity import Weights
from kvspec.adapters.sglang.session_metrics import Metrics
from kvspec.errors import KVSpecError, SpecError, TransferError, TransferState
from kvspec.nixl import NixlRank
from kvspec.session import Load, Session, TcpChannel
from kvspec.tickets import PrefillTicket
from kvspec.wire.messages import NEW_NONCE

log = logging.getLogger(__name__)

# The states of SGLang's `KVPoll`.
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)

# Seconds between two polls of the session.
SETTLED_REST = 0.001
# Seconds between two looks at the numbers of the session.
OBSERVED = 1.0
# Seconds for which a ticket is published again and again if the server does not answer, and the
# pause before each attempt.
SERVER_PATIENCE, PAUSE = 15.0, 0.1


class _OneEngine:
    """SGLang's table of prefill engines. Each has one group of ranks, with data parallelism 1."""

    def get(self, address: str) -> SimpleNamespace:  # noqa: ARG002
        """Return the facts about the engine at *address* that SGLang reads."""
        return SimpleNamespace(dp_size=1, follow_bootstrap_room=True)


class Manager:
    """The session of one rank."""

    supports_host_destination = False
    supports_role_switch = False
    # SGLang then keeps the memory of a failed request until `is_abort_release_safe`.
    supports_deferred_decode_kv_release = True
    enable_deferred_decode_kv_release = True
    prefill_info_table = _OneEngine()

    def __init__(
        self,
        args: Any,
        disaggregation_mode: Any,
        server_args: Any,
        is_mla_backend: bool | None = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        self.kv_args = args
        around = self.surroundings(args, disaggregation_mode)
        check_supported(server_args, around)
        settings = self.settings = BackendSettings.of(server_args)
        cache = describe(around, settings)
        # The epoch and the name must be the same on all ranks, so all take those of the first.
        own = time.time_ns(), settings.engine_id or f"sglang-{uuid.uuid4().hex}"
        (self.epoch, self.engine_id), *_ = around.gather(own)
        self.around = around
        self.groups = [group.name for group in cache.engine.groups]
        # The next chunk overwrites a recurrent state, and only the last one has a slot.
        self.overlaps = settings.overlap and STATE not in self.groups
        self.server = tickets.own_address(server_args)
        staging = settings.staging << 20 or None
        self._nixl = NixlRank(prefix=f"{self.engine_id[:64]}-", staging=staging)
        self.session = Session(
            self._nixl,
            cache,
            engine_id=self.engine_id,
            epoch=self.epoch,
            model=settings.model,
            revision=settings.revision,
            channel=TcpChannel(settings.host, settings.port, public=settings.public),
            owner=around.pool,
            lease=settings.lease,
            heartbeat=min(5.0, settings.lease / 4),
            background=True,
        )
        address = self.session.channel.address
        # With a range of ports, only this line shows which one the rank has.
        log.info("rank %s of %s listens at %s", cache.rank, self.engine_id, address)
        self.addresses: list[str] = around.gather(address)
        self.lookups = Lookups(settings.waiting, self._decline, keep=self._keep)
        self.weights = Weights(around.weight_version)
        self.metrics = Metrics(around.labels)
        self._count, self._polled = 0, 0.0
        self._rejected = ""
        self._outcomes: dict[str, str] = {}
        self._held: set[str] = set()
        self._rooms: weakref.WeakValueDictionary[int, RequestHalf] = weakref.WeakValueDictionary()
        self._releasing: dict[int, list[Load]] = {}
        self._outbox: queue.SimpleQueue[_Post] = queue.SimpleQueue()
        threading.Thread(target=self._post, name="kvspec-outbox", daemon=True).start()
        if around.releases is not None:
            # SGLang would free memory after a time limit, although bytes may still arrive. So the
            # limit is infinite.
            around.releases.enable_deferred_kv_release = True
            around.releases.deferred_kv_release_timeout = math.inf

    def surroundings(self, args: Any, mode: Any) -> Surroundings:
        """Return the objects of this rank. The class in `plugin` finds them."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the session and NIXL."""
        self.session.close()
        self._nixl.close()

    def register_to_bootstrap(self) -> None:
        """Do nothing: the ticket of each prompt contains the addresses of the ranks."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:  # noqa: ARG002
        """Return True: nothing about an engine must be known before its tickets."""
        return True

    def submit_prefill_recompute(self, receiver: RequestHalf, payload: Any) -> None:  # noqa: ARG002
        """Fail a request that SGLang would compute again with new weights."""
        receiver.fail(SpecError("is_rebootstrap", True, rule="not yet run with kvspec"))  # noqa: FBT003

    # ---- requests of both roles

    def enter(self, transfer: RequestHalf, room: Any) -> bytes:
        """Give *transfer* its *room*, and return the nonce of its request.

        The nonce is the same on all ranks, which create equal transfers in equal order. If the
        transfer is refused, it has failed.
        """
        self._count += 1
        try:
            tickets.check_room(room)
            if room in self._rooms:
                rule = "another request of this engine, which is not yet over, has the same room"
                raise SpecError("bootstrap_room", room, rule=rule)
            self._rooms[room] = transfer
            self.weights.check()
        except KVSpecError as error:
            transfer.fail(error)
        return self._nonce(transfer.bootstrap_room, self._count)

    def _nonce(self, room: object, request: object) -> bytes:
        """Return the nonce of a request, which is the same on all ranks."""
        text = f"{self.engine_id} {self.epoch} {room} {request}"
        return hashlib.sha256(text.encode()).digest()[:NEW_NONCE]

    def owns(self, transfer: RequestHalf) -> bool:
        """Return whether *transfer* has its room."""
        return self._rooms.get(transfer.bootstrap_room) is transfer

    def free_room(self, transfer: RequestHalf) -> None:
        """Let another request have the room of *transfer*, which has ended."""
        if self.owns(transfer):
            del self._rooms[transfer.bootstrap_room]

    def weights_changing(self) -> None:
        """Fail all requests: their prompts are computed with weights that are about to change."""
        self.weights.named = self.weights.clean = False
        rule = "the weights were updated while the request was served"
        for transfer in list(self._rooms.values()):
            transfer.fail(SpecError("weight_version", self.weights.version(), rule=rule))

    # ---- prefill

    def hold(self, remote_id: str) -> None:
        """Hold a computed request until its readers are done."""
        self.session.hold(remote_id, lease=self.settings.hold)
        self._held.add(remote_id)

    def publish(self, transfer: RequestHalf, what: PrefillTicket | tickets.Params) -> None:
        """Send *what* to the server of this engine, from its first rank, in a thread."""
        if self.around.tp_rank == 0:
            self._outbox.put(_Post(transfer.bootstrap_room, transfer, what))

    def refused(self, room: int, why: str) -> None:
        """Publish that the prompt of *room* is refused, although it has no sender."""
        if self.around.tp_rank == 0 and tickets.is_room(room):
            self._outbox.put(_Post(room, None, tickets.failure(room, why[:1000])))

    def has_room(self, room: int) -> bool:
        """Return whether a request of this rank has *room*."""
        return room in self._rooms

    def outcome(self, remote_id: str) -> str | None:
        """Return "done", "expired" or "aborted" for a request that is held no more, or None."""
        if remote_id not in self._outcomes and time.monotonic() - self._polled > SETTLED_REST:
            settled, self._polled = self.session.settled(), time.monotonic()
            for name in ("done", "expired", "aborted"):
                ended = self._held & set(getattr(settled, name))
                self._outcomes |= dict.fromkeys(ended, name)
        return self._outcomes.get(remote_id)

    def abort_held(self, remote_id: str) -> None:
        """Abort a request if it is still held, and forget it."""
        try:
            if remote_id in self._held and self.outcome(remote_id) is None:
                self.session.abort(remote_id)
        except KVSpecError as error:
            log.error("%s is not aborted: %s", remote_id, error)  # noqa: TRY400
        self._held.discard(remote_id)
        self._outcomes.pop(remote_id, None)

    def _post(self) -> None:
        """Send what is to be published, and observe the session. Runs in a thread."""
        observed = 0.0
        while True:
            try:
                post = self._outbox.get(timeout=OBSERVED)
            except queue.Empty:
                post = None
            if time.monotonic() - observed > OBSERVED:
                observed = time.monotonic()
                self.metrics.observe(self.session.stats().counters)
            if post is not None and not post.outdated:
                self._put(post)

    def _put(self, post: _Post) -> None:
        deadline = time.monotonic() + SERVER_PATIENCE
        try:
            while True:
                try:
                    return tickets.put(self.server, post.room, post.params())
                except OSError:
                    # The server runs on this machine, which is perhaps busy.
                    if post.outdated or time.monotonic() > deadline:
                        raise
                    time.sleep(PAUSE)
        # An error would end the thread, and no later ticket would be published.
        except Exception as error:  # noqa: BLE001 - the server may be anything
            ticket = isinstance(post.what, PrefillTicket) and not post.outdated
            if ticket and post.transfer is not None:
                # Nobody will find the ticket, so the prompt need not wait for its lease.
                post.transfer.fail(error)
            log.warning("The ticket of room %d is not published: %s", post.room, error)

    # ---- decode

    def reject(self, request: str, room: int, address: str) -> None:
        """Decline the prompt of *room* at the server *address*, although it has no receiver.

        A second call for the same *request* does nothing.
        """
        if request != self._rejected:
            self._rejected, name = request, self._nonce(room, f"rejected {request}").hex()
            self.lookups.decline(self.lookups.add(address, room, name))

    def _keep(self, ticket: PrefillTicket) -> None:
        """Let the producer keep a prompt until its load begins. The thread of look-ups calls it."""
        try:
            self.session.keep(ticket, timeout=self.settings.waiting)
        except KVSpecError as error:
            log.error("%s is not kept: %s", ticket.remote_id, error)  # noqa: TRY400

    def _decline(self, ticket: PrefillTicket) -> None:
        try:
            self.session.decline(ticket=ticket)
            self.metrics.declined += 1
        except KVSpecError as error:
            # The producer waits for its lease. An error here would end SGLang's scheduler.
            log.error("%s is not declined: %s", ticket.remote_id, error)  # noqa: TRY400

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:  # noqa: ARG002
        """Return whether nothing can write the memory of a failed request any more."""
        return all(load.poll() != "moving" for load in self._releasing.get(room, ()))

    def keep_until_ended(self, room: int, load: Load) -> None:
        """Keep the memory of *room* until *load* has ended."""
        self._releasing.setdefault(room, []).append(load)

    def clear_deferred_abort_state(self, room: int) -> None:
        """Forget a request whose memory was freed."""
        self._releasing.pop(room, None)


class _Post(NamedTuple):
    """What is to be published for a room."""

    room: int
    transfer: RequestHalf | None
    what: PrefillTicket | tickets.Params

    @property
    def outdated(self) -> bool:
        """Whether it is a ticket of chunks, and a newer ticket of the request exists."""
        newest = None if self.transfer is None else self.transfer.newest
        return isinstance(self.what, PrefillTicket) and newest not in (None, self.what.remote_id)

    def params(self) -> tickets.Params:
        """Return the parameters. To seal them takes long if the prompt is long."""
        return self.what.to_params() if isinstance(self.what, PrefillTicket) else self.what


class RequestHalf:
    """The state that a sender and a receiver have in common."""

    # SGLang's request. A hook sets it after it has created the transfer.
    request: Any = None
    # The `remote_id` of the newest ticket that was published.
    newest: str | None = None

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None) -> None:
        self.kv_mgr, self.bootstrap_addr = mgr, bootstrap_addr
        # A client may send any value. `enter` refuses a value that is not a room.
        self.bootstrap_room = bootstrap_room if type(bootstrap_room) is int else -1
        self.error: Exception | None = None
        # SGLang reads it, and compares it only with the failed state.
        self.conclude_state: int | None = None
        self.nonce = mgr.enter(self, bootstrap_room)

    def fail(self, error: Exception) -> None:
        """Let this request fail."""
        if self.conclude_state is None:
            self.error, self.conclude_state = error, FAILED

    def gone(self, why: str) -> TransferError:
        """Return the error of a request that has ended early."""
        request = f"room-{self.bootstrap_room}"
        return TransferError(why, request=request, state=TransferState.GONE)

    def elsewhere(self) -> TransferError:
        """Return the error of a request that has failed, but not on this rank."""
        error = self.gone("the request has failed on another rank, whose log has the reason")
        error.is_from_another_rank = True  # type: ignore[attr-defined] # SGLang logs it once.
        return error
