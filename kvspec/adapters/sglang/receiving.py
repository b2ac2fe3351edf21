"""One request on one rank of a decode engine of SGLang.

Invariant: SGLang frees the memory of a failed request only after no load of any rank can write it.
A load begins only after no forward pass can write its memory any more.

How it works:
    SGLang's `pop_transferred` sees a failed request on all ranks at once, because it takes the
    lowest state of all ranks. Then it calls, on each rank:

        `failure_exception`         the reason, on the rank that has failed
        `abort_notified`            False
        `ensure_abort_notified`     stops the load of this rank, which may still be moving
        `abort_notified`            True: SGLang keeps the memory
        `is_abort_release_safe`     of the manager: True when no load is moving any more

    SGLang frees the memory when the last answer is True on all ranks.

    With its overlap schedule, SGLang frees the memory of a request that has ended while one more
    forward pass of it runs on the GPU. That pass writes a token into memory that may belong to
    another request by then:

        CPU    launch n + 1   result n: A ends, free its pages   allocate them to B, send_metadata
        GPU    ---- n ----    -------------- n + 1: writes a token of A ------------|  load of B

    So the load of B begins after the passes that were launched before `send_metadata`.
"""

# ruff: noqa: ANN401 - buffers and requests are of SGLang's classes, which are not imported
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvspec.adapters.sglang import tickets
from kvspec.adapters.sglang.backend import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Manager,
    RequestHalf,
)
from kvspec.adapters.sglang.lookups import Lookup
from kvspec.adapters.sglang.request_identity import identity_of, sampling_text
from kvspec.errors import SpecError
from kvspec.session import Load
from kvspec.tickets import PrefillTicket

# SGLang's buffers have tokens of 32 bits.
MOST_TOKENS = 1 << 31


