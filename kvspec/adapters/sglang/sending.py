"""One request on one rank of a prefill engine of SGLang.

Invariant: a ticket is published after all ranks have computed its tokens. Exactly one ticket of a
request is of the whole prompt.
"""

# ruff: noqa: ANN401 - requests are of SGLang's classes, which are not imported
from __future__ import annotations

import math
from typing import Any

import attrs

from kvspec.adapters.sglang import tickets
from kvspec.adapters.sglang.backend import (
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Manager,
    RequestHalf,
)
from kvspec.adapters.sglang.request_identity import identity_of, sampling_text
from kvspec.errors import SpecError
from kvspec.tickets import PrefillTicket, content_of

# The lowest number of SGLang's buffers, which have the type float32.
LOWEST = -3.4e38


class Sender(RequestHalf):
    """One request on one rank of a prefill engine."""

    def __init__(
        self,
        mgr: Manager,
        bootstrap_addr: str,
        bootstrap_room: int | None,
        req_has_disagg_prefill_dp_rank: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._remote_id = tickets.key_in(self.bootstrap_room, self.nonce).remote_id
        self._pages: list[int] = []
        self._tokens = self._expected = 0
        self._held = False
        self._slot: Any = None
        self._offered: list[str] = []

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:  # noqa: ARG002
        """Take the number of pages of the prompt."""
        self._expected = num_kv_indices

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:  # noqa: FBT001
        """Return whether SGLang calls `send` for a chunk."""
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Take the pages of a chunk, hold the prompt so far, and publish its ticket.

        *state_indices* comes with the last chunk.
        """
        self._pages += [int(page) for page in kv_indices]
        self._slot = self.kv_mgr.around.slot(state_indices)
        self._tokens += num_kv_tokens or 0
        # SGLang sets it for pages of another request that is perhaps still computed.
        early = vars(self).pop("_early_send_wait_event", None) is not None
        if self._held or self.conclude_state is not None:
            return
        try:
            # All layers of all ranks exchange their results. So if this rank has computed a chunk,
            # all ranks have written it, although only the first one publishes the ticket.
            if len(self._pages) >= self._expected:
                self._publish(self._whole())
                self._held = True
                self.kv_mgr.metrics.held += 1
            elif self.kv_mgr.overlaps and self._tokens and not early:
                ticket = self._chunks()
                self._offered.append(ticket.remote_id)
                self._publish(ticket)
        except Exception as error:  # noqa: BLE001 - it would end SGLang's scheduler
            self.fail(error)

    def _publish(self, ticket: PrefillTicket) -> None:
        """Hold a prompt, or the first chunks of it, and publish its ticket."""
        self.kv_mgr.hold(ticket.remote_id)
        self.newest = ticket.remote_id
        self.kv_mgr.publish(self, ticket)

    def _chunks(self) -> PrefillTicket:
        """Return the ticket of the chunks that were computed so far."""
        key = tickets.key_in(self.bootstrap_room, self.nonce, len(self._offered))
        return self._ticket(key.remote_id)

    def _whole(self) -> PrefillTicket:
        """Return the ticket of the whole prompt."""
        request, tokens = self.request, self.request.origin_input_ids
        if len(tokens) != self._tokens:
            raise SpecError("num_kv_tokens", self._tokens, f"{len(tokens)}, as the prompt has")
        return attrs.evolve(
            self._ticket(self._remote_id),
            tokens_digest=content_of(tokens),
            sampling=sampling_text(request),
            first_token=int(request.output_ids[0]),
            first_logprobs=_logprobs(request) if request.return_logprob else None,
        )

    def _ticket(self, remote_id: str) -> PrefillTicket:
        """Return the ticket of all tokens that were computed so far."""
        groups, around = self.kv_mgr.groups, self.kv_mgr.around
        return PrefillTicket(
            engine_id=self.kv_mgr.engine_id,
            addresses=self.kv_mgr.addresses,
            remote_id=remote_id,
            computed_tokens=self._tokens,
            tables=around.tables(groups, self._pages, 0, self._slot),
            content=identity_of(self.request, self.kv_mgr.weights.stated, self._tokens),
        )

    def poll(self) -> int:
        """Return the state of this rank."""
        if self.conclude_state is None and self._held:
            outcome = self.kv_mgr.outcome(self._remote_id)
            if outcome is None:
                return TRANSFERRING
            self._settled(outcome)
            if outcome == "done":
                self.conclude_state = SUCCESS
            else:
                why = f"the prompt is {outcome}: no decode engine has read all of it"
                self.fail(self.gone(why))
        return WAITING if self.conclude_state is None else self.conclude_state

    def _settled(self, outcome: str) -> None:
        """Count the prompt, once."""
        if self._held:
            self._held = False
            self.kv_mgr.metrics.held -= 1
            self.kv_mgr.metrics.holds[outcome] += 1

    def failure_exception(self) -> None:
        """Raise the error. All ranks call it if the request has failed on one of them."""
        self.fail(self.elsewhere())
        self.abort()
        raise self.error or self.elsewhere()

    def abort(self) -> None:
        """Abort the prompt. Its readers fail."""
        self.fail(self.gone("the request was aborted at the prefill engine"))
        self.clear()
        if self.conclude_state == FAILED and self.bootstrap_room > 0:
            why, room = str(self.error)[:1000], self.bootstrap_room
            self.kv_mgr.publish(self, tickets.failure(room, why, self.nonce))

    def clear(self) -> None:
        """Forget the request, and delete its ticket if it was read."""
        # A rank of the decode engine reads chunks before the whole prompt, so it reads none now.
        for remote_id in (*self._offered, self._remote_id):
            self.kv_mgr.abort_held(remote_id)
        self._offered.clear()
        self._settled("aborted")
        if self.conclude_state == SUCCESS:
            room = self.bootstrap_room
            self.kv_mgr.publish(self, tickets.failure(room, "", self.nonce))
        self.kv_mgr.free_room(self)


def _logprobs(request: Any) -> list[tuple[int, float]]:
    """Return tokens and log probabilities at the first token: the top ones, and the token itself.

    A token that a grammar excludes has minus infinity, which JSON cannot represent: it becomes the
    lowest number. Rounding may give a token of probability 1 a little more than 0.

    Raises:
        SpecError: If one is not a number, or plus infinity.
    """
    found = request.logprob
    pairs: list[tuple[int, float]] = []
    if found.output_top_logprobs_val:
        values, ids = found.output_top_logprobs_val[0], found.output_top_logprobs_idx[0]
        pairs = [(int(token), float(value)) for token, value in zip(ids, values, strict=True)]
    own = int(found.output_token_logprobs_idx[0]), float(found.output_token_logprobs_val[0])
    if own[0] not in dict(pairs):
        pairs.append(own)
    for token, value in pairs:
        if math.isnan(value) or value == math.inf:
            raise SpecError("output_token_logprobs", (token, value), "numbers: the logits are not")
    return [(token, max(LOWEST, min(0.0, value))) for token, value in pairs]
