"""Requests that differ in one field never share a name, for every field.

vLLM's suite for its block hashes (vllm#53769) had this idea. `kvspec.testing.differing` has the
list of changes, by which the kit judges foreign stores, too.
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
from kvspec.testing import differing
from kvspec.testing.differing import ITEMS, changed, prompt_pairs
from kvspec.testing.laws.prompt_names import OTHER_PROCESS, PagedPrompt, first_difference
from kvspec.testing.stored import own_names
from kvspec.tickets import MediaItem

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


def last_name(prompt: PagedPrompt) -> str:
    """Return the name of the last page of a prompt."""
    return named(prompt)[-1]


def named(prompt: PagedPrompt) -> tuple[str, ...]:
    """Return the names of the pages of a prompt."""
    return own_names(prompt.model, prompt.prompt, prompt.placement, prompt.token_ids)


def extreme_prompts() -> Iterator[PagedPrompt]:
    """Yield prompts with token ids that no engine has, one item twice, and items of other lengths.

    An identifier decides the length of its item, so a foreign store may leave the length out.
    """
    tokens = differing.BASE.token_ids
    for at, own in enumerate(tokens):
        for token in (-1, own + 2**32, own - 2**63):
            yield changed(differing.BASE, {"token_ids": (*tokens[:at], token, *tokens[at + 1 :])})
    cat, dog = ITEMS
    for media in ((cat, dog, cat), (cat, ("dog", 5, 3)), (("cat", 1, 3), dog)):
        yield changed(differing.BASE, {"media": media})
    yield changed(differing.BASE, {"media": (("cat", 1, 1), ("dog", 5, 1))})


def test_prompts_that_differ_share_no_last_page() -> None:
    """Also any two changed prompts share none, so no two fields can be confused."""
    pairs = [
        pair for pair in prompt_pairs() if pair.fact not in ("length", "nothing", OTHER_PROCESS)
    ]
    prompts = [each for pair in pairs for each in (pair.one, pair.other)] + [*extreme_prompts()]
    different = [each for at, each in enumerate(prompts) if each not in prompts[:at]]
    assert 100 < len(different)
    assert len(different) == len(set(map(last_name, different)))


def test_first_page_differs_unless_the_change_is_behind_it() -> None:
    for pair in prompt_pairs():
        position = first_difference(pair.one, pair.other)
        names = named(pair.one), named(pair.other)
        assert (names[0][0] == names[1][0]) == (position is None or position >= 4)
        assert all(len(own) == len(set(own)) for own in names)


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
