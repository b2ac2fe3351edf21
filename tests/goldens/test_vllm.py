"""What vLLM's own connector moves, and what this library moves instead.

Recorded by running vLLM 0.33: for 226 scenarios the placements of its tensors and the copies that
its connector posts. The specs and tensors
go through the adapter as a caller's would. Where vLLM is right the same bytes move, in no more
descriptors; where it is wrong or refuses, every byte is compared with what should be there.
"""

from __future__ import annotations

import ctypes
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from builders import request as request_of
from moved import moves
from vllm_like import B12X, FLASH, MSA, config_of, engine_spec, tensors_of

import kvspec
from kvspec.adapters import vllm
from kvspec.testing.oracle import content
from kvspec.testing.world import described

GOLDENS = Path(__file__).parent
RECORDED: list[dict[str, Any]] = json.loads(
    gzip.decompress((GOLDENS / "vllm_nixl_descs.json.gz").read_bytes())
)["rows"]
GROUPS = {"hybrid.mamba2.g1": 1, "hybrid.mamba2.g8": 8}
BACKENDS = {"packing.slots2": B12X, "packing.nvfp4": MSA}
IDS = [
    f"{at}-{r['name'].split('(')[0]}-K{r['K']}-{r['layout']}-tp{r['ptp']}to{r['dtp']}"
    for at, r in enumerate(RECORDED)
]


def rows_with(status: str) -> Any:
    """Return the parametrisation over the rows with that *status*."""
    found = []
    for row, name in zip(RECORDED, IDS, strict=True):
        if row["status"] == status:
            found.append(pytest.param(row, id=name))
    return pytest.mark.parametrize("row", found)


def layout_of(row: dict[str, Any], side: str) -> str:
    """Return one side's layout."""
    return str(row.get("p_layout", row["layout"]) if side == "p" else row["layout"])


def engine_of(row: dict[str, Any], side: str) -> kvspec.EngineSpec:
    """Return the engine of one side, read by the adapter; id 0 was recorded as a block like any."""
    config = config_of(row, side)
    engine = engine_spec(
        config,
        parallel=kvspec.ParallelConfig(
            tp_size=row[f"{side}tp"],
            dcp_size=row[f"{side}dcp"],
            interleave_size=config.kv_cache_groups[0].kv_cache_spec.block_size,
        ),
        total_num_kv_heads=row["K"],
        layout=layout_of(row, side),
        n_groups=GROUPS.get(row["name"]),
        backends=BACKENDS.get(row["name"], FLASH),
    )
    return attrs.evolve(engine, null_block=None)


Side = tuple[kvspec.EngineSpec, dict[kvspec.RankId, kvspec.RankCache], dict[kvspec.RankId, Any]]


def side_of(row: dict[str, Any], side: str) -> Side:
    """Return one side's engine, caches and buffers; the tensors lie where vLLM placed them."""
    engine, config = engine_of(row, side), config_of(row, side)
    caches, buffers = {}, {}
    for rank in engine.parallel.ranks:
        flat = buffers[rank] = np.zeros(
            max(t.offset + t.size for t in config.kv_cache_tensors), np.uint8
        )
        tensors = tensors_of(config, layout_of(row, side), flat)
        caches[rank] = vllm.rank_cache(engine, rank, tensors, config.num_blocks)
    return engine, caches, buffers


def request_in(
    row: dict[str, Any], producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec
) -> kvspec.TransferRequest:
    """Return the recorded request: its tokens are those that both sides' tables hold."""
    held, tables = [], []
    for side, engine in (("p", producer), ("d", consumer)):
        ids = row[f"{side}_block_ids"]
        tables.append({f"group{at}": group for at, group in enumerate(ids)})
        spec = engine.groups[0].spec
        held.append(len(ids[0]) * spec.block_size * engine.parallel.context_size)
    return request_of(min(held), *tables, cached_tokens=row.get("cached_tokens", 0))


Bytes = npt.NDArray[np.int64]


def bytes_of(copies: Any) -> Bytes:
    """Return the sorted bytes (rank, remote, local) of copies (rank, local, remote, length)."""
    found = [np.empty((0, 3), np.int64)]
    for rank, local, remote, length in copies:
        at = np.arange(length)
        found.append(np.column_stack([np.full(length, rank), remote + at, local + at]))
    return in_order(np.concatenate(found))


def in_order(rows: Bytes) -> Bytes:
    """Return *rows* sorted."""
    return rows[np.lexsort(rows.T)]


def permuted(row: dict[str, Any], local: Bytes) -> Bytes:
    """Return where bytes end after vLLM's own permutation of blocks that it received in parts.

    vLLM writes a producer's [heads, tokens, content] into each part of a larger block, and then
    permutes the block on the device; we write it in its place at once.
    """
    spec, other = row["d_specs"][0], row["p_specs"][0]
    sub_blocks = spec["block_size"] // other["block_size"]
    content_bytes = spec["head_size"] + spec["head_size_v"]
    heads, rows = spec["num_kv_heads"], other["block_size"]
    page, rest = np.divmod(local, spec["page_size_bytes"])
    sub_block, head, token, byte = np.unravel_index(rest, (sub_blocks, heads, rows, content_bytes))
    inside = np.ravel_multi_index(
        (head, sub_block, token, byte), (heads, sub_blocks, rows, content_bytes)
    )
    return page * spec["page_size_bytes"] + inside


