"""The overlap planner of torch's distributed checkpoints, for the same overlap as kvspec.

There is one saved chunk for each distinct range of heads, because a checkpoint keeps one of several
replicas. There is one requested chunk for the reading rank. Preparation that torch does once for a
checkpoint happens outside the timed call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from kvspec.ownership.sharding import even_sharding

# Rows of a block, and elements of one head's row.
STATES, CONTENT = 16, 128


class Overlap:
    """The units that one of *local* consumer ranks reads of *heads* on *remote* producer ranks."""

    def __init__(self, heads: int, rank: int, local: int, remote: int) -> None:
        self.own = even_sharding(heads, local).ranges[rank]
        self.stored = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.bfloat16),
            size=torch.Size([heads, STATES, CONTENT]),
            chunks=[_chunk(each) for each in even_sharding(heads, remote).owned],
        )
        self.wanted = [_chunk(self.own)]

    def plan(self) -> list[Any]:
        """Return torch's read items. This call is timed."""
        return planner_helpers.create_read_items_for_chunk_list("kv", self.stored, self.wanted)

    def heads(self, items: Iterable[Any]) -> list[range]:
        """Return the global heads that each of *items* moves, in ascending order."""
        starts = ((self.own.start + each.dest_offsets[0], each.lengths[0]) for each in items)
        return [range(start, start + length) for start, length in sorted(starts)]


def _chunk(heads: range) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size([heads.start, 0, 0]), sizes=torch.Size([len(heads), STATES, CONTENT])
    )
