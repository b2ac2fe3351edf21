"""The connector in vLLM's scheduler: it decides which requests are held, fetched and declined.

Invariant: a consumer fetches a prompt once, all of it but the last token. The producer learns the
outcome exactly once. If other requests bring the same parameters, their prompts are computed here,
and the ticket is not declined. Parameters from a router are validated: if they are not a producer's
answer about this very request, the prompt is computed here, as if they had not come.

How it works:
    A request passes through the methods of two schedulers. `held`, `kept`, `fetched`, `declined`
    and `cancelled` are the lists of `EngineStep` to which a method adds the request:

        producer    on_new_request                 removes the last token if `loses_a_token`
        producer    request_finished_all_groups    `held`, and returns a `PrefillTicket` as params
        consumer    on_new_request                 `kept`, or `declined` if it is of another prompt
        consumer    get_num_new_matched_tokens     returns the number of tokens to fetch
        consumer    update_state_after_alloc       `fetched`, or `declined` if nothing is missing
        consumer    request_finished_all_groups    `declined`, if the request ends before that, or
                                                   `cancelled`, if it may still be loading

    A kept ticket sends heartbeats, so a long queue does not lose the prompt, and a producer holds a
    prompt that nobody wants for a short time only. If the front end rejects a request, vLLM submits
    a request with the ticket, but without the prompt, and aborts it at once. It is declined, too.

    For example, a prompt has 40 tokens and the consumer has cached 16 of them. It fetches the
    tokens 16 to 38: 40 - 1 - 16 = 23 tokens. vLLM computes token 39 in any case.

    If a request is `fetched`, its incomplete blocks stay out of vLLM's prefix cache (see
    `kvspec.adapters.vllm.prefix_cache`).

    With the setting `store`, a request without a ticket may load stored pages in the same way, and
    the pages of all requests are stored (see `kvspec.adapters.vllm.store_scheduler`).
"""

# ruff: noqa: ANN401 - requests, blocks and configs are of vLLM's classes, which are not imported
from __future__ import annotations

import logging
import re
from typing import Any

import attrs

from kvspec.adapters.vllm.adapters import Adapters, StatedAdapter
from kvspec.adapters.vllm.content import content_of_request, sampling_of_request
from kvspec.adapters.vllm.drafts import draft_of
from kvspec.adapters.vllm.prefix_cache import Hashed, hashed_of, withhold
from kvspec.adapters.vllm.store_scheduler import PageLoad, PageSave, StoredPrompts
from kvspec.adapters.vllm.store_settings import StoreSettings
from kvspec.adapters.vllm.tables import (
    block_tables,
    check_rings,
    keeps_all_tokens,
    loses_a_token,
)
from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.session import new_remote_id
from kvspec.tickets import PrefillTicket, content_of

log = logging.getLogger(__name__)

# The number of tickets that the scheduler remembers, to use each of them once.
_REMEMBERED = 1 << 12

# The final states of requests whose cache is complete. vLLM has others, such as aborted ones.
FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


@attrs.frozen(kw_only=True)
class Served:
    """A rank of this engine that has registered its caches.

    Attributes:
        engine: The engine of the rank.
        engine_id: The name of the engine.
        address: The address of the rank's channel.
    """

    engine: EngineSpec
    engine_id: str
    address: str


