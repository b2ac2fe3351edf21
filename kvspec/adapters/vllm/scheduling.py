"""What a connector does in vLLM's scheduler: which requests are held, fetched and released.

Law: a consumer fetches all of a prompt but its last token, once, and whatever becomes of that, the
producer is told once. Of what a router passes on nothing is believed: what is not a producer's
answer is computed here, as if it had never come.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import attrs

from kvspec.adapters.given import Given
from kvspec.adapters.vllm.config import read_config
from kvspec.adapters.vllm.tables import block_tables
from kvspec.descriptors.request import BlockTable
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import mapping, positive_int, sequence
from kvspec.protocol.handshake import is_name
from kvspec.session.introduction import key_of, new_remote_id

log = logging.getLogger(__name__)

FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""How requests end whose cache is whole."""
_ADDRESSES = "where the producer's ranks are, each a text"


@attrs.frozen(kw_only=True)
class Served:
    """A rank of this engine that is ready: the engine, its name, and the rank's channel."""

    engine: EngineSpec
    engine_id: str
    address: str


@attrs.frozen(kw_only=True)
class RemotePrompt:
    """A request that a producer holds, as its `kv_transfer_params` say.

    *engine_id*: the producer's name; *addresses*: of its ranks' channels; *remote_id*: what all
    ranks name the request by; *num_tokens*: how many have gone through its model; *tables*: by its
    groups.
    """

    engine_id: str
    addresses: tuple[str, ...]
    remote_id: str
    num_tokens: int
    tables: Mapping[str, BlockTable]

    def params(self) -> dict[str, Any]:
        """Return what a router passes on to a consumer, in vLLM's names."""
        tables = {name: [t.first_token, t.block_ids.tolist()] for name, t in self.tables.items()}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_addresses": list(self.addresses),
            "remote_request_id": self.remote_id,
            "remote_num_tokens": self.num_tokens,
            "remote_block_ids": tables,
        }

    @staticmethod
    def of(params: Mapping[str, Any]) -> RemotePrompt:
        """Return what *params* say; raise `SpecError` for what no producer said."""
        addresses = sequence("remote_addresses", params.get("remote_addresses"), _ADDRESSES)
        if not addresses or not all(isinstance(address, str) for address in addresses):
            raise SpecError("remote_addresses", addresses, _ADDRESSES)
        remote_id, field = params.get("remote_request_id"), "remote_block_ids"
        key_of(remote_id)
        tables = {}
        for group, given in mapping(field, params.get(field), "groups to tables").items():
            pair = sequence(f"{field}[{group!r}]", given, "the first token, and ids")
            if len(pair) != 2:  # noqa: PLR2004 - as `params` writes it
                raise SpecError(f"{field}[{group!r}]", pair, "the first token, and ids")
            tables[str(group)] = BlockTable(pair[1], first_token=pair[0])
        return RemotePrompt(
            engine_id=is_name("remote_engine_id", params.get("remote_engine_id")),
            addresses=addresses,
            remote_id=str(remote_id),
            num_tokens=positive_int("remote_num_tokens", params.get("remote_num_tokens")),
            tables=tables,
        )


@attrs.frozen(kw_only=True)
class Fetch:
    """A request to read: into which blocks, by vLLM's groups, and which of its tokens.

    *num_tokens*: the first that this engine computes itself; *cached_tokens*: what it has.
    """

    request_id: str
    remote: RemotePrompt
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    cached_tokens: int


@attrs.frozen(kw_only=True)
class EngineStep:
    """What the scheduler tells the workers: vLLM's connector metadata.

    *held*: requests that peers may read, with their remote ids; *released*: what is not read.
    """

    held: tuple[tuple[str, str], ...] = ()
    fetched: tuple[Fetch, ...] = ()
    released: tuple[RemotePrompt, ...] = ()


