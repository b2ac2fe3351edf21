"""Names of pages: what they depend on, how they are computed, and what is refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspec.errors import SpecError
from kvspec.stored import (
    ModelIdentity,
    PageNames,
    PromptIdentity,
    explain_difference,
    page_names,
    space_of,
)
from kvspec.tickets import MediaItem
from kvspec.tickets.stated import differences

MODEL = ModelIdentity(model="org/m", revision="0e9e39f", weights="", quantization="", overrides="")
TEXT = PromptIdentity.of_text()
SPACE = space_of(MODEL, "ab" * 32)


def test_names_are_sha256_of_the_documented_bytes() -> None:
    """The bytes are built without the functions of the package."""
    prompt = PromptIdentity(
        adapter="sql@1", media=[MediaItem("é", 3, 4), ("cat", 2, 1)], embeddings="e", salt="s"
    )
    seed = (
        f'{{"adapter":"sql@1","embeddings":"e","page_tokens":2,"salt":"s","space":"{SPACE}",'
        '"version":1}'
    )
    name = hashlib.sha256(seed.encode()).digest()
    expected = []
    for tokens, media in (((1, -2), b""), ((3, 2**40), b'[["cat",2,1],["\\u00e9",3,4]]')):
        for token in tokens:
            name += token.to_bytes(8, "little", signed=True)
        name = hashlib.sha256(name + media).digest()
        expected.append(name.hex())
    assert tuple(expected) == page_names(SPACE, [1, -2, 3, 2**40, 9], 2, prompt)


def test_space_is_sha256_of_the_documented_json() -> None:
    model = json.dumps(MODEL.to_params(), sort_keys=True, separators=(",", ":"))
    text = (
        f'{{"model":"{hashlib.sha256(model.encode()).hexdigest()}","placement":"{"ab" * 32}",'
        '"version":1}'
    )
    assert hashlib.sha256(text.encode()).hexdigest() == SPACE


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30),
    st.integers(1, 5),
    st.lists(st.integers(0, 30), max_size=3).map(sorted),
)
def test_growing_prompt_has_the_names_of_the_whole_prompt(
    tokens: list[int], page_tokens: int, cuts: list[int]
) -> None:
    prompt = PromptIdentity.of(adapter="", media=[("cat", 3, 2)], embeddings="", salt="")
    whole = page_names(SPACE, tokens, page_tokens, prompt)
    growing = PageNames(SPACE, page_tokens, prompt)
    for start, stop in zip([0, *cuts], [*cuts, 30], strict=True):
        growing.extend(tokens[start:stop])
    assert whole == growing.names
    assert len(tokens) // page_tokens == len(whole) == len(set(whole))


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_prompts_share_the_names_of_their_common_pages(one: list[int], other: list[int]) -> None:
    """Neither fewer nor more: a page is shared if all tokens up to its end are equal."""
    names = [page_names(SPACE, tokens, 2, TEXT) for tokens in (one, other)]
    pages = range(min(map(len, names)))
    shared = [one[: 2 * page + 2] == other[: 2 * page + 2] for page in pages]
    assert shared == [names[0][page] == names[1][page] for page in pages]
    assert sum(shared) == len(set(names[0]) & set(names[1]))


def test_media_enter_the_page_in_which_they_begin() -> None:
    """A later page depends on them by the chain, an earlier one does not."""
    plain = page_names(SPACE, [1] * 8, 2, TEXT)
    for start, equal in ((0, 0), (1, 0), (2, 1), (5, 2), (7, 3), (8, 4), (99, 4)):
        media = attrs.evolve(TEXT, media=[("cat", start, 50)])
        names = page_names(SPACE, [1] * 8, 2, media)
        assert equal == sum(map(str.__eq__, plain, names))


def test_order_of_media_changes_no_name() -> None:
    items = [MediaItem("b", 1, 2), MediaItem("a", 1, 2), MediaItem("c", 0, 9)]
    names = {
        page_names(SPACE, [1, 2], 2, attrs.evolve(TEXT, media=order))
        for order in (items, items[::-1])
    }
    assert 1 == len(names)


def test_tokens_of_any_type_have_one_name() -> None:
    tokens = np.arange(6)
    ways: list[Any] = [
        list(tokens), tuple(tokens), range(6), tokens, tokens.astype(np.uint8),
        tokens.astype(">i4"), np.arange(12)[::2] // 2, tokens.astype(np.uint64),
    ]  # fmt: skip
    assert 1 == len({page_names(SPACE, way, 2, TEXT) for way in ways})


CHANGES: dict[str, Any] = {
    "model": "org/n", "revision": "1", "weights": "step-2", "quantization": "fp8",
    "overrides": "{}", "adapter": "sql@1", "media": [("cat", 0, 1)], "embeddings": "e", "salt": "s",
}  # fmt: skip


@pytest.mark.parametrize("identity", [MODEL, TEXT], ids=["model", "prompt"])
def test_each_field_is_named_if_it_differs_or_is_not_stated(
    identity: ModelIdentity | PromptIdentity,
) -> None:
    """The table has all fields, so a field that is left out is found."""
    for field in attrs.fields(type(identity)):
        other = attrs.evolve(identity, **{field.name: CHANGES[field.name]})
        assert identity.digest != other.digest
        assert [field.name] == [name for name, _ in differences(identity, other)]
        assert field.name in explain_difference(identity, other)
        unknown = attrs.evolve(identity, **{field.name: None})
        assert [field.name] == [name for name, _ in differences(unknown, unknown)]
        assert (field.name,) == unknown.unstated
        with pytest.raises(SpecError) as caught:
            _name_with(unknown)
        assert field.name == caught.value.field
    loaded = type(identity).from_params(json.loads(json.dumps(identity.to_params())))
    assert identity == loaded
    assert not explain_difference(identity, loaded)


def _name_with(identity: ModelIdentity | PromptIdentity) -> tuple[str, ...]:
    """Return the names of a prompt of this model, or of this prompt."""
    if isinstance(identity, ModelIdentity):
        return page_names(space_of(identity, "ab" * 32), [1, 2], 2, TEXT)
    return page_names(SPACE, [1, 2], 2, identity)


def test_identities_of_two_classes_are_not_compared() -> None:
    with pytest.raises(SpecError) as caught:
        explain_difference(MODEL, TEXT)
    assert "other" == caught.value.field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"space": "AB" * 32}, "space"), ({"space": "ab"}, "space"), ({"space": b"a"}, "space"),
        ({"space": "\u0661" * 64}, "space"),
        ({"page_tokens": 0}, "page_tokens"), ({"page_tokens": True}, "page_tokens"),
        ({"page_tokens": np.int64(2)}, "page_tokens"), ({"page_tokens": 2.0}, "page_tokens"),
        ({"token_ids": [2**63]}, "token_ids"), ({"token_ids": [2**64]}, "token_ids"),
        ({"token_ids": [-(2**63) - 1]}, "token_ids"), ({"token_ids": [True, False]}, "token_ids"),
        ({"token_ids": [1, True]}, "token_ids[1]"), ({"token_ids": [np.False_, 1]}, "token_ids[0]"),
        ({"token_ids": [1.0]}, "token_ids"), ({"token_ids": "12"}, "token_ids"),
        ({"token_ids": b"12"}, "token_ids"),
        ({"token_ids": bytearray(b"12")}, "token_ids"), ({"token_ids": [[1, 2]]}, "token_ids"),
        ({"token_ids": [2**63, -1]}, "token_ids"), ({"token_ids": {1: 2}}, "token_ids"),
        ({"prompt": MODEL}, "prompt"), ({"prompt": None}, "prompt"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments: dict[str, Any], field: str) -> None:
    valid = {"space": SPACE, "token_ids": [1, 2], "page_tokens": 2, "prompt": TEXT}
    with pytest.raises(SpecError) as caught:
        page_names(**{**valid, **arguments})
    assert field == caught.value.field


def test_extreme_prompts_have_names() -> None:
    """Pages may be larger than any prompt, and items may begin and end anywhere."""
    items = [MediaItem("a", 2**63 - 1, 2**63 - 1), MediaItem("b", 0, 2**63 - 1)]
    prompt = attrs.evolve(TEXT, media=items)
    assert () == page_names(SPACE, [], 1, prompt) == page_names(SPACE, [1] * 9, 2**62, prompt)
    assert 9 == len(set(page_names(SPACE, [1] * 9, 1, prompt)))
    # Items that overlap are both in the name, whatever the order in which they are given.
    one, other = MediaItem("a", 0, 3), MediaItem("b", 0, 3)
    several = [(one,), (other,), (one, other), (one, one)]
    names = {page_names(SPACE, [1], 1, attrs.evolve(TEXT, media=way)) for way in several}
    assert 4 == len(names)


def test_refused_tokens_leave_a_growing_prompt_unchanged() -> None:
    growing = PageNames(SPACE, 2, TEXT)
    growing.extend([1, 2, 3])
    with pytest.raises(SpecError):
        growing.extend([4, 2**64])
    growing.extend([4])
    assert page_names(SPACE, [1, 2, 3, 4], 2, TEXT) == growing.names


def test_salt_has_one_digest_as_text_and_as_bytes() -> None:
    """Halves of a surrogate pair are another salt than the character that they make."""
    salts = ["", b"", "x", b"x", "\U0001f600", "\ud83d\ude00", "\U0001f600".encode()]
    texts = [PromptIdentity.of_text(salt=salt).salt for salt in salts]
    assert texts[0] == texts[1] == ""
    assert texts[2] == texts[3]
    assert texts[4] == texts[6] != texts[5]


def test_empty_names_of_model_and_revision_are_refused() -> None:
    """An engine that does not know them must not equal another one that does not."""
    for name in ("model", "revision"):
        with pytest.raises(SpecError) as caught:
            attrs.evolve(MODEL, **{name: ""})
        assert name == caught.value.field


@pytest.mark.parametrize(
    ("model", "digest", "field"), [(MODEL, "", "placement_digest"), (TEXT, "0" * 64, "model")]
)
def test_wrong_space_is_refused(model: Any, digest: str, field: str) -> None:
    """The identity of a prompt has a digest, too."""
    with pytest.raises(SpecError) as caught:
        space_of(model, digest)
    assert field == caught.value.field
