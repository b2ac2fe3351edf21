"""A handshake is decoded equal, and a fault in its bytes raises an error with its path."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refusal
from shakes import caches, closed, handshakes, opened

import kvspec
from kvspec.testing import strategies
from kvspec.wire.codec import decode_handshake, encode_handshake
from kvspec.wire.handshake import Handshake, disagreements, one_engine
from kvspec.wire.values import KNOWN
from kvspec.wire.versions import NO_START, OLDEST, RANGED, VERSION, Versions

GOLDEN = Path(__file__).parent


def engine(layers: int = 3, tp: int = 2, **more: Any) -> kvspec.EngineSpec:
    """Return an engine of full attention."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16"
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in range(layers)]
    group = kvspec.KVCacheGroup(name="full", layers=names, spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp), **more)


def shake(tp: int = 0, of: kvspec.EngineSpec | None = None, **more: Any) -> Handshake:
    """Return the handshake of one rank."""
    cache = kvspec.plan_memory(of or engine(), kvspec.RankId(tp=tp), 100, address=4096)
    fields: dict[str, Any] = {"engine_id": "prefill-0", "epoch": 7, "library": "0.1.0"}
    return Handshake(**{**fields, "cache": cache, **more})


@given(handshakes())
def test_handshake_of_any_engine_decodes_equal(given: Handshake) -> None:
    """Every kind of layer, engine, cache and replica policy arrives equal."""
    read = decode_handshake(encode_handshake(given))
    assert given == read
    assert given.cache.regions == read.cache.regions


@given(strategies.engine_pairs(largest=4).flatmap(lambda pair: caches(pair[0])), st.randoms())
def test_regions_in_any_order_and_place_decode_equal(
    cache: kvspec.RankCache, drawn: random.Random
) -> None:
    """Shuffled regions, each in its own memory, arrive in the same order."""
    address, regions, memory = 2**40, [], []
    for region in drawn.sample(cache.regions, len(cache.regions)):
        size = len(region.address_range)
        memory.append(kvspec.Memory(address, size, "VRAM", drawn.randrange(3)))
        device = memory[-1].device
        moved = attrs.evolve(region, base=address, memory_type="VRAM", device=device)
        regions.append(moved)
        address += size + drawn.randrange(2) * drawn.randrange(2**30)
    drawn.shuffle(memory)
    given = Handshake(
        engine_id="x", epoch=0, cache=kvspec.RankCache(cache.engine, cache.rank, regions, memory)
    )
    assert given == decode_handshake(encode_handshake(given))


def wide(parts: int = 33, layers: int = 80) -> kvspec.EngineSpec:
    """Return an engine of many layers with many parts."""
    each = [
        kvspec.Part(
            name=f"part.{n}", units=8, states=1, content_bytes=64 + n, tokens_per_state=0,
            tensor=f"tensor.{n}",
        )
        for n in range(parts)
    ]  # fmt: skip
    names = [f"model.layers.{number}.mixer" for number in range(layers)]
    spec = kvspec.MambaSpec(state_parts=each)
    group = kvspec.KVCacheGroup(name="states", layers=names, spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=8))


