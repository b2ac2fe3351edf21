"""Read the objects that SGLang's HiCache stores under its unified keys.

Invariant: the keys are those of SGLang's own scheme. A wrong model, type, page size or grid has
another digest, so its objects are not found.

How it works:
    With the layout `page_unified`, a page of SGLang consists of chunks: some layers of some heads,
    keys and values together. A key names a chunk, and not the rank that wrote it:

        {page hash}_ukv1-{digest}_L{first layer}-{last layer + 1}_H{number of the head group}

    That is kvspec's grid of head groups and layer ranges. A chunk of latents has no `_H`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvspec.adapters.foreign_pages import ForeignObjects, check_length, copy_object, opened, read_at
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence, texts
from kvspec.specs import FullAttentionSpec, SlidingWindowMLASpec
from kvspec.stored.placement import PageObject, StoredSpec

SCHEMA_VERSION = 1
OBJECT_LAYOUT = "page-unified-v1"
_KEY_DIGITS = 16


class UnifiedPages(ForeignObjects):
    """Objects of SGLang's unified keys, read only.

    The name of a page is SGLang's hash of it, as 64 hexadecimal digits.

    Attributes:
        namespace: The fields from which SGLang computes the digest of its keys.
        digest: The digest.

    Args:
        objects: A directory with a file `<key>.bin` for each object, or a mapping from keys to
            bytes, such as a client of another store.
        group: All layers of the model, in their order. Block sizes do not matter.
        model_id: Identity of the model, as in SGLang's namespace.
        page_size: Tokens of a page.
        head_group: Heads of a chunk. SGLang's default is the number of heads of a rank. Not for
            latents.
        layer_partition: Layers of a chunk, if SGLang was started with it. The last chunk may have
            less.
        stages: Names of the layers of each pipeline stage of the writer, if it had several and no
            `layer_partition`.
        total_kv_heads: SGLang's number of heads if several of its ranks held the same head. SGLang
            then counts the heads of all ranks.
        accept_unverified: True, since the objects have no checksum.

    Raises:
        SpecError: If an argument is missing or does not fit the others.
    """

    FORMAT = "SGLang's unified object"

    def __init__(
        self,
        objects: str | Path | Mapping[str, Any],
        group: KVCacheGroup,
        *,
        model_id: str,
        page_size: int,
        head_group: int | None = None,
        layer_partition: int = 0,
        stages: Iterable[Iterable[str]] | None = None,
        total_kv_heads: int | None = None,
        accept_unverified: bool = False,
    ) -> None:
        self.source = Path(objects) if isinstance(objects, str | Path) else objects
        if not isinstance(model_id, str) or not model_id:
            raise SpecError("model_id", model_id, "a text")
        spec = instance("group", group, KVCacheGroup).spec
        if isinstance(spec, SlidingWindowMLASpec) or spec.layers:
            rule = "SGLang has unified keys for layers of one kind only, and none of latent windows"
            raise SpecError("group.spec", type(spec).__name__, rule=rule)
        heads = spec.total_num_kv_heads if isinstance(spec, FullAttentionSpec) else 0
        total, chunk = self._heads(heads, head_group, total_kv_heads)
        names = list(group.layers)
        ranges = _layer_ranges(names, layer_partition, stages)
        self.namespace = {
            "schema_version": SCHEMA_VERSION,
            "model_id": model_id,
            "dtype": getattr(spec, "dtype", ""),
            "page_size": positive_int("page_size", page_size),
            "rank_replicated": not heads,
            "total_kv_heads": total,
            "layer_partition": layer_partition,
            "head_group": chunk,
            "object_layout": OBJECT_LAYOUT,
        }
        self.digest = digest_of(self.namespace)
        self._replicas = total // heads if heads else 1
        placement = StoredSpec(
            groups=[group],
            page_tokens=page_size,
            head_groups=heads // chunk if heads else 1,
            layer_ranges=ranges,
            layout="BLKNHC",
        )
        super().__init__([group], placement, accept_unverified=accept_unverified)
        first = [names.index(own[0]) for own in ranges]
        bounds = zip(first, ranges, strict=True)
        self._coordinates = [f"L{start}-{start + len(own)}" for start, own in bounds]

    @staticmethod
    def _heads(heads: int, head_group: int | None, total_kv_heads: int | None) -> tuple[int, int]:
        """Return SGLang's number of all heads, and of those of a chunk."""
        if not heads:
            for name, value in (("head_group", head_group), ("total_kv_heads", total_kv_heads)):
                if value is not None:
                    raise SpecError(name, value, "None, because latents have no heads")
            return 0, 0
        total = positive_int("total_kv_heads", heads if total_kv_heads is None else total_kv_heads)
        if head_group is None:
            raise SpecError("head_group", None, "the heads of a chunk: the keys depend on it")
        chunk = positive_int("head_group", head_group)
        if heads % chunk:
            raise SpecError("head_group", chunk, f"a divisor of the {heads} heads of the model")
        if total != heads and (total % heads or chunk != 1):
            expected = f"{heads}, or a multiple of it with head_group=1"
            raise SpecError("total_kv_heads", total, expected)
        return total, chunk

    def name_of(self, page: str, stored: PageObject) -> str:
        """Return SGLang's key of an object."""
        name = f"{page}_{self.digest}_{self._coordinates[stored.chunk.pp]}"
        if self.namespace["rank_replicated"]:
            return name
        return f"{name}_H{stored.chunk.tp * self._replicas}"

    def has_name(self, name: str) -> bool:
        """Return whether an object is there."""
        if isinstance(self.source, Path):
            return (self.source / f"{name}.bin").is_file()
        return name in self.source

    def read_name(self, name: str, stored: PageObject, place: str, into: memoryview) -> None:  # noqa: ARG002
        """Read an object. SGLang writes nothing besides its payload."""
        if not isinstance(self.source, Path):
            copy_object(self.source, name, place, into)
            return
        with opened(self.source / f"{name}.bin", place) as (descriptor, length):
            check_length(length, place, into)
            read_at(descriptor, 0, into, place)


def digest_of(namespace: Mapping[str, object]) -> str:
    """Return the digest in SGLang's keys.

    SGLang encodes a struct. A mapping with the same fields in the same order has the same bytes.
    """
    import msgspec  # noqa: PLC0415 - `import kvspec` does not need it

    encoded = msgspec.msgpack.encode(dict(namespace))
    digest = hashlib.sha256(encoded).hexdigest()[:_KEY_DIGITS]
    return f"ukv{SCHEMA_VERSION}-{digest}"


def _layer_ranges(
    names: list[str], layer_partition: int, stages: Iterable[Iterable[str]] | None
) -> list[list[str]]:
    """Return the names of the layers of each chunk."""
    size = positive_int("layer_partition", layer_partition, least=0)
    if stages is None:
        step = size or len(names)
        return [names[at : at + step] for at in range(0, len(names), step)]
    given = sequence("stages", stages, "layer names of each stage")
    ranges = [[*texts("stages", each, "layer names")] for each in given]
    if size or [name for each in ranges for name in each] != names or not all(ranges):
        expected = "all layers of the group in their order, without layer_partition"
        raise SpecError("stages", ranges, expected)
    return ranges
