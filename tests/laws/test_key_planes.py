"""Pages of keys alone, which have all keys and then all scales: the indexers of DeepSeek-V3.2.

The places of the bytes were worked out by hand.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from builders import case, engine, group, mla, request

import kvspec
from kvspec.testing import laws
from kvspec.testing.laws import KVSPEC
from kvspec.testing.world import world
from kvspec.wire.values import Decoder, encode

INDEXER: dict[str, Any] = {"head_size": 128, "dtype": "uint8", "scale_dtype": "float32"}
FP4: dict[str, Any] = {
    "head_size": 64, "dtype": "uint8", "scale_dtype": "float8_e8m0fnu", "elements_per_scale": 16,
}  # fmt: skip
V4: dict[str, Any] = {
    "head_size": 576, "dtype": "uint8", "scale_dtype": "uint8", "elements_per_scale": 72,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "row", "scales"), [(INDEXER, 128, 4), (FP4, 64, 4), (V4, 576, 8)]
)
@pytest.mark.parametrize(("own", "other"), [(4, 4), (4, 6), (6, 4), (2, 8)])
def test_keys_and_scales_move_between_pages_of_unequal_blocks(
    fields: dict[str, Any], row: int, scales: int, own: int, other: int
) -> None:
    """A page of B tokens has B keys, and then B scales."""
    sides = [engine(mla(**fields, block_size=size), tp=tp) for size, tp in ((own, 2), (other, 3))]
    blocks = [[*range(5 * 12 // size)][::-1] for size in (own, other)]
    one = case(*sides, request(11, *blocks, cached_tokens=1))
    here = world(one)
    assert [] == laws.broken(KVSPEC, one)
    table = here.table(kvspec.RankId(), kvspec.RankId())
    found = set()
    bases = [
        side[kvspec.RankId()][0].memory[0].address for side in (here.producers, here.consumers)
    ]
    for source, target, length in table.descriptors(one.request).astype(np.int64).tolist():
        found |= {(source - bases[0] + byte, target - bases[1] + byte) for byte in range(length)}

    def place(size: int, ids: list[int], token: int, byte: int) -> int:
        page, at = ids[token // size] * size * (row + scales), token % size
        inner = at * row + byte if byte < row else size * row + at * scales + byte - row
        return page + inner

    assert found == {
        (place(own, blocks[0], token, byte), place(other, blocks[1], token, byte))
        for token in range(1, 11)
        for byte in range(row + scales)
    }


def test_kernel_blocks_have_planes_of_their_own() -> None:
    """A block of 128 tokens in kernel blocks of 64 has two pages of planes."""
    spec = mla(**INDEXER, block_size=8)
    sides = engine(group(spec, kernel_block_size=4)), engine(mla(**INDEXER, block_size=4))
    assert [] == laws.broken(KVSPEC, case(*sides, request(13, [3, 1], [2, 0, 1, 4])))


def test_page_of_deepseek_v4_has_padding_after_its_scales() -> None:
    """64 rows of 584 bytes are 37,376, padded to 65 x 576."""
    spec = mla(**V4, block_size=64, page_size_padded=37_440)
    assert (37_440, 64 * 584) == (spec.page_size_bytes(), 64 * (576 + 8))
    assert [("latent", 576), ("latent_scale", 8)] == [(p.name, p.content_bytes) for p in spec.parts]
    sides = engine(mla(**V4, block_size=64, page_size_padded=37_440)), engine(mla(**V4))
    assert [] == laws.broken(KVSPEC, case(*sides, request(20, [1], [2, 0])))


@pytest.mark.parametrize("field", ["scale_dtype", "elements_per_scale"])
def test_keys_with_other_scales_are_refused(field: str) -> None:
    """Scales of other sizes or types mean other numbers."""
    value: Any = {"scale_dtype": "bfloat16", "elements_per_scale": 64}[field]
    other = attrs.evolve(mla(**INDEXER), **{field: value})
    found = kvspec.mismatches(engine(mla(**INDEXER)), engine(other))
    assert f"l.{field}" in {mismatch.field for mismatch in found}
    assert kvspec.mismatches(engine(mla(**INDEXER)), engine(mla(head_size=132, dtype="uint8")))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"elements_per_scale": 3, **INDEXER}, "elements_per_scale"),
        ({"head_size": 8, "elements_per_scale": 8}, "elements_per_scale"),
        ({"head_size": 8, "tokens_per_scale": 2}, "tokens_per_scale"),
        ({**INDEXER, "state_content_bytes": 132}, "scale_dtype"),
    ],
)
def test_latents_reject_impossible_scales(fields: Any, field: str) -> None:
    with pytest.raises(kvspec.SpecError) as caught:
        mla(**fields)
    assert field == caught.value.field


def test_older_peers_read_latents_without_scales() -> None:
    """Versions 10 and 11 do not know the fields of scales, so a default is not sent."""
    names = {"scale_dtype", "elements_per_scale", "tokens_per_scale"}
    for spec, sent in ((mla(), set()), (mla(**INDEXER), {"scale_dtype"})):
        plain = encode(spec)
        assert sent == names & set(plain["MLAAttentionSpec"])
        assert spec == Decoder().value("spec", plain)
