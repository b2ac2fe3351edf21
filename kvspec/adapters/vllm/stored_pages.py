"""Read the files in which vLLM's tiered offloading stores its canonical pages.

Invariant: a file is read by the length of its canonical pages, never by the length of a row of the
engine that reads. No file is changed or deleted.

How it works:
    With `canonical_layout`, a row of vLLM's host memory holds one block of all layers with all KV
    heads, whatever the parallel sizes of the engine are. Its tier `fs` writes a row as a file:

        <root>/<model>_<digest>/config.json               what the digest is made of
        <root>/<model>_<digest>_r0/<hhh>/<hh>_g<group>/<hash>.bin

        | layer 0: block 0, block 1, ... | layer 1: ... | ... | zeros up to the row of the engine |

    The row is as long as the pages of all workers. So it depends on the number of workers if some
    of them hold the same heads. vLLM reads files only of its own row length, and *deletes* shorter
    ones. Here, the zeros at the end have any length.

    The file states less than it needs: `CanonicalPages` lists what the caller has to add.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvspec.adapters.foreign_pages import ForeignObjects, opened, read_at
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, StoreError
from kvspec.inputs import instance, positive_int, sequence, texts
from kvspec.specs import FullAttentionSpec, LayerSpec, SlidingWindowMLASpec
from kvspec.stored.placement import PageObject, StoredSpec
from kvspec.tickets.identity import tokens_of

# vLLM's format and the order inside a page of a layer -> the letters of kvspec.
CANONICAL_LAYOUTS = {
    ("v1-nhd", "packed"): "BLNHC",
    ("v1-nhd", "split"): "BLKNHC",
    ("v1-hnd", "packed"): "BLHNC",
    ("v1-hnd", "split"): "BLKHNC",
}
CANONICAL_FORMATS = tuple(dict.fromkeys(name for name, _ in CANONICAL_LAYOUTS))
# vLLM's name of a quantised cache -> types of an element. The device decides which one.
CANONICAL_DTYPES = {
    "fp8": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "fp8_e4m3": ("float8_e4m3fn", "float8_e4m3fnuz"),
    "fp8_e5m2": ("float8_e5m2", "float8_e5m2fnuz"),
}
# Rows have whole pages of the operating system. 4096 divides all their sizes.
ROW_ALIGNMENT = 4096
MAX_CONFIG = 1 << 24
# The seed of vLLM's hashes, unless PYTHONHASHSEED is set.
HASH_SEED = "vllm-none-hash"
_CONFIG_SIZES = ("tokens_per_hash", "blocks_per_file", "tp_size", "pp_size", "pcp_size", "dcp_size")
_FIELDS = {"model_name", "dtype", "kv_cache_groups", "inference_engine", *_CONFIG_SIZES}
_OPTIONAL = {"parallel_agnostic", "replicated_layout", "canonical_format"}
_CONFIG_DIGITS = 12


@attrs.frozen
class LayerPlace:
    """Where a layer lies in a file.

    Attributes:
        offset: First byte of its first block.
        stride: Bytes from one block to the next.
        nbytes: Bytes of one block.
    """

    offset: int
    stride: int
    nbytes: int


class CanonicalPages(ForeignObjects):
    """The canonical pages in one directory of vLLM's tier `fs`, read only.

    A page is a file: `blocks_per_file` blocks. Its name is the hash of its last block, as 64
    hexadecimal digits (`Request.block_hashes` of vLLM).

    Attributes:
        fields: The fields of vLLM's `config.json`.

    Args:
        folder: The directory that has `config.json`.
        groups: The layers, with vLLM's names, in which block sizes do not matter. The file states
            neither heads nor sizes nor the order of keys.
        model: Name of the model, as vLLM was started with it.
        encoding: The order inside a page of a layer, which the file does not state: "packed" if a
            value follows its key (vLLM 0.33), "split" if all keys are first.
        accept_unverified: True, since the files have no checksum.
        interleave_size: Consecutive tokens of one context rank. Required if the files were written
            by several context ranks.
        shared_by: Names of the layers that share each tensor, as in vLLM's `kv_cache_tensors`.
            Required if there are several groups.

    Raises:
        StoreError: If the directory is not what its name says, or has another format.
        SpecError: If an argument is missing or does not fit the files.
    """

    FORMAT = "vLLM's canonical file"

    def __init__(
        self,
        folder: str | Path,
        groups: Iterable[KVCacheGroup],
        *,
        model: str,
        encoding: str,
        accept_unverified: bool = False,
        interleave_size: int | None = None,
        shared_by: Iterable[Iterable[str]] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.fields = fields = read_config(self.folder)
        if fields["model_name"] != model:
            raise SpecError("model", model, f"{fields['model_name']!r}, as the files state")
        layout = CANONICAL_LAYOUTS.get((fields["canonical_format"], encoding))
        if layout is None:
            raise SpecError("encoding", encoding, "'packed' or 'split': the files do not state it")
        given = [
            instance("groups", group, KVCacheGroup)
            for group in sequence("groups", groups, "KVCacheGroups")
        ]
        tokens = self._numbers(given)
        specs = {name: group.spec.of_layer(name) for group in given for name in group.layers}
        for name, spec in specs.items():
            check_layer(name, spec, fields, interleave_size)
        placement = StoredSpec(
            groups=given,
            page_tokens=tokens * fields["blocks_per_file"],
            layout=layout,
        )
        super().__init__(given, placement, accept_unverified=accept_unverified)
        self._outer = {name: _before_tokens(layout, spec) for name, spec in specs.items()}
        self._places, self._length = self._placed(shared_by)
        self._tails_checked: set[int] = set()
        # Begin of each layer in the payload, by group.
        self._starts: dict[str, dict[str, int]] = {}
        for stored, regions in self._regions.items():
            starts = self._starts[stored.group] = dict[str, int]()
            for region in regions:
                starts[region.layer] = min(region.base, starts.get(region.layer, region.base))
        self._whole = {group for group, starts in self._starts.items() if self._in_order(starts)}

    def _numbers(self, groups: Sequence[KVCacheGroup]) -> int:
        """Find vLLM's number of each group. Return the tokens of a block of all groups."""
        stated = self.fields["kv_cache_groups"]
        number_of = {name: at for at, each in enumerate(stated) for name in each["layer_names"]}
        self._group_numbers: dict[str, int] = {}
        for group in groups:
            numbers = {number_of.get(name) for name in group.layers}
            if len(numbers) > 1 or None in numbers:
                layers = [each["layer_names"] for each in stated]
                raise SpecError(
                    f"groups[{group.name!r}].layers", group.layers, f"of one of {layers}"
                )
            self._group_numbers[group.name] = next(
                number for number in numbers if number is not None
            )
        missing = number_of.keys() - {name for group in groups for name in group.layers}
        if missing:
            rule = "all layers of the files are needed, to find where each of them lies"
            raise SpecError("groups", sorted(missing), rule=rule)
        sizes = {each["tokens_per_block"] for each in stated}
        if len(sizes) > 1:
            rule = "not yet: groups with blocks of different sizes"
            raise SpecError("tokens_per_block", sorted(sizes), rule=rule)
        return int(sizes.pop())

    def _placed(
        self, shared_by: Iterable[Iterable[str]] | None
    ) -> tuple[dict[str, LayerPlace], int]:
        """Return the place of each layer, and the bytes of all of them."""
        count = self.fields["blocks_per_file"]
        stated = self.fields["kv_cache_groups"]
        sizes: dict[str, int] = {}
        for regions in self._regions.values():
            for region in regions:
                nbytes = region.units * region.states * region.content_bytes
                sizes[region.layer] = sizes.get(region.layer, 0) + nbytes // count
        names = [name for each in stated for name in each["layer_names"]]
        if shared_by is None and len(stated) > 1:
            expected = "the layers that share each tensor: the files have several groups"
            raise SpecError("shared_by", None, expected)
        tensors = [[name] for name in names]
        if shared_by is not None:
            given = sequence("shared_by", shared_by, "layer names of each tensor")
            tensors = [[*texts("shared_by", each, "layer names")] for each in given]
            # A tensor may list layers that have no cache of their own.
            tensors = [kept for each in tensors if (kept := [n for n in each if n in sizes])]
            if sorted(name for each in tensors for name in each) != sorted(names):
                raise SpecError("shared_by", tensors, f"each of {names} once")
            # vLLM registers layer after layer, so a tensor has the place of its first layer.
            tensors.sort(key=lambda each: min(map(names.index, each)))
        places: dict[str, LayerPlace] = {}
        offset = 0
        for tensor in tensors:
            cell = max(sizes[name] for name in tensor)
            places |= {name: LayerPlace(offset, cell, sizes[name]) for name in tensor}
            offset += count * cell
        return places, offset

    def _in_order(self, starts: dict[str, int]) -> bool:
        """Whether the payload of a group with layers at *starts* is the begin of a file."""
        count = self.fields["blocks_per_file"]
        return all(
            self._places[name].offset == start
            and self._places[name].stride == self._places[name].nbytes
            and 1 in (count, self._outer[name])
            for name, start in starts.items()
        )

    def names(self, token_ids: Sequence[int], *, seed: str = HASH_SEED) -> tuple[str, ...]:
        """Return vLLM's name of each whole page of a prompt of text, for the base model.

        A prompt with an adapter, images, a salt or embeddings has other names: use
        `Request.block_hashes` of vLLM. So has a vLLM with another algorithm than `sha256`.

        Args:
            token_ids: The tokens of the prompt.
            seed: `PYTHONHASHSEED` of vLLM, if it was set.

        Raises:
            SpecError: If *token_ids* are not ints.
        """
        tokens = tokens_of(token_ids).tolist()
        step = self.fields["tokens_per_hash"]
        last, hashes = _vllm_hash(seed), list[str]()
        for start in range(0, len(tokens) - step + 1, step):
            last = _vllm_hash((last, tuple(tokens[start : start + step]), None))
            hashes.append(last.hex())
        each = self.placement.page_tokens // step
        return tuple(hashes[each - 1 :: each])

    def name_of(self, page: str, stored: PageObject) -> str:
        """Return the path of a file, from the directory on."""
        number = self._group_numbers[stored.group]
        return f"{page[:3]}/{page[3:5]}_g{number}/{page}.bin"

    def _path(self, name: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}_r0") / name

    def has_name(self, name: str) -> bool:
        """Return whether a file is there."""
        return self._path(name).is_file()

    def read_name(self, name: str, stored: PageObject, place: str, into: memoryview) -> None:
        """Read the blocks of all layers of the group."""
        with opened(self._path(name), place) as (descriptor, length):
            if length < self._length or length % ROW_ALIGNMENT:
                expected = f"a multiple of {ROW_ALIGNMENT}, at least {self._length}"
                raise StoreError("damaged", place, "length", length, expected)
            # A caller that states too few heads leaves bytes behind.
            number = self._group_numbers[stored.group]
            if number not in self._tails_checked:
                self._check_tail(descriptor, length, place)
                self._tails_checked.add(number)
            self._read_layers(descriptor, stored, place, into)

    def _check_tail(self, descriptor: int, length: int, place: str) -> None:
        tail = bytearray(length - self._length)
        read_at(descriptor, self._length, memoryview(tail), place)
        if any(tail):
            expected = "zeros behind all layers: the groups may have too few heads or layers"
            raise StoreError("foreign", place, "length", self._length, expected)

    def _read_layers(
        self, descriptor: int, stored: PageObject, place: str, into: memoryview
    ) -> None:
        """Read each layer, and join the tokens of its blocks."""
        count = self.fields["blocks_per_file"]
        if stored.group in self._whole:
            read_at(descriptor, 0, into, place)
            return
        for layer, start in self._starts[stored.group].items():
            where, outer = self._places[layer], self._outer[layer]
            target = into[start : start + count * where.nbytes]
            blocks = np.empty((count, where.nbytes), np.uint8)
            for number, block in enumerate(blocks):
                read_at(descriptor, where.offset + number * where.stride, block.data, place)
            rows = blocks.reshape(count, outer, -1).swapaxes(0, 1)
            np.frombuffer(target, np.uint8).reshape(rows.shape)[:] = rows