def scattered(cache: kvspec.RankCache, *, one_memory: bool) -> kvspec.RankCache:
    """Return a cache with its parts on random pages, in one memory or in one memory each."""
    drawn, start = random.Random(0), 0x7F00_0000_0000
    regions, memory, address = [], [], start
    for region in cache.regions:
        size = -(-len(region.address_range) // 4096) * 4096
        regions.append(attrs.evolve(region, base=address))
        memory.append(kvspec.Memory(address, size))
        address += size + 4096 * drawn.randrange(1 << 20)
    whole = [kvspec.Memory(start, address - start)]
    return kvspec.RankCache(cache.engine, cache.rank, regions, whole if one_memory else memory)


def test_handshake_of_a_large_rank_is_small() -> None:
    """32 layers take less than 2 KB. 80 layers of 33 parts take less than 50 KB anywhere."""
    assert len(encode_handshake(shake(of=engine(layers=32)))) < 2000
    cache = kvspec.plan_memory(wide(), kvspec.RankId(tp=3), 1000, address=1 << 46)
    several = [cache, *(scattered(cache, one_memory=one) for one in (True, False))]
    sizes = [len(encode_handshake(shake(cache=cache))) for cache in several]
    assert max(sizes) < 50_000
    assert sizes[0] < 30_000


@pytest.mark.parametrize("version", range(OLDEST, VERSION + 1))
def test_stored_handshake_of_each_version_decodes_equal(version: int) -> None:
    """If this fails, the format has changed and needs a new `VERSION`."""
    kept = bytes.fromhex((GOLDEN / f"handshake_{version}.hex").read_text(encoding="ascii"))
    wanted = attrs.evolve(golden(), versions=Versions(OLDEST, version))
    if version < RANGED:
        wanted = attrs.evolve(wanted, start=NO_START)
    assert wanted == decode_handshake(kept)
    assert opened(kept) == opened(encode_handshake(wanted, version))


DEAL = [range(3), range(3, 4)]


def golden() -> Handshake:
    """Return the handshake that the file contains.

    Several kinds, shardings, stages and a replica policy.
    """
    full = engine().groups[0]
    window = kvspec.SlidingWindowSpec(
        block_size=16, total_num_kv_heads=4, head_size=64, dtype="float16", sliding_window=128
    )
    local = kvspec.KVCacheGroup(
        name="local", layers=["draft", "model.layers.3.attn"], spec=window, layout="LBNHC",
        excluded=["draft"], shardings={"k": DEAL, "v": DEAL}, kernel_block_size=8,
    )  # fmt: skip
    names = ("draft", "model.layers.3.attn", *full.layers)
    parallel = kvspec.ParallelConfig(tp_size=2, stages=[names])
    nodes = dict.fromkeys(parallel.ranks, "a")
    return shake(
        tp=1,
        of=kvspec.EngineSpec(groups=[full, local], parallel=parallel, layout="BLHNC"),
        replica_policy=kvspec.ReplicaPolicy(
            "nearest", 1, kvspec.Topology(producer=nodes, consumer=nodes)
        ),
        transport=b"agent",
        start=b"sixteen in count",
        model="llama",
        revision="1",
    )


@attrs.frozen(kw_only=True, slots=False)
class KeysOnlySpec(kvspec.MLAAttentionSpec):
    """A kind of layer that a user adds."""


def test_handshake_of_an_unknown_kind_is_not_sent() -> None:
    """A peer knows only the kinds of this version."""
    error = refusal(lambda: encode_handshake(of_kind(KeysOnlySpec)))
    assert ("handshake", "KeysOnlySpec") == (error.field, error.value)


@pytest.mark.parametrize("field", ["engine_id", "model", "revision", "library"])
@pytest.mark.parametrize("value", ["", "x" * 256, "\ud800", 7, b"x"])
def test_handshake_rejects_invalid_names(field: str, value: object) -> None:
    """A name is a text of 1 to 255 bytes."""
    error = refusal(lambda: shake(**{field: value}))
    assert (field, value) == (error.field, error.value)
    assert "255" in error.expected


def test_handshake_rejects_fields_of_wrong_types() -> None:
    """An epoch is a count, and the transport has at most 1 MiB."""
    for field, value in (
        ("epoch", -1),
        ("epoch", True),
        ("cache", 1),
        ("replica_policy", "spread"),
    ):
        assert refusal(lambda f=field, v=value: shake(**{f: v})).field == field
    error = refusal(lambda: shake(transport=bytes(2**20 + 1)))
    assert "transport" == error.field
    assert "1048576" in error.expected
    assert kvspec.__version__ == Handshake(engine_id="x", epoch=0, cache=shake().cache).library


def agreed(**more: Any) -> tuple[Handshake, Handshake]:
    """Return the handshakes of a producer and of a consumer, whose fields *more* replaces."""
    return shake(), shake(**{"engine_id": "decode-0", "epoch": 3, **more})


def test_disagreements_name_each_field_that_must_be_equal() -> None:
    """Parallel sizes and layouts may differ, because a plan bridges them."""
    assert () == disagreements(*agreed())
    assert () == disagreements(*agreed(of=engine(tp=1, layout="BLNHC")))
    rows = {
        "engine_id": {"engine_id": "prefill-0"},
        "model": {"model": "llama"},
        "revision": {"revision": "2"},
        "replica_policy.name": {"replica_policy": kvspec.ReplicaPolicy("first")},
        "replica_policy.salt": {"replica_policy": kvspec.ReplicaPolicy("spread", 1)},
        "layer": {"of": engine(layers=4)},
    }
    for field, more in rows.items():
        (only,) = disagreements(*agreed(**more))
        assert only.field.endswith(field)


def test_one_engine_needs_each_rank_of_one_incarnation_once() -> None:
    """All ranks have one name, epoch, engine, model and replica policy."""
    ranks = [shake(tp=tp) for tp in (1, 0)]
    assert [kvspec.RankId(tp=0), kvspec.RankId(tp=1)] == list(one_engine(ranks))
    for incomplete, word in ((ranks[1:], "tp1"), ([*ranks, ranks[0]], "once"), ([], "each")):
        error = refusal(lambda incomplete=incomplete: one_engine(incomplete))
        assert "handshakes" == error.field
        assert word in error.expected
    for more in ({"epoch": 8}, {"engine_id": "x"}, {"model": "x"}, {"of": engine(layout="BLNHC")}):
        error = refusal(lambda more=more: one_engine([shake(), shake(tp=1, **more)]), ERROR)
        assert {("tp0", "tp1")} == {mismatch.sides for mismatch in error.mismatches}


ERROR = kvspec.MismatchError

Change = Callable[[dict[str, Any]], object]


def packed(fields: bytes) -> bytes:
    """Return *fields* as one zlib stream under the head of a handshake."""
    return DATA[:19] + zlib.compress(fields, 9)


DATA = encode_handshake(shake())
ENGINE = ("engine", "EngineSpec")
GROUP = (*ENGINE, "groups", 0, "KVCacheGroup")
SPEC = (*GROUP, "spec", "FullAttentionSpec")
PARALLEL = (*ENGINE, "parallel", "ParallelConfig")
AT_ENGINE, AT_GROUP, AT_SPEC, AT_PARALLEL = (
    "engine.EngineSpec", "engine.EngineSpec.groups[0].KVCacheGroup",
    "engine.EngineSpec.groups[0].KVCacheGroup.spec.FullAttentionSpec",
    "engine.EngineSpec.parallel.ParallelConfig",
)  # fmt: skip
LAYER = "model.layers.0.self_attn.attn"


def put(*path: Any) -> Change:
    """Return a change of a message: the last of *path* is put where the others lead."""

    def change(message: dict[str, Any]) -> None:
        *way, last, value = path
        inner: Any = message
        for step in way:
            inner = inner[step]
        inner[last] = value(inner[last]) if callable(value) else value

    return change


def remove(*path: Any) -> Change:
    """Return a change of a message that removes the last of *path*."""

    def change(message: dict[str, Any]) -> None:
        inner: Any = message
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]

    return change