class Receiver(RequestHalf):
    """One request on one rank of a decode engine."""

    require_staging = False
    supports_host_destination = False
    bootstrap_infos: tuple[object, ...] = ()

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._lookup: Lookup | None = None
        # The newest ticket that was checked, and the newest one whose load has begun.
        self._ticket: PrefillTicket | None = None
        self._loading: PrefillTicket | None = None
        self._load: Load | None = None
        # The pages of SGLang, the slot of the state, the first token in the pages, and the tokens
        # that have arrived.
        self._pages: list[int] | None = None
        self._slot: Any = None
        self._first = self._arrived = 0
        self._aux = -1
        # Whether the forward passes that may write the pages have ended.
        self._unwritten: Callable[[], bool] | None = None
        # Whether the load of the whole prompt has begun: the producer learns how it ends.
        self._read = False
        self._armed = False

    def init(self, prefill_dp_rank: int) -> None:  # noqa: ARG002
        """Begin to look for the ticket of the request. If it has failed, decline the ticket."""
        if self.kv_mgr.owns(self):
            name = self.nonce.hex()
            lookups = self.kv_mgr.lookups
            self._lookup = lookups.add(self.bootstrap_addr, self.bootstrap_room, name)
            if self.conclude_state is not None:
                self._cancel()

    def poll(self) -> int:
        """Return the state of this rank."""
        if self.conclude_state is None:
            try:
                state = self._state()
            except Exception as error:  # noqa: BLE001 - it would end SGLang's scheduler
                self.fail(error)
                state = FAILED
            if state not in (FAILED, SUCCESS):
                return state
            self.conclude_state = state
        return self.conclude_state

    def _state(self) -> int:
        """Return the state. Raise if the request cannot succeed."""
        found = self._lookup.result() if self._lookup is not None else None
        if found is not None and found is not self._ticket:
            self._check(found)
            self._ticket = found
        if self._pages is None:
            return BOOTSTRAPPING if self._ticket is None else WAITING
        return SUCCESS if self._loaded() else TRANSFERRING

    def _loaded(self) -> bool:
        """Return whether the whole prompt has arrived. Begin the next load if there is one."""
        load, ticket = self._load, self._loading
        if load is not None and ticket is not None:
            state = load.poll()
            if state == "moving":
                return False
            self._load = None
            if state == "done":
                self._arrived = ticket.computed_tokens
            self.kv_mgr.metrics.ended(load)
            if tickets.is_whole(ticket):
                if load.error is not None:
                    raise load.error
                self._write(ticket)
                return True
        if self._unwritten is not None and not self._unwritten():
            return False
        self._unwritten = None
        if self._ticket is not None and self._ticket is not self._loading:
            return self._begin(self._ticket)
        return False

    def _begin(self, ticket: PrefillTicket) -> bool:
        """Begin to load the rest of *ticket*. Return whether there is none."""
        self._loading = ticket
        if self._arrived >= ticket.computed_tokens:
            if tickets.is_whole(ticket):
                self._cancel()  # Nothing is read.
                self._write(ticket)
                return True
            return False
        groups, around = self.kv_mgr.groups, self.kv_mgr.around
        tables = around.tables(groups, self._pages or [], self._first, self._slot)
        request = ticket.request(ticket.remote_id, ticket.computed_tokens, tables, self._arrived)
        timeout = self.kv_mgr.settings.timeout
        self._load = self.kv_mgr.session.load(request, ticket=ticket, timeout=timeout)
        self._read = tickets.is_whole(ticket)
        return False

    def _check(self, ticket: PrefillTicket) -> None:
        """Raise `SpecError` if SGLang cannot go on from *ticket*."""
        request, tokens = self.request, self.request.origin_input_ids
        if ticket.computed_tokens > len(tokens):
            wanted = f"at most {len(tokens)}, the tokens of the prompt"
            raise SpecError("remote_num_tokens", ticket.computed_tokens, wanted)
        own = identity_of(request, self.kv_mgr.weights.stated, ticket.computed_tokens)
        ticket.check(own, self.kv_mgr.engine_id)
        if not tickets.is_whole(ticket):
            return
        if ticket.computed_tokens != len(tokens):
            wanted = f"{len(tokens)}: a decode engine of SGLang computes no token of a prompt"
            raise SpecError("remote_num_tokens", ticket.computed_tokens, wanted)
        first = ticket.sampled(tokens, sampling_text(request))
        vocabulary = getattr(request, "vocab_size", None) or MOST_TOKENS
        if first >= min(vocabulary, MOST_TOKENS):
            wanted = f"less than {min(vocabulary, MOST_TOKENS)}, the tokens of the model"
            raise SpecError("remote_first_token", first, wanted)
        self._check_logprobs(ticket, first)

    def _check_logprobs(self, ticket: PrefillTicket, first: int) -> None:
        """Raise `SpecError` if *ticket* has not the log probabilities that the request wants."""
        if not self.request.return_logprob:
            return
        count = max(1, self.request.logprob.top_logprobs_num)
        pairs = ticket.first_logprobs or ()
        if len(pairs) < count or first not in dict(pairs):
            wanted = f"{count} log probabilities at the first token, as the request wants"
            raise SpecError("remote_first_logprobs", len(pairs), wanted)
        room = self.kv_mgr.around.buffers.output_top_logprobs_val.shape[1]
        if len(pairs) > room + 1:
            wanted = f"at most {room}, and one for the token itself"
            raise SpecError("remote_first_logprobs", len(pairs), wanted)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,  # noqa: ARG002 - a host destination is refused
    ) -> None:
        """Load the prompt into the pages *kv_indices*, which follow the cached prefix."""
        if self._ticket is None or self.conclude_state is not None:
            self.fail(self.gone("it was aborted before its load has begun"))
            return
        self._aux = -1 if aux_index is None else aux_index
        self._pages = [int(page) for page in kv_indices]
        self._slot = self.kv_mgr.around.slot(state_indices)
        self._first = self._arrived = decode_prefix_len or 0
        self._unwritten = self.kv_mgr.around.forwards()
        self.poll()

    def _write(self, ticket: PrefillTicket) -> None:
        """Write the first token to SGLang's metadata buffers."""
        buffers, at = self.kv_mgr.around.buffers, self._aux
        buffers.output_ids[at, 0] = ticket.first_token
        # A ticket contains neither the prefill engine's cache hits nor its numbers of media tokens.
        buffers.cached_tokens[at] = 0
        if ticket.first_logprobs is not None:
            room = buffers.output_top_logprobs_val.shape[1]
            buffers.output_token_logprobs_idx[at, 0] = ticket.first_token
            buffers.output_token_logprobs_val[at, 0] = dict(ticket.first_logprobs).get(
                ticket.first_token or 0, math.nan
            )
            for place, (token, logprob) in enumerate(ticket.first_logprobs[:room]):
                buffers.output_top_logprobs_idx[at, place] = token
                buffers.output_top_logprobs_val[at, place] = logprob
        # SGLang takes the request as ready when it finds its room here, so this comes last.
        buffers.bootstrap_room[at, 0] = self.bootstrap_room

    def failure_exception(self) -> None:
        """Raise the error. All ranks call it if the request has failed on one of them."""
        if self.error is None:
            # The load of this rank may have failed too, since the last poll.
            self.poll()
        self.fail(self.elsewhere())
        self._cancel()
        raise self.error or self.elsewhere()

    def abort(self) -> None:
        """Abort the request."""
        self.fail(self.gone("the request was aborted at the decode engine"))
        self._cancel()

    @property
    def abort_notified(self) -> bool:
        """Whether `ensure_abort_notified` was called, so that SGLang waits until it is safe."""
        return self._armed

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:  # noqa: ARG002
        """Cancel the load. SGLang then keeps the memory until it has stopped."""
        self._cancel()
        if self._load is not None and not self._armed:
            self.kv_mgr.keep_until_ended(self.bootstrap_room, self._load)
        self._armed = True

    def clear(self) -> None:
        """Forget the request, and let the producer know if it is not read."""
        self._cancel()
        if self._load is None or self._load.poll() != "moving":
            self.kv_mgr.free_room(self)

    def _cancel(self) -> None:
        """Cancel the load, or decline the ticket if the whole prompt is not loaded."""
        if self._load is not None:
            self._load.cancel()
        if self._lookup is not None and not self._read:
            self.kv_mgr.lookups.decline(self._lookup)
