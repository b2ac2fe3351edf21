"""SGLang's transfer backend over a `Session`: manager, sender and receiver.

SGLang's scheduler calls the methods, and their names are SGLang's. The classes here import nothing
of SGLang. `kvspec.adapters.sglang.plugin` combines them with SGLang's base classes.

Invariant: no method waits for a peer. An error fails one request. The memory of a request on a
decode engine is not freed before nothing can write it any more, on no rank.

How it works:
    A request has one sender on each rank of the prefill engine, and one receiver on each rank of
    the decode engine. SGLang polls both, and takes the lowest state of all ranks of an engine:

        prefill                                         decode
        sender waits for input                          receiver is bootstrapping
        prompt is computed; each chunk calls `send`
        last chunk: hold, and publish the ticket   ->   ticket found: waiting for input
        transferring                                    SGLang allocates memory, `send_metadata`
                                                        load begins: transferring
        settled: success                           <-   load is done: success

    So a decode engine has no memory reserved for a prompt that is not computed yet. It keeps a
    prompt with its first token, which the ticket contains.
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
from types import SimpleNamespace
from typing import Any

from kvspec.adapters.sglang import tickets
from kvspec.adapters.sglang.describing import (
    BackendSettings,
    Surroundings,
    check_supported,
    describe,
)
from kvspec.descriptors.request import BlockTable
from kvspec.errors import KVSpecError, SpecError, TransferError, TransferState
from kvspec.nixl import NixlRank
from kvspec.session import Load, Session, TcpChannel
from kvspec.tickets import PrefillTicket, content_of
from kvspec.wire.messages import NEW_NONCE, Key

log = logging.getLogger(__name__)

# The states of SGLang's `KVPoll`.
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)

# Seconds between two polls of the session.
REST = 0.001
# The lowest number of SGLang's buffers, which have the type float32.
LOWEST = -3.4e38


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
        self.server = _own_address(server_args)
        self._nixl = NixlRank(prefix=f"{self.engine_id[:64]}-")
        self.session = Session(
            self._nixl,
            cache,
            engine_id=self.engine_id,
            epoch=self.epoch,
            model=settings.model,
            revision=settings.revision,
            channel=TcpChannel(settings.host, public=settings.public or ""),
            owner=around.pool,
            lease=settings.lease,
            heartbeat=min(5.0, settings.lease / 4),
            background=True,
        )
        self.addresses: list[str] = around.gather(self.session.channel.address)
        self.lookups = tickets.Lookups(settings.waiting, self._decline)
        self._count, self._polled = 0, 0.0
        self._outcomes: dict[str, str] = {}
        self._held: set[str] = set()
        self._releasing: dict[int, Load] = {}
        self._outbox: queue.SimpleQueue[tuple[int, tickets.Params]] = queue.SimpleQueue()
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

    def submit_prefill_recompute(self, receiver: Receiver, payload: Any) -> None:  # noqa: ARG002
        """Fail a request that SGLang would compute again with new weights."""
        receiver.fail(SpecError("is_rebootstrap", True, rule="not yet run with kvspec"))  # noqa: FBT003

    # ---- prefill

    def new_remote_id(self, room: int) -> str:
        """Return the name of a request. It is the same on all ranks, which create equal senders."""
        self._count += 1
        text = f"{self.engine_id} {self.epoch} {room} {self._count}"
        return Key(f"room-{room}", hashlib.sha256(text.encode()).digest()[:NEW_NONCE]).remote_id

    def hold(self, remote_id: str) -> None:
        """Hold a computed request until its readers are done."""
        self.session.hold(remote_id, lease=self.settings.hold)
        self._held.add(remote_id)

    def publish(self, room: int, params: tickets.Params) -> None:
        """Send *params* to the server of this engine, from its first rank, in a thread."""
        if self.around.tp_rank == 0:
            self._outbox.put((room, params))

    def outcome(self, remote_id: str) -> str | None:
        """Return "done", "expired" or "aborted" for a request that is held no more, or None."""
        if remote_id not in self._outcomes and time.monotonic() - self._polled > REST:
            settled, self._polled = self.session.settled(), time.monotonic()
            for name in ("done", "expired", "aborted"):
                ended = self._held & set(getattr(settled, name))
                self._outcomes |= dict.fromkeys(ended, name)
        return self._outcomes.get(remote_id)

    def forget(self, remote_id: str) -> None:
        """Abort a request if it is still held, and forget it."""
        try:
            if remote_id in self._held and self.outcome(remote_id) is None:
                self.session.abort(remote_id)
        except KVSpecError as error:
            log.error("%s is not aborted: %s", remote_id, error)  # noqa: TRY400
        self._held.discard(remote_id)
        self._outcomes.pop(remote_id, None)

    def _post(self) -> None:
        while True:
            room, params = self._outbox.get()
            try:
                tickets.put(self.server, room, params)
            except (KVSpecError, OSError) as error:
                # The lease of the prompt expires, and its sender fails.
                log.error("The ticket of room %d is not published: %s", room, error)  # noqa: TRY400

    # ---- decode

    def _decline(self, ticket: PrefillTicket) -> None:
        try:
            self.session.decline(ticket=ticket)
        except KVSpecError as error:
            # The producer waits for its lease. An error here would end SGLang's scheduler.
            log.error("%s is not declined: %s", ticket.remote_id, error)  # noqa: TRY400

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:  # noqa: ARG002
        """Return whether nothing can write the memory of a failed request any more."""
        load = self._releasing.get(room)
        return load is None or load.poll() != "moving"

    def keep_until_stopped(self, room: int, load: Load) -> None:
        """Keep the memory of *room* until *load* has ended."""
        self._releasing[room] = load

    def clear_deferred_abort_state(self, room: int) -> None:
        """Forget a request whose memory was freed."""
        self._releasing.pop(room, None)


def _own_address(server_args: Any) -> str:
    """Return the address of this engine's server, which runs on the same machine."""
    host = server_args.host
    if host in ("0.0.0.0", "::", "", None):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"{host}:{server_args.disaggregation_bootstrap_port}"


