"""Read vLLM's lists of block ids of one request as kvspec's block tables.

Invariant: the place of a list determines its group, and the place of an id determines its tokens.
So null blocks keep their places. Only the table of a recurrent state is cut, to the one block that
holds the state.

How it works:
    A request has 40 tokens in blocks of 16. vLLM passes one list for each group:

        group0, full attention             [7, 3, 9]    tokens 0-15, 16-31, 32-47
        group1, window of 16 tokens        [0, 4, 6]    0: the window has passed tokens 0-15
        group2, recurrent, mode "align"    [2, 5, 8]    states after 16, 32 and 40 tokens
        group3, a ring                     [1]          the rows of the open group of tokens

    The tables of the first two groups have the same ids, and so has the table of the ring. The
    table of the third has only block 8. In mode "none", which is the default, the first block holds
    the state. Other modes are refused.

    A consumer computes the last token of a prompt itself, so it needs the tokens before the last
    one. Tokens are counted from 0, so a prompt of N tokens ends with token N - 1. But after N
    tokens, vLLM keeps what the next query, of token N, reads. Sometimes that frees a block that the
    query of the last token reads. The window is 16 again, and a prompt has 48 tokens:

        query of token 48, the next one, reads tokens 33-48: vLLM keeps blocks from token 32 on
        query of token 47, the last one, reads tokens 32-47: nothing is missing

    With 47 tokens, the query of token 46 reads tokens 31-46. The next query reads tokens 32-47, so
    vLLM has freed the block of tokens 16-31. A producer must stop such a prompt one token early
    (`loses_a_token`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Group, read_config
from kvspec.adapters.vllm.engine import NULL_BLOCK, vllm_group
from kvspec.descriptors.request import BlockTable
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence


def block_tables(
    engine: EngineSpec,
    kv_cache_config: Any,  # noqa: ANN401 - vLLM's class, not imported
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
) -> dict[str, BlockTable]:
    """Return the block tables of one request, by group name, for a `TransferRequest`.

    Args:
        engine: The engine, from `engine_spec` or `from_vllm`.
        kv_cache_config: The `KVCacheConfig` of a rank of the engine.
        block_ids: The ids of each group, with null blocks in place, as
            `KVCacheBlocks.get_block_ids` and `request_finished_all_groups` contain them. Do not
            pass the lists of `get_unhashed_block_ids_all_groups`, which lack the null blocks.
        num_tokens: The tokens of the transfer: N - 1 for a whole prompt of N tokens (see
            docs/adapters.md).

    Returns:
        A table for each group of the engine. The table of a recurrent state has one block.

    Raises:
        SpecError: If a list is missing or too short for *num_tokens*, or no block holds the state.

    >>> import kvspec
    >>> from types import SimpleNamespace
    >>> sizes = {"block_size": 16, "head_size": 8, "dtype": "float16"}
    >>> spec = kvspec.FullAttentionSpec(total_num_kv_heads=4, **sizes)
    >>> group = kvspec.KVCacheGroup(name="group0", layers=["layers.0"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBHNC", null_block=0)
    >>> config = SimpleNamespace(
    ...     kv_cache_groups=[SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=spec)]
    ... )
    >>> block_tables(engine, config, [[7, 3, 9]], num_tokens=40)["group0"].block_ids.tolist()
    [7, 3, 9]
    """
    instance("engine", engine, EngineSpec)
    groups = read_config(FieldReader("kv_cache_config", kv_cache_config)).groups
    tables = sequence("block_ids", block_ids, "lists of ids")
    if len(tables) != len(groups):
        raise SpecError(
            "block_ids", f"{len(tables)} lists", f"one for each of {len(groups)} groups"
        )
    positive_int("num_tokens", num_tokens, least=0)
    request_tables: dict[str, BlockTable] = {}
    for number, (group, ids) in enumerate(zip(groups, tables, strict=True)):
        # A group that is not in the engine keeps no cache, or one that vLLM does not transfer. A
        # group of several classes is in the engine several times.
        for name in (g.name for g in engine.groups if vllm_group(g.name) == f"group{number}"):
            table = BlockTable(ids)
            # Ids keep their distance from the front. Pairing two lists from their ends moves the
            # wrong tokens if one engine has a block more (vllm#50558, vllm#46694).
            if type(_spec_of(group).value).__name__ == "MambaSpec":
                table = _state(group, name, table, num_tokens)
            else:
                _check_whole(engine, name, table, num_tokens)
            request_tables[name] = table
    return request_tables


def loses_a_token(engine: EngineSpec, num_tokens: int) -> bool:
    """Whether vLLM, after a prompt of *num_tokens*, lacks cache that the last token needs.

    A consumer computes the last token of a prompt itself. For that it needs recurrent states that
    have not seen the last token, and all tokens that the query of the last token reads. After
    *num_tokens*, the states have seen it, and vLLM has freed the blocks before the window of the
    next query. The producer of such a prompt must stop one token early.

    Args:
        engine: The engine of the producer.
        num_tokens: The tokens of the whole prompt.

    Returns:
        Whether the producer must stop one token early.

    >>> import kvspec
    >>> sizes = {"block_size": 16, "head_size": 8, "dtype": "float16"}
    >>> spec = kvspec.SlidingWindowSpec(total_num_kv_heads=4, sliding_window=16, **sizes)
    >>> group = kvspec.KVCacheGroup(name="group0", layers=["layers.0"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBHNC")
    >>> loses_a_token(engine, 47), loses_a_token(engine, 48)
    (True, False)
    """
    positive_int("num_tokens", num_tokens)
    for group in instance("engine", engine, EngineSpec).groups:
        spec, block = group.spec, engine.virtual_block(group)
        live, needed = spec.live_tokens(num_tokens), spec.live_tokens(num_tokens - 1)
        if spec.is_ring:
            block = 1  # vLLM writes rows of the open group, and perhaps no others.
        # vLLM frees whole blocks, also the earlier ones if the next query reads nothing.
        first_kept = live.start // block * block
        if not spec.parts[0].per_token or (needed and needed.start < first_kept):
            return True
    return False


def keeps_all_tokens(engine: EngineSpec, num_tokens: int) -> bool:
    """Return whether vLLM still has the caches of all tokens of a prompt of *num_tokens*.

    A window, a chunk, a ring or a state has lost earlier tokens, unless the prompt is short.
    """
    return all(group.spec.live_tokens(num_tokens).start == 0 for group in engine.groups)


def check_rings(engine: EngineSpec, computed: int, num_tokens: int) -> None:
    """Raise `SpecError` if vLLM's rings after *computed* tokens lack rows of *num_tokens* tokens.

    vLLM's kernels write the rows of the group that is open after a step, and perhaps no others. So
    a row of an earlier group may hold anything, although the ring has room for it.
    """
    for group in engine.groups:
        if group.spec.is_ring:
            held, needed = (group.spec.live_tokens(count) for count in (computed, num_tokens))
            if needed and needed.start < held.start:
                wanted = f"{computed}, for the ring of {group.name!r} has only the open group"
                raise SpecError("num_tokens", num_tokens, wanted)


def _check_whole(engine: EngineSpec, name: str, table: BlockTable, num_tokens: int) -> None:
    """Raise `SpecError` if a list is too short: the caller may have removed its null blocks."""
    group = engine.group(name)
    if group.spec.counts_prompt and set(group.layers) - set(group.excluded):
        count = -(-num_tokens // engine.virtual_block(group))
        if group.spec.is_ring:
            count = min(count, 1)
        if len(table.block_ids) < count:
            wanted = f"{count} ids for {num_tokens} tokens, null blocks in place"
            raise SpecError(f"block_ids[{name!r}]", table.block_ids.tolist(), wanted)


def _spec_of(group: Group) -> FieldReader:
    """Return the spec of a group's layers."""
    # A group whose layers are all on another stage has no names here, but it has the spec.
    return group.spec_of(group.layers[0]) if group.layers else group.spec


def _state(group: Group, name: str, table: BlockTable, num_tokens: int) -> BlockTable:
    """Return the table of the block that holds the state after *num_tokens*."""
    spec, ids = _spec_of(group), table.block_ids
    mode = spec.get("mamba_cache_mode")
    if mode.value not in (None, "none", "align"):
        raise SpecError(mode.path, mode.value, "'none' or 'align'")
    # Blocks after the place are scratch: vLLM uses them for states of speculative tokens.
    place = max(num_tokens - 1, 0) // spec.get("block_size").size() if mode.value == "align" else 0
    if not num_tokens:
        return BlockTable(ids[:0])
    if place >= len(ids) or ids[place] == NULL_BLOCK:
        wanted = f"a block at place {place}, with the state after {num_tokens} tokens"
        raise SpecError(f"block_ids[{name!r}]", ids.tolist(), wanted)
    return BlockTable(ids[place : place + 1])
