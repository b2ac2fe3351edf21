"""The handshake: what is written is read back equal, what cannot be true is refused by its path."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refusal
from shakes import caches, closed, handshakes, opened

import kvspec
from kvspec.testing import strategies
from kvspec.wire.codec import decode_handshake, encode_handshake
from kvspec.wire.encode import register
from kvspec.wire.handshake import Handshake, disagreements, one_engine

GOLDEN = Path(__file__).with_name("handshake_7.hex")


def engine(layers: int = 3, tp: int = 2, **more: Any) -> kvspec.EngineSpec:
    """Return an engine of full attention."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16"
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in range(layers)]
    group = kvspec.KVCacheGroup(name="full", layers=names, spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp), **more)


def shake(tp: int = 0, of: kvspec.EngineSpec | None = None, **more: Any) -> Handshake:
    """Return the introduction of one rank."""
    cache = kvspec.plan_memory(of or engine(), kvspec.RankId(tp=tp), 100, address=4096)
    fields: dict[str, Any] = {"engine_id": "prefill-0", "epoch": 7, "library": "0.1.0"}
    return Handshake(**{**fields, "cache": cache, **more})


@given(handshakes())
def test_what_is_written_is_read_back(given: Handshake) -> None:
    """Every kind of layer, engine, cache and replica policy arrives equal, and means the same."""
    read = decode_handshake(encode_handshake(given))
    assert given == read
    assert given.compatibility_hash == read.compatibility_hash
    assert given.cache.regions == read.cache.regions


