"""The overlap planner of torch's distributed checkpoints, given the same overlap as kvspec.

One saved chunk for each distinct range of heads (a checkpoint keeps one of several replicas), one
wanted chunk for the asking rank. What torch prepares once for a checkpoint is prepared outside of
the timed call.
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

STATES, CONTENT = 16, 128
"""Rows of a block, and elements of one head's row."""


class Overlap:
    """What one consumer rank of *local* reads, of *heads* sharded to *remote* producer ranks."""

    def __init__(self, heads: int, rank: int, local: int, remote: int) -> None:
        self.own = even_sharding(heads, local).ranges[rank]
        self.stored = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.bfloat16),
            size=torch.Size([heads, STATES, CONTENT]),
            chunks=[_chunk(each) for each in even_sharding(heads, remote).owned],
        )
        self.wanted = [_chunk(self.own)]

    def plan(self) -> list[Any]:
        """Return torch's read items: the call that is timed."""
        return planner_helpers.create_read_items_for_chunk_list("kv", self.stored, self.wanted)

    def heads(self, items: Iterable[Any]) -> list[range]:
        """Return the global heads that each of *items* moves, ascending."""
        starts = ((self.own.start + each.dest_offsets[0], each.lengths[0]) for each in items)
        return [range(start, start + length) for start, length in sorted(starts)]


def _chunk(heads: range) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size([heads.start, 0, 0]), sizes=torch.Size([len(heads), STATES, CONTENT])
    )
