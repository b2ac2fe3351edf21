"""The longest prefix that all groups can serve, and the words that explain it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.stored import explain_lookup, longest_prefix
from kvspec.stored.lookup import pages_read

ROWS: dict[str, Any] = {"block_size": 4, "head_size": 2, "dtype": "uint8"}
HEADS = ROWS | {"total_num_kv_heads": 2}


def window(tokens: int, **more: Any) -> kvspec.SlidingWindowSpec:
    """Return a window of *tokens* tokens."""
    return kvspec.SlidingWindowSpec(sliding_window=tokens, **HEADS, **more)


STATE = kvspec.MambaSpec.mamba1(intermediate_size=4, state_size=2, conv_kernel=2, dtype="float32")
FULL = kvspec.FullAttentionSpec(**HEADS)
SPECS = {
    "full": FULL,
    "mla": kvspec.MLAAttentionSpec(**ROWS),
    "window": window(9),
    "wide": window(14, extra_retained_tokens=3),
    "mla window": kvspec.SlidingWindowMLASpec(sliding_window=6, **ROWS),
    "chunked": kvspec.ChunkedLocalAttentionSpec(attention_chunk_size=6, **HEADS),
    "state": STATE,
    "uniform": kvspec.UniformTypeKVCacheSpecs(specs={"uniform.l": FULL}),
}
RING = kvspec.CircularBufferSpec(
    block_size=8, compress_ratio=4, overlap=True, head_size=8, dtype="float32"
)


def group(name: str, spec: kvspec.LayerSpec | None = None, **more: Any) -> KVCacheGroup:
    """Return a group of one layer."""
    return KVCacheGroup(name=name, layers=[f"{name}.l"], spec=spec or SPECS[name], **more)


def is_read(spec: Any, position: int, query: int) -> bool:
    """Return whether the query behind *query* tokens reads *position*, by the definitions."""
    spec = getattr(spec, "specs", {"uniform.l": spec})["uniform.l"]
    if isinstance(spec, kvspec.MambaSpec):
        return position == query - 1
    if isinstance(spec, kvspec.ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size == query // spec.attention_chunk_size
    window = getattr(spec, "sliding_window", 10**9)
    return query - position < window + getattr(spec, "extra_retained_tokens", 0)


@given(
    st.lists(st.sampled_from(sorted(SPECS)), min_size=1, max_size=4, unique=True),
    st.integers(0, 9),
    st.integers(1, 6),
    st.sampled_from([0.5, 0.8, 0.95]),
    st.randoms(use_true_random=False),
)
def test_prefix_is_the_longest_whose_live_tokens_are_stored(
    names: list[str], num_pages: int, page_tokens: int, share: float, random: Any
) -> None:
    """Count position by position, without `live_tokens`, and try each length."""
    groups = [group(name) for name in names]
    stored = {(n, page) for n in names for page in range(num_pages) if random.random() < share}
    asked = Counter[tuple[str, int]]()

    def has(name: str, page: int) -> bool:
        asked[name, page] += 1
        return (name, page) in stored

    def serves(pages: int) -> bool:
        return all(
            (g.name, position // page_tokens) in stored
            for g in groups
            for position in range(pages * page_tokens)
            if is_read(g.spec, position, pages * page_tokens)
        )

    expected = max(pages for pages in range(num_pages + 1) if serves(pages))
    assert expected == longest_prefix(groups, num_pages, page_tokens, has)
    assert 1 >= max(asked.values(), default=0)
    words = explain_lookup(groups, num_pages, page_tokens, has)
    assert words.startswith(f"{expected * page_tokens} of {num_pages * page_tokens} token")
    assert (expected < num_pages) == ("\n" in words)


def of_rows(*rows: str) -> tuple[list[KVCacheGroup], Any]:
    """Return the groups, and `has` for rows such as ``state .x.x``."""
    stored = {row.split()[0]: row.split()[1] for row in rows}
    return [group(name) for name in stored], lambda name, page: stored[name][page] == "x"


def test_example_of_the_module_by_hand() -> None:
    """The window of 9 tokens reads the last 8 of them, which are two pages."""
    rows = ("full xxxxxxx.", "window .xx.xxx.", "state ...x.x..")
    each = [longest_prefix(*found[:1], 8, 4, found[1]) for found in map(of_rows, rows)]
    assert [7, 7, 6] == each
    groups, has = of_rows(*rows)
    assert 6 == longest_prefix(groups, 8, 4, has)
    assert [
        "24 of 32 tokens can be loaded",
        "full: page 7 (tokens 28 to 31) is not stored",
        "window: page 7 (tokens 28 to 31) is not stored, and no later position has all its pages",
        "state: no state behind token 24 is stored",
    ] == explain_lookup(groups, 8, 4, has).splitlines()
    assert [range(8), range(6, 8), range(7, 8)] == [pages_read(g, 8, 4) for g in groups]


def test_state_serves_only_its_own_position() -> None:
    groups, has = of_rows("full xxxxx...", "state ..x..x..")
    assert 3 == longest_prefix(groups, 8, 4, has)
    last = explain_lookup(groups, 8, 4, has).splitlines()[-1]
    assert "each ends at 20 or later" in last


def test_group_that_reads_nothing_at_one_place_reads_pages_at_another() -> None:
    """A chunk of 6 tokens ends at page 4 of 3 tokens, so nothing is read there."""
    groups, has = of_rows("chunked xx..", "state .xx.")
    assert [range(0), range(2, 3)] == [pages_read(groups[0], pages, 3) for pages in (4, 3)]
    assert 2 == longest_prefix(groups, 4, 3, has)


def test_nothing_is_stored() -> None:
    groups, has = of_rows("full ...", "state ...")
    words = explain_lookup(groups, 3, 4, has).splitlines()
    assert "0 of 12 tokens can be loaded" == words[0]
    assert "state: no state is stored" == words[-1]
    assert 0 == longest_prefix(groups, 0, 4, has)


@pytest.mark.parametrize(
    ("spec", "word"), [(RING, "ring"), (kvspec.CrossAttentionSpec(**HEADS), "encoder")]
)
def test_groups_without_pages_are_refused_with_a_reason(spec: Any, word: str) -> None:
    groups = [group("full"), group("other", spec)]
    assert 0 == longest_prefix(groups, 3, 4, lambda *_: True)
    words = explain_lookup(groups, 3, 4, lambda *_: True).splitlines()
    assert 2 == len(words)
    assert word in words[1]


def test_layers_that_do_not_move_need_no_pages() -> None:
    groups = [group("full"), group("draft", RING, excluded=["draft.l"])]
    groups.append(group("other", FULL, excluded=["other.l"]))
    assert 2 == longest_prefix(groups, 2, 4, lambda name, _: name == "full")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"groups": []}, "groups"), ({"groups": [group("full"), group("full")]}, "groups"),
        ({"groups": [FULL]}, "groups"), ({"groups": None}, "groups"),
        ({"num_pages": -1}, "num_pages"), ({"num_pages": True}, "num_pages"),
        ({"page_tokens": 0}, "page_tokens"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_lookup_are_refused(arguments: dict[str, Any], field: str) -> None:
    valid: dict[str, Any] = {"groups": [group("full")], "num_pages": 2, "page_tokens": 4}
    with pytest.raises(SpecError) as caught:
        longest_prefix(**{**valid, **arguments}, has=lambda *_: True)
    assert field == caught.value.field


def test_lookup_of_many_pages_asks_little() -> None:
    """A missing state at each page but the first, and a wide window."""
    asked = Counter[str]()

    def has(name: str, page: int) -> bool:
        asked[name] += 1
        return name != "state" or page == 0

    groups = [group("wide", window(4000)), group("state"), group("full")]
    assert 1 == longest_prefix(groups, 1000, 16, has)
    assert {"wide": 1, "full": 1000, "state": 1000} == asked
    asked.clear()
    assert 0 == longest_prefix(groups, 1000, 16, lambda name, page: has(name, page) and page > 0)
    assert {"full": 1} == asked