@rows_with("ok")
def test_we_move_what_vllm_moves(row: dict[str, Any]) -> None:
    """The same bytes of the same ranks come to the same places, in no more descriptors.

    Only where vLLM permutes on the device what it received do we need more: a run ends with a head.
    """
    producer, consumer = side_of(row, "p"), side_of(row, "d")
    request = request_in(row, producer[0], consumer[0])
    plan = kvspec.plan_transfer(producer[0], consumer[0])
    permutes = row["name"] == "block_size_ratio" and row["d_specs"][0]["num_kv_heads"] > 1
    for recorded in row["d_ranks"]:
        rank = kvspec.RankId(tp=recorded["rank"])
        place = consumer[2][rank].ctypes.data
        ours = [
            (source.tp, b - place, a - producer[2][source].ctypes.data, length)
            for source in plan.sources(rank)
            for a, b, length in described(
                kvspec.build_table(plan, producer[1][source], consumer[1][rank]), request
            )
        ]
        theirs = [(source, *copy) for source, copies in recorded["transfers"] for copy in copies]
        wanted = bytes_of(theirs)
        if permutes:
            wanted[:, 2] = permuted(row, wanted[:, 2])
        assert np.array_equal(in_order(wanted), bytes_of(ours))
        assert len(ours) <= len(theirs) * (row["d_specs"][0]["num_kv_heads"] if permutes else 1)


Truth = tuple[Any, Any]


def truths(row: dict[str, Any], side: str, tensors: dict[str, Any], rank: int) -> list[Truth]:
    """Return (view, what it should hold) of the recorded blocks of one rank, worked out by hand.

    x, heads and SSM heads are sharded; the one group of B and of C is on every rank.
    """
    size, total = row[f"{side}tp"], row["K"]
    heads = range(rank * total // size, max(rank * total // size + 1, (rank + 1) * total // size))
    found: list[Truth] = []
    for ids, members in zip(row[f"{side}_block_ids"], row["groups"], strict=True):
        for layer in (f"layer.{at}" for at in members):
            spec, tensor = row[f"{side}_specs"][members[0]], tensors[layer]
            if spec["cls"] == "MambaSpec":
                found += state_truth(layer, tensor, ids[0], rank, spec["shapes"])
                continue
            for at, block in enumerate(ids):
                tokens = np.arange(at * spec["block_size"], (at + 1) * spec["block_size"])
                if "num_head_slots" not in spec:
                    found.append((tensor[block], content(layer, "kv", heads, tokens, 64)))
                    continue
                for plane in (0, 1):
                    true = content(layer, "kv"[plane], heads, tokens, spec["head_size"])
                    true = true.swapaxes(0, 1).reshape(len(tokens), -1)
                    found.append((tensor[block, plane], true))
    return found


def state_truth(
    layer: str, tensors: list[Any], slot: int, rank: int, shapes: list[list[int]]
) -> list[Truth]:
    """Return the same of a Mamba2 state of one group, state size 4."""
    (_, rows), (heads, dim, state) = shapes
    width, every = heads * dim, np.arange(rows)
    x = content(layer, "x", range(rank * width, (rank + 1) * width), every, 1)
    b, c = (content(layer, name, range(state), every, 1) for name in "BC")
    conv = np.concatenate([x, b, c])[:, :, 0]
    own = range(rank * heads, (rank + 1) * heads)
    ssm = content(layer, "ssm", own, np.zeros(1, np.int64), dim * state)
    return [(tensors[0][slot], conv), (tensors[1][slot], ssm.reshape(heads, dim, state))]


@rows_with("wrong")
def test_where_vllm_is_wrong_we_are_right(row: dict[str, Any]) -> None:
    """Every byte is the one that belongs there: Mamba2 of one group, K and V as two head slots."""
    producer, consumer = side_of(row, "p"), side_of(row, "d")
    request = request_in(row, producer[0], consumer[0])
    views = {
        side: {
            rank: tensors_of(config_of(row, side), layout_of(row, side), flat)
            for rank, flat in buffers.items()
        }
        for side, (_, _, buffers) in (("p", producer), ("d", consumer))
    }
    for rank, tensors in views["p"].items():
        for view, true in truths(row, "p", tensors, rank.tp):
            view[...] = true
    plan = kvspec.plan_transfer(producer[0], consumer[0])
    for rank, tensors in views["d"].items():
        for source in plan.sources(rank):
            table = kvspec.build_table(plan, producer[1][source], consumer[1][rank])
            for a, b, length in described(table, request):
                ctypes.memmove(b, a, length)
        for view, true in truths(row, "d", tensors, rank.tp):
            assert true.tolist() == view.tolist()


@rows_with("refused")
def test_what_vllm_refuses_we_move(row: dict[str, Any]) -> None:
    """It arrives byte by byte; only packed pages, whose heads cannot be cut, are refused."""
    producer, consumer = engine_of(row, "p"), engine_of(row, "d")
    if row["name"] == "packing.nvfp4":
        with pytest.raises(kvspec.MismatchError, match="its bytes mix all heads of a rank"):
            kvspec.plan_transfer(producer, consumer)
        return
    assert [] == moves(producer, consumer, 70)


def test_every_recorded_row_is_tested() -> None:
    """226 rows: 181 right, 12 wrong, 33 refused by vLLM; we refuse 2 of these."""
    assert Counter(ok=181, wrong=12, refused=33) == Counter(r["status"] for r in RECORDED)
