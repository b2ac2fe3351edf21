"""Compare the transfers of kvspec with those of vLLM's own connector.

The 226 scenarios were recorded by running vLLM 0.33: the placements of its tensors and the copies
that its connector posts. The adapter converts the specs and tensors as it does for a caller. If
vLLM is right, kvspec moves the same bytes in at most as many descriptors. If vLLM is wrong or
rejects the scenario, every byte is compared with the right content.
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
from refused import refusal
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

LARGE = range(209, 216)
"""The rows of whole models, of which one runs in each check."""


def rows_with(status: str) -> Any:
    """Return the decorator that runs a test for all rows with *status*, large ones at night."""
    rows = [
        pytest.param(row, id=name, marks=pytest.mark.slow if at in LARGE else ())
        for at, (row, name) in enumerate(zip(RECORDED, IDS, strict=True))
        if row["status"] == status
    ]
    return pytest.mark.parametrize("row", rows)


def layout_of(row: dict[str, Any], side: str) -> str:
    """Return the layout of one side, "p" (producer) or "d" (consumer)."""
    return str(row.get("p_layout", row["layout"]) if side == "p" else row["layout"])


def engine_of(row: dict[str, Any], side: str) -> kvspec.EngineSpec:
    """Return the engine of one side from the adapter.

    It has no null block, because block 0 was recorded as an ordinary block.
    """
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
    """Return the engine, the caches and the buffers of one side. vLLM placed the tensors."""
    engine, config = engine_of(row, side), config_of(row, side)
    caches, buffers = {}, {}
    for rank in engine.parallel.ranks:
        flat = buffers[rank] = np.zeros(
            max(tensor.offset + tensor.size for tensor in config.kv_cache_tensors), np.uint8
        )
        tensors = tensors_of(config, layout_of(row, side), flat)
        caches[rank] = vllm.rank_cache(engine, rank, tensors)
    return engine, caches, buffers


def request_in(
    row: dict[str, Any], producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec
) -> kvspec.TransferRequest:
    """Return the recorded request of all tokens that both tables hold."""
    num_tokens, tables = [], []
    for side, engine in (("p", producer), ("d", consumer)):
        ids = row[f"{side}_block_ids"]
        tables.append({f"group{at}": group for at, group in enumerate(ids)})
        spec = engine.groups[0].spec
        num_tokens.append(len(ids[0]) * spec.block_size * engine.parallel.context_size)
    return request_of(min(num_tokens), *tables, cached_tokens=row.get("cached_tokens", 0))


Bytes = npt.NDArray[np.int64]


def bytes_of(copies: Any) -> Bytes:
    """Return the bytes (rank, remote, local) of *copies* (rank, local, remote, length), sorted."""
    rows = [np.empty((0, 3), np.int64)]
    for rank, local, remote, length in copies:
        offsets = np.arange(length)
        rows.append(np.column_stack([np.full(length, rank), remote + offsets, local + offsets]))
    return in_order(np.concatenate(rows))


def in_order(rows: Bytes) -> Bytes:
    """Return *rows* sorted."""
    return rows[np.lexsort(rows.T)]


def permuted(row: dict[str, Any], local: Bytes) -> Bytes:
    """Return the final places of *local* bytes after vLLM's permutation of received blocks.

    vLLM writes a producer's [heads, tokens, content] into each part of a larger block, and then
    permutes the block on the device. kvspec writes each byte to its final place.
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
def test_bytes_equal_vllms_if_vllm_is_right(row: dict[str, Any]) -> None:
    """Bytes that vLLM moves go to the same places, all live ones, in at most as many descriptors.

    VLLM moves whole blocks, with dead tokens. kvspec moves those that spare a descriptor. If vLLM
    permutes blocks on the device, kvspec needs a descriptor for each head.
    """
    producer, consumer = side_of(row, "p"), side_of(row, "d")
    request = request_in(row, producer[0], consumer[0])
    plan = kvspec.plan_transfer(producer[0], consumer[0])
    permutes = row["name"] == "block_size_ratio" and row["d_specs"][0]["num_kv_heads"] > 1
    for recorded in row["d_ranks"]:
        rank = kvspec.RankId(tp=recorded["rank"])
        place = consumer[2][rank].ctypes.data
        live, ours = (
            [
                (source.tp, target - place, start - producer[2][source].ctypes.data, length)
                for source in plan.sources(rank)
                for start, target, length in described(
                    kvspec.build_table(
                        plan, producer[1][source], consumer[1][rank], dead_tokens=dead
                    ),
                    request,
                )
            ]
            for dead in (False, True)
        )
        theirs = [(source, *copy) for source, copies in recorded["transfers"] for copy in copies]
        expected = bytes_of(theirs)
        if permutes:
            expected[:, 2] = permuted(row, expected[:, 2])
        wanted, moved, all_of_vllm = (
            set(map(tuple, each.tolist())) for each in (bytes_of(live), bytes_of(ours), expected)
        )
        assert len(all_of_vllm) == len(expected)  # VLLM copies no byte twice.
        assert wanted <= moved <= all_of_vllm
        assert len(ours) <= len(theirs) * (row["d_specs"][0]["num_kv_heads"] if permutes else 1)


