"""Prompts that differ in one fact on which the values or the bytes of their pages depend.

Invariant: each field of `ModelIdentity` and of `PromptIdentity` differs in some pair.

How it works:
    `prompt_pairs` lists pairs of prompts. All but a few differ in one field. The texts of a field
    are those that a careless digest confuses: a text that ends in a null byte, a text that contains
    the name of another field, two forms of one letter, or one text in two fields.

    A fact that follows from another one does not differ alone: the number of heads follows from the
    name and the revision of a model, and the number of tokens of an image from its identifier. The
    choices of an engine differ alone: the type of the cache, its scales, and the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import attrs

from kvspec.engines.group import KVCacheGroup
from kvspec.specs import FullAttentionSpec
from kvspec.stored.names import ModelIdentity, PromptIdentity
from kvspec.stored.placement import StoredSpec
from kvspec.testing.laws.prompt_names import OTHER_PROCESS, PagedPrompt, PromptPair

ITEMS = (("cat", 1, 2), ("dog", 5, 2))
"""Two items of media, one in each page of `BASE`."""
_SPEC = FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=8, dtype="bfloat16")
_LAYERS = ("l.0", "l.1")
# The choices of an engine. Those of a placement follow.
_OF_CACHE: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float16"},
    "scales": {"scales_digest": "ab" * 32},
}


def _group(fields: Mapping[str, Any]) -> KVCacheGroup:
    return KVCacheGroup(name="full", layers=_LAYERS, spec=attrs.evolve(_SPEC, **fields))


BASE = PagedPrompt(
    model=ModelIdentity(
        model="org/m", revision="0e9e39f", weights="", quantization="", overrides=""
    ),
    prompt=PromptIdentity.of_text(),
    placement=StoredSpec(groups=[_group({})], page_tokens=4),
    token_ids=tuple(range(10, 18)),
)
"""A prompt of two pages without media."""
# Texts that a careless digest confuses with each other, or with another field.
_TEXTS = ("x", "x\0", "None", "0", '","salt":"', "x@y", "\u00e9", "e\u0301", "\U0001f600")
_MODEL_TEXTS = ("org/M", "org/m ", "org/m\0", "0", "None")
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
        else:
            (owner,) = (key for key, part in parts.items() if hasattr(part, name))
            parts[owner] = attrs.evolve(parts[owner], **{name: value})
    return attrs.evolve(base, **parts)


def prompt_pairs(*, placements: bool = True) -> Iterator[PromptPair]:
    """Yield pairs of prompts, of which all but those of the last kinds differ in one fact.

    Args:
        placements: Whether the pages may be cut in several ways. See `Supports`.
    """
    for fact, value in _changes():
        yield PromptPair(fact=fact, one=BASE, other=changed(BASE, {fact: value}))
    yield from _media()
    for fact, fields in _OF_CACHE.items():
        yield PromptPair(fact=fact, one=BASE, other=changed(BASE, {"groups": [_group(fields)]}))
    for fact, fields in _CUTS.items() if placements else ():
        yield PromptPair(fact=fact, one=BASE, other=changed(BASE, fields))
    yield from _confused()
    yield from (PromptPair(fact=fact, one=BASE, other=BASE) for fact in ("nothing", OTHER_PROCESS))
    for more in (1, 4, 5):
        longer = changed(BASE, {"token_ids": (*BASE.token_ids, *range(more))})
        yield PromptPair(fact="length", one=BASE, other=longer)
    # Equal pages at two places have other values.
    same = changed(BASE, {"token_ids": (1,) * 12})
    yield PromptPair(fact="length", one=same, other=changed(BASE, {"token_ids": (1,) * 8}))


def _changes() -> Iterator[tuple[str, Any]]:
    """Yield fields of `BASE`, each with other values."""
    for name in ("model", "revision"):
        yield from ((name, text) for text in _MODEL_TEXTS)
    for name in ("weights", "quantization", "overrides", "adapter", "embeddings", "salt"):
        yield from ((name, text) for text in _TEXTS)
    yield from (("salt", b"\xff"), ("salt", "x" * 999))
    yield from (("page_tokens", size) for size in (1, 2, 3, 8))
    tokens = BASE.token_ids
    for at, own in enumerate(tokens):
        for token in (0, own + 1, own + 2**16):
            yield "token_ids", (*tokens[:at], token, *tokens[at + 1 :])
    yield "token_ids", tokens[::-1]


def _media() -> Iterator[PromptPair]:
    """Yield pairs that differ in an item of media."""
    base = changed(BASE, {"media": ITEMS})
    others: list[Any] = [(), *((item,) for item in ITEMS)]
    for at, (identifier, start, length) in enumerate(ITEMS):
        rest = ITEMS[:at] + ITEMS[at + 1 :]
        names = (f"{identifier}2", f'{identifier}",1', f"{identifier}\0")
        others += [(*rest, (name, start, length)) for name in names]
        others.append((*rest, (identifier, start + 1, length)))
    others.append((("dog", 1, 2), ("cat", 5, 2)))
    for media in others:
        yield PromptPair(fact="media", one=base, other=changed(BASE, {"media": media}))


def _confused() -> Iterator[PromptPair]:
    """Yield pairs in which two fields have one text, or share one text in two ways."""
    names = ("weights", "quantization", "overrides", "adapter", "embeddings", "salt")
    for first, second in combinations(names, 2):
        fact = f"{first} and {second}"
        for texts in (({first: "x"}, {second: "x"}), ({first: "xy"}, {first: "x", second: "y"})):
            one, other = (changed(BASE, fields) for fields in texts)
            yield PromptPair(fact=fact, one=one, other=other)
