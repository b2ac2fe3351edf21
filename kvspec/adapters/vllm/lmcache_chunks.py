"""Read the chunks of LMCache that state their contents.

Invariant: a chunk is read only if its metadata state the length, the type, the shape and a format
whose meaning has not changed.

How it works:
    LMCache inside of an engine stores a chunk of one worker under a key. Its remote backends store
    the metadata of the chunk, too. They are seven numbers of four bytes:

        <model>@<world size>@<worker>@<hash>@<dtype>       the key
        length, format, dtype, 2, layers, tokens, elements     the metadata

    With the format `KV_2LTD`, all keys lie before all values: K, layer, token, head, element. All
    heads of a worker are one axis. So heads and their size have to be known.

    LMCache's server has keys without a type, and its files and its disk backend have no metadata.
    The format of latents, `KV_MLA_FMT`, has had two meanings. kvspec reads none of these.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from kvspec.adapters.foreign_pages import ForeignObjects, copy_object
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, StoreError
from kvspec.inputs import instance, mapping, positive_int
from kvspec.specs import FullAttentionSpec
from kvspec.stored.placement import PageObject, StoredSpec

KV_2LTD = 1
# Type of an element -> its name in keys, and its number in metadata.
LMCACHE_DTYPES = {
    "float16": ("half", (1, 2)),
    "bfloat16": ("bfloat16", (3,)),
    "float32": ("float", (4,)),
    "float8_e4m3fn": ("fp8_e4m3fn", (7,)),
    "float8_e5m2": ("fp8_e5m2", (8,)),
}
_METADATA = struct.Struct("<iiiiiii")


class LMCacheChunks(ForeignObjects):
    """Chunks of LMCache in a remote backend, read only.

    The name of a page is LMCache's hash of the chunk, as hexadecimal digits.

    Args:
        objects: A mapping from keys to the bytes of chunks.
        metadata: A mapping from the same keys to the metadata. Without them, a chunk states neither
            its type nor its shape.
        group: All layers, in the order of the engine.
        model: Name of the model in the keys.
        world_size: Number of workers, which must be the TP size: a key does not state stages.
        chunk_size: Tokens of a chunk. Shorter chunks at the end of a prompt are refused.
        accept_unverified: True, since the chunks have no checksum.

    Raises:
        SpecError: If an argument is missing or does not fit the others.
    """

    FORMAT = "LMCache's chunk"

    def __init__(
        self,
        objects: Mapping[str, Any],
        metadata: Mapping[str, Any],
        group: KVCacheGroup,
        *,
        model: str,
        world_size: int,
        chunk_size: int,
        accept_unverified: bool = False,
    ) -> None:
        self.source = mapping("objects", objects, "keys to bytes")
        if metadata is None:
            rule = "needed: without metadata, a chunk states neither its format nor its shape"
            raise SpecError("metadata", None, rule=rule)
        self.metadata = mapping("metadata", metadata, "keys to metadata")
        spec = instance("group", group, KVCacheGroup).spec
        if type(spec) is not FullAttentionSpec or spec.dtype not in LMCACHE_DTYPES:
            dtypes = ", ".join(LMCACHE_DTYPES)
            rule = f"full attention of {dtypes}: the format of latents has two meanings"
            raise SpecError("group.spec", type(spec).__name__, rule=rule)
        heads, workers = spec.total_num_kv_heads, positive_int("world_size", world_size)
        if max(heads, workers) % min(heads, workers):
            expected = f"a divisor or a multiple of the {heads} heads of the model"
            raise SpecError("world_size", workers, expected)
        self._copies = max(1, workers // heads)
        self._key = f"{instance('model', model, str)}@{workers}"
        self._dtype, self._dtype_numbers = LMCACHE_DTYPES[spec.dtype]
        row = spec.head_size * heads // min(heads, workers)
        self._shape = 2, len(group.layers), positive_int("chunk_size", chunk_size), row
        placement = StoredSpec(
            groups=[group],
            page_tokens=chunk_size,
            head_groups=min(heads, workers),
            layout="BKLNHC",
        )
        super().__init__([group], placement, accept_unverified=accept_unverified)

    def name_of(self, page: str, stored: PageObject) -> str:
        """Return LMCache's key of the first worker that has these heads."""
        return f"{self._key}@{stored.chunk.tp * self._copies}@{page}@{self._dtype}"

    def has_name(self, name: str) -> bool:
        """Return whether a chunk and its metadata are there."""
        return name in self.source and name in self.metadata

    def read_name(self, name: str, stored: PageObject, place: str, into: memoryview) -> None:  # noqa: ARG002
        """Read a chunk, if its metadata state what the caller expects."""
        if name not in self.metadata:
            raise StoreError("absent", place, "metadata", name, "the metadata of a chunk")
        content = bytes(self.metadata[name])
        if len(content) != _METADATA.size:
            expected = f"{_METADATA.size} bytes"
            raise StoreError("version", place, "metadata", len(content), expected)
        length, form, dtype, *shape = _METADATA.unpack(content)
        if form != KV_2LTD:
            raise StoreError("version", place, "format", form, f"{KV_2LTD}, which is KV_2LTD")
        if dtype not in self._dtype_numbers:
            raise StoreError("foreign", place, "dtype", dtype, f"{self._dtype_numbers[-1]}")
        if tuple(shape) != self._shape:
            raise StoreError("foreign", place, "shape", tuple(shape), f"{self._shape}")
        if length != into.nbytes:
            raise StoreError("damaged", place, "length", length, f"{into.nbytes}")
        copy_object(self.source, name, place, into)
