"""Mooncake's KV cache planner as a program for its own environment.

The program reads one JSON object, the work, and then one command a line from its input. It answers
each command with one JSON object on a line. It imports Mooncake and the standard library, and
nothing of kvspec, because it runs in another environment: `python mooncake_planner.py < commands`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from array import array
from collections.abc import Callable
from importlib import metadata
from typing import Any

from mooncake.reshard import kv_cache as mooncake
from mooncake.reshard.kv_cache import transfer as lowering

RESOURCE, REVISION, OPERATION = "kv", "1", "bench"
NAMES = {"k": mooncake.KVCacheComponent.KEY, "v": mooncake.KVCacheComponent.VALUE}


def placement(work: dict[str, Any], side: str) -> Any:  # noqa: ANN401 - Mooncake has no stubs
    """Return the places of the heads on one *side* of *work*."""
    ranks = work[side]
    participants = tuple(
        mooncake.KVCacheTopologyParticipant(rank["name"], mooncake.KVCacheRank(tp=at))
        for at, rank in enumerate(ranks)
    )
    sizes = {"dp_size": 1, "pp_size": 1, "tp_size": len(ranks)}
    topology = mooncake.KVCacheTopology(**sizes, participants=participants)
    parts = [
        mooncake.KVCachePlacementPart(
            resource_id=RESOURCE,
            revision=REVISION,
            placement_set_id=side,
            topology_id=topology.topology_id,
            participant_id=rank["name"],
            rank=mooncake.KVCacheRank(tp=at),
            descriptor=descriptor(work),
            layer_ids=tuple(range(work["layers"])),
            head_start=rank["heads"][0],
            head_count=rank["heads"][1] - rank["heads"][0],
        )
        for at, rank in enumerate(ranks)
    ]
    return mooncake.assemble_kv_cache_placement(parts, **sizes)


def descriptor(work: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the sizes of the model."""
    return mooncake.KVCacheDescriptor(
        global_layer_ids=tuple(range(work["layers"])),
        dtype="bfloat16",
        itemsize=2,
        page_size=work["page"],
        total_kv_heads=work["heads"],
        key_head_dim=work["head_size"],
        value_head_dim=work["head_size"],
    )


def binding(work: dict[str, Any], side: str, rank: dict[str, Any], placed: Any, shot: Any) -> Any:  # noqa: ANN401
    """Return one rank's memory: a range for each page of each layer."""
    first, last = rank["heads"]
    region = f"{rank['name']}-memory"
    ranges = [
        mooncake.KVCacheResolvedRange(
            global_layer_id=layer,
            component=NAMES[part],
            token_start=page * work["page"],
            token_count=work["page"],
            head_start=first,
            head_count=last - first,
            region_id=region,
            offset_bytes=offset + block * rank["block_stride"],
            token_stride_bytes=rank["token_stride"],
            head_stride_bytes=rank["head_stride"],
        )
        for layer, part, offset in rank["buffers"]
        for page, block in enumerate(work["blocks"][side])
    ]
    memory = mooncake.KVCacheRegisteredRegion(region, rank["name"], rank["base"], rank["nbytes"])
    return mooncake.KVCacheResolvedRuntimeBinding(
        operation_id=OPERATION,
        resource_id=RESOURCE,
        placement_id=placed.placement_id,
        placement_digest=placed.digest,
        instance_id=rank["name"],
        revision=REVISION,
        participant_id=rank["name"],
        snapshot_id=shot.snapshot_id,
        snapshot_digest=shot.digest,
        regions=(memory,),
        ranges=tuple(ranges),
    )


class Planner:
    """Both placements and all memory of a work, made once. Each command is timed by itself."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.source, self.target = placement(work, "producer"), placement(work, "consumer")
        self.shot = mooncake.KVCacheSnapshotDescriptor(
            namespace="bench",
            resource_id=RESOURCE,
            model_id="model",
            model_revision="1",
            token_start=0,
            token_count=work["tokens"],
            token_fingerprint=hashlib.sha256(b"tokens").hexdigest(),
            semantic_fingerprint=hashlib.sha256(b"meaning").hexdigest(),
        )
        self.targets = [each["name"] for each in work["consumer"]]
        self.sources, self.sinks = (
            tuple(binding(work, side, rank, placed, self.shot) for rank in work[side])
            for side, placed in (("producer", self.source), ("consumer", self.target))
        )
        self.plans = self.plan()

    def plan(self) -> tuple[Any, ...]:
        """Return the logical plans of every target."""
        return tuple(
            mooncake.plan_kv_cache_transfer_to_local_target(
                self.source, self.target, name, snapshot=self.shot
            )
            for name in self.targets
        )

    def lower(self) -> tuple[Any, ...]:
        """Return the writes of all ranks through the public class, which also checks them."""
        plan = mooncake.KVCacheRuntimeTransferPlan(OPERATION, self.plans, self.sources, self.sinks)
        return plan.writes

    def lower_only(self) -> tuple[Any, ...]:
        """Return the writes of the inner function alone, without checks and digest."""
        limits = mooncake.KVCacheTransferLimits()
        return lowering._lower(self.plans, self.sources, self.sinks, limits)  # noqa: SLF001


def timed(work: Callable[[], object]) -> tuple[object, dict[str, Any]]:
    """Return the result of *work*, and its seconds."""
    started = time.perf_counter()
    result = work()
    return result, {"seconds": time.perf_counter() - started}


def digest(writes: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the number of *writes* and a digest of their sorted 64-bit columns."""
    rows = sorted((w.source_address, w.target_address, w.nbytes) for w in writes)
    flat = array("Q", [number for row in rows for number in row])
    return {"writes": len(rows), "sha256": hashlib.sha256(flat.tobytes()).hexdigest()}


def main() -> None:
    """Answer commands until the input ends."""
    planner = Planner(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        match line.strip():
            case "version":
                names = metadata.packages_distributions()["mooncake"]
                answer = {"version": f"{names[0]} {metadata.version(names[0])}"}
            case "digest":
                answer = digest(planner.lower())
            case "plan" | "lower" | "lower_only" as command:
                _, answer = timed(getattr(planner, command))
            case command:
                answer = {"error": f"unknown command {command!r}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