@attrs.define
class EngineStep:
    """The work of one step for the workers. vLLM calls it connector metadata.

    Attributes:
        held: Requests that peers may read: the request id and the ticket for the peer.
        kept: Tickets of requests that wait in the queue. Their producers shall hold the prompts.
        fetched: Transfers to begin: the producer's ticket and the request.
        declined: Tickets that are not used. Their producers may free the blocks.
        failed: Ids of requests that cannot be fetched.
        cancelled: Ids of requests that have ended. If they still load, that is in vain.
        adapters: The LoRA adapters of held and fetched requests, by request id.
        page_loads: Stored pages to load before their requests run.
        page_saves: Pages to store after this step.
    """

    held: list[tuple[str, PrefillTicket]] = attrs.field(factory=list)
    kept: list[PrefillTicket] = attrs.field(factory=list)
    fetched: list[tuple[PrefillTicket, TransferRequest]] = attrs.field(factory=list)
    declined: list[PrefillTicket] = attrs.field(factory=list)
    failed: list[str] = attrs.field(factory=list)
    cancelled: list[str] = attrs.field(factory=list)
    adapters: dict[str, StatedAdapter] = attrs.field(factory=dict)
    page_loads: list[PageLoad] = attrs.field(factory=list)
    page_saves: list[PageSave] = attrs.field(factory=list)