class _Transfer:
    """The state that a sender and a receiver have in common."""

    # SGLang's request. A hook sets it after it has created the transfer.
    request: Any = None

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None) -> None:
        self.kv_mgr, self.bootstrap_addr = mgr, bootstrap_addr
        self.bootstrap_room: int = -1 if bootstrap_room is None else bootstrap_room
        self.error: Exception | None = None
        if bootstrap_room is None:
            self.error = SpecError("bootstrap_room", None, "the room of the request")
        # SGLang reads it, and compares it only with the failed state.
        self.conclude_state: int | None = None if self.error is None else FAILED

    def fail(self, error: Exception) -> None:
        """Let this request fail."""
        if self.conclude_state is None:
            self.error, self.conclude_state = error, FAILED

    def _gone(
        self, why: str = "the request was aborted, or has failed on another rank"
    ) -> TransferError:
        request = f"room-{self.bootstrap_room}"
        return TransferError(why, request=request, state=TransferState.GONE)


class Sender(_Transfer):
    """One request on one rank of a prefill engine."""

    def __init__(
        self,
        mgr: Manager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._remote_id = mgr.new_remote_id(self.bootstrap_room)
        self._pages: list[int] = []
        self._tokens = self._expected = 0
        self._held = False

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:  # noqa: ARG002
        """Take the number of pages of the prompt."""
        self._expected = num_kv_indices

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:  # noqa: FBT001
        """Return whether SGLang calls `send` for a chunk."""
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,
        state_indices: Any = None,  # noqa: ARG002 - such pools are refused
        num_kv_tokens: int | None = None,
    ) -> None:
        """Take the pages of a chunk. After the last one, hold the prompt and publish its ticket."""
        self._pages += [int(page) for page in kv_indices]
        self._tokens += num_kv_tokens or 0
        if len(self._pages) < self._expected or self._held or self.conclude_state is not None:
            return
        try:
            ticket = self._ticket()
            self.kv_mgr.hold(self._remote_id)
            self._held = True
            # The first token was sampled from the results of all ranks. So all ranks have
            # computed the prompt, although only the first one publishes the ticket.
            self.kv_mgr.publish(self.bootstrap_room, ticket.to_params())
        except (KVSpecError, AttributeError, IndexError) as error:
            self.fail(error)

    def _ticket(self) -> PrefillTicket:
        request, tokens = self.request, list(self.request.origin_input_ids)
        if len(tokens) != self._tokens:
            raise SpecError("num_kv_tokens", self._tokens, f"{len(tokens)}, as the prompt has")
        table = BlockTable(self._pages)
        return PrefillTicket(
            engine_id=self.kv_mgr.engine_id,
            addresses=self.kv_mgr.addresses,
            remote_id=self._remote_id,
            computed_tokens=self._tokens,
            tables=dict.fromkeys(self.kv_mgr.groups, table),
            content=content_of(tokens),
            tokens_digest=content_of(tokens),
            first_token=int(request.output_ids[0]),
            first_logprobs=_logprobs(request) if request.return_logprob else None,
        )

    def poll(self) -> int:
        """Return the state of this rank."""
        if self.conclude_state is None and self._held:
            outcome = self.kv_mgr.outcome(self._remote_id)
            if outcome is None:
                return TRANSFERRING
            if outcome == "done":
                self.conclude_state = SUCCESS
            else:
                why = f"the prompt is {outcome}: no decode engine has read all of it"
                self.fail(self._gone(why))
        return WAITING if self.conclude_state is None else self.conclude_state

    def failure_exception(self) -> None:
        """Raise the error. All ranks call it if the request has failed on one of them."""
        self.abort()
        raise self.error or self._gone()

    def abort(self) -> None:
        """Give the prompt up. Its readers fail."""
        self.fail(self._gone())  # Does nothing if it has ended before.
        self.clear()
        if self.conclude_state == FAILED and self.bootstrap_room >= 0:
            why = str(self.error)[:1000]
            self.kv_mgr.publish(self.bootstrap_room, tickets.failure(self.bootstrap_room, why))

    def clear(self) -> None:
        """Forget the request, and delete its ticket if it was read."""
        self.kv_mgr.forget(self._remote_id)
        if self.conclude_state == SUCCESS:
            self.kv_mgr.publish(self.bootstrap_room, tickets.failure(self.bootstrap_room, ""))