def double(members: Any) -> Any:
    """Return a list with its last member twice."""
    return [*members, members[-1]]


REFUSED = [
    (put("epoch", -1), "epoch", ..., ">="),
    (put("epoch", 2**63), "epoch", ..., "9223372036854775807"),
    (put("engine_id", ""), "handshake.engine_id", "", ""),
    (put("engine_id", "x" * 2000), "engine_id", ..., "1024"),
    (put("rank", "tp", 2), "handshake.rank", kvspec.RankId(tp=2), ""),
    (put("rank", "tp", -1), "handshake.rank", kvspec.RankId(tp=-1), ""),
    (put("rank", [0, 0, 0]), "rank", ..., "object"),
    (put("library", 1), "library", ..., "`str`"),
    (put("more", 1), "handshake", ..., "more"),
    (remove("epoch"), "handshake", ..., "epoch"),
    (put("engine", {"rank": [0, 0, 0]}), "handshake.engine", kvspec.RankId(), "EngineSpec"),
    (put("engine", None), "handshake.engine", None, "EngineSpec"),
    (put("replica_policy", 1), "handshake.replica_policy", 1, "ReplicaPolicy"),
    (put(*GROUP, "spec", {"Nothing": {}}), f"{AT_GROUP}.spec", "Nothing", "Part"),
    (put(*GROUP, "spec", {1: {}}), f"{AT_GROUP}.spec", "another key", "Part"),
    (put(*GROUP, "spec", {(1,): {}}), f"{AT_GROUP}.spec", "another key", "Part"),
    (put(*SPEC, "block_size", 0), f"{AT_SPEC}.block_size", 0, "int"),
    (put(*SPEC, "block_size", 2**64 - 1), f"{AT_SPEC}.block_size", 2**64 - 1, "63 bits"),
    (put(*SPEC, "block_size", -(2**63)), f"{AT_SPEC}.block_size", -(2**63), "63 bits"),
    (put(*SPEC, "more", 1), AT_SPEC, ["more"], "dtype"),
    (put(*SPEC, 7, 1), AT_SPEC, ["7"], "dtype"),
    (put(*SPEC[:-1], {"FullAttentionSpec": []}), AT_SPEC, ..., "dtype"),
    (remove(*SPEC, "dtype"), AT_SPEC, ["dtype"], "dtype"),
    (put(*SPEC, "dtype", float("nan")), f"{AT_SPEC}.dtype", ..., "number"),
    (put(*SPEC, "dtype", b"x"), f"{AT_SPEC}.dtype", b"x", "number"),
    (put(*GROUP, "layers", {"range": [0, 2**62, 1]}), f"{AT_GROUP}.layers", ..., "steps"),
    (put(*GROUP, "layers", {"range": [0, 9, 0]}), f"{AT_GROUP}.layers", ..., "range"),
    (put(*GROUP, "layers", {"range": [0, 9]}), f"{AT_GROUP}.layers", (0, 9), "three"),
    (put(*GROUP, "layers", {"range": [0, 9, 0.5]}), f"{AT_GROUP}.layers", ..., "three"),
    (put(*GROUP, "layers", {"rank": [0, 9]}), f"{AT_GROUP}.layers", ..., "three"),
    (put(*GROUP, "layers", {"rank": 9}), f"{AT_GROUP}.layers", ..., "rank"),
    (put(*GROUP, "layers", [[]]), f"{AT_GROUP}.groups['full'].layers", (), "names"),
    (put(*GROUP, "shardings", {"map": ["k"]}), f"{AT_GROUP}.shardings", ..., "map"),
    (put(*GROUP, "shardings", {"map": [["k"]]}), f"{AT_GROUP}.shardings", ..., "map"),
    (put(*GROUP, "shardings", {"map": 1}), f"{AT_GROUP}.shardings", ..., "map"),
    (put(*GROUP, "shardings", {"map": [[None, 1]]}),
     f"{AT_GROUP}.shardings", ((None, 1),), "pairs"),
    (put(*GROUP, "shardings", {"map": [["k", 1], ["k", 2]]}),
     f"{AT_GROUP}.shardings", (("k", 1), ("k", 2)), "once"),
    (put(*GROUP, "shardings", {"map": ["k1"]}), f"{AT_GROUP}.shardings", ("k1",), "pairs"),
    (put(*GROUP, "shardings", {"map": [["k", 1, 2]]}), f"{AT_GROUP}.shardings", ..., "pairs"),
    (put(*GROUP, "shardings", {"map": [[True, 1]]}), f"{AT_GROUP}.shardings", ..., "pairs"),
    (put(*GROUP, "shardings", {"map": ""}), f"{AT_GROUP}.shardings", "", "pairs"),
    (put(*GROUP, "layers", {"rank": {"range": [0, 3, 1]}}), f"{AT_GROUP}.layers", ..., "three"),
    (put(*GROUP, "name", {}), f"{AT_GROUP}.name", "dict", "one entry"),
    (put(*GROUP, "name", "x" * 1025), f"{AT_GROUP}.name", "x" * 1025, "1024"),
    (put(*GROUP, "layers", 5), f"{AT_GROUP}.layers", 5, "sequence"),
    (put(*GROUP, "spec", None), f"{AT_GROUP}.groups['full'].spec", None, "spec"),
    (put(*GROUP, "kernel_block_size", 0.5),
     f"{AT_GROUP}.groups['full'].kernel_block_size", 0.5, "int"),
    (put(*ENGINE, "groups", 1), f"{AT_ENGINE}.groups", 1, "sequence"),
    (put(*ENGINE, "groups", [1]), f"{AT_ENGINE}.groups", 1, "KVCacheGroup"),
    (put(*ENGINE, "parallel", 1), f"{AT_ENGINE}.parallel", 1, "ParallelConfig"),
    (put(*PARALLEL, "stages", 1), f"{AT_PARALLEL}.stages", 1, "sequence"),
    (put(*PARALLEL, "tp_size", 2**40), f"{AT_PARALLEL}.ranks", 2**40, "65536"),
    (put(*PARALLEL, lambda fields: fields | {"tp_size": 2**16, "dcp_size": 2**16}),
     AT_ENGINE, ..., "steps"),
    (put("regions", 5, "num_blocks", 101),
     "handshake.regions['model.layers.2.self_attn.attn.v']", ..., "inside"),
    (put("regions", 0, "num_blocks", 0), f"handshake.regions['{LAYER}.k'].num_blocks", 0, "int"),
    (put("regions", 0, "num_blocks", "9"), "regions[0].num_blocks", ..., "int"),
    (put("regions", 0, "num_blocks", []), "regions[0].num_blocks", ..., "int"),
    (put("regions", 0, "num_blocks", 0.5), "regions[0].num_blocks", ..., "int"),
    (put("regions", 0, "block_stride", 2**63 - 1),
     f"handshake.regions['{LAYER}.k']", ..., "inside"),
    (put("regions", 0, "block_stride", 1), "handshake.tensors", ..., "overlap"),
    (put("regions", 0, "block_stride", -1),
     f"handshake.regions['{LAYER}.k'].block_stride", -1, ">="),
    (put("regions", 0, "unit_stride", 2**62), f"handshake.regions['{LAYER}.k']", ..., "inside"),
    (put("regions", 0, "content_bytes", 1), f"handshake.regions['{LAYER}.k'].content_bytes", 1, ""),
    (put("regions", 0, "base", -1), f"handshake.regions['{LAYER}.k'].base", -1, "int"),
    (put("regions", 1, "base", 2**63), f"handshake.regions['{LAYER}.v'].base", 2**63, "64-bit"),
    (put("regions", 1, "base", 4096), "handshake.tensors", ..., "overlap"),
    (put("regions", 0, "base", "x"), "regions[0].base", ..., "int"),
    (put("regions", 0, "layer", "q"), "handshake.regions", "q.k", "tp0"),
    (put("regions", 0, "part", "q"), "handshake.regions", f"{LAYER}.q", "tp0"),
    (put("regions", 0, "part", 1), "regions[0].part", ..., "str"),
    (put("regions", lambda rows: rows[:-1]),
     "handshake.regions", ..., "model.layers.2.self_attn.attn.v"),
    (put("regions", double), "handshake.regions", "model.layers.2.self_attn.attn.v", "once"),
    (put("regions", 0, "segments", [[0, 1, 2]]), "regions[0].segments[0]", ..., "length 4"),
    (put("regions", 0, []), "regions[0]", ..., "object"),
    (remove("regions", 0, "units"), "regions[0]", ..., "units"),
    (put("regions", {}), "regions", ..., "array"),
    (put("memory", 0, "length", 8), f"handshake.regions['{LAYER}.k']", ..., "inside"),
    (put("memory", 0, "memory_type", "ROM"), "memory[0].memory_type", "ROM", "VRAM"),
    (remove("memory", 0, "length"), "memory[0]", ..., "length"),
    (put("memory", 0, "address", 2**63 - 1), "memory[0].length", ..., "9223372036854775807"),
    (put("memory", 0, "address", -1), "memory[0].address", -1, ">= 0"),
]  # fmt: skip


