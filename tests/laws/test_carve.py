"""Tests of the oracle's shardings and arrays, against values by hand and a walk over all bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.check.counting import rank_layers, rank_units, shard_units
from kvspec.specs import AttentionSpec
from kvspec.testing import strategies
from kvspec.testing.carve import logical_views, stored_views
from kvspec.testing.parallels import is_state

pytestmark = pytest.mark.uncovered

RANK = kvspec.RankId()


def engine_of(spec: kvspec.LayerSpec, layout: str) -> kvspec.EngineSpec:
    """Return an engine of one rank and one group of the layers a and b."""
    return builders.engine(spec, layers=("a", "b"), layout=layout)


@pytest.mark.parametrize("granularity", [1, 3])
def test_shard_units_deals_the_ranges_of_the_definition(granularity: int) -> None:
    """With U packs and T ranks, rank r owns packs r * U // T up to (r + 1) * U // T.

    If there are fewer packs than ranks, rank r owns only pack r * U // T.
    """
    for packs in range(1, 33):
        for size in range(1, 33):
            for rank, units in enumerate(shard_units(packs * granularity, size, granularity)):
                first = rank * packs // size
                last = (rank + 1) * packs // size if packs >= size else first + 1
                assert list(range(first * granularity, last * granularity)) == units


def test_shard_units_deals_three_small_examples() -> None:
    """Three heads on two ranks, two heads on five, and six channels in packs of two on two."""
    assert [[0], [1, 2]] == shard_units(3, 2)
    assert [[0], [0], [0], [1], [1]] == shard_units(2, 5)
    assert [[0, 1], [2, 3, 4, 5]] == shard_units(6, 2, granularity=2)


@attrs.frozen
class Walk:
    """Every byte of one group's storage on one rank, in the order of the layout.

    *layers* are those of the rank's stage. *blocks* is the number of blocks of the table, and each
    of them is *kernel_blocks_per_block* blocks in memory.
    """

    engine: kvspec.EngineSpec
    rank: kvspec.RankId
    group: kvspec.KVCacheGroup
    layers: tuple[str, ...]
    blocks: int
    kernel_blocks_per_block: int

    def __iter__(self) -> Iterator[Mapping[str, Any] | None]:
        """Yield the place of each byte by letter ("K" for the part), or None for padding."""
        letters = self.group.layout or self.engine.layout
        if is_state(self.group.spec):
            inner = "".join(letter for letter in letters if letter in "HN").replace("H", "KH")
            letters = "".join(letter for letter in letters if letter in "LB") + "T" + inner + "C"
        else:
            letters = letters if "K" in letters else letters[:-1] + "KC"
            inside = 1 + max(letters.index("L"), letters.index("B"))
            letters = letters[:inside] + "T" + letters[inside:]
        return self.step(letters, {})

    def parts(self, at: Mapping[str, Any]) -> list[kvspec.Part]:
        """Return the parts inside the box *at*."""
        layer_parts = self.group.spec.of_layer(at.get("L", self.layers[0])).parts
        layer_parts = tuple(p for p in layer_parts if at.get("T", p.tensor) == p.tensor)
        return [part for part in layer_parts if at.get("K", part.name) == part.name]

    def choices(self, letter: str, at: Mapping[str, Any]) -> Sequence[Any]:
        """Return the values of *letter* inside the box *at*."""
        if letter in "LB":
            return (
                self.layers if letter == "L" else range(self.blocks * self.kernel_blocks_per_block)
            )
        parts = self.parts(at)
        if letter in "TK":
            return list(dict.fromkeys(p.tensor if letter == "T" else p.name for p in parts))
        units = len(rank_units(self.engine, self.rank, parts[0], self.group))
        rows = 0
        while rows * self.kernel_blocks_per_block < parts[0].states:
            rows += 1
        return range({"H": units, "N": rows, "C": parts[0].content_bytes}[letter])

    def step(self, rest: str, at: Mapping[str, Any]) -> Iterator[Mapping[str, Any] | None]:
        """Yield the bytes of the box *at*, whose remaining axes are *rest*."""
        if not rest:
            yield at
            return
        written = 0
        for value in self.choices(rest[0], at):
            for byte in self.step(rest[1:], {**at, rest[0]: value}):
                written += 1
                yield byte
        if set(at) == {"L", "B"}:
            page = self.group.spec.of_layer(at["L"]).page_size_padded
            yield from [None] * ((page or written) - written)


def split_of(group: kvspec.KVCacheGroup) -> int:
    """Return how many kernel blocks fill a block of the table, by trying each number."""
    kernel_blocks_per_block = 1
    while (
        kernel_blocks_per_block * (group.kernel_block_size or group.spec.block_size)
        < group.spec.block_size
    ):
        kernel_blocks_per_block += 1
    return kernel_blocks_per_block


@given(strategies.engine_pairs(largest=4), st.integers(1, 3), st.data())
@settings(max_examples=80)
def test_logical_views_agree_with_a_walk_over_all_bytes(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec], blocks: int, data: st.DataObject
) -> None:
    """The views are cut by letters, and the walk counts bytes one by one in the same order."""
    engine = in_rows(engines[0])
    rank = data.draw(st.sampled_from(engine.parallel.ranks))
    storage, walked, marked = {}, {}, {}
    for group in engine.groups:
        layers = tuple(layer for layer in group.layers if stage_of(engine, layer) == rank.pp)
        if layers:
            walk = Walk(engine, rank, group, layers, blocks, split_of(group))
            walked[group.name] = list(walk)
            storage[group.name] = np.zeros(len(walked[group.name]), np.uint8)
    views = stored_views(engine, rank, storage, blocks)
    for name, counted in walked.items():
        marks = [0 if at is None else number % 251 for number, at in enumerate(counted, 1)]
        for mark, at in zip(marks, counted, strict=True):
            if at is not None:
                views[name, at["L"], at["K"]][at["B"], at["H"], at["N"], at["C"]] = mark
        marked[name] = marks
    assert marked == {name: flat.tolist() for name, flat in storage.items()}


def in_rows(engine: kvspec.EngineSpec) -> kvspec.EngineSpec:
    """Return *engine* with plain pages, because letters do not describe formats."""
    groups = [attrs.evolve(group, spec=plain(group.spec)) for group in engine.groups]
    return attrs.evolve(engine, groups=groups)


def plain(spec: kvspec.LayerSpec) -> kvspec.LayerSpec:
    """Return *spec* with plain pages. In a uniform-type group, each layer has plain pages."""
    if isinstance(spec, kvspec.UniformTypeKVCacheSpecs):
        return attrs.evolve(
            spec, specs={name: plain(member) for name, member in spec.specs.items()}
        )
    return attrs.evolve(spec, page_format="plain") if isinstance(spec, AttentionSpec) else spec


def stage_of(engine: kvspec.EngineSpec, layer: str) -> int:
    """Return the stage that names a layer, or whose share of the numbers contains it."""
    stages, size = engine.parallel.stages, engine.parallel.pp_size
    if stages is not None:
        return next(at for at, names in enumerate(stages) if layer in names)
    if size == 1:
        return 0
    layers = [each for group in engine.groups for each in group.layers]
    number = {each: int(next(iter(re.findall(r"[0-9]+", each)))) for each in layers}
    place = sorted(set(number.values())).index(number[layer])
    return max(s for s in range(size) if s * len(set(number.values())) // size <= place)


def test_rank_layers_divides_five_numbers_into_two_and_three() -> None:
    """Layers with the same number stay together."""
    spec = kvspec.MLAAttentionSpec(block_size=1, head_size=1, dtype="uint8")
    names = tuple(f"{kind}.{at}" for at in (9, 2, 4, 7, 5) for kind in ("key", "index"))
    engine = builders.engine(spec, layers=names, pp_size=2)
    layers = [rank_layers(engine, rank, engine.groups[0]) for rank in engine.parallel.ranks]
    assert [
        ["key.2", "index.2", "key.4", "index.4"],
        [x for x in names if x[-1] in "975"],
    ] == layers


def test_logical_views_have_a_block_for_each_kernel_block() -> None:
    """A block of 4 tokens has two kernel blocks, of two rows each."""
    spec = kvspec.MLAAttentionSpec(block_size=4, head_size=3, dtype="uint8")
    engine = engine_of(spec, "LBHNC")
    cut = attrs.evolve(engine.groups[0], kernel_block_size=2)
    storage = {"g": np.arange(48, dtype=np.uint8)}
    views = logical_views(attrs.evolve(engine, groups=(cut,)), RANK, storage, 2)
    assert (4, 1, 2, 3) == views["g", "b", "latent"].shape
    assert [[30, 31, 32], [33, 34, 35]] == views["g", "b", "latent"][1, 0].tolist()


def test_logical_views_of_groups_that_share_an_array() -> None:
    """Both groups begin at the first byte. The smaller group ends before the array does."""
    spec = kvspec.MLAAttentionSpec(block_size=1, head_size=3, dtype="uint8", page_size_padded=4)
    groups = tuple(
        kvspec.KVCacheGroup(name=name, layers=layers, spec=spec)
        for name, layers in (("g", ("a", "b")), ("h", ("c",)))
    )
    flat = np.arange(24, dtype=np.uint8)
    engine = kvspec.EngineSpec(groups=groups)
    views = logical_views(engine, RANK, {"g": flat, "h": flat}, 3)
    assert [[0, 1, 2], [4, 5, 6], [8, 9, 10]] == views["h", "c", "latent"][:, 0, 0].tolist()
    assert [[12, 13, 14], [16, 17, 18], [20, 21, 22]] == views["g", "b", "latent"][:, 0, 0].tolist()


def test_logical_views_of_a_page_with_rows_outermost() -> None:
    """The layout is LBNHC: token, head, then keys and values of that head. Padding ends a page."""
    spec = builders.gqa(2, block_size=2, head_size=1, dtype="uint8", page_size_padded=10)
    storage = {"g": np.arange(60, dtype=np.uint8)}
    views = logical_views(engine_of(spec, "LBNHC"), RANK, storage, 3)
    assert [[30, 34], [32, 36]] == views["g", "b", "k"][0, :, :, 0].tolist()
    assert [[51, 55], [53, 57]] == views["g", "b", "v"][2, :, :, 0].tolist()


def test_logical_views_of_nhd_and_hnd_equal_those_of_their_letters() -> None:
    """NHD is LBNHC, and HND is LBHNC."""
    spec = kvspec.FullAttentionSpec(block_size=2, total_num_kv_heads=2, head_size=1, dtype="uint8")
    storage = {"g": np.arange(16, dtype=np.uint8)}
    for alias, letters in (("NHD", "LBNHC"), ("HND", "LBHNC")):
        alias_views, letter_views = (
            logical_views(engine_of(spec, x), RANK, storage, 1) for x in (alias, letters)
        )
        assert letter_views["g", "b", "v"].tolist() == alias_views["g", "b", "v"].tolist()


def test_logical_views_of_conv_states_in_both_orders() -> None:
    """With dimensions first, a channel has its rows. With rows first, a row has its channels."""
    spec = kvspec.MambaSpec.mamba2(
        num_heads=2, head_dim=1, n_groups=1, state_size=1, conv_kernel=3, dtype="uint8"
    )
    storage = {"g": np.arange(20, dtype=np.uint8)}
    first = logical_views(engine_of(spec, "LBHNC"), RANK, storage, 1)
    assert [[0, 1], [2, 3]] == first["g", "a", "conv_x"][0, :, :, 0].tolist()
    assert [[6, 7]] == first["g", "a", "conv_c"][0, :, :, 0].tolist()
    last = logical_views(engine_of(spec, "LBNHC"), RANK, storage, 1)
    assert [[0, 4], [1, 5]] == last["g", "a", "conv_x"][0, :, :, 0].tolist()
    assert [[3, 7]] == last["g", "a", "conv_c"][0, :, :, 0].tolist()
    assert [[8], [9]] == last["g", "a", "ssm"][0, :, :, 0].tolist()


def test_logical_views_reject_storage_of_another_size() -> None:
    """The layout needs 12 bytes, and the storage has 13."""
    spec = kvspec.MLAAttentionSpec(block_size=2, head_size=3, dtype="uint8")
    with pytest.raises(ValueError, match=r"13.*12"):
        logical_views(engine_of(spec, "LBHNC"), RANK, {"g": np.zeros(13, np.uint8)}, 1)


def test_logical_views_reject_a_head_axis_of_unequal_layers() -> None:
    """Layers with 1 and 2 heads have no common head axis outside of the layers."""
    first, second = (
        kvspec.FullAttentionSpec(block_size=1, total_num_kv_heads=n, head_size=1, dtype="uint8")
        for n in (1, 2)
    )
    spec = kvspec.UniformTypeKVCacheSpecs(specs={"a": first, "b": second})
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        logical_views(engine_of(spec, "BHLNC"), RANK, {"g": np.zeros(6, np.uint8)}, 1)


def test_logical_views_reject_padding_without_contiguous_pages() -> None:
    """The block of a layer is not contiguous, so it has no end that could be padded."""
    spec = builders.gqa(2, block_size=1, head_size=1, dtype="uint8", page_size_padded=7)
    with pytest.raises(ValueError, match="LHBNC"):
        logical_views(engine_of(spec, "LHBNC"), RANK, {"g": np.zeros(14, np.uint8)}, 1)


def test_logical_views_ignore_the_position_of_an_axis_of_one() -> None:
    """A single head outside of the blocks leaves a page contiguous, so it may be padded."""
    spec = kvspec.MLAAttentionSpec(block_size=1, head_size=3, dtype="uint8", page_size_padded=4)
    storage = {"g": np.arange(16, dtype=np.uint8)}
    views = logical_views(engine_of(spec, "HLBNC"), RANK, storage, 2)
    assert [[8, 9, 10], [12, 13, 14]] == views["g", "b", "latent"][:, 0, 0].tolist()
