"""Mistakes of names that real stores make or made: the pairs of prompts of law 15 show each."""

from __future__ import annotations

import hashlib
import struct
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import attrs
import pytest

from kvspec.stored import ModelIdentity, PromptIdentity, StoredSpec
from kvspec.testing.differing import prompt_pairs
from kvspec.testing.laws.prompt_names import OTHER_PROCESS, PromptPair, names
from kvspec.testing.laws.system import System, Trial

Namer = Callable[[ModelIdentity, PromptIdentity, StoredSpec, Sequence[int]], list[Any]]


def chain(
    *,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda facts: facts,
    media: Callable[[list[Any]], object] = lambda items: [(i.identifier, i.start) for i in items],
    tokens: Callable[[tuple[int, ...]], object] = tuple,
    digest: Callable[[bytes], object] = lambda whole: whole,
    parent: Callable[[list[bytes], bytes], bytes] = lambda names, seed: (
        names[-1] if names else seed
    ),
) -> Namer:
    """Return a chain of digests of all facts. It is right, unless an argument plants a mistake."""

    def named(model: Any, prompt: Any, placement: Any, token_ids: Any) -> list[Any]:
        own = attrs.asdict(prompt, filter=lambda field, _: field.name != "media")
        facts = change({**attrs.asdict(model), **own, "placement": placement.digest})
        seed = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
        size, before = placement.page_tokens, list[bytes]()
        for page in range(len(token_ids) // size):
            items = media([i for i in prompt.media or () if i.start // size == page])
            part = repr((tokens(tuple(token_ids[page * size :][:size])), items))
            before.append(hashlib.sha256(parent(before, seed) + part.encode()).digest())
        return [digest(name) for name in before]

    return named


def restart(pages: int) -> Namer:
    """Return names that begin again with the seed every *pages* pages."""
    return chain(parent=lambda own, seed: own[-1] if len(own) % pages else seed)


def only(field: str, kept: Callable[[str], object]) -> Namer:
    """Return names that contain only a part of one field."""
    return chain(change=lambda facts: {**facts, field: kept(facts[field])})


def later(field: str) -> Namer:
    """Return names of which only the first two depend on *field*."""

    def named(model: Any, prompt: Any, *rest: Any) -> list[Any]:
        without = attrs.evolve(prompt, **{field: ""})
        return [*chain()(model, prompt, *rest)[:2], *chain()(model, without, *rest)[2:]]

    return named


def joined(first: str, second: str, joint: str) -> Namer:
    """Return names that contain two fields as one text."""
    return chain(
        change=lambda facts: {**facts, first: f"{facts[first]}{joint}{facts[second]}", second: ""}
    )


def modulo(bits: int) -> Namer:
    """Return names of token ids that are cut to *bits* bits."""
    return chain(tokens=lambda ids: [each % (1 << bits) for each in ids])


PLANTED: dict[str, tuple[str, Namer]] = {
    "chain begins again at page 2": ("length", restart(2)),
    "chain begins again at page 64": ("token_ids", restart(64)),
    "chain begins again at page 1024": ("token_ids", restart(1024)),
    "later pages know only their own tokens": (
        "token_ids",
        chain(parent=lambda own, seed: own[-1] if 0 < len(own) < 3 else seed + bytes(len(own))),
    ),
    "later pages miss the salt": ("salt", later("salt")),
    "later pages miss the adapter": ("adapter", later("adapter")),
    "32 bits": ("nothing", chain(digest=lambda name: name[:4])),
    "32 bits as a number": (
        "nothing",
        chain(digest=lambda name: int.from_bytes(name[:4], "big")),
    ),
    "32 bits in 64 digits": ("nothing", chain(digest=lambda name: f"{name[:4].hex():0>64}")),
    "48 bits behind a folder": ("nothing", chain(digest=lambda name: f"m_r0/{name[:6].hex()}")),
    "tokens of 16 bits": ("token_ids", modulo(16)),
    "tokens of 17 bits": ("token_ids", modulo(17)),
    "tokens of 18 bits": ("token_ids", modulo(18)),
    "tokens in any order": ("token_ids", chain(tokens=sorted)),
    "sum of the tokens": ("token_ids", chain(tokens=sum)),
    "set of the tokens": ("token_ids", chain(tokens=lambda ids: sorted(set(ids)))),
    "tokens without a border": ("token_ids", chain(tokens=lambda ids: "".join(map(str, ids)))),
    "name of an adapter, not its content": ("adapter", only("adapter", lambda v: v.split("@")[0])),
    "whether there is an adapter": ("adapter", only("adapter", bool)),
    "whether there is a salt": ("salt", only("salt", bool)),
    "whether there are embeddings": ("embeddings", only("embeddings", bool)),
    "whether there are overrides": ("overrides", only("overrides", bool)),
    "first digits of the salt": ("salt", only("salt", lambda v: v[:16])),
    "first digits of the revision": ("revision", only("revision", lambda v: v[:12])),
    "model without its organisation": ("model", only("model", lambda v: v.split("/")[-1])),
    "model as a file name": ("model", only("model", lambda v: v.replace("/", "_"))),
    "model in small letters": ("model", only("model", str.lower)),
    "adapter without spaces around it": ("adapter", only("adapter", str.strip)),
    "adapter up to a null byte": ("adapter", only("adapter", lambda v: v.split("\0")[0])),
    "adapter in one form of Unicode": (
        "adapter",
        only("adapter", lambda v: unicodedata.normalize("NFKC", v)),
    ),
    "adapter in ASCII": ("adapter", only("adapter", lambda v: v.encode("ascii", "replace"))),
    "version of the weights as a number": (
        "weights",
        only("weights", lambda v: float(v) if v.replace(".", "").isdecimal() else v),
    ),
    "model@revision": ("model and revision", joined("model", "revision", "@")),
    "model and revision without a border": ("model and revision", joined("model", "revision", "")),
    "overrides_quantization": (
        "quantization and overrides",
        joined("overrides", "quantization", "_"),
    ),
    "image without its place": ("media", chain(media=lambda items: [i.identifier for i in items])),
    "images and places apart": (
        "media",
        chain(media=lambda items: [sorted(i.identifier for i in items), [i.start for i in items]]),
    ),
    "image by 32 digits": (
        "media",
        chain(media=lambda items: [(i.identifier[:32], i.start) for i in items]),
    ),
    "image by its last digits": (
        "media",
        chain(media=lambda items: [(i.identifier[-16:], i.start) for i in items]),
    ),
    "first image of a page": (
        "media",
        chain(media=lambda items: [(i.identifier, i.start) for i in items[:1]]),
    ),
    "number of images": ("media", chain(media=len)),
}
"""Each mistake with a fact that shows it."""

RIGHT: dict[str, Namer] = {
    "a digest": chain(),
    "64 bits": chain(digest=lambda name: name[:8]),
    "64 bits as a number": chain(digest=lambda name: struct.unpack("<q", name[:8])[0]),
    "64 bits in digits": chain(digest=lambda name: name[:8].hex()),
    "several objects": chain(digest=lambda name: (name + b"k", name + b"v")),
    "items of all pages": chain(media=lambda items: [attrs.astuple(item) for item in items]),
}


@lru_cache
def pairs() -> tuple[PromptPair, ...]:
    """Return all pairs of this process."""
    return tuple(pair for pair in prompt_pairs() if pair.fact != OTHER_PROCESS)


def faults(namer: Namer, facts: Sequence[str]) -> list[str]:
    """Return the fault of each pair that differs in one of *facts*."""
    system = System(name="planted", names=namer)
    some: Any = [pair for pair in pairs() if pair.fact in facts]
    return [fault for pair in some for fault in [next(names(Trial(system, pair)), "")] if fault]


@pytest.mark.parametrize("mistake", PLANTED)
def test_pairs_of_one_fact_show_the_mistake(mistake: str) -> None:
    fact, namer = PLANTED[mistake]
    assert faults(namer, [fact])


@pytest.mark.parametrize("kind", RIGHT)
def test_right_names_of_another_author_are_not_accused(kind: str) -> None:
    assert not faults(RIGHT[kind], [pair.fact for pair in pairs()])
