"""vLLM's block tables of one request, read as this library's.

Law: a list's place says its group and an id's place says its tokens; the null block stays where it
stands. Only a state's table is cut: to the one block that holds the state. What vLLM has freed is
told before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Group, read_config
from kvspec.adapters.vllm.engine import NULL_BLOCK
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
    """Return the tables of one request, by group of *engine*, for a `TransferRequest`.

    *engine*: from `engine_spec` or `from_vllm`. *block_ids*: a list for each of *kv_cache_config*'s
    groups, as `KVCacheBlocks.get_block_ids` and `request_finished_all_groups` have them, null
    blocks in place: not those without positions (`get_unhashed_block_ids_all_groups`), which are
    refused where they are short of *num_tokens*.
    *num_tokens*: the request's own, N - 1 of a whole prompt of N (see docs/adapters.md).

    A recurrent state stands at the table's front, or in mode ``align`` in the block of the last of
    *num_tokens*; blocks after it are scratch.
    """
    instance("engine", engine, EngineSpec)
    groups = read_config(FieldReader("kv_cache_config", kv_cache_config)).groups
    tables = sequence("block_ids", block_ids, "lists of ids")
    if len(tables) != len(groups):
        raise SpecError(
            "block_ids", f"{len(tables)} lists", f"one for each of {len(groups)} groups"
        )
    known = {group.name for group in engine.groups}
    positive_int("num_tokens", num_tokens, least=0)
    found: dict[str, BlockTable] = {}
    for number, (group, ids) in enumerate(zip(groups, tables, strict=True)):
        name = f"group{number}"
        if name in known:
            table = BlockTable(ids)
            if type(_spec_of(group).value).__name__ == "MambaSpec":
                table = _state(group, name, table, num_tokens)
            else:
                _check_whole(engine, name, table, num_tokens)
            found[name] = table
    return found


def loses_a_token(engine: EngineSpec, num_tokens: int) -> bool:
    """Return whether vLLM, having computed *num_tokens*, lacks what the last one's query reads.

    A consumer computes the last token of a prompt itself: it needs states that have not seen it,
    and all tokens that it looks back at. By then vLLM has freed the blocks that end before what the
    *next* token looks back at. A producer of such a prompt has to stop one token early.
    """
    positive_int("num_tokens", num_tokens)
    for group in instance("engine", engine, EngineSpec).groups:
        spec, block = group.spec, engine.virtual_block(group)
        live, needed = spec.live_tokens(num_tokens), spec.live_tokens(num_tokens - 1)
        kept = (live.start if live else num_tokens) // block * block
        if not spec.parts[0].per_token or (needed and needed.start < kept):
            return True
    return False


def _check_whole(engine: EngineSpec, name: str, table: BlockTable, num_tokens: int) -> None:
    """Raise `SpecError` for a list that is short: one from which null blocks were dropped is."""
    group = engine.group(name)
    if group.spec.counts_prompt and set(group.layers) - set(group.excluded):
        wanted = -(-num_tokens // engine.virtual_block(group))
        if len(table.block_ids) < wanted:
            told = f"{wanted} ids for {num_tokens} tokens, null blocks in place"
            raise SpecError(f"block_ids[{name!r}]", table.block_ids.tolist(), told)


def _spec_of(group: Group) -> FieldReader:
    """Return what a group's layers are, also where all of them are another stage's."""
    return group.spec_of(group.layers[0]) if group.layers else group.spec


def _state(group: Group, name: str, table: BlockTable, num_tokens: int) -> BlockTable:
    """Return the table of the block that holds the state after *num_tokens*."""
    spec, ids = _spec_of(group), table.block_ids
    mode = spec.get("mamba_cache_mode")
    if mode.value not in (None, "none", "align"):
        raise SpecError(mode.path, mode.value, "'none' or 'align'")
    place = max(num_tokens - 1, 0) // spec.get("block_size").size() if mode.value == "align" else 0
    if not num_tokens:
        return BlockTable(ids[:0])
    if place >= len(ids) or ids[place] == NULL_BLOCK:
        wanted = f"a block at place {place}, with the state after {num_tokens} tokens"
        raise SpecError(f"block_ids[{name!r}]", ids.tolist(), wanted)
    return BlockTable(ids[place : place + 1])
