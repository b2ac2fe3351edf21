"""Read the shards in which vLLM's connector for Mooncake's store keeps blocks of any TP size.

Invariant: only keys that state the format of the payload are read. Other keys of this connector
name a rank, and neither they nor the payload state what the memory of the rank looked like.

How it works:
    With `store_tp_size`, a rank stores one object for each of its shards of the heads:

        [<prefix>@]<model>@store_tp:<shards>@store_pp:<stages>@store_format:tp_shared_<layout>
        @tp_rank:<shard>@pcp0@dcp0@pp_rank:<stage>@group:0@<hash>        (one line)

    The payload has all layers of the stage, one after the other, with packed keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvspec.adapters.foreign_pages import ForeignObjects, copy_object
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int, sequence, texts
from kvspec.specs import FullAttentionSpec
from kvspec.stored.placement import PageObject, StoredSpec

# Mooncake's name of the layout -> the letters of kvspec.
MOONCAKE_LAYOUTS = {"lbhnc": "BLHNC", "lbnhc": "BLNHC"}


class MooncakeShards(ForeignObjects):
    """Shards of vLLM's `MooncakeStoreConnector`, read only.

    The name of a page is the hash of the last block that vLLM hashed in it.

    Args:
        objects: A mapping from keys to bytes, such as a client of the store.
        group: All layers, in the order in which vLLM registers them. The key states neither the
            layers nor the type, the heads, or their size.
        model: Name of the model. The key has only what follows the last "/", so two models may
            have equal keys.
        block_size: Tokens of a block, which the key does not state.
        store_tp_size: Number of shards.
        layout: vLLM's layout, "lbhnc" or "lbnhc".
        stages: Names of the layers of each pipeline stage. One stage by default.
        prefix: The setting `cache_prefix`.
        accept_unverified: True, since the objects have no checksum.

    Raises:
        SpecError: If an argument is missing or does not fit the others.
    """

    FORMAT = "Mooncake's shard"

    def __init__(
        self,
        objects: Mapping[str, Any],
        group: KVCacheGroup,
        *,
        model: str,
        block_size: int,
        store_tp_size: int,
        layout: str,
        stages: Iterable[Iterable[str]] | None = None,
        prefix: str = "",
        accept_unverified: bool = False,
    ) -> None:
        self.source = mapping("objects", objects, "keys to bytes")
        spec = instance("group", group, KVCacheGroup).spec
        if type(spec) is not FullAttentionSpec:
            raise SpecError("group.spec", type(spec).__name__, "full attention, as in such shards")
        if layout not in MOONCAKE_LAYOUTS:
            raise SpecError("layout", layout, f"one of {', '.join(MOONCAKE_LAYOUTS)}")
        shards = positive_int("store_tp_size", store_tp_size)
        if spec.total_num_kv_heads % shards:
            expected = f"a divisor of the {spec.total_num_kv_heads} heads of the model"
            raise SpecError("store_tp_size", shards, expected)
        own = None
        if stages is not None:
            given = sequence("stages", stages, "layer names of each stage")
            own = [[*texts("stages", each, "layer names")] for each in given]
        name = instance("model", model, str).rstrip("/").rpartition("/")[2]
        start = f"{prefix}@{name}" if instance("prefix", prefix, str) else name
        self._start = (
            f"{start}@store_tp:{shards}@store_pp:{len(own or [0])}@store_format:tp_shared_{layout}"
        )
        placement = StoredSpec(
            groups=[group],
            page_tokens=block_size,
            head_groups=shards,
            layer_ranges=own,
            layout=MOONCAKE_LAYOUTS[layout],
        )
        super().__init__([group], placement, accept_unverified=accept_unverified)

    def name_of(self, page: str, stored: PageObject) -> str:
        """Return Mooncake's key of an object."""
        chunk = stored.chunk
        return f"{self._start}@tp_rank:{chunk.tp}@pcp0@dcp0@pp_rank:{chunk.pp}@group:0@{page}"

    def has_name(self, name: str) -> bool:
        """Return whether an object is there."""
        return name in self.source

    def read_name(self, name: str, stored: PageObject, place: str, into: memoryview) -> None:  # noqa: ARG002
        """Read an object."""
        copy_object(self.source, name, place, into)