def test_handshake_without_a_change_decodes_equal() -> None:
    """So each case above fails because of its change alone."""
    assert shake() == decode_handshake(closed(DATA, opened(DATA)))


@pytest.mark.parametrize(
    ("change", "path", "value", "word"), REFUSED, ids=map(str, range(len(REFUSED)))
)
def test_decode_handshake_rejects_impossible_fields(
    change: Change, path: str, value: Any, word: str
) -> None:
    """The error carries the path of the field, and its value unless the table has `...`."""
    message = opened(DATA)
    change(message)
    error = refusal(lambda: decode_handshake(closed(DATA, message)), kvspec.WireError)
    assert path in (error.path, re.sub(r"\[[\d.]+\]", "[...]", error.path))
    assert value is ... or value == error.value
    assert word in (error.expected or error.rule)


@pytest.mark.parametrize(
    ("data", "path", "value"),
    [
        (b"", "handshake", b""),
        (DATA[:18], "handshake", DATA[:18]),
        (b"x" + DATA, "handshake", b"x" + DATA[:18]),
        (DATA[:17] + b"\0\6" + DATA[19:], "version", 6),
        (DATA[:19], "handshake", "0 bytes"),
        (DATA[:-1], "handshake", ...),
        (DATA + b"\0", "handshake", ...),
        (DATA[:19] + b"\x91" * 5000, "handshake", ...),
        (DATA[:25] + b"\xff" * 9 + DATA[34:], "handshake", ...),
        (bytes(6 << 20), "handshake", bytes(19)),
        (packed(b""), "handshake", ...),
        (packed(zlib.decompress(DATA[19:])[:-1]), "handshake", ...),
        (packed(zlib.decompress(DATA[19:]) + b"\0"), "handshake", ...),
        (packed(b"\x91" * 5000), "handshake", ...),
        (packed(b"\xdf\xff\xff\xff\xff"), "handshake", ...),
        (packed(b"\x81\xa6engine" + b"\x91" * 5000), "handshake", ...),
        (packed(bytes(1 << 30)), "handshake", ...),
    ],
    ids=str,
)
def test_decode_handshake_rejects_malformed_bytes(data: Any, path: str, value: Any) -> None:
    """Another version, cut or doubled bytes, other bytes, too many bytes, deep nesting."""
    error = refusal(lambda: decode_handshake(data), kvspec.WireError)
    assert path == error.path
    assert value is ... or value == error.value


