"""Requests that differ in one field never share a name, for every field.

vLLM's suite for its block hashes (vllm#53769) had this idea. Here, the facts of a request are one
flat mapping, so a test can change each of them, and compare each result with all others.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspec.errors import SpecError
from kvspec.stored import ModelIdentity, PromptIdentity, page_names, space_of
from kvspec.tickets import MediaItem

ITEMS = (("cat", 1, 2), ("dog", 5, 2))
BASE: dict[str, Any] = {
    "model": "org/m", "revision": "0e9e39f", "weights": "", "quantization": "", "overrides": "",
    "placement": "ab" * 32, "page_tokens": 4, "token_ids": tuple(range(10, 18)),
    "adapter": "", "media": ITEMS, "embeddings": "", "salt": "",
}  # fmt: skip
MODEL_FIELDS = tuple(field.name for field in attrs.fields(ModelIdentity))
PROMPT_FIELDS = tuple(field.name for field in attrs.fields(PromptIdentity))


def names_of(facts: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the pages of a request with these facts."""
    model = ModelIdentity(**{name: facts[name] for name in MODEL_FIELDS})
    prompt = PromptIdentity.of(**{name: facts[name] for name in PROMPT_FIELDS})
    space = space_of(model, facts["placement"])
    return page_names(space, facts["token_ids"], facts["page_tokens"], prompt)


def changes() -> Iterator[tuple[str, Any]]:
    """Yield the field and the new value of each request. Each field has at least one."""
    for name in ("model", "revision"):
        yield from ((name, text) for text in ("org/M", "org/m ", "org/m\0", "0", "None"))
    for name in ("weights", "quantization", "overrides", "adapter", "embeddings", "salt"):
        # Equal texts in two fields, a text that is two fields, and both forms of one letter.
        texts = ["x", "x\0", "None", "0", '","salt":"', "x@y", "\u00e9", "e\u0301", "\U0001f600"]
        yield from ((name, text) for text in texts)
    yield from (("salt", b"\xff"), ("salt", "x" * 999), ("placement", "0" * 64))
    yield from (("page_tokens", size) for size in (1, 2, 3, 8))
    for at in range(8):
        for token in (0, -1, BASE["token_ids"][at] + 2**32, BASE["token_ids"][at] - 2**63):
            yield "token_ids", (*BASE["token_ids"][:at], token, *BASE["token_ids"][at + 1 :])
    yield "token_ids", BASE["token_ids"][::-1]
    for at, item in enumerate(ITEMS):
        rest = ITEMS[:at] + ITEMS[at + 1 :]
        identifier, start, length = item
        yield "media", rest
        yield "media", (*ITEMS, item)
        for name in (f"{identifier}2", f'{identifier}",1', f"{identifier}\0"):
            yield "media", (*rest, (name, start, length))
        yield "media", (*rest, (identifier, start + 1, length))
        yield "media", (*rest, (identifier, start, length + 1))
    yield "media", tuple((identifier, start, 3 - length) for identifier, start, length in ITEMS)
    yield "media", (("dog", 1, 2), ("cat", 5, 2))


def test_requests_that_differ_in_one_field_share_no_last_page() -> None:
    """Also any two changed requests share none, so no two fields can be confused."""
    cases = [BASE, *({**BASE, field: value} for field, value in changes())]
    assert set(BASE) == {field for field, _ in changes()}
    assert 100 < len(cases)
    last = [names_of(case)[-1] for case in cases]
    equal = [(a, b) for a, b in itertools.combinations(range(len(last)), 2) if last[a] == last[b]]
    assert [] == equal


def test_first_page_differs_unless_the_change_is_behind_it() -> None:
    first = names_of(BASE)[0]
    for field, value in changes():
        names = names_of({**BASE, field: value})
        behind = field == "token_ids" and value[:4] == BASE["token_ids"][:4]
        early = [item for item in value if item[1] < 4] if field == "media" else []
        behind |= field == "media" and early == [ITEMS[0]]
        assert behind == (first == names[0])
        assert len(names) == len(set(names))


TEXT = st.text(alphabet='ab"\\,:\x00\u00e9', max_size=3)
MEDIA = st.lists(
    st.builds(MediaItem, st.sampled_from(["a", "b", 'a",']), st.integers(0, 5), st.integers(1, 3)),
    max_size=2,
).map(lambda items: tuple(sorted(items, key=attrs.astuple)))
FACTS = st.fixed_dictionaries({
    "model": st.sampled_from(["a", "b"]), "revision": st.sampled_from(["a", "b"]), "weights": TEXT,
    "quantization": TEXT, "overrides": TEXT, "placement": st.sampled_from(["0" * 64, "1" * 64]),
    "page_tokens": st.integers(1, 2), "adapter": TEXT, "embeddings": TEXT, "salt": TEXT,
    "token_ids": st.lists(st.integers(-1, 1), min_size=1, max_size=4).map(tuple), "media": MEDIA,
})  # fmt: skip


@given(FACTS, FACTS, st.sets(st.sampled_from(sorted(BASE)), max_size=3))
def test_names_are_equal_if_and_only_if_the_facts_are(
    one: dict[str, Any], other: dict[str, Any], changed: set[str]
) -> None:
    """Compare each pair of pages of two requests that differ in few facts, or in none."""
    other = one | {field: other[field] for field in changed}
    names = [names_of(facts) for facts in (one, other)]
    for pages in itertools.product(*(range(len(own)) for own in names)):
        seen = []
        for facts, page in zip((one, other), pages, strict=True):
            end = (page + 1) * facts["page_tokens"]
            known = [item for item in facts["media"] if item.start < end]
            seen.append({**facts, "token_ids": facts["token_ids"][:end], "media": known})
        assert (seen[0] == seen[1]) == (names[0][pages[0]] == names[1][pages[1]])


@pytest.mark.parametrize("field", [*MODEL_FIELDS, *PROMPT_FIELDS])
def test_unknown_values_have_no_name(field: str) -> None:
    """None is not a text, and it is not "" either."""
    with pytest.raises(SpecError) as caught:
        names_of({**BASE, field: None})
    assert field == caught.value.field


@pytest.mark.parametrize("field", [*MODEL_FIELDS, "adapter", "embeddings"])
@pytest.mark.parametrize("value", ["\ud83d\ude00", "\ud800", b"x", 0, True, ["x"]])
def test_values_that_are_no_text_are_refused(field: str, value: Any) -> None:
    """Two halves of a surrogate pair would become the character that they make."""
    with pytest.raises(SpecError) as caught:
        names_of({**BASE, field: value})
    assert field == caught.value.field


def test_texts_are_not_normalised() -> None:
    """Two forms of one letter miss each other, which costs time. Equal names would cost tokens."""
    forms = {unicodedata.normalize(form, "\u00e9\ufb01") for form in ("NFC", "NFD", "NFKC", "NFKD")}
    assert len(forms) == len({names_of({**BASE, "adapter": form})[-1] for form in forms})
