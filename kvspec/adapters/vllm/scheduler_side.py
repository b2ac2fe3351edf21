"""What a connector does in vLLM's scheduler: which requests are held, fetched and declined.

Law: a consumer fetches all of a prompt but its last token, once, and whatever becomes of that, the
producer is told once. Of what a router passes on nothing is believed: what is not a producer's
answer, or is one about another prompt, is computed here, as if it had never come.
"""

# ruff: noqa: ANN401 - requests, blocks and configs are of vLLM's classes, which are not imported
from __future__ import annotations

import logging
from typing import Any

import attrs

from kvspec.adapters.vllm.tables import block_tables, loses_a_token
from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.session import PrefillTicket, content_of, new_remote_id

log = logging.getLogger(__name__)

FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""How requests end whose cache is whole."""


@attrs.frozen(kw_only=True)
class Served:
    """A rank of this engine that is ready: the engine, its name, and the rank's channel."""

    engine: EngineSpec
    engine_id: str
    address: str


@attrs.define
class EngineStep:
    """What the scheduler tells the workers: vLLM's connector metadata.

    *held*: requests that peers may read, with their remote ids; *fetched*: what is read, of which
    prompt; *declined*: prompts that are not read; *failed*: requests that cannot be read.
    """

    held: list[tuple[str, str]] = attrs.field(factory=list)
    fetched: list[tuple[PrefillTicket, TransferRequest]] = attrs.field(factory=list)
    declined: list[PrefillTicket] = attrs.field(factory=list)
    failed: list[str] = attrs.field(factory=list)


class Scheduling:
    """The requests of one scheduler that have to do with another engine.

    Methods have vLLM's names and are called by it; *request* and *blocks* are of its classes.
    """

    def __init__(self, kv_cache_config: Any) -> None:
        self._kv_cache_config = kv_cache_config
        self._ranks: tuple[Served, ...] = ()
        self._prompts: dict[str, PrefillTicket] = {}  # of requests that are yet to be fetched
        self._next = EngineStep()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Served]) -> None:
        """Know this engine's ranks: all have registered their caches."""
        self._ranks = tuple(metadata.values())

    def on_new_request(self, request: Any) -> None:
        """Note who holds a request, or stop it one token early."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            try:
                prompt = PrefillTicket.from_params(params)
                prompt.check(request.prompt_token_ids or ())
                self._prompts[request.request_id] = prompt
            except SpecError as error:
                log.warning("%s is computed here: %s", request.request_id, error)
        elif params.get("do_remote_decode") and self._ranks:
            _shorten(request, self._ranks[0].engine)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens are fetched, and that the request waits meanwhile."""
        prompt = self._prompts.get(request.request_id)
        count = max(0, _end(request, prompt) - num_computed_tokens) if prompt else 0
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """Return all groups that move: vLLM shall not zero what is fetched."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Fetch a request into its blocks, or release it."""
        prompt, name = self._prompts.pop(request.request_id, None), request.request_id
        if prompt is None:
            return
        if not num_external_tokens:
            self._next.declined.append(prompt)
            return
        end = _end(request, prompt)
        try:
            tables = self._tables(blocks.get_block_ids(), end)
            asked = prompt.request(name, end, tables, end - num_external_tokens)
            self._next.fetched.append((prompt, asked))
        except SpecError as error:
            log.error("%s: %s", name, error)  # noqa: TRY400
            self._next.failed.append(name)
            self._next.declined.append(prompt)

    def build_connector_meta(self, scheduler_output: Any) -> EngineStep:  # noqa: ARG002
        """Return what came up since the last step."""
        step, self._next = self._next, EngineStep()
        return step

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request's blocks are held for a peer, and what the peer has to know."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self._next.declined.append(prompt)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status.name not in FINISHED:
            return False, None
        try:
            held = self._hold(request, block_ids)
        except SpecError as error:
            log.warning("%s is not held: %s", request.request_id, error)
            return False, None
        self._next.held.append((request.request_id, held.remote_id))
        return True, {"do_remote_prefill": True, "do_remote_decode": False, **held.to_params()}

    def _hold(self, request: Any, block_ids: Any) -> PrefillTicket:
        computed = request.num_computed_tokens
        return PrefillTicket(
            tables=self._tables(block_ids, computed),
            engine_id=self._ranks[0].engine_id,
            addresses=tuple(rank.address for rank in self._ranks),
            remote_id=new_remote_id(request.request_id),
            num_tokens=computed,
            content=content_of((request.prompt_token_ids or ())[:computed]),
        )

    def _tables(self, block_ids: Any, num_tokens: int) -> dict[str, Any]:
        if not self._ranks:
            raise SpecError("kv_caches", None, "caches that all workers have registered")
        return block_tables(self._ranks[0].engine, self._kv_cache_config, block_ids, num_tokens)


def _end(request: Any, prompt: PrefillTicket) -> int:
    """Return before which token to stop fetching: vLLM computes the last one of a prompt itself."""
    return int(min(request.num_tokens - 1, prompt.num_tokens))


def _shorten(request: Any, engine: EngineSpec) -> None:
    """Take the last token off a prompt that would lose one, as vLLM does for models with states."""
    known = request.num_prompt_tokens > 1 and request.prompt_token_ids is not None
    if known and loses_a_token(engine, request.num_tokens):
        del request.prompt_token_ids[-1:], request._all_token_ids[-1:]  # noqa: SLF001
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