class Scheduling:
    """The requests of one scheduler that involve another engine.

    vLLM calls the methods, and their names are vLLM's. *request* and *blocks* are objects of vLLM.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._store = StoreSettings.in_config(vllm_config)
        draft = draft_of(vllm_config)
        self._adapters = Adapters(vllm_config)
        self._lookahead = 0 if draft is None else draft.lookahead
        self._pages: StoredPrompts | None = None
        self._kv_cache_manager: Any = None
        engine_id = vllm_config.kv_transfer_config.engine_id
        self._one_of_several = re.search(r"_dp\d+$", engine_id) is not None
        self._ranks: tuple[Served, ...] = ()
        self._hashed: dict[str, Hashed] | None = None
        self._tickets: dict[str, PrefillTicket] = {}  # Tickets not yet used or declined.
        self._cached: dict[str, int] = {}  # Leading tokens of their requests that vLLM has.
        self._used = dict[str, None]()  # The seals of the last tickets, in order of arrival.
        self._fetching = set[str]()  # Ids of requests that were `fetched` and have not ended.
        self._shortened = set[str]()  # Ids of requests without the last token of their prompt.
        self._next = EngineStep()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Served]) -> None:
        """Take the ranks of this engine, after all have registered their caches.

        Raises:
            SpecError: If they describe ranks of another connector.
        """
        for rank in metadata.values():
            # vLLM's `MultiConnector` passes what its first connector returns to all of them.
            if not isinstance(rank, Served):
                wanted = "KvspecConnector before all connectors that shake hands"
                raise SpecError("connectors", type(rank).__name__, wanted)
        self._ranks = tuple(metadata.values())
        if self._store is not None and self._ranks:
            engine = self._ranks[0].engine
            configs = self._vllm_config, self._kv_cache_config
            self._pages = StoredPrompts(
                self._store, engine, configs, self._kv_cache_manager, self._adapters
            )

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keep vLLM's counts of hashed blocks, with which `withhold` keeps blocks unhashed."""
        self._hashed = hashed_of(kv_cache_manager)
        self._kv_cache_manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        """Keep the ticket of a request, or stop its prompt one token early."""
        self._take_ticket(request)
        if self._pages is not None:
            self._pages.accept(request)

    def _take_ticket(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            try:
                ticket = PrefillTicket.from_params(params)
                self._use(request.request_id, ticket, params["remote_seal"])
            except SpecError as error:
                if not getattr(request, "abort_immediately", False):
                    log.warning("%s is computed here: %s", request.request_id, error)
                return
            self._accept(request, ticket)
        elif params.get("do_remote_decode") and self._ranks:
            self._shortened |= _shorten(request, self._ranks[0].engine)

    def _accept(self, request: Any, ticket: PrefillTicket) -> None:
        """Keep *ticket*, whose only user is *request*, or decline it."""
        name, rejected = request.request_id, getattr(request, "abort_immediately", False)
        if self._ranks and ticket.engine_id == self._ranks[0].engine_id:
            # No engine connects to itself. The blocks are in its prefix cache, if it has one. They
            # are held until the lease is over.
            if not rejected:
                log.warning("%s is computed here: its ticket is of this engine", name)
            return
        # vLLM aborts this request before it does anything else. Its prompt is a placeholder.
        if rejected:
            log.info("%s was rejected: its ticket is declined", name)
            self._next.declined.append(ticket)
            return
        try:
            # A router may mix up two requests.
            ticket.check(content_of_request(request, ticket.computed_tokens, self._adapters))
        except SpecError as error:
            log.warning("%s is computed here: %s", name, error)
            self._next.declined.append(ticket)
            return
        self._tickets[name] = ticket
        self._next.kept.append(ticket)

    def _use(self, name: str, ticket: PrefillTicket, seal: str) -> None:
        """Remember that a request has *ticket*. Raise `SpecError` if another request has had it.

        For n samples of one prompt, vLLM makes n requests with equal parameters. The ticket belongs
        to the first. A second load of it would fail, and to decline it would end the first load.
        """
        # With data parallelism, the samples go to several schedulers, which do not know each other.
        if self._one_of_several and re.match(r"[1-9]\d*_", name):
            wanted = "the ticket of this sample: it belongs to the first of several samples"
            raise SpecError("remote_request_id", ticket.remote_id, wanted)
        # Tickets of one remote id may differ, for example in addresses. The seal covers all fields.
        if seal in self._used:
            wanted = "a ticket that no other request has brought, such as another sample"
            raise SpecError("remote_request_id", ticket.remote_id, wanted)
        self._used[seal] = None
        if len(self._used) > _REMEMBERED:
            del self._used[next(iter(self._used))]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of tokens to fetch, and whether the request waits for them."""
        ticket, count = self._tickets.get(request.request_id), 0
        if ticket is not None:
            count = max(0, self._end(request, ticket) - num_computed_tokens)
        elif self._pages is not None:
            count = self._pages.matched(request, num_computed_tokens)
        self._cached[request.request_id] = num_computed_tokens
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups that move, so that vLLM does not zero their new blocks.

        vLLM zeroes blocks that receive pages, since the pages may not fill them.
        """
        if self._pages is not None and request.request_id not in self._tickets:
            return ()
        return tuple(self._kv_cache_config.transfer_group_ids)

    def _end(self, request: Any, ticket: PrefillTicket) -> int:
        """Return the token before which fetching stops. vLLM computes the last token itself."""
        computed = ticket.computed_tokens
        # The last keys of a draft depend on the token that the producer has sampled. A window, a
        # ring or a state may lack what an earlier token needs. Then they are fetched all the same.
        if self._ranks and keeps_all_tokens(self._ranks[0].engine, computed):
            computed = max(0, computed - self._lookahead)
        return int(min(request.num_tokens - 1, computed))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Fetch a request into its blocks, or decline its ticket if no token is missing."""
        ticket, name = self._tickets.pop(request.request_id, None), request.request_id
        # vLLM may load fewer tokens than it was offered. Then the last ones are missing.
        cached = self._cached.pop(name, 0)
        if ticket is None:
            if self._pages is not None:
                ids = blocks.get_block_ids()
                if not self._pages.allocated(name, ids, cached, num_external_tokens):
                    self._next.failed.append(name)
            return
        if not num_external_tokens:
            self._next.declined.append(ticket)
            return
        end = cached + num_external_tokens
        try:
            tables = self._tables(blocks.get_block_ids(), end)
            check_rings(self._ranks[0].engine, ticket.computed_tokens, end)
            transfer = ticket.request(name, end, tables, cached)
            complete_from = withhold(self._ranks[0].engine, transfer, self._hashed)
            self._next.fetched.append((ticket, transfer))
            self._state_adapter(request)
            self._fetching.add(name)
        except SpecError as error:  # One request fails, and the engine goes on.
            log.error("%s: %s", name, error)  # noqa: TRY400
            self._next.failed.append(name)
            self._next.declined.append(ticket)
            return
        if self._pages is not None:
            self._pages.loaded_by_ticket(name, complete_from)

    def build_connector_meta(self, scheduler_output: Any) -> EngineStep:
        """Return the work since the last step."""
        step, self._next = self._next, EngineStep()
        if self._pages is not None:
            step.page_loads, step.page_saves = self._pages.advance(scheduler_output)
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the results of the workers."""
        if self._pages is not None:
            self._pages.settle(connector_output)

    def loads_pages(self, request_id: str) -> bool:
        """Return whether a request loads stored pages."""
        return self._pages is not None and self._pages.loads(request_id)

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must take steps because pages are being stored."""
        return self._pages is not None and self._pages.is_saving

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether vLLM must keep the blocks for a peer, and the parameters for the peer."""
        # A request that ends with an unused ticket was aborted before it was scheduled.
        ticket = self._tickets.pop(request.request_id, None)
        self._cached.pop(request.request_id, None)
        if ticket is not None:
            self._next.declined.append(ticket)
        loads = self._pages is not None and self._pages.finish(request)
        if loads or request.request_id in self._fetching:
            self._fetching.discard(request.request_id)
            self._next.cancelled.append(request.request_id)
        shortened = request.request_id in self._shortened
        self._shortened.discard(request.request_id)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status.name not in FINISHED:
            return False, None
        try:
            held = self._hold(request, block_ids, whole=not shortened)
        except SpecError as error:
            log.warning("%s is not held: %s", request.request_id, error)
            return False, None
        self._next.held.append((request.request_id, held))
        self._state_adapter(request)
        return True, {"do_remote_prefill": True, "do_remote_decode": False, **held.to_params()}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the same for a request of one group.

        vLLM's MultiConnector calls this if another of its connectors supports one group only. The
        base class would hold nothing, and never decline a ticket.
        """
        return self.request_finished_all_groups(request, (block_ids,))

    def _state_adapter(self, request: Any) -> None:
        adapter = self._adapters.to_workers(getattr(request, "lora_request", None))
        if adapter is not None:
            self._next.adapters[request.request_id] = adapter

    def _hold(self, request: Any, block_ids: Any, *, whole: bool) -> PrefillTicket:
        """Return the ticket of a request. *whole* is whether vLLM has computed all of its prompt.

        A token that was sampled after a part of the prompt is not the first new one. vLLM gives a
        connector no log probabilities: the scheduler has them, but they are not in the request.
        """
        computed = request.num_computed_tokens
        sampled = (
            request.output_token_ids if whole and computed == request.num_prompt_tokens else ()
        )
        return PrefillTicket(
            tables=self._tables(block_ids, computed),
            engine_id=self._ranks[0].engine_id,
            addresses=tuple(rank.address for rank in self._ranks),
            remote_id=new_remote_id(request.request_id),
            computed_tokens=computed,
            content=content_of_request(request, computed, self._adapters),
            tokens_digest=content_of(request.prompt_token_ids or ()),
            first_token=int(sampled[0]) if sampled else None,
            sampling=sampling_of_request(request),
        )

    def _tables(self, block_ids: Any, num_tokens: int) -> dict[str, Any]:
        if not self._ranks:
            raise SpecError("kv_caches", None, "caches that all workers have registered")
        return block_tables(self._ranks[0].engine, self._kv_cache_config, block_ids, num_tokens)


def _shorten(request: Any, engine: EngineSpec) -> set[str]:
    """Remove the last token of a prompt for which `loses_a_token` is True, and return its id."""
    # vLLM's NIXL connector does the same for models with recurrent states. vLLM has no public way,
    # so all lists of the request change. Its workers end if their lengths differ. One token is
    # generated, as for any prefill.
    if request.num_prompt_tokens < 2 or not loses_a_token(engine, request.num_tokens):  # noqa: PLR2004
        return set()
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]  # noqa: SLF001
    for name in ("prompt_embeds", "prompt_is_token_ids"):
        if getattr(request, name, None) is not None:
            setattr(request, name, getattr(request, name)[:-1])
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    return {request.request_id}
