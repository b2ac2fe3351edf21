"""Two contents that differ in one field never share a name, and malformed values are refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspec.errors import SpecError
from kvspec.tickets import (
    ContentIdentity,
    MediaItem,
    content_of,
    explain_difference,
    sampling_of,
)
from kvspec.tickets.stated import differences

BASE: dict[str, Any] = {
    "weights": "", "adapter": "", "media": (), "embeddings": "", "salt": "",
}  # fmt: skip
TEXTS = st.text(max_size=9)
MEDIA = st.builds(MediaItem, st.text(min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 9))
IDENTITIES = st.builds(
    ContentIdentity.of,
    st.lists(st.integers(0, 99), min_size=10, max_size=12),
    st.integers(0, 10),
    weights=st.none() | TEXTS,
    adapter=st.none() | TEXTS,
    media=st.none() | st.lists(MEDIA, max_size=3),
    embeddings=st.none() | TEXTS,
    salt=st.none() | TEXTS | st.binary(max_size=4),
)


@given(IDENTITIES, IDENTITIES)
def test_contents_with_one_digest_are_equal(one: ContentIdentity, other: ContentIdentity) -> None:
    """A field that is not stated equals nothing, so it has no digest."""
    if one.unstated or other.unstated:
        assert explain_difference(one, other)
        with pytest.raises(SpecError):
            _ = (one.digest, other.digest)
        return
    assert (one == other) == (one.digest == other.digest) == (not explain_difference(one, other))


@given(IDENTITIES)
def test_content_is_equal_after_json(content: ContentIdentity) -> None:
    assert content == ContentIdentity.from_params(json.loads(json.dumps(content.to_params())))


CHANGES: dict[str, Any] = {
    "num_tokens": 2, "tokens": "0" * 32, "weights": "2", "adapter": "sql@1", "embeddings": "e",
    "media": [MediaItem("cat", 0, 1)], "salt": "t",
}  # fmt: skip


def test_each_field_changes_the_digest_and_is_named() -> None:
    """The list has all fields, so a field that the digest leaves out is found."""
    content = ContentIdentity.of([1, 2, 3], **BASE)
    assert {field.name for field in attrs.fields(ContentIdentity)} == set(CHANGES)
    for name, value in CHANGES.items():
        other = attrs.evolve(content, **{name: value})
        assert content.digest != other.digest
        assert [name] == [field for field, _ in differences(content, other)]
        if name not in ("num_tokens", "tokens"):
            unknown = attrs.evolve(content, **{name: None})
            assert [name] == [field for field, _ in differences(unknown, unknown)]


def test_media_behind_the_first_tokens_are_left_out() -> None:
    item = MediaItem("cat", 2, 5)
    assert () == ContentIdentity.of([1] * 9, 2, **BASE | {"media": [item]}).media
    assert (item,) == ContentIdentity.of([1] * 9, 3, **BASE | {"media": [["cat", 2, 5]]}).media


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"num_tokens": 4}, "num_tokens"), ({"num_tokens": True}, "num_tokens"),
        ({"media": [("", 0, 1)]}, "media.identifier"), ({"media": [("a", -1, 1)]}, "media.start"),
        ({"media": [("a", 0, 0)]}, "media.length"), ({"media": [("a", 0)]}, "media"),
        ({"media": "cat"}, "media"), ({"salt": 3}, "salt"), ({"weights": 3}, "weights"),
        ({"adapter": b"x"}, "adapter"), ({"adapter": "\ud83d\ude00"}, "adapter"),
        ({"media": [("\ud800", 0, 1)]}, "media.identifier"),
    ],
)  # fmt: skip
def test_content_rejects_wrong_arguments(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        ContentIdentity.of([1, 2, 3], **BASE | changed)
    assert field == caught.value.field.partition("[")[0]


@pytest.mark.parametrize(
    "changed",
    [{"version": 2}, {"version": True}, {"other": 1}, {"tokens": None}, {"media": [[1, 2, 3]]}],
)
def test_content_rejects_wrong_params(changed: dict[str, Any]) -> None:
    params = ContentIdentity.of_text([1]).to_params() | changed
    params = {name: value for name, value in params.items() if value is not None}
    with pytest.raises(SpecError) as caught:
        ContentIdentity.from_params(params)
    assert caught.value.field.startswith("content")


def test_long_differences_are_shortened() -> None:
    many = ContentIdentity.of([1] * 99, **BASE | {"media": [(f"m{n}", n, 1) for n in range(50)]})
    assert 500 > len(explain_difference(ContentIdentity.of([1] * 99, **BASE), many))


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"beam": 2}, None), ({3: 1}, None), ({"top_p": "high"}, None), ({"top_k": True}, None),
        ({"min_p": 10**400}, None), (None, {"grammar": object()}), (None, {"x": float("nan")}),
        (None, {1: "x"}), (None, {"grammar": "\ud83d\ude00"}),
    ],
)  # fmt: skip
def test_sampling_rejects_what_it_cannot_name(settings: Any, others: Any) -> None:
    with pytest.raises(SpecError):
        sampling_of(0.5, settings, others)


def test_settings_that_change_nothing_are_left_out() -> None:
    """A bias or a grammar changes even the most probable token."""
    assert "greedy" == sampling_of(0, {"top_p": 0.5, "seed": 3, "logit_bias": {}, "top_k": -1})
    texts = {
        sampling_of(0.0, *more)
        for more in ((), ({"logit_bias": {"5": 1.0}},), (None, {"grammar": "x"}))
    }
    assert 3 == len(texts)
    assert sampling_of(1, {"top_k": 5}) == sampling_of(1.0, {"top_k": 5.0})


def test_large_seeds_that_round_to_one_float_are_two_settings() -> None:
    texts = {sampling_of(1.0, {"seed": seed}) for seed in (2**53, 2**53 + 1, 2**64 - 1, 2**64 - 2)}
    assert 4 == len(texts)


def test_token_id_beyond_64_bits_with_a_sign_is_refused() -> None:
    """Its checksum would be that of a negative id."""
    with pytest.raises(SpecError) as caught:
        content_of([2**64 - 1])
    assert "token_ids" == caught.value.field
    assert content_of([2**63 - 1]) != content_of([-1])
