"""Prompts that differ in one fact on which the values or the bytes of their pages depend.

Invariant: each field of `ModelIdentity` and of `PromptIdentity` differs in some pair.

How it works:
    `prompt_pairs` lists pairs of prompts. All but a few differ in one field. The two texts of a
    field are those that a careless digest confuses: a text and none, two long texts that differ in
    their last letter, two forms of one letter, two versions of one adapter, or one text in two
    fields. Some prompts have more than 1024 pages: a chain of names may lose what is far behind.

    A fact that follows from another one does not differ alone: the number of heads follows from the
    name and the revision of a model, and the number of tokens of an image from its identifier. The
    choices of an engine differ alone: the type of the cache, its scales, and the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, permutations, product
from typing import Any

import attrs

from kvspec.engines.group import KVCacheGroup
from kvspec.specs import FullAttentionSpec
from kvspec.stored.names import ModelIdentity, PromptIdentity
from kvspec.stored.placement import StoredSpec
from kvspec.testing.laws.prompt_names import MANY, OTHER_PROCESS, PagedPrompt, PromptPair

ITEMS = (("cat", 1, 2), ("dog", 5, 2))
"""Two items of media, one in each page of `BASE`."""
_SPEC = FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=8, dtype="bfloat16")
_LAYERS = ("l.0", "l.1")
# The choices of an engine, each with other values. Those of a placement follow.
_OF_CACHE: dict[str, tuple[Any, ...]] = {
    "dtype": ("float16", "float32"),
    "scales_digest": ("ab" * 32, "cd" * 32),
}
BASE = PagedPrompt(
    model=ModelIdentity(
        model="org/m", revision="0e9e39f", weights="", quantization="", overrides=""
    ),
    prompt=PromptIdentity.of_text(),
    placement=StoredSpec(
        groups=[KVCacheGroup(name="full", layers=_LAYERS, spec=_SPEC)], page_tokens=4
    ),
    token_ids=tuple(range(10, 18)),
)
"""A prompt of two pages without media."""
FULL_REQUEST: dict[str, Any] = {
    "model": "org/model", "revision": "0e9e39f", "weights": "", "quantization": "",
    "overrides": "", "dtype": "bfloat16", "scales_digest": None, "layout": "BLHNC",
    "page_tokens": 4, "token_ids": (1, 2, 3, 4, 9, 9, 9, 9, 7, 6, 5, 4), "adapter": "sql@first",
    "media": (("a" * 64, 5, 2),), "embeddings": "", "salt": "tenant",
}  # fmt: skip
"""The fields of a request under an adapter, with an image and a salt, for `changed`."""
CHANGES: dict[str, dict[str, Any]] = {
    "tokens of the page": {"token_ids": (*FULL_REQUEST["token_ids"][:-1], 3)},
    "tokens of an earlier page": {"token_ids": (0, *FULL_REQUEST["token_ids"][1:])},
    "the adapter": {"adapter": ""},
    "weights under one name and path of an adapter": {"adapter": "sql@second"},
    "image": {"media": (("b" * 64, 5, 2),)},
    "position of the image": {"media": (("a" * 64, 6, 2),)},
    "prompt embeddings": {"embeddings": "1", "media": ()},
    "salt": {"salt": "other"},
    "model": {"model": "org/other"},
    "organisation of the model": {"model": "other/model"},
    "revision of the model": {"revision": "1"},
    "weights that a running engine has loaded": {"weights": "step-2"},
    "quantization of the weights": {"quantization": "fp8"},
    "other overrides of the configuration": {"overrides": "{}"},
    "type of the cache": {"dtype": "float8_e4m3fn"},
    "scales outside the cache": {"scales_digest": "ab" * 32},
    "layout of the page": {"layout": "BLNHC"},
    "tokens of a page": {"page_tokens": 2},
}
"""One change of each fact of `FULL_REQUEST`, by its name in a table of conformance/naming.py."""
# Each line has texts that a careless digest confuses with each other: one that only keeps whether
# there is a text, one that trims, folds or cuts it, or one that ends at a null byte.
_TEXTS = (
    ("", "x", "y", "None", '","salt":"'),
    ("x", "X", "x ", " x", "x\0", "x\0y"),
    ("0", "1", "01", "1.0", "True"),
    ("sql@1", "sql@2"),
    ("\u00e9", "e\u0301", "e", "?", "\U0001f600"),
    ("\ufb01", "fi"),
    ("a" * 64, "a" * 63 + "b", "b" + "a" * 63),
)
_MODEL_TEXTS = (
    ("org/m", "org/M", "org/m ", "org/m\0", "other/m", "m", "org_m", "org-m", "org--m", "org", "0"),
    ("org/" + "a" * 64, "org/" + "a" * 63 + "b", "None"),
)
_REVISION_TEXTS = (
    ("0e9e39f", "0E9E39F", "0e9e39f0", "0e9e39f" + "0" * 33, "0", "None", "main"),
    ("a" * 40, "a" * 39 + "b", "b" + "a" * 39),
)
# The fields that are a text, besides the name and the revision of the model.
_TEXT_FIELDS = ("weights", "quantization", "overrides", "adapter", "embeddings")
# Separators with which a careless author joins two texts.
_JOINTS = ("", "@", "/", "-", "_")
_TOKENS = BASE.token_ids
_LONG = MANY + 100  # Pages. A chain may begin again after a power of two, such as 1024.
_EVERYTHING: dict[str, Any] = {
    "weights": "1", "quantization": "fp8", "overrides": "{}", "adapter": "sql@1", "media": ITEMS,
    "embeddings": "e", "salt": "x",
}  # fmt: skip
_CUTS: dict[str, dict[str, Any]] = {
    "layout": {"layout": "BLHNC"},
    "head_groups": {"head_groups": 2},
    "layer_ranges": {"layer_ranges": [[name] for name in _LAYERS]},
    "context_size": {"context_size": 2},
}


def changed(base: PagedPrompt, fields: Mapping[str, Any]) -> PagedPrompt:
    """Return *base* with other values of some fields of it, or of its model, prompt or placement.

    >>> changed(BASE, {"revision": "1"}).model.revision
    '1'
    """
    parts: dict[str, Any] = {
        "model": base.model,
        "prompt": base.prompt,
        "placement": base.placement,
    }
    for name, value in fields.items():
        if name == "salt":
            parts["prompt"] = attrs.evolve(parts["prompt"], salt=PromptIdentity.of(salt=value).salt)
        elif name == "token_ids":
            parts[name] = value
        elif name in _OF_CACHE:
            (group,) = parts["placement"].groups
            spec = attrs.evolve(group.spec, **{name: value})
            groups = [attrs.evolve(group, spec=spec)]
            parts["placement"] = attrs.evolve(parts["placement"], groups=groups)
        else:
            (owner,) = (key for key, part in parts.items() if hasattr(part, name))
            parts[owner] = attrs.evolve(parts[owner], **{name: value})
    return attrs.evolve(base, **parts)


@cache
def prompt_pairs(*, placements: bool = True) -> tuple[PromptPair, ...]:
    """Return pairs of prompts, of which all but those of the last kinds differ in one fact.

    Args:
        placements: Whether the pages may be cut in several ways. See `Supports`.
    """
    return tuple(_pairs(placements=placements))


def _pairs(*, placements: bool) -> Iterator[PromptPair]:
    for fact, first, second in _changes():
        one, other = (changed(BASE, {fact: value}) for value in (first, second))
        yield PromptPair(fact=fact, one=one, other=other)
    yield from _salts()
    yield from _tokens()
    yield from _media()
    for fact, values in _OF_CACHE.items():
        prompts = [BASE, *(changed(BASE, {fact: value}) for value in values)]
        for one, other in combinations(prompts, 2):
            yield PromptPair(fact=fact, one=one, other=other)
    for fact, fields in _CUTS.items() if placements else ():
        yield PromptPair(fact=fact, one=BASE, other=changed(BASE, fields))
    yield from _whole_requests(placements=placements)
    yield from _confused()
    yield from _long()
    whole = changed(BASE, _EVERYTHING)
    for fact, one in product(("nothing", OTHER_PROCESS), (BASE, whole)):
        yield PromptPair(fact=fact, one=one, other=one)
    for more in (1, 4, 5):
        longer = changed(BASE, {"token_ids": (*_TOKENS, *range(more))})
        yield PromptPair(fact="length", one=BASE, other=longer)
    # Equal pages at two places have other values.
    same = changed(BASE, {"token_ids": (1,) * 12})
    yield PromptPair(fact="length", one=same, other=changed(BASE, {"token_ids": (1,) * 8}))


def _whole_requests(*, placements: bool) -> Iterator[PromptPair]:
    """Yield pairs of requests that have all facts, and differ in one."""
    one = changed(BASE, FULL_REQUEST)
    for fields in CHANGES.values():
        if placements or not fields.keys() & _CUTS.keys():
            other = changed(BASE, FULL_REQUEST | fields)
            yield PromptPair(fact=" and ".join(fields), one=one, other=other)


def _changes() -> Iterator[tuple[str, Any, Any]]:
    """Yield fields of `BASE`, each with two values."""
    lines = {"model": _MODEL_TEXTS, "revision": _REVISION_TEXTS} | dict.fromkeys(
        _TEXT_FIELDS, _TEXTS
    )
    for name, all_texts in lines.items():
        for texts in all_texts:
            yield from ((name, *both) for both in combinations(texts, 2))
    yield from (("page_tokens", 4, size) for size in (1, 2, 3, 8))


def _salts() -> Iterator[PromptPair]:
    """Yield pairs that differ in the salt, of which an identity has a digest."""
    salts = ("", "x", "y", "x\0", b"\xff", "x" * 999, "None")
    digests = [PromptIdentity.of(salt=salt).salt for salt in salts]
    for pair in (*combinations(digests, 2), *combinations(("a" * 32, "a" * 31 + "b"), 2)):
        prompts = [attrs.evolve(BASE, prompt=attrs.evolve(BASE.prompt, salt=s)) for s in pair]
        yield PromptPair(fact="salt", one=prompts[0], other=prompts[1])


def _tokens() -> Iterator[PromptPair]:
    """Yield pairs that differ in tokens: in one, in their order, or in the borders of numbers."""
    others: list[tuple[int, ...]] = [_TOKENS[::-1], (_TOKENS[1], _TOKENS[0], *_TOKENS[2:])]
    for at, own in enumerate(_TOKENS):
        wrong = 0, own + 1, own + 2**16, own + 2**17, own + 2**18
        others += [(*_TOKENS[:at], token, *_TOKENS[at + 1 :]) for token in wrong]
    firsts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((1, 12, 3, 4), (11, 2, 3, 4)),
        ((1, 1, 2, 3), (1, 2, 2, 3)),
        # Horner's rule with the factor 31, which hashes of texts use.
        ((7, 40, 3, 4), (8, 9, 3, 4)),
        ((40, 7, 3, 4), (9, 8, 3, 4)),
    ]
    rest = _TOKENS[4:]
    pairs = [(_TOKENS, other) for other in others]
    pairs += [((*one, *rest), (*other, *rest)) for one, other in firsts]
    for pair in pairs:
        prompts = [changed(BASE, {"token_ids": tokens}) for tokens in pair]
        yield PromptPair(fact="token_ids", one=prompts[0], other=prompts[1])


def _media() -> Iterator[PromptPair]:
    """Yield pairs that differ in an item of media."""
    pairs: list[tuple[Any, Any]] = [(ITEMS, ())]
    for at, (identifier, start, length) in enumerate(ITEMS):
        rest = ITEMS[:at] + ITEMS[at + 1 :]
        names = (f"{identifier}2", f'{identifier}",1', f"{identifier}\0", identifier.upper())
        pairs += [(ITEMS, (*rest, (name, start, length))) for name in names]
        pairs += [(ITEMS, rest), (ITEMS, (*rest, (identifier, start + 1, length)))]
    pairs.append((ITEMS, (("dog", 1, 2), ("cat", 5, 2))))
    # Two items in one page, of which the second one differs, or which change places.
    both = (("cat", 0, 1), ("dog", 2, 1))
    pairs += [(both, (both[0], ("owl", 2, 1))), (both, (("dog", 0, 1), ("cat", 2, 1)))]
    # Cut hashes are equal for two images.
    for one, other in combinations(_TEXTS[-1], 2):
        pairs.append((((one, 1, 2),), ((other, 1, 2),)))
    for media in pairs:
        prompts = [changed(BASE, {"media": items}) for items in media]
        yield PromptPair(fact="media", one=prompts[0], other=prompts[1])


def _confused() -> Iterator[PromptPair]:
    """Yield pairs in which two fields have one text, or share one text in two ways."""
    for first, second in combinations(_TEXT_FIELDS, 2):
        for texts in (({first: "x"}, {second: "x"}), ({first: "xy"}, {first: "x", second: "y"})):
            yield _confusing(first, second, texts)
    for first in _TEXT_FIELDS:
        salt = PromptIdentity.of(salt="x").salt
        yield _confusing(first, "salt", ({first: salt}, {"salt": "x"}))
    fields = ("model", "revision", *_TEXT_FIELDS)
    for first, second in permutations(fields, 2):
        for joint in _JOINTS:
            one = {first: f"x{joint}y", second: "z"}
            other = {first: "x", second: f"y{joint}z"}
            before, behind = sorted((first, second), key=fields.index)
            yield _confusing(before, behind, (one, other))


def _confusing(first: str, second: str, texts: tuple[dict[str, Any], ...]) -> PromptPair:
    one, other = (changed(BASE, fields) for fields in texts)
    return PromptPair(fact=f"{first} and {second}", one=one, other=other)


def _long() -> Iterator[PromptPair]:
    """Yield pairs of long prompts that differ only in their first page, or in no page of theirs."""
    tokens = tuple(range(1000, 1000 + 4 * _LONG))
    long = changed(BASE, {"token_ids": tokens})
    for fact, value in (
        ("token_ids", (0, *tokens[1:])),
        *((name, "x") for name in ("revision", "adapter", "embeddings", "salt")),
        ("media", ITEMS[:1]),
        ("nothing", None),
    ):
        other = long if value is None else changed(long, {fact: value})
        yield PromptPair(fact=fact, one=long, other=other)