def _vllm_hash(value: object) -> bytes:
    """Return vLLM's hash of *value*, which it encodes as Python does."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of vLLM's `config.json`, if they have the digest of the directory's name.

    Raises:
        StoreError: If they have not, or if the files are not canonical pages.
    """
    place = f"{folder.name}/config.json"
    with opened(folder / "config.json", place) as (descriptor, length):
        if length > MAX_CONFIG:
            raise StoreError("damaged", place, "length", length, f"at most {MAX_CONFIG}")
        text = bytearray(length)
        read_at(descriptor, 0, memoryview(text), place)
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise StoreError("damaged", place, "file", str(error), "JSON") from error
    if not isinstance(fields, dict):
        raise StoreError("damaged", place, "file", type(fields).__name__, "an object")
    if wrong := sorted((_FIELDS - fields.keys()) | (fields.keys() - _FIELDS - _OPTIONAL)):
        raise StoreError("version", place, "fields", wrong, f"exactly {sorted(_FIELDS)}")
    defined = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(defined).hexdigest()[:_CONFIG_DIGITS]
    expected = f"{str(fields['model_name']).replace('/', '_')}_{digest}"
    if folder.name != expected:
        raise StoreError("damaged", place, "directory", folder.name, repr(expected))
    if fields["inference_engine"] != "vllm":
        raise StoreError("foreign", place, "inference_engine", fields["inference_engine"], "'vllm'")
    if fields.get("canonical_format") not in CANONICAL_FORMATS:
        rule = f"one of {', '.join(CANONICAL_FORMATS)}: other files depend on their writer"
        raise StoreError("foreign", place, "canonical_format", fields.get("canonical_format"), rule)
    _check_config(fields, place)
    return fields