@given(strategies.engine_pairs(largest=4).flatmap(lambda pair: caches(pair[0])), st.randoms())
def test_regions_of_any_order_and_place_are_read_back(
    cache: kvspec.RankCache, drawn: random.Random
) -> None:
    """Regions that stand in no order, each in memory of its own, arrive in that order."""
    address, regions, memory = 2**40, [], []
    for region in drawn.sample(cache.regions, len(cache.regions)):
        size = len(region.extent)
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
    """Return a cache whose parts lie anywhere, on pages, in one memory or one each."""
    drawn, start = random.Random(0), 0x7F00_0000_0000
    regions, memory, address = [], [], start
    for region in cache.regions:
        size = -(-len(region.extent) // 4096) * 4096
        regions.append(attrs.evolve(region, base=address))
        memory.append(kvspec.Memory(address, size))
        address += size + 4096 * drawn.randrange(1 << 20)
    whole = [kvspec.Memory(start, address - start)]
    return kvspec.RankCache(cache.engine, cache.rank, regions, whole if one_memory else memory)


def test_a_plain_rank_takes_little() -> None:
    """32 layers in under 2 KB; 80 layers of 33 parts in under 20 KB, wherever each part lies."""
    assert len(encode_handshake(shake(of=engine(layers=32)))) < 2000
    cache = kvspec.plan_memory(wide(), kvspec.RankId(tp=3), 1000, address=1 << 46)
    several = [cache, *(scattered(cache, one_memory=one) for one in (True, False))]
    sizes = [len(encode_handshake(shake(cache=cache))) for cache in several]
    assert max(sizes) < 20_000
    assert sizes[0] < 5000


def test_the_format_stands() -> None:
    """A message of format 7 that was kept says what it always said; see `VERSION` if this fails."""
    kept = bytes.fromhex(GOLDEN.read_text(encoding="ascii"))
    assert golden() == decode_handshake(kept)
    assert kept == encode_handshake(golden())


DEAL = [range(3), range(3, 4)]


def golden() -> Handshake:
    """Return the introduction that was kept.

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
        model="llama",
        revision="1",
    )


@attrs.frozen
class Packing:
    """A format that a user adds."""

    bits: int


@attrs.frozen(kw_only=True, slots=False)
class KeysOnlySpec(kvspec.MLAAttentionSpec):
    """A kind that a user adds, with a field of a class of its own."""

    packing: Packing


def keys_only() -> Handshake:
    """Return the introduction of an engine of a user's kind."""
    spec = KeysOnlySpec(block_size=4, head_size=8, dtype="uint8", packing=Packing(4))
    group = kvspec.KVCacheGroup(name="keys", layers=["layers.0"], spec=spec)
    return shake(of=kvspec.EngineSpec(groups=[group]))


def test_kinds_of_a_user_travel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered, they arrive; not registered, the sender and the receiver say so."""
    monkeypatch.setattr("kvspec.wire.encode.KINDS", dict(kvspec.wire.encode.KINDS))
    monkeypatch.setattr("kvspec.wire.decode.KINDS", kvspec.wire.encode.KINDS)
    error = refusal(lambda: encode_handshake(keys_only()))
    assert "KeysOnlySpec" in str(error.value)
    assert "kvspec.wire.register" in str(error)
    assert register(KeysOnlySpec) is register(KeysOnlySpec) is KeysOnlySpec
    register(Packing)
    data = encode_handshake(keys_only())
    assert keys_only() == decode_handshake(data)
    del kvspec.wire.encode.KINDS["KeysOnlySpec"]
    error = refusal(lambda: decode_handshake(data), kvspec.WireError)
    assert ("objects[1].KeysOnlySpec", "KeysOnlySpec") == (error.path, error.value)


def test_a_name_is_registered_once() -> None:
    """Neither a second class of one name, nor what has no fields."""
    other = attrs.make_class("Part", ["name"], frozen=True)
    # The error of `other` has a class as its value that cannot be pickled, so `refusal` does not
    # apply.
    for wrong, word in ((other, "name"), (int, "attrs")):
        with pytest.raises(kvspec.SpecError, match=word) as caught:
            register(wrong)
        assert ("kind", wrong) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize("field", ["engine_id", "model", "revision", "library"])
@pytest.mark.parametrize("value", ["", "x" * 256, "\ud800", 7, b"x"])
def test_names_are_names(field: str, value: object) -> None:
    """A name is a text of 1 to 255 bytes."""
    error = refusal(lambda: shake(**{field: value}))
    assert (field, value) == (error.field, error.value)
    assert "255" in error.expected


def test_an_introduction_is_whole() -> None:
    """Epochs are counts, caches and replica policies are those, transports are bytes and few."""
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
    """Return a producer's and a consumer's introduction, but for what *more* says of the latter."""
    return shake(), shake(**{"engine_id": "decode-0", "epoch": 3, **more})


def test_both_sides_agree_or_it_is_named() -> None:
    """What both have to share is compared, each by its name; what a plan bridges is not."""
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


def test_ranks_of_one_engine_are_of_one_start() -> None:
    """All ranks come, each once, of one name, epoch, engine, model and replica policy."""
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
DATA = encode_handshake(shake())
SPEC, GROUP, PARALLEL, ENGINE = range(4)


def put(*path: Any) -> Change:
    """Return a change of a message: the last of *path* is put where the others lead."""

    def change(message: dict[str, Any]) -> None:
        *way, last, value = path
        inner: Any = message
        for step in way:
            inner = inner[step]
        inner[last] = value(inner[last]) if callable(value) else value

    return change


REFUSED = [
    (put("epoch", -1), "epoch", ..., ">="),
    (put("epoch", 2**63), "epoch", ..., "9223372036854775807"),
    (put("engine_id", ""), "handshake.engine_id", "", ""),
    (put("engine_id", "x" * 2000), "engine_id", ..., "1024"),
    (put("rank", [0, 0, 2]), "cache.rank", kvspec.RankId(tp=2), ""),
    (put("rank", [0, 0]), "rank", ..., "length"),
    (put("library", 1), "library", "`int`", "`str`"),
    (put("more", 1), "message", ..., "more"),
    (lambda message: message.pop("epoch"), "message", ..., "epoch"),
    (put("compatibility_hash", bytes(16)), "compatibility_hash", "0" * 32, ""),
    (put("engine", SPEC), "message.engine", ..., "EngineSpec"),
    (put("engine", 99), "engine", [99], "number"),
    (put("replica_policy", SPEC), "handshake.replica_policy", ..., "ReplicaPolicy"),
    (put("objects", SPEC, 0, "Nothing"), "objects[0].Nothing", "Nothing", "known"),
    (put("objects", SPEC, 1, "block_size", 0), "objects[0].FullAttentionSpec.block_size", 0, "int"),
    (put("objects", SPEC, 1, "block_size", 2**64 - 1),
     "objects[0].FullAttentionSpec.block_size", 2**64 - 1, "whole"),
    (put("objects", SPEC, 1, "more", 1),
     "objects[0].FullAttentionSpec.more", "more", "FullAttentionSpec"),
    (lambda message: message["objects"][SPEC][1].pop("dtype"),
     "objects[0].FullAttentionSpec", ..., "dtype"),
    (put("objects", SPEC, 1, "dtype", float("nan")),
     "objects[0].FullAttentionSpec.dtype", ..., "number"),
    (put("objects", GROUP, 1, "layers", ["names", ["x", 0, 2**40, 1, ""]]),
     "objects[1].KVCacheGroup.layers[0]", ..., "steps"),
    (put("objects", GROUP, 1, "layers", ["names", ["x", 0, -1, 1, ""]]),
     "objects[1].KVCacheGroup.layers[0]", [0, -1, 1], "count"),
    (put("objects", GROUP, 1, "layers", ["range", 0, 2**62, 1]),
     "objects[1].KVCacheGroup.layers", ..., "steps"),
    (put("objects", GROUP, 1, "layers", ["names", ["x", 0]]),
     "objects[1].KVCacheGroup.layers[0]", ["x", 0], "run"),
    (put("objects", GROUP, 1, "layers", ["tuple", ["tuple"]]),
     "objects[1].KVCacheGroup.groups['full'].layers", (), "names"),
    (put("objects", GROUP, 1, "spec", ["object", GROUP]),
     "objects[1].KVCacheGroup.spec", [1], "earlier"),
    (put("objects", GROUP, 1, "name", ["what"]), "objects[1].KVCacheGroup.name", "what", "object"),
    (put("objects", GROUP, 1, "shardings", ["map", "k"]),
     "objects[1].KVCacheGroup.shardings", ["k"], "pairs"),
    (put("objects", GROUP, 1, "shardings", ["map", "k", 1, "k", 2]),
     "objects[1].KVCacheGroup.shardings", ["k", "k"], "once"),
    (put("objects", GROUP, 1, "name", {}), "objects[1].KVCacheGroup.name", {}, "list"),
    (put("objects", GROUP, 1, "name", "x" * 1025),
     "objects[1].KVCacheGroup.name", "x" * 1025, "1024"),
    (put("objects", GROUP, 1, "layers", ["range", 0, 1]),
     "objects[1].KVCacheGroup.layers", [0, 1], "range"),
    (put("objects", GROUP, 1, "layers", ["rank", 0, 1]),
     "objects[1].KVCacheGroup.layers", [0, 1], "rank"),
    (put("objects", GROUP, 1, "layers", 5), "objects[1].KVCacheGroup.layers", 5, "sequence"),
    (put("objects", GROUP, 1, "spec", None),
     "objects[1].KVCacheGroup.groups['full'].spec", None, "spec"),
    (put("objects", GROUP, 1, "kernel_block_size", 0.5),
     "objects[1].KVCacheGroup.groups['full'].kernel_block_size", 0.5, "int"),
    (put("objects", ENGINE, 1, "groups", 1), "objects[3].EngineSpec.groups", 1, "sequence"),
    (put("objects", ENGINE, 1, "groups", ["tuple", 1]),
     "objects[3].EngineSpec.groups", 1, "KVCacheGroup"),
    (put("objects", PARALLEL, 1, "stages", 1), "objects[2].ParallelConfig.stages", 1, "sequence"),
    (put("objects", PARALLEL, 1, "tp_size", 2**40),
     "objects[2].ParallelConfig.ranks", 2**40, "65536"),
    (put("objects", PARALLEL, 1, {"tp_size": 2**16, "dcp_size": 2**16}),
     "objects[3].EngineSpec", ..., "steps"),
    (put("regions", 0, 0, 0, 101),
     "cache.regions['model.layers.2.self_attn.attn.k']", ..., "inside"),
    (put("regions", 0, 0, 0, 0),
     "cache.regions['model.layers.0.self_attn.attn.k'].num_blocks", 0, "int"),
    (put("regions", 0, 0, 1, 2**63 - 1),
     "cache.regions['model.layers.0.self_attn.attn.k']", ..., "inside"),
    (put("regions", 0, 0, 1, 1), "cache.tensors", ..., "overlap"),
    (put("regions", 0, 0, 1, -1), "regions[0][0][1]", ..., ">="),
    (put("regions", 0, 0, 2, 2**62),
     "cache.regions['model.layers.0.self_attn.attn.k']", ..., "inside"),
    (put("regions", 2, 0, 0, -1),
     "cache.regions['model.layers.0.self_attn.attn.k']", ..., "inside"),
    (put("regions", 2, 0, 0, 2**63 - 1),
     "cache.regions['model.layers.0.self_attn.attn.k'].base", ..., "64-bit"),
    (put("regions", 3, 0), "cache.tensors", ..., "overlap"),
    (put("regions", 4, 0, 0, 99), "regions[0]", 99, "3"),
    (put("regions", 4, lambda rows: rows[:-1]),
     "cache.regions", ..., "model.layers.2.self_attn.attn.k"),
    (put("regions", 4, lambda rows: [*rows, rows[-1]]),
     "cache.regions", "model.layers.2.self_attn.attn.k", "once"),
    (put("regions", 1, 0, 0, 0, "q"), "regions[0]", "model.layers.0.self_attn.attn.q", "tp0"),
    (put("regions", 1, 0, 0, 2, 5), "regions[0]", 4, "1"),
    (put("regions", 2, 0, []), "regions[0]", 0, "2"),
    (put("memory", 0, 0, 0, 8), "cache.regions['model.layers.0.self_attn.attn.k']", ..., "inside"),
    (put("memory", 0, 0, 1, "ROM"), "memory[0].memory_type", "ROM", "VRAM"),
    (put("memory", 1, 0, 1, 2**24), "memory", ..., "steps"),
    (put("memory", 1, []), "memory.gaps", 1, "0"),
    (put("memory", 1, 0, 0, 7), "memory.runs", (7, 1), "gap"),
    (put("memory", 2, 0, 2**63 - 1), "memory[0].length", ..., "9223372036854775807"),
]  # fmt: skip


def test_what_it_is_made_of() -> None:
    """The cases below change the message that they mean to change."""
    message = opened(DATA)
    kinds = ["FullAttentionSpec", "KVCacheGroup", "ParallelConfig", "EngineSpec", "ReplicaPolicy"]
    assert kinds == [name for name, _ in message["objects"]]
    assert DATA == closed(DATA, message)


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
    assert path == error.path
    assert value is ... or value == error.value
    assert word in (error.expected or error.rule)


@pytest.mark.parametrize(
    ("data", "path", "value"),
    [
        ("text", "handshake", "str"),
        (b"", "handshake", b""),
        (DATA[:18], "handshake", DATA[:18]),
        (b"x" + DATA, "handshake", b"x" + DATA[:18]),
        (DATA[:17] + b"\0\6" + DATA[19:], "version", 6),
        (DATA[:-1], "message", "Input data was truncated"),
        (DATA + b"\0", "message", ...),
        (DATA[:19] + b"\x91" * 5000, "message", "`array`"),
        (DATA[:19] + b"\xdf\xff\xff\xff\xff", "message", "Input data was truncated"),
        (bytes(6 << 20), "handshake", "6291456 bytes"),
    ],
)
def test_decode_handshake_rejects_malformed_bytes(data: Any, path: str, value: Any) -> None:
    """Another version, a part of a message, more than one, other bytes, too many, too deep."""
    error = refusal(lambda: decode_handshake(data), kvspec.WireError)
    assert path == error.path
    assert value is ... or value == error.value


@attrs.frozen(kw_only=True, slots=False)
class GrowingSpec(kvspec.MLAAttentionSpec):
    """A kind that is another whenever it is built again."""

    extra_retained_tokens: int = attrs.field(default=0, converter=lambda given: given + 1)


@attrs.frozen(kw_only=True, slots=False)
class PickySpec(kvspec.MLAAttentionSpec):
    """A kind whose constructor fails in a way of its own."""

    more: int = attrs.field(default=1, converter=lambda given: given if 12 // given else 1)


def of_kind(kind: Any, **more: Any) -> Handshake:
    """Return the introduction of an engine with one layer of a *kind*."""
    spec = kind(block_size=4, head_size=8, dtype="uint8", **more)
    group = kvspec.KVCacheGroup(name="own", layers=["layers.0"], spec=spec)
    return shake(of=kvspec.EngineSpec(groups=[group]))


def test_kinds_that_are_not_read_back_as_they_were_are_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A constructor that changes what it is given, texts that are no UTF-8, too many parts."""
    monkeypatch.setattr("kvspec.wire.encode.KINDS", dict(kvspec.wire.encode.KINDS))
    monkeypatch.setattr("kvspec.wire.decode.KINDS", kvspec.wire.encode.KINDS)
    for kind in (GrowingSpec, PickySpec):
        register(kind)
    growing = of_kind(GrowingSpec, extra_retained_tokens=3)
    error = refusal(lambda: encode_handshake(growing))
    assert ("handshake", growing) == (error.field, error.value)
    message = opened(encode_handshake(of_kind(PickySpec, more=4)))
    message["objects"][SPEC][1]["more"] = 0
    error = refusal(lambda: decode_handshake(closed(DATA, message)), kvspec.WireError)
    assert "objects[0].PickySpec" == error.path
    layer = attrs.evolve(engine().groups[0], layers=["\ud800"])
    error = refusal(lambda: encode_handshake(shake(of=kvspec.EngineSpec(groups=[layer]))))
    assert "UTF-8" in str(error)
    many = wide(parts=1025, layers=1)
    cache = kvspec.plan_memory(many, kvspec.RankId(), 1)
    assert "1024" in refusal(lambda: encode_handshake(shake(cache=cache))).expected


def test_nesting_has_an_end() -> None:
    """Lists in lists are read to a depth, not until the stack ends."""
    deep: Any = 1
    for _ in range(200):
        deep = ["tuple", deep]
    message = opened(DATA)
    message["objects"][SPEC][1]["dtype"] = deep
    error = refusal(lambda: decode_handshake(closed(DATA, message)), kvspec.WireError)
    assert error.path.startswith("objects[0].FullAttentionSpec.dtype")
    assert "16" in error.expected


def test_what_no_peer_could_read_is_not_sent() -> None:
    """More units than a message may spell out are the sender's error."""
    sharding = tuple(range(2**22 + 1) for _ in range(2))
    parallel = kvspec.ParallelConfig(tp_size=2, shardings={2**22 + 1: sharding})
    spec = kvspec.FullAttentionSpec(
        block_size=1, total_num_kv_heads=2**22 + 1, head_size=1, dtype="uint8"
    )
    group = kvspec.KVCacheGroup(name="wide", layers=["layers.0"], spec=spec)
    error = refusal(
        lambda: encode_handshake(shake(of=kvspec.EngineSpec(groups=[group], parallel=parallel)))
    )
    assert ("handshake", 2**22 + 39) == (error.field, error.value)
    assert "steps" in error.expected
