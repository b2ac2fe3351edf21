"""The identity of the content of a KV cache: everything on which the values of its tokens depend.

Two caches of equal token ids may differ: in the weights, in a LoRA adapter, in images, in prompt
embeddings. A `ContentIdentity` states all of these, so that a cache of one request is never taken
for that of another. A field that is not stated equals nothing, as `Stated` describes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.inputs import MOST, instance, positive_int
from kvspec.tickets.stated import MediaItem, Stated, media_items, text_or_none

_BOOL_TYPES = bool, np.bool_


@attrs.frozen(kw_only=True)
class ContentIdentity(Stated):
    """Everything on which the cached values of a prompt's first tokens depend.

    The names of model and revision are not part of it: the handshake of two engines compares them.

    Attributes:
        num_tokens: Number of tokens.
        tokens: `content_of` their ids.
        weights: Version of the weights, if a running engine has loaded other weights than those of
            its model and revision. "" if it has not. Two engines must use the same texts. An engine
            that cannot name its weights leaves it None.
        adapter: Name of the LoRA adapter and a digest or version of its weights, joined by "@".
            "" for the base model.
        media: Images, videos and audio that begin before the last of these tokens. () for none.
        embeddings: Digest of the prompt embeddings. "" if the prompt consists of token ids.
        salt: Digest of the salt that separates tenants. "" for none.
    """

    KIND: ClassVar[str] = "content"

    num_tokens: int = attrs.field()
    tokens: str = attrs.field(validator=text_or_none)
    weights: str | None = attrs.field(default=None, validator=text_or_none)
    adapter: str | None = attrs.field(default=None, validator=text_or_none)
    media: tuple[MediaItem, ...] | None = attrs.field(default=None, converter=media_items)
    embeddings: str | None = attrs.field(default=None, validator=text_or_none)
    salt: str | None = attrs.field(default=None, validator=text_or_none)

    def __attrs_post_init__(self) -> None:
        positive_int("num_tokens", self.num_tokens, least=0)
        instance("tokens", self.tokens, str)

    @staticmethod
    def of(
        token_ids: Sequence[int] | npt.NDArray[Any],
        num_tokens: int | None = None,
        *,
        weights: str | None = None,
        adapter: str | None = None,
        media: Iterable[MediaItem] | None = None,
        embeddings: str | None = None,
        salt: str | bytes | None = None,
    ) -> ContentIdentity:
        """Return the identity of the first *num_tokens* tokens of a prompt.

        Args:
            token_ids: The tokens of the prompt.
            num_tokens: Number of leading tokens. All of them by default.
            weights: As in `ContentIdentity`.
            adapter: As in `ContentIdentity`.
            media: The media items of the prompt. Items behind the first tokens are left out.
            embeddings: As in `ContentIdentity`.
            salt: The salt itself. "" for none. Only a digest of it is kept.

        Returns:
            The identity. A field whose argument was left out is not stated.

        Raises:
            SpecError: If an argument is wrong, or the prompt has fewer tokens.

        >>> text = dict(weights="1", adapter="", media=(), embeddings="", salt="")
        >>> ContentIdentity.of([1, 2, 3], 2, **text) == ContentIdentity.of([1, 2], **text)
        True
        """
        tokens = tokens_of(token_ids)
        count = len(tokens)
        if num_tokens is not None:
            count = positive_int("num_tokens", num_tokens, least=0)
            if count > len(tokens):
                wanted = f"at most {len(tokens)}, the tokens of the prompt"
                raise SpecError("num_tokens", count, wanted)
        items = media_items(media)
        return ContentIdentity(
            num_tokens=count,
            tokens=content_of(tokens[:count]),
            weights=weights,
            adapter=adapter,
            media=None if items is None else tuple(i for i in items if i.start < count),
            embeddings=embeddings,
            salt=None if salt is None else salt_digest(salt),
        )

    @staticmethod
    def of_text(
        token_ids: Sequence[int] | npt.NDArray[Any],
        num_tokens: int | None = None,
        *,
        weights: str = "",
        adapter: str | None = "",
    ) -> ContentIdentity:
        """Return the identity of a prompt that is nothing but token ids, without a salt.

        Args:
            token_ids: As in `of`.
            num_tokens: As in `of`.
            weights: As in `ContentIdentity`. "" for those of the model and revision.
            adapter: As in `ContentIdentity`. The base model by default.

        Raises:
            SpecError: As `of`.

        >>> ContentIdentity.of_text([1, 2]).unstated
        ()
        """
        return ContentIdentity.of(
            token_ids,
            num_tokens,
            weights=weights,
            adapter=adapter,
            media=(),
            embeddings="",
            salt="",
        )


def salt_digest(salt: str | bytes) -> str:
    """Return a digest of *salt*, or "" if it is empty."""
    text = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
    if not isinstance(text, bytes):
        raise SpecError("salt", salt, "a str or bytes")
    return hashlib.sha256(text).hexdigest()[:32] if text else ""


def content_of(token_ids: Sequence[int] | npt.NDArray[Any]) -> str:
    """Return a checksum of a prompt's tokens. It detects that a router confused two prompts.

    Args:
        token_ids: The tokens.

    Returns:
        Hexadecimal digits.

    Raises:
        SpecError: If the tokens are not ints.

    >>> content_of([1, 2, 3]) == content_of((1, 2, 3)) != content_of([1, 2])
    True
    """
    return hashlib.sha256(tokens_of(token_ids).astype("<i8").tobytes()).hexdigest()[:32]


def tokens_of(value: object) -> npt.NDArray[Any]:
    """Return the tokens of a prompt as an array, or raise `SpecError`."""
    if isinstance(value, bytearray):  # numpy takes it as numbers, and refuses `bytes`.
        raise SpecError("token_ids", value, "a sequence of ints")
    try:
        ids = np.asarray(value)
    except (ValueError, TypeError):
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise SpecError("token_ids", value, "a sequence of ints")
    # Beside an int, numpy takes a bool as 0 or 1. So only these have to be looked at.
    if isinstance(value, (list, tuple)) and ids.size:
        for place in np.flatnonzero((ids == 0) | (ids == 1)):
            if isinstance(value[place], _BOOL_TYPES):
                raise SpecError(f"token_ids[{place}]", value[place], "an int")
    # A checksum is of 64-bit numbers with a sign. A larger one would become a negative one.
    if ids.size and ids.dtype == np.uint64 and ids.max() > MOST:
        raise SpecError("token_ids", int(ids.max()), f"ints of at most {MOST}")
    return ids
