"""The placement of stored pages: which bytes of a prompt's cache lie in which object.

Invariant: a placement does not depend on the engine that writes or reads. Two engines that use
equal placements make equal objects of equal content.

How it works:
    A stored page is a block of a *virtual engine*. Its TP ranks are head groups, its pipeline
    stages are layer ranges, its PCP ranks share the tokens of a page. A *chunk* is one rank of the
    virtual engine, and an *object* is one block of one group of one chunk. Its layout begins with
    B, so an object is contiguous.

    For example, a model has 2 layers with 4 heads of 8 bytes (4 for K, 4 for V), and a page has 16
    tokens. With 2 head groups, a page consists of 2 objects. Each has 2 heads of both layers:

        >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup
        >>> spec = FullAttentionSpec(block_size=8, total_num_kv_heads=4, head_size=4, dtype="uint8")
        >>> group = KVCacheGroup(name="full", layers=["l.0", "l.1"], spec=spec)
        >>> placement = StoredSpec(groups=[group], page_tokens=16, head_groups=2)
        >>> [(group, str(chunk), placement.object_bytes(group, chunk))
        ...  for group, chunk in placement.objects]
        [('full', 'tp0', 512), ('full', 'tp1', 512)]

    No object is a replica of another one. A latent cache has one unit, so only the first head group
    has objects of it. A recurrent state is not divided by tokens, so only the first PCP rank does.

    A window or chunked layer is stored as full attention. Its engine stores each page before the
    window passes it, and a reader loads the pages that its own window needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import layout_letters, without_alias
from kvspec.errors import SpecError
from kvspec.inputs import MAX_TOKENS, instance, mapping, positive_int, sequence, texts
from kvspec.memory.allocation import plan_memory
from kvspec.memory.region import Region
from kvspec.ownership.dtypes import itemsize
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.sharding import even_sharding
from kvspec.specs import KeyContent, LayerSpec, UniformTypeKVCacheSpecs
from kvspec.specs.formats import PLAIN, is_opaque
from kvspec.specs.layer import LIVENESS_FIELDS, MEMORY_FIELDS, meaning
from kvspec.stored.objects import ObjectContents, StoredTensor
from kvspec.wire.values import Decoder, encode

PLACEMENT_VERSION = 1
"""The version of the definition of `StoredSpec.digest`, and of `StoredSpec.to_params`."""
LEAST_OBJECT = 64 << 10
"""Bytes below which `StoredSpec.of` makes fewer head groups: small objects cost more to write."""
# The name of a group is part of the name of a file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Two makers compute the angles of one rotation with differences of a few units of 1e-7. Another
# rotary base changes the slowest angle by 1e-4 or more.
_ANGLE_STEP = 2e-5


class PageObject(NamedTuple):
    """One object of a page: a group of one chunk.

    Attributes:
        group: Name of the stored group.
        chunk: Rank of the virtual engine.
    """

    group: str
    chunk: RankId


def keeping_all(spec: LayerSpec) -> LayerSpec:
    """Return *spec* as of a layer that keeps all tokens. A window becomes full attention.

    >>> from kvspec import SlidingWindowSpec
    >>> window = SlidingWindowSpec(
    ...     block_size=4, total_num_kv_heads=1, head_size=4, dtype="uint8", sliding_window=8)
    >>> type(keeping_all(window)).__name__
    'FullAttentionSpec'
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kept = {layer: keeping_all(one) for layer, one in spec.specs.items()}
        return UniformTypeKVCacheSpecs(specs=kept)
    own = {field.name for field in attrs.fields(type(spec))}
    for kind in type(spec).__mro__[1:]:
        names = [field.name for field in attrs.fields(kind)] if attrs.has(kind) else []
        if own > set(names) and own - set(names) <= LIVENESS_FIELDS:
            whole: LayerSpec = kind(**{name: getattr(spec, name) for name in names})
            return whole
    return spec


def is_state(spec: LayerSpec) -> bool:
    """Return whether a block of *spec* is a recurrent state, which has no tokens."""
    return not any(part.per_token for part in spec.parts)