def _logprobs(request: Any) -> list[tuple[int, float]]:
    """Return tokens and log probabilities at the first token: the top ones, and the token itself.

    A token that a grammar excludes has minus infinity, which JSON cannot represent: it becomes the
    lowest number. Rounding may give a token of probability 1 a little more than 0.
    """
    found = request.logprob
    pairs: list[tuple[int, float]] = []
    if found.output_top_logprobs_val:
        values, ids = found.output_top_logprobs_val[0], found.output_top_logprobs_idx[0]
        pairs = [(int(token), float(value)) for token, value in zip(ids, values, strict=True)]
    own = int(found.output_token_logprobs_idx[0]), float(found.output_token_logprobs_val[0])
    if own[0] not in dict(pairs):
        pairs.append(own)
    return [(token, max(LOWEST, min(0.0, value))) for token, value in pairs]


class Receiver(_Transfer):
    """One request on one rank of a decode engine."""

    require_staging = False
    supports_host_destination = False
    bootstrap_infos: tuple[object, ...] = ()

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._lookup: tickets.Lookup | None = None
        self._ticket: PrefillTicket | None = None
        self._load: Load | None = None
        self._aux = -1

    def init(self, prefill_dp_rank: int) -> None:  # noqa: ARG002
        """Begin to look for the ticket of the request."""
        if self.conclude_state is None:
            self._lookup = self.kv_mgr.lookups.add(self.bootstrap_addr, self.bootstrap_room)

    def poll(self) -> int:
        """Return the state of this rank."""
        if self.conclude_state is None:
            try:
                state = self._waiting() if self._load is None else self._loading(self._load)
            except (KVSpecError, AttributeError, OSError, ValueError) as error:
                self.fail(error)
                state = FAILED
            if state not in (FAILED, SUCCESS):
                return state
            self.conclude_state = state
        return self.conclude_state

    def _waiting(self) -> int:
        """Return the state of a request whose load has not begun. Raise if no ticket will come."""
        found = self._lookup.result() if self._lookup is not None else None
        if self._ticket is None and found is not None:
            self._check(found)
            self._ticket = found
        return BOOTSTRAPPING if self._ticket is None else WAITING

    def _loading(self, load: Load) -> int:
        state = load.poll()
        if state == "moving":
            return TRANSFERRING
        if state == "failed" or self._ticket is None:
            raise load.error or self._gone()
        self._write(self._ticket)
        return SUCCESS

    def _check(self, ticket: PrefillTicket) -> None:
        """Raise `SpecError` if SGLang cannot go on from *ticket*."""
        tokens = list(self.request.origin_input_ids)
        ticket.check(tokens, self.kv_mgr.engine_id)
        ticket.sampled()
        if ticket.computed_tokens != len(tokens):
            wanted = f"{len(tokens)}: a decode engine of SGLang computes no token of a prompt"
            raise SpecError("remote_num_tokens", ticket.computed_tokens, wanted)
        if self.request.return_logprob:
            count = max(1, self.request.logprob.top_logprobs_num)
            pairs = ticket.first_logprobs or ()
            if len(pairs) < count or ticket.sampled() not in dict(pairs):
                wanted = f"{count} log probabilities at the first token, as the request wants"
                raise SpecError("remote_first_logprobs", len(pairs), wanted)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,  # noqa: ARG002 - such pools are refused
        decode_prefix_len: int | None = None,
        destination: Any = None,  # noqa: ARG002 - a host destination is refused
    ) -> None:
        """Load the prompt into the pages *kv_indices*, which follow the cached prefix."""
        ticket, cached = self._ticket, decode_prefix_len or 0
        if ticket is None or self.conclude_state is not None:
            self.fail(self._gone())
            return
        self._aux = -1 if aux_index is None else aux_index
        if cached >= ticket.computed_tokens:
            self._stop()  # Nothing is read.
            self._write(ticket)
            self.conclude_state = SUCCESS
            return
        try:
            table = BlockTable([int(page) for page in kv_indices], first_token=cached)
            request = ticket.request(
                ticket.remote_id,
                ticket.computed_tokens,
                dict.fromkeys(self.kv_mgr.groups, table),
                cached,
            )
            self._load = self.kv_mgr.session.load(
                request, ticket=ticket, timeout=self.kv_mgr.settings.timeout
            )
        except KVSpecError as error:
            self.fail(error)

    def _write(self, ticket: PrefillTicket) -> None:
        """Write the first token to SGLang's metadata buffers."""
        buffers, at = self.kv_mgr.around.buffers, self._aux
        buffers.output_ids[at, 0] = ticket.sampled()
        buffers.cached_tokens[at] = 0  # A ticket does not contain the prefill engine's cache hits.
        if ticket.first_logprobs is not None:
            top = ticket.first_logprobs[: buffers.output_top_logprobs_val.shape[1]]
            buffers.output_token_logprobs_idx[at, 0] = ticket.sampled()
            buffers.output_token_logprobs_val[at, 0] = dict(ticket.first_logprobs).get(
                ticket.sampled(), math.nan
            )
            for place, (token, logprob) in enumerate(top):
                buffers.output_top_logprobs_idx[at, place] = token
                buffers.output_top_logprobs_val[at, place] = logprob
        # SGLang takes the request as ready when it finds its room here, so this comes last.
        buffers.bootstrap_room[at, 0] = self.bootstrap_room

    def failure_exception(self) -> None:
        """Raise the error. All ranks call it if the request has failed on one of them."""
        self.fail(self._gone())
        raise self.error or self._gone()

    def abort(self) -> None:
        """Give the request up."""
        self.fail(self._gone())
        self._stop()

    @property
    def abort_notified(self) -> bool:
        """Whether bytes may still arrive, so that SGLang keeps the memory of the request."""
        return self._load is not None and self._load.poll() == "moving"

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:  # noqa: ARG002
        """Stop the load. SGLang then keeps the memory until it has stopped."""
        self._stop()
        if self._load is not None:
            self.kv_mgr.keep_until_stopped(self.bootstrap_room, self._load)

    def clear(self) -> None:
        """Forget the request, and let the producer know if it is not read."""
        self._stop()

    def _stop(self) -> None:
        """Stop the load, or decline the ticket if there is no load."""
        if self._load is not None:
            self._load.cancel()
        elif self._lookup is not None:
            self.kv_mgr.lookups.give_up(self._lookup)