def _check_config(fields: dict[str, Any], place: str) -> None:
    """Raise `StoreError` if a field has a wrong type, or kvspec cannot read such files."""
    groups = fields["kv_cache_groups"]
    known = isinstance(groups, list) and groups and all(map(_is_group, groups))
    if not known:
        expected = "groups with tokens_per_block and layer_names"
        raise StoreError("version", place, "kv_cache_groups", groups, expected)
    for name in _CONFIG_SIZES:
        if type(fields[name]) is not int or fields[name] < 1:
            raise StoreError("version", place, name, fields[name], "an int >= 1")
    for name in ("pp_size", "pcp_size"):
        # With several stages, vLLM has no canonical pages. With PCP, the tokens of a block are
        # not stated.
        if fields[name] != 1:
            raise StoreError("foreign", place, name, fields[name], "1 in canonical pages")


def _is_group(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"tokens_per_block", "layer_names"}:
        return False
    tokens, names = value["tokens_per_block"], value["layer_names"]
    named = isinstance(names, list) and bool(names) and {type(name) for name in names} == {str}
    return type(tokens) is int and tokens > 0 and named


def check_layer(
    layer: str, spec: LayerSpec, fields: dict[str, Any], interleave_size: int | None
) -> None:
    """Raise `SpecError` if vLLM has no canonical page of *layer*, or another type of elements."""
    dtype, stated = getattr(spec, "dtype", None), fields["dtype"]
    if dtype not in CANONICAL_DTYPES.get(stated, (stated,)):
        raise SpecError(f"dtype of {layer}", dtype, f"that of the files: {stated}")
    if isinstance(spec, SlidingWindowMLASpec):
        rule = "vLLM has no canonical pages of latents with a window"
        raise SpecError(f"spec of {layer}", type(spec).__name__, rule=rule)
    if fields.get("parallel_agnostic", True):
        return
    # vLLM then stores some layers whole for each rank, and does not state which.
    tp, dcp = fields["tp_size"], fields["dcp_size"]
    tokens = next(
        each["tokens_per_block"]
        for each in fields["kv_cache_groups"]
        if layer in each["layer_names"]
    )
    if dcp > 1:
        if interleave_size is None:
            raise SpecError("interleave_size", None, "an int: the files do not state it")
        positive_int("interleave_size", interleave_size)
        if tokens // dcp % interleave_size:
            raise SpecError("interleave_size", interleave_size, f"a divisor of {tokens // dcp}")
    heads = spec.total_num_kv_heads if isinstance(spec, FullAttentionSpec) else 1
    replicas = max(1, tp // heads)
    if max(tp, heads) % min(tp, heads) or replicas % dcp:
        rule = f"tp_size={tp} and dcp_size={dcp} of the files divide no {heads} heads"
        raise SpecError(f"spec of {layer}", heads, rule=rule)


def _before_tokens(layout: str, spec: LayerSpec) -> int:
    """Return the number of pieces that have all tokens of a block: the axes between L and N."""
    sizes = {"K": len(spec.parts), "H": spec.parts[0].units}
    between = layout[layout.index("L") + 1 : layout.index("N")]
    return math.prod(sizes[letter] for letter in between)
