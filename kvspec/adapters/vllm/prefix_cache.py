"""Keep blocks that a load does not fill out of vLLM's prefix cache.

Invariant: after a load, vLLM hashes no block of the request in which a token was neither moved nor
cached before.

How it works:
    A load moves only live tokens. With a window of 20 tokens, a query after 39 tokens reads the
    tokens 20 to 38. The producer has blocks of 16 tokens, which move whole. The consumer has blocks
    of 32 tokens:

        token       0 ... 15      16 ... 31     32 ... 38     39 ... 63
        content     not moved     moved         moved         computed later

    After the load, vLLM hashes all full blocks, and so it hashes the first one. For a later prompt
    that begins with the same 32 tokens, vLLM takes this block from the cache. The query of token 32
    reads the tokens 13 to 31, and the tokens 13 to 15 were never moved. The answer is wrong, and
    nothing fails.

    vLLM counts the blocks of each request that it has hashed (`num_cached_block`), for each group.
    It hashes only blocks after that number. Before a load begins, `withhold` raises the number to
    the first block from which on all tokens are complete. The blocks before it serve their own
    request, which does not read the missing tokens. They never enter the prefix cache. vLLM drops
    the number when it frees the request, so a request that is computed again is hashed again.

    Evicting the blocks afterwards would be too late. vLLM hashes them when the load has finished,
    and it may look up another prompt before it calls the connector again. Loading a number of
    tokens that is a multiple of the block size would not be enough. If an earlier prompt has left
    the blocks before the window in the cache, vLLM joins them with the incomplete block.
"""

# ruff: noqa: ANN401 - the managers are of vLLM's classes, which are not imported
from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs

from kvspec.adapters.vllm.engine import vllm_group
from kvspec.descriptors.complete import complete_tokens
from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.plan.plan import TransferPlan, plan_transfer


@attrs.frozen
class Hashed:
    """The blocks of one group that vLLM has hashed.

    Attributes:
        block_size: The tokens of a block that vLLM hashes. With context ranks, the block of all.
        counts: The number of hashed blocks, by request id. It belongs to vLLM.
    """

    block_size: int
    counts: dict[str, int]


def hashed_of(kv_cache_manager: Any) -> dict[str, Hashed]:
    """Return the counts of vLLM's `KVCacheManager`, by group. Empty if it hashes no blocks.

    Raises:
        SpecError: If this version of vLLM has other fields.
    """
    if not kv_cache_manager.enable_caching:
        return {}
    managers = getattr(kv_cache_manager.coordinator, "single_type_managers", None)
    groups: dict[str, Hashed] = {}
    for number, manager in enumerate(managers or ()):
        counts, size = (getattr(manager, name, None) for name in ("num_cached_block", "block_size"))
        if isinstance(counts, dict) and isinstance(size, int):
            groups[f"group{number}"] = Hashed(size, counts)
    if managers is None or len(groups) < len(managers):
        wanted = "False: kvspec cannot keep incomplete blocks out of this vLLM's prefix cache"
        raise SpecError("enable_prefix_caching", kv_cache_manager.enable_caching, wanted)
    return groups


def withhold(
    engine: EngineSpec, request: TransferRequest, hashed: Mapping[str, Hashed] | None
) -> dict[str, int]:
    """Keep the incomplete blocks of *request* out of vLLM's prefix cache.

    Must be called after vLLM has allocated the blocks, and before it hashes them.

    Args:
        engine: The consumer.
        request: The request that will be loaded.
        hashed: The result of `hashed_of`. None if vLLM did not call `bind_kv_cache_manager`.

    Returns:
        By group: the token from which on all tokens up to the end of the load are complete.

    Raises:
        SpecError: If a block is incomplete and *hashed* is None.
    """
    complete_from: dict[str, int] = {}
    for name, ranges in complete_tokens(_plan_to_itself(engine), request).items():
        # Groups of recurrent states are not here. vLLM hashes the block of a state only if the
        # state is the one after the block's last token.
        group = engine.group(name)
        own = (hashed or {}).get(vllm_group(name))
        block = own.block_size if own else engine.virtual_block(group)
        full = request.total(group.spec) // block
        complete = ranges[-1] if ranges else range(0)
        complete_from[name] = complete.start
        first = -(-complete.start // block) if complete.stop >= full * block else full
        if first and hashed is None:
            wanted = "a call by vLLM before the first request: this version is not supported"
            raise SpecError("bind_kv_cache_manager", None, wanted)
        if own:
            own.counts[request.request_id] = max(first, own.counts.get(request.request_id, 0))
    return complete_from


@lru_cache(maxsize=1)
def _plan_to_itself(engine: EngineSpec) -> TransferPlan:
    """Return a plan for `complete_tokens`, which depends on the consumer alone."""
    return plan_transfer(engine, engine)