def _stored_spec(field: str, spec: LayerSpec, page_tokens: int, context_size: int) -> LayerSpec:
    """Return the spec of stored pages of a layer of *spec*. *field* is for errors."""
    kind = type(spec).__name__
    if spec.is_ring:
        rule = f"a {kind} cannot be stored: a ring has no pages, and its rows are overwritten"
        raise SpecError(field, kind, rule=rule)
    if not spec.counts_prompt:
        rule = f"a {kind} cannot be stored: a page is named by the tokens of the prompt"
        raise SpecError(field, kind, rule=rule)
    if is_state(spec):
        return attrs.evolve(spec, block_size=page_tokens, page_size_padded=None)
    whole: Any = keeping_all(spec)
    changed: dict[str, Any] = {"page_size_padded": None, "block_size": page_tokens // context_size}
    if is_opaque(whole.page_format):
        changed["page_block_size"] = whole.page_block_size or whole.block_size
    else:
        changed["page_format"] = PLAIN
    stored: LayerSpec = attrs.evolve(whole, key_content=whole.common_key_content, **changed)
    return stored


def _stored_group(group: KVCacheGroup, page_tokens: int, context_size: int) -> KVCacheGroup | None:
    """Return *group* as it is stored, or None if all its layers are excluded."""
    layers = [layer for layer in group.layers if layer not in group.excluded]
    if not layers:
        return None
    field = f"groups[{group.name!r}].spec"
    context_size = context_size if group.context_sharded else 1
    if not group.spec.layers:
        spec = _stored_spec(field, group.spec, page_tokens, context_size)
    else:
        specs = {
            layer: _stored_spec(field, group.spec.of_layer(layer), page_tokens, context_size)
            for layer in layers
        }
        spec = UniformTypeKVCacheSpecs(specs=specs)
    return KVCacheGroup(
        name=group.name, layers=layers, spec=spec, context_sharded=group.context_sharded
    )


def _groups(value: Iterable[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    return tuple(
        instance("groups", group, KVCacheGroup)
        for group in sequence("groups", value, "KVCacheGroups")
    )


def _ranges(value: object) -> tuple[tuple[str, ...], ...] | None:
    if value is None:
        return None
    ranges = sequence("layer_ranges", value, "layer names of each range")
    return tuple(tuple(texts("layer_ranges", names, "layer names")) for names in ranges)


@attrs.frozen(kw_only=True)
class StoredSpec:
    """The description of a stored page. It does not depend on who writes or reads it.

    The constructor changes the groups to the form in which they are stored: windows become full
    attention, blocks become pages, padding and page formats of kernels disappear, keys have the
    common order of their rotated elements, and excluded layers are left out.

    Attributes:
        groups: Groups of layers. Each has objects of its own.
        page_tokens: Tokens of a page.
        head_groups: Number of chunks into which the heads (units) of each layer are divided.
        layer_ranges: Names of the layers of each layer range, or None for one range of all layers.
        context_size: Number of chunks into which the tokens of a page are divided.
        interleave_size: Consecutive tokens of one such chunk, as for context ranks.
        layout: Letters of the layout, the outermost first. It begins with B.

    Raises:
        SpecError: If a group cannot be stored (a ring, cross attention), or if a size is not
            possible.

    >>> from kvspec import KVCacheGroup, MLAAttentionSpec
    >>> spec = MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16")
    >>> group = KVCacheGroup(name="latent", layers=["l.0"], spec=spec)
    >>> placement = StoredSpec(groups=[group], page_tokens=64)
    >>> placement.page_bytes == 64 * 576 * 2
    True
    """

    groups: tuple[KVCacheGroup, ...] = attrs.field(converter=_groups)
    page_tokens: int
    head_groups: int = 1
    layer_ranges: tuple[tuple[str, ...], ...] | None = attrs.field(default=None, converter=_ranges)
    context_size: int = 1
    interleave_size: int = 1
    layout: str = attrs.field(default="BLKNHC", converter=without_alias)

    def __attrs_post_init__(self) -> None:
        tokens = positive_int("page_tokens", self.page_tokens, most=MAX_TOKENS)
        for name in ("head_groups", "context_size", "interleave_size"):
            positive_int(name, getattr(self, name))
        if tokens % self.context_size:
            raise SpecError("page_tokens", tokens, f"a multiple of {self.context_size} chunks")
        if not layout_letters(self.layout).startswith("B"):
            raise SpecError("layout", self.layout, "letters that begin with B, such as BLKNHC")
        for group in self.groups:
            if not _NAME.fullmatch(group.name):
                raise SpecError("groups", group.name, f"a name that matches {_NAME.pattern}")
        stored = (_stored_group(group, tokens, self.context_size) for group in self.groups)
        groups = tuple(self._divided(group) for group in stored if group is not None)
        object.__setattr__(self, "groups", groups)
        self.engine  # noqa: B018 - it raises an error if the sizes do not fit together

    def _divided(self, group: KVCacheGroup) -> KVCacheGroup:
        """Return *group* with a sharding of each part in which no two chunks have equal units."""
        shardings: dict[str, tuple[range, ...]] = {}
        units: dict[str, int] = {}
        for part in group.own_parts:
            packs = part.units // part.granularity
            if packs >= self.head_groups:
                continue
            if units.setdefault(part.name, part.units) != part.units:
                field = f"groups[{group.name!r}].layers"
                raise SpecError(field, group.layers, f"layers with equal units of {part.name!r}")
            # The first of several replicas keeps the unit. So parts with other numbers of units, as
            # in Mamba 2, lie where an engine of that many ranks has them.
            ranges = even_sharding(part.units, self.head_groups, part.granularity).ranges
            shardings[part.name] = tuple(
                own if own not in ranges[:at] else range(0) for at, own in enumerate(ranges)
            )
        return attrs.evolve(group, shardings=shardings)

    @cached_property
    def engine(self) -> EngineSpec:
        """The virtual engine whose blocks are the pages."""
        parallel = ParallelConfig(
            tp_size=self.head_groups,
            pp_size=len(self.layer_ranges or (None,)),
            pcp_size=self.context_size,
            interleave_size=self.interleave_size,
            stages=self.layer_ranges,
        )
        return EngineSpec(groups=self.groups, parallel=parallel, layout=self.layout)

    @property
    def chunks(self) -> tuple[RankId, ...]:
        """The chunks: all ranks of the virtual engine."""
        return self.engine.parallel.ranks

    @cached_property
    def _sizes(self) -> dict[PageObject, int]:
        sizes: dict[PageObject, int] = {}
        for group in self.groups:
            divided = self.engine.context_size(group) > 1 and not is_state(group.spec)
            for chunk in self.chunks:
                layers = self.engine.layers_at(group, chunk.pp)
                size = sum(self.engine.page_size_bytes(layer, chunk) for layer in layers)
                # Another PCP rank would be a replica.
                if size and (divided or not chunk.pcp):
                    sizes[PageObject(group.name, chunk)] = size
        return sizes

    @property
    def objects(self) -> tuple[PageObject, ...]:
        """The objects of a page: the pairs of a group and a chunk that have any bytes."""
        return tuple(self._sizes)

    def object_bytes(self, group: str, chunk: RankId) -> int:
        """Return the bytes of an object, or 0 if the chunk has no object of the group.

        Args:
            group: Name of a stored group.
            chunk: A chunk.

        Raises:
            SpecError: If the group or the chunk is unknown.
        """
        self.engine.group(group)
        self.engine.parallel.check_rank(chunk, "chunk")
        return self._sizes.get(PageObject(group, chunk), 0)

    def contents(self, group: str, chunk: RankId, facts: Mapping[str, str]) -> ObjectContents:
        """Return what an object consists of: a tensor for each part of each layer.

        Args:
            group: Name of a stored group.
            chunk: A chunk that has an object of the group.
            facts: Texts for people and for other readers.
        """
        cache = plan_memory(self.engine, chunk, 1)
        regions = sorted((r for r in cache.regions if r.group == group), key=lambda r: r.base)
        tensors = [_tensor(region, cache.part_of(region)[0].dtype) for region in regions]
        # In some layouts, a part of a layer is not one run of bytes.
        if None in tensors:
            return ObjectContents.of_bytes(self.object_bytes(group, chunk), facts)
        return ObjectContents([tensor for tensor in tensors if tensor is not None], facts)

    def _divided_bytes(self) -> int:
        """Return the bytes of the smallest object of a group that head groups divide."""
        chunks: dict[tuple[str, int, int], list[int]] = {}
        for (group, chunk), size in self._sizes.items():
            chunks.setdefault((group, chunk.pp, chunk.pcp), []).append(size)
        divided = [min(sizes) for sizes in chunks.values() if len(sizes) > 1]
        return min(divided, default=LEAST_OBJECT)

    @property
    def page_bytes(self) -> int:
        """Bytes of all objects of a page."""
        return sum(self._sizes.values())

    @cached_property
    def digest(self) -> str:
        """A digest of everything that decides the bytes of the objects, as 64 hexadecimal digits.

        It is SHA-256 of a JSON text with sorted keys. The meaning of keys is part of it. The angles
        of a rotation count with a precision of 2e-5, since two makers compute them by different
        steps.
        """
        defined = {
            "version": PLACEMENT_VERSION,
            **{name: getattr(self, name) for name in PLACEMENT_SIZES},
            "layer_ranges": [list(names) for names in self.layer_ranges or ()],
            "groups": [
                {
                    "name": group.name,
                    "context_sharded": group.context_sharded,
                    "layers": [
                        [layer, _defined(group.spec.of_layer(layer))] for layer in group.layers
                    ],
                }
                for group in self.groups
            ],
        }
        text = json.dumps(defined, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_params(self) -> dict[str, Any]:
        """Return the placement as plain values that JSON can represent."""
        sizes = {name: getattr(self, name) for name in PLACEMENT_SIZES}
        ranges = self.layer_ranges and [list(names) for names in self.layer_ranges]
        bare = tuple(attrs.evolve(group, shardings={}) for group in self.groups)
        groups = {"groups": encode(bare), "layer_ranges": ranges}
        return {"version": PLACEMENT_VERSION, **sizes, **groups}

    @staticmethod
    def from_params(given: Mapping[str, Any]) -> StoredSpec:
        """Return the placement in *given*.

        Raises:
            SpecError: If *given* has another version, an unknown field, or a malformed value.
            WireError: If a group is malformed.
        """
        params = dict(mapping("placement", given, "the fields of a StoredSpec"))
        version = params.pop("version", None)
        if type(version) is not int or version != PLACEMENT_VERSION:
            raise SpecError("placement.version", version, f"{PLACEMENT_VERSION}")
        names = (*PLACEMENT_SIZES, "groups", "layer_ranges")
        if wrong := sorted(set(params) ^ set(names), key=repr):
            raise SpecError("placement", wrong, f"exactly the fields {', '.join(names)}")
        groups = Decoder().value("placement.groups", params.pop("groups"))
        return StoredSpec(groups=groups, **params)

    @staticmethod
    def of(
        engine: EngineSpec,
        *,
        page_tokens: int,
        head_groups: int | None = None,
        layer_ranges: Iterable[Iterable[str]] | None = None,
        context_size: int = 1,
        interleave_size: int = 1,
        layout: str = "BLKNHC",
    ) -> StoredSpec:
        """Return a placement for the model of *engine*.

        It does not depend on the groups or the parallel sizes of *engine*. So two engines of one
        model get equal placements if they keep the same tokens of each layer. Layers of one
        kind, window and number of units become one group.

        Args:
            engine: An engine that stores or loads pages.
            page_tokens: Tokens of a page. Choose a multiple of the blocks of all engines.
            head_groups: Number of head groups. By default the number of heads, or less if objects
                would have less than 64 KiB. An engine can store pages only if each head group
                belongs to one rank, see `plan_store`.
            layer_ranges: As in `StoredSpec`. An engine with pipeline stages needs at least its own
                stages.
            context_size: As in `StoredSpec`. An engine with context ranks needs its own number.
            interleave_size: As in `StoredSpec`. An engine with context ranks needs its own number.
            layout: As in `StoredSpec`.

        Raises:
            SpecError: If the model cannot be stored, or if a size is not possible.

        >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup
        >>> spec = FullAttentionSpec(
        ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
        >>> group = KVCacheGroup(name="g", layers=[f"l.{n}" for n in range(4)], spec=spec)
        >>> placement = StoredSpec.of(EngineSpec(groups=[group]), page_tokens=64)
        >>> placement.head_groups, placement.page_bytes
        (8, 1048576)
        """
        instance("engine", engine, EngineSpec)
        positive_int("page_tokens", page_tokens, most=MAX_TOKENS)
        positive_int("context_size", context_size)
        sizes: dict[str, Any] = {
            "groups": _canonical_groups(engine, page_tokens, context_size),
            "page_tokens": page_tokens,
            "layer_ranges": layer_ranges,
            "context_size": context_size,
            "interleave_size": interleave_size,
            "layout": layout,
        }
        if head_groups is not None:
            return StoredSpec(head_groups=head_groups, **sizes)
        heads = _heads(engine)
        placement = StoredSpec(head_groups=heads, **sizes)
        if any(part.whole for group in engine.groups for part in group.own_parts):
            return placement
        for count in (count for count in range(heads - 1, 0, -1) if heads % count == 0):
            if placement._divided_bytes() >= LEAST_OBJECT:
                break
            placement = StoredSpec(head_groups=count, **sizes)
        return placement


PLACEMENT_SIZES = (
    "page_tokens",
    "head_groups",
    "context_size",
    "interleave_size",
    "layout",
)


# Names of dtypes in the safetensors format. Others are stored as bytes.
_TENSOR_DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int8": "I8",
}


def _tensor(region: Region, dtype: str | None) -> StoredTensor | None:
    """Return the tensor of one part of one layer, or None if its bytes are not contiguous."""
    name = _TENSOR_DTYPES.get(dtype or "", "U8")
    content = region.content_bytes
    elements = content // (itemsize(dtype) if dtype and name != "U8" else 1)
    sizes = {"N": (region.states, region.state_stride), "H": (region.units, region.unit_stride)}
    for outer, inner in (("N", "H"), ("H", "N")):
        (many, far), (few, near) = sizes[outer], sizes[inner]
        if (few == 1 or near == content) and (many == 1 or far == few * content):
            return StoredTensor(f"{region.layer}.{region.part}", name, (many, few, elements))
    return None


def _heads(engine: EngineSpec) -> int:
    """Return the largest useful number of head groups: that of the heads, or of whole shards."""
    pairs = [(group, part) for group in engine.groups for part in group.own_parts]
    for group, part in pairs:
        if part.whole:
            return len(engine.sharding(group, part).owned)
    heads = [part.units for _, part in pairs if part.per_token]
    states = [part.units // part.granularity for _, part in pairs if part.name == "ssm"]
    return max(heads or states or [1])


def _canonical_groups(
    engine: EngineSpec, page_tokens: int, context_size: int
) -> list[KVCacheGroup]:
    """Return groups that depend on the model and on the tokens that *engine* keeps, nothing else.

    Layers of one kind, one window and one stored spec are a group.
    """
    members: dict[tuple[str, LayerSpec, bool], list[str]] = {}
    for layer in sorted(engine.homes, key=_layer_order):
        group = engine.homes[layer]
        if layer not in group.excluded:
            spec = group.spec.of_layer(layer)
            field = f"groups[{group.name!r}].spec"
            shared = context_size if group.context_sharded else 1
            stored = _stored_spec(field, spec, page_tokens, shared)
            key = _name_of(spec), stored, group.context_sharded
            members.setdefault(key, []).append(layer)
    groups: list[KVCacheGroup] = []
    taken: dict[str, int] = {}
    for (name, spec, sharded), layers in members.items():
        number = taken[name] = taken.get(name, 0) + 1
        own = name if number == 1 else f"{name}-{number}"
        groups.append(KVCacheGroup(name=own, layers=layers, spec=spec, context_sharded=sharded))
    return groups


def _layer_order(layer: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts layer names by the numbers in them."""
    words = re.findall(r"\d{1,18}|\D+|\d", layer)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words], layer


def _name_of(spec: LayerSpec) -> str:
    """Return the name of a group of layers of *spec*, such as `full` or `window-128`."""
    if is_state(spec):
        return "state"
    window: Any = spec
    latent = "latent" if spec.parts[0].name == "latent" else ""
    if hasattr(spec, "sliding_window"):
        return "-".join(filter(None, (latent, f"window-{window.sliding_window}")))
    if hasattr(spec, "attention_chunk_size"):
        return f"chunked-{window.attention_chunk_size}"
    return latent or "full"


def _defined(spec: LayerSpec) -> dict[str, Any]:
    """Return what decides the bytes of a layer, and what they mean, as plain values."""
    # Equal parts of states may be given in several ways, and the parts contain their dtypes.
    skipped = MEMORY_FIELDS | ({"state_parts", "dtype", "ssm_dtype"} if is_state(spec) else set())
    names = [field.name for field in attrs.fields(type(spec)) if field.name not in skipped]
    fields = {name: _plain(meaning(spec, name)) for name in names if name != "key_content"}
    return {
        "kind": type(spec).__name__,
        "parts": [attrs.asdict(part) for part in spec.parts],
        "key_content": _key_content(getattr(spec, "key_content", None)),
        **fields,
    }


def _plain(value: object) -> object:
    """Return *value*, which JSON must be able to represent. A field of a new type is an error."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise SpecError("groups", value, "fields that JSON can represent")


def _key_content(content: KeyContent | None) -> object:
    """Return what stored keys mean, with rounded numbers in place of all angles."""
    if content is None:
        return None
    # Two makers' angles may fall on the two sides of a rounding step. With all 64 angles that would
    # give one model two names in one case of four, with three sums in one of a hundred.
    numbers: list[float] = []
    if content.frequencies:
        logs = [math.log(angle) for angle in content.frequencies]
        mean = math.fsum(logs) / len(logs)
        spread = math.fsum((log - mean) * at for at, log in enumerate(logs)) / len(logs)
        numbers = [mean, spread, logs[-1]]
    magnitude = None if content.magnitude is None else round(content.magnitude / _ANGLE_STEP)
    return {
        "rotary": content.rotary,
        "rotary_start": content.rotary_start,
        "rotary_size": content.rotary_size,
        "normalized": content.normalized,
        "frequencies": [round(number / _ANGLE_STEP) for number in numbers],
        "magnitude": magnitude,
    }
