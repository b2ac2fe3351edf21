"""The identity of the content of a KV cache: everything on which the values of its tokens depend.

Two caches of equal token ids may differ: in the weights, in a LoRA adapter, in images, in prompt
embeddings. A `ContentIdentity` states all of these, so that a cache of one request is never taken
for that of another.

Invariant: a field that is not stated equals nothing, not even another field that is not stated.

How it works:
    `None` means that a field is not stated. An empty value means that there is none: `adapter=""`
    is a request without an adapter.

        own           other         result
        ""            ""            equal: no adapter on either side
        "sql@1f3a"    "sql@1f3a"    equal
        "sql@1f3a"    ""            different
        None          anything      different: one side does not state it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.inputs import MOST, instance, mapping, positive_int, sequence

IDENTITY_VERSION = 1
"""The version of the definition of `ContentIdentity.digest`. It is part of each digest."""
_MEDIA = "media items, each with an identifier, a first token and a number of tokens"


def _text(field: str, value: object) -> str:
    """Return *value* if it is a text that UTF-8 can encode.

    JSON shows two halves of a surrogate pair and the character that they make as the same escapes.
    So two texts would have one digest.
    """
    text = instance(field, value, str)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SpecError(field, text, "a text that UTF-8 can encode") from None
    return text


def _text_or_none(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        _text(field.name, value)


@attrs.frozen
class MediaItem:
    """One image, video or audio of a prompt.

    Attributes:
        identifier: A text that differs if the content or its processing differs, such as a hash.
        start: Position of its first token in the prompt.
        length: Number of its tokens.
    """

    identifier: str = attrs.field()
    start: int = attrs.field()
    length: int = attrs.field()

    def __attrs_post_init__(self) -> None:
        if not _text("media.identifier", self.identifier):
            raise SpecError("media.identifier", "", "a text that identifies the item")
        positive_int("media.start", self.start, least=0)
        positive_int("media.length", self.length)


def _media(value: object) -> tuple[MediaItem, ...] | None:
    if value is None:
        return None
    items = list[MediaItem]()
    for item in sequence("media", value, _MEDIA):
        if isinstance(item, MediaItem):
            items.append(item)
            continue
        fields = sequence("media", item, _MEDIA)
        if len(fields) != 3:  # noqa: PLR2004 - see MediaItem
            raise SpecError("media", item, _MEDIA)
        items.append(MediaItem(*fields))
    return tuple(sorted(items, key=lambda item: (item.start, item.length, item.identifier)))


@attrs.frozen(kw_only=True)
class ContentIdentity:
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

    num_tokens: int = attrs.field()
    tokens: str = attrs.field(validator=_text_or_none)
    weights: str | None = attrs.field(default=None, validator=_text_or_none)
    adapter: str | None = attrs.field(default=None, validator=_text_or_none)
    media: tuple[MediaItem, ...] | None = attrs.field(default=None, converter=_media)
    embeddings: str | None = attrs.field(default=None, validator=_text_or_none)
    salt: str | None = attrs.field(default=None, validator=_text_or_none)

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
        items = _media(media)
        return ContentIdentity(
            num_tokens=count,
            tokens=content_of(tokens[:count]),
            weights=weights,
            adapter=adapter,
            media=None if items is None else tuple(i for i in items if i.start < count),
            embeddings=embeddings,
            salt=None if salt is None else _salt_digest(salt),
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

    @property
    def unstated(self) -> tuple[str, ...]:
        """The names of the fields that are not stated."""
        return tuple(name for name in _FIELDS if getattr(self, name) is None)

    @property
    def digest(self) -> str:
        """A digest of all fields, as 64 hexadecimal digits: SHA-256 of `to_params` as JSON.

        Keys of the JSON are sorted. It has no spaces, and only ASCII characters.

        Raises:
            SpecError: If a field is not stated.
        """
        for name in self.unstated:
            raise SpecError(name, None, "a stated value: what is not stated equals nothing")
        text = json.dumps(self.to_params(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_params(self) -> dict[str, Any]:
        """Return the identity as plain values that JSON can represent."""
        stated = {name: getattr(self, name) for name in _FIELDS if name not in self.unstated}
        if self.media is not None:
            stated["media"] = [list(attrs.astuple(item)) for item in self.media]
        return {"version": IDENTITY_VERSION, **stated}

    @staticmethod
    def from_params(given: Mapping[str, Any]) -> ContentIdentity:
        """Return the identity in *given*.

        Raises:
            SpecError: If *given* has another version, an unknown field, or a malformed value.
        """
        params = dict(mapping("content", given, "the fields of a ContentIdentity"))
        version = params.pop("version", None)
        if type(version) is not int or version != IDENTITY_VERSION:
            raise SpecError("content.version", version, f"{IDENTITY_VERSION}")
        for name in params:
            if name not in _FIELDS:
                raise SpecError("content", name, f"one of {', '.join(_FIELDS)}")
        for name in ("num_tokens", "tokens"):
            if name not in params:
                raise SpecError(f"content.{name}", None, "a stated value")
        try:
            return ContentIdentity(**params)
        except SpecError as error:
            field = f"content.{error.field}"
            raise SpecError(field, error.value, error.expected, rule=error.rule) from error


_FIELDS = tuple(field.name for field in attrs.fields(ContentIdentity))


def _salt_digest(salt: str | bytes) -> str:
    """Return a digest of *salt*, or "" if it is empty."""
    text = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
    if not isinstance(text, bytes):
        raise SpecError("salt", salt, "a str or bytes")
    return hashlib.sha256(text).hexdigest()[:32] if text else ""


def explain_difference(own: ContentIdentity, other: ContentIdentity) -> str:
    """Return why the contents of two caches are not known to be equal, or "" if they are.

    Args:
        own: The content that is wanted.
        other: The content that is offered.

    Returns:
        One sentence for each field that differs or is not stated.

    >>> base = ContentIdentity.of([1], weights="1", adapter="", media=(), embeddings="", salt="")
    >>> explain_difference(base, attrs.evolve(base, adapter="sql@1f3a"))
    "adapter: 'sql@1f3a' is offered, '' is wanted"
    >>> explain_difference(base, attrs.evolve(base, weights=None))
    'weights: not stated by the other side'
    """
    return "; ".join(difference for _, difference in differences(own, other))


def differences(own: ContentIdentity, other: ContentIdentity) -> tuple[tuple[str, str], ...]:
    """Return the fields that differ or are not stated, each with one sentence."""
    found = []
    for name in _FIELDS:
        wanted, offered = getattr(own, name), getattr(other, name)
        sides = [s for s, v in (("this side", wanted), ("the other side", offered)) if v is None]
        if sides:
            found.append((name, f"{name}: not stated by {' and '.join(sides)}"))
        elif wanted != offered:
            found.append(
                (name, f"{name}: {_shown(offered)} is offered, {_shown(wanted)} is wanted")
            )
    return tuple(found)


def _shown(value: object) -> str:
    """Return *value* for a message. The number of media items may be large."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."  # noqa: PLR2004 - fits a log line


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
    try:
        ids = np.asarray(value)
    except (ValueError, TypeError):
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise SpecError("token_ids", value, "a sequence of ints")
    # A checksum is of 64-bit numbers with a sign. A larger one would become a negative one.
    if ids.size and ids.dtype == np.uint64 and ids.max() > MOST:
        raise SpecError("token_ids", int(ids.max()), f"ints of at most {MOST}")
    return ids