@attrs.frozen(kw_only=True, slots=False)
class GrowingSpec(kvspec.MLAAttentionSpec):
    """A kind whose constructor changes a field each time."""

    extra_retained_tokens: int = attrs.field(default=0, converter=lambda given: given + 1)


@attrs.frozen(kw_only=True, slots=False)
class PickySpec(kvspec.MLAAttentionSpec):
    """A kind whose constructor may raise ZeroDivisionError."""

    more: int = attrs.field(default=1, converter=lambda given: given if 12 // given else 1)


def of_kind(kind: Any, **more: Any) -> Handshake:
    """Return the handshake of an engine with one layer of a *kind*."""
    spec = kind(block_size=4, head_size=8, dtype="uint8", **more)
    group = kvspec.KVCacheGroup(name="own", layers=["layers.0"], spec=spec)
    return shake(of=kvspec.EngineSpec(groups=[group]))


def test_handshake_that_would_decode_unequal_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A constructor that changes its argument, and a text that UTF-8 cannot encode."""
    for kind in (GrowingSpec, PickySpec):
        monkeypatch.setitem(KNOWN, kind.__name__, kind)
    growing = of_kind(GrowingSpec, extra_retained_tokens=3)
    error = refusal(lambda: encode_handshake(growing))
    assert ("handshake", growing) == (error.field, error.value)
    message = opened(encode_handshake(of_kind(PickySpec, more=4)))
    own = "engine.EngineSpec.groups[0].KVCacheGroup.spec.PickySpec"
    put(*GROUP, "spec", "PickySpec", "more", 0)(message)
    error = refusal(lambda: decode_handshake(closed(DATA, message)), kvspec.WireError)
    assert own == error.path
    layer = attrs.evolve(engine().groups[0], layers=["\ud800"])
    error = refusal(lambda: encode_handshake(shake(of=kvspec.EngineSpec(groups=[layer]))))
    assert "handshake" == error.field
    assert "utf-8" in str(error.value)


def test_plain_value_that_nests_too_deeply_is_refused() -> None:
    """Values nest to a fixed depth, not until the stack ends."""
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    message = opened(DATA)
    put(*SPEC, "dtype", deep)(message)
    error = refusal(lambda: decode_handshake(closed(DATA, message)), kvspec.WireError)
    assert error.path.startswith(f"{AT_SPEC}.dtype")
    assert "32" in error.expected


@pytest.mark.parametrize("depth", [20, 400, 900])
def test_map_key_that_nests_deeply_is_refused(depth: int) -> None:
    """A key may be an array of arrays, whose text would exhaust the stack."""
    key = b"\x91" * depth + b"\x90"
    engine = opened(DATA)["engine"]["EngineSpec"]
    wrong = [
        b"\x81" + key + b"\xc0",
        b"\x81\xaaEngineSpec\x81" + key + b"\xc0",
        b"\x81\xa3map\x91\x92" + key + b"\xc0",
    ]
    before, after = zlib.decompress(DATA[19:]).split(msgspec.msgpack.encode({"EngineSpec": engine}))
    for each in wrong:
        refusal(lambda each=each: decode_handshake(packed(before + each + after)), kvspec.WireError)


def test_handshake_of_too_much_work_is_not_sent() -> None:
    """A range with more units than a peer would count is the sender's error."""
    sharding = tuple(range(2**22 + 1) for _ in range(2))
    parallel = kvspec.ParallelConfig(tp_size=2, shardings={2**22 + 1: sharding})
    spec = kvspec.FullAttentionSpec(
        block_size=1, total_num_kv_heads=2**22 + 1, head_size=1, dtype="uint8"
    )
    group = kvspec.KVCacheGroup(name="wide", layers=["layers.0"], spec=spec)
    error = refusal(
        lambda: encode_handshake(shake(of=kvspec.EngineSpec(groups=[group], parallel=parallel)))
    )
    assert "handshake" == error.field
    assert "steps" in str(error.value)