class Requests:
    """The requests of one scheduler that have to do with another engine.

    *config*: its `KVCacheConfig`. *ranks*: this engine's, once they have registered their caches.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - vLLM's class, not imported
        self.config = config
        self.ranks: tuple[Served, ...] = ()
        self._remotes: dict[str, RemotePrompt] = {}
        self._next = EngineStep()

    def arrive(self, request: Any) -> None:  # noqa: ANN401
        """Take a new request: note who holds it, or stop it one token early."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            try:
                self._remotes[request.request_id] = RemotePrompt.of(params)
            except SpecError as error:
                log.warning("%s is computed here: %s", request.request_id, error)
        elif params.get("do_remote_decode") and loses_a_token(self.config, request.num_tokens):
            _shorten(request)

    def matched(self, request: Any, computed: int) -> int:  # noqa: ANN401
        """Return how many tokens after the first *computed* are to be fetched."""
        remote = self._remotes.get(request.request_id)
        return max(0, _reach(request, remote) - computed) if remote else 0

    def allocated(self, request: Any, block_ids: Any, external: int) -> None:  # noqa: ANN401
        """Take the blocks of a request, *external* tokens of which are to be fetched."""
        remote = self._remotes.pop(request.request_id, None)
        if remote is None:
            return
        if not external:
            self._release(remote)
            return
        end = _reach(request, remote)
        fetch = Fetch(
            request_id=request.request_id,
            remote=remote,
            block_ids=tuple(map(tuple, block_ids)),
            num_tokens=end,
            cached_tokens=end - external,
        )
        self._next = attrs.evolve(self._next, fetched=(*self._next.fetched, fetch))

    def finished(
        self,
        request: Any,  # noqa: ANN401
        block_ids: Any,  # noqa: ANN401
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request's blocks are held for a peer, and what the peer has to know."""
        asked = self._remotes.pop(request.request_id, None)
        if asked is not None:
            self._release(asked)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status.name not in FINISHED:
            return False, None
        try:
            held = self._hold(request, block_ids)
        except SpecError as error:
            log.warning("%s is not held: %s", request.request_id, error)
            return False, None
        pair = request.request_id, held.remote_id
        self._next = attrs.evolve(self._next, held=(*self._next.held, pair))
        return True, held.params()

    def _release(self, remote: RemotePrompt) -> None:
        self._next = attrs.evolve(self._next, released=(*self._next.released, remote))

    def _hold(self, request: Any, block_ids: Any) -> RemotePrompt:  # noqa: ANN401
        if not self.ranks:
            raise SpecError("kv_caches", None, "caches that all workers have registered")
        engine, computed = self.ranks[0].engine, request.num_computed_tokens
        return RemotePrompt(
            engine_id=self.ranks[0].engine_id,
            addresses=tuple(rank.address for rank in self.ranks),
            remote_id=new_remote_id(request.request_id),
            num_tokens=computed,
            tables=block_tables(engine, self.config, block_ids, computed),
        )

    def step(self) -> EngineStep:
        """Return what came up since the last step."""
        step, self._next = self._next, EngineStep()
        return step


def loses_a_token(config: Any, num_tokens: int) -> bool:  # noqa: ANN401
    """Return whether an engine that has computed *num_tokens* lacks what the last of them reads.

    A consumer computes the last token of a prompt itself: it needs states that have not seen it,
    and every token that it looks back at. By then the engine has freed the blocks that lie wholly
    before the window of the *next* token.
    """
    for group in read_config(Given("kv_cache_config", config)).groups:
        spec = group.spec_of(group.layers[0])
        kind = type(spec.value).__name__
        if kind == "MambaSpec":
            return True
        if kind.startswith("SlidingWindow"):
            window, block = spec.get("sliding_window").size(), spec.get("block_size").size()
            skipped = num_tokens - window + 1 - spec.get("extra_retained_tokens").size(0, least=0)
            if skipped > num_tokens - window >= 0 and not skipped % block:
                return True
        if (
            kind.startswith("ChunkedLocal")
            and not num_tokens % spec.get("attention_chunk_size").size()
        ):
            return True
    return False


def _reach(request: Any, remote: RemotePrompt) -> int:  # noqa: ANN401
    """Return before which token to stop fetching: vLLM computes the last one of a prompt itself."""
    return int(min(request.num_tokens - 1, remote.num_tokens))


def _shorten(request: Any) -> None:  # noqa: ANN401
    """Take the last token off a prompt, as vLLM does for models with states."""
    if request.num_prompt_tokens > 1 and request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:], request._all_token_ids[-1:]  # noqa: SLF001
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
