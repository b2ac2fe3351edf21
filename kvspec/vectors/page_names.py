"""Test vectors of the names of stored pages: models and prompts, and their right names.

Invariant: rule 10 of `docs/spec.md`, followed word by word, gives each name. The tests follow it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs

from kvspec.stored.names import ModelIdentity, PromptIdentity, page_names, space_of
from kvspec.tickets.stated import MediaItem

NAMES_FORMAT, NAMES_VERSION = "kvspec-page-names", 1
_BASE_MODEL = ModelIdentity(
    model="org/m", revision="0e9e39f", weights="", quantization="", overrides=""
)
_CHANGED_MODELS = (
    {"model": "org/n"}, {"revision": "1"}, {"weights": "step-2"}, {"quantization": "fp8"},
    {"overrides": '{"a":1}'},
)  # fmt: skip
# Quotes, control characters, both forms of one letter, and a character of two UTF-16 units.
_STRANGE_TEXTS = 'a"b\\c', "\b\f\n\r\t\x00\x1f\x7f/", "\u00e9", "e\u0301", "\U0001f600 \ufffd"
_CHANGED_PROMPTS: tuple[dict[str, Any], ...] = (
    {"embeddings": "e"}, {"salt": "s"}, {"salt": b"\xff"},
    {"media": [MediaItem("cat", 3, 40)]}, {"media": [MediaItem("cat", 4, 2)]},
    {"media": [MediaItem("b", 2, 2), MediaItem("a", 2, 2), MediaItem("a", 2, 1)]},
    {"media": [MediaItem("\U0001f600", 5, 1), MediaItem("\uffff", 5, 1)]},
    {"media": [MediaItem("cat", 99, 1)]},
    *({"adapter": text} for text in _STRANGE_TEXTS),
)  # fmt: skip
_PAGES_AND_TOKENS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (4, ()), (4, (1, 2, 3)), (1, (1, 2, 3)), (3, tuple(range(9))),
    (2, (-1, 2**63 - 1, -(2**63), 2**31, 0)), (16, tuple(range(151_000, 151_033))),
)  # fmt: skip


def vectors() -> Iterator[dict[str, Any]]:
    """Yield the vectors. They are the same on each machine."""
    tokens = tuple(range(1, 10))
    for page_tokens, ids in _PAGES_AND_TOKENS:
        yield _vector(_BASE_MODEL, {}, page_tokens, ids)
    yield _vector(_BASE_MODEL, {}, 4, tokens)
    for change in _CHANGED_MODELS:
        yield _vector(attrs.evolve(_BASE_MODEL, **change), {}, 4, tokens)
    yield _vector(_BASE_MODEL, {}, 4, tokens, "f" * 64)
    for changed in _CHANGED_PROMPTS:
        yield _vector(_BASE_MODEL, changed, 4, tokens)


def encoded() -> bytes:
    """Return the file of the vectors."""
    head = json.dumps({"format": NAMES_FORMAT, "version": NAMES_VERSION})[:-1]
    lines = ",\n".join(json.dumps(vector) for vector in vectors())
    return f'{head}, "vectors": [\n{lines}\n]}}\n'.encode()


def _vector(
    model: ModelIdentity,
    changed: dict[str, Any],
    page_tokens: int,
    token_ids: tuple[int, ...],
    placement: str = "0123456789abcdef" * 4,
) -> dict[str, Any]:
    fields: dict[str, Any] = {"adapter": "", "media": (), "embeddings": "", "salt": ""}
    prompt = PromptIdentity.of(**fields | changed)
    space = space_of(model, placement)
    return {
        "model": model.to_params(),
        "placement": placement,
        "prompt": prompt.to_params(),
        "page_tokens": page_tokens,
        "token_ids": list(token_ids),
        "space": space,
        "names": list(page_names(space, token_ids, page_tokens, prompt)),
    }