# (view, right content)
Truth = tuple[Any, Any]


def truths(row: dict[str, Any], side: str, tensors: dict[str, Any], rank: int) -> list[Truth]:
    """Return the views of the recorded blocks of one rank with their right contents.

    x, heads and SSM heads are sharded. Every rank has the only group of B and of C.
    """
    size, total = row[f"{side}tp"], row["K"]
    heads = range(rank * total // size, max(rank * total // size + 1, (rank + 1) * total // size))
    views: list[Truth] = []
    for ids, members in zip(row[f"{side}_block_ids"], row["groups"], strict=True):
        for layer in (f"layer.{at}" for at in members):
            spec, tensor = row[f"{side}_specs"][members[0]], tensors[layer]
            if spec["cls"] == "MambaSpec":
                views += state_truth(layer, tensor, ids[0], rank, spec["shapes"])
                continue
            for at, block in enumerate(ids):
                tokens = np.arange(at * spec["block_size"], (at + 1) * spec["block_size"])
                if "num_head_slots" not in spec:
                    views.append((tensor[block], content(layer, "kv", heads, tokens, 64)))
                    continue
                for plane in (0, 1):
                    right = content(layer, "kv"[plane], heads, tokens, spec["head_size"])
                    right = right.swapaxes(0, 1).reshape(len(tokens), -1)
                    views.append((tensor[block, plane], right))
    return views


def state_truth(
    layer: str, tensors: list[Any], slot: int, rank: int, shapes: list[list[int]]
) -> list[Truth]:
    """Return the views and contents of a Mamba2 state of one group, with state size 4."""
    (_, rows), (heads, dim, state) = shapes
    width, all_rows = heads * dim, np.arange(rows)
    x = content(layer, "x", range(rank * width, (rank + 1) * width), all_rows, 1)
    b, c = (content(layer, name, range(state), all_rows, 1) for name in "BC")
    conv = np.concatenate([x, b, c])[:, :, 0]
    own = range(rank * heads, (rank + 1) * heads)
    ssm = content(layer, "ssm", own, np.zeros(1, np.int64), dim * state)
    return [(tensors[0][slot], conv), (tensors[1][slot], ssm.reshape(heads, dim, state))]


@rows_with("wrong")
def test_bytes_are_right_if_vllm_is_wrong(row: dict[str, Any]) -> None:
    """VLLM is wrong for Mamba2 with one group, and for K and V as two head slots."""
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
        for view, right in truths(row, "p", tensors, rank.tp):
            view[...] = right
    plan = kvspec.plan_transfer(producer[0], consumer[0])
    for rank, tensors in views["d"].items():
        for source in plan.sources(rank):
            table = kvspec.build_table(plan, producer[1][source], consumer[1][rank])
            for start, target, length in described(table, request):
                ctypes.memmove(target, start, length)
        for view, right in truths(row, "d", tensors, rank.tp):
            assert right.tolist() == view.tolist()


@rows_with("refused")
def test_bytes_are_right_if_vllm_rejects(row: dict[str, Any]) -> None:
    """Kvspec rejects only pages with packed heads, because one byte belongs to several heads."""
    producer, consumer = engine_of(row, "p"), engine_of(row, "d")
    if row["name"] == "packing.nvfp4":
        error = refusal(lambda: kvspec.plan_transfer(producer, consumer), kvspec.MismatchError)
        assert error.mismatches
        assert all("heads" in mismatch.why for mismatch in error.mismatches)
        return
    assert [] == moves(producer, consumer, 70)


def test_every_recorded_row_is_counted() -> None:
    """VLLM is right in 181 of 226 rows and wrong in 12. It rejects 33, and kvspec 2 of these."""
    assert Counter(ok=181, wrong=12, refused=33) == Counter(row["status"] for row in RECORDED)
    packed = [row for row in RECORDED if row["name"] == "packing.nvfp4"]
    assert 2 == sum(row["status"] == "refused" for row in packed)
