"""Identities whose fields may be unstated, and the sentences that name what differs.

Invariant: a field that is not stated equals nothing, not even another field that is not stated.

How it works:
    A class of identities derives from `Stated` and has a field of type `X | None` for each value.
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
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int, sequence

IDENTITY_VERSION = 1
"""The version of the definition of `Stated.digest`. It is part of each digest."""
_MEDIA = "media items, each with an identifier, a first token and a number of tokens"


def encodable(field: str, value: object) -> str:
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


def text_or_none(_: object, field: attrs.Attribute[Any], value: object) -> None:
    """Validate a field that is a text, or not stated."""
    if value is not None:
        encodable(field.name, value)


def sha256_of(values: Mapping[str, Any]) -> str:
    """Return SHA-256 of *values* as JSON, as 64 hexadecimal digits.

    Keys of the JSON are sorted. It has no spaces, and characters beyond "~" are escapes.
    """
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


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
        if not encodable("media.identifier", self.identifier):
            raise SpecError("media.identifier", "", "a text that identifies the item")
        positive_int("media.start", self.start, least=0)
        positive_int("media.length", self.length)


def media_items(value: object) -> tuple[MediaItem, ...] | None:
    """Return the items of *value* in the order of the prompt, or None if they are not stated."""
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


class Stated:
    """The base class of identities: a digest, plain values, and the fields that are not stated.

    Attributes:
        KIND: The word with which errors of `from_params` name the identity.
    """

    __slots__ = ()
    KIND: ClassVar[str]

    @property
    def unstated(self) -> tuple[str, ...]:
        """The names of the fields that are not stated."""
        return tuple(name for name in names_of(type(self)) if getattr(self, name) is None)

    @property
    def digest(self) -> str:
        """A digest of all fields, as 64 hexadecimal digits: SHA-256 of `to_params` as JSON.

        Keys of the JSON are sorted. It has no spaces, and characters beyond "~" are escapes.

        Raises:
            SpecError: If a field is not stated.
        """
        self.check_stated()
        return sha256_of(self.to_params())

    def check_stated(self) -> None:
        """Raise `SpecError` if a field is not stated."""
        for name in self.unstated:
            raise SpecError(name, None, "a stated value: a field that is not stated equals nothing")

    def to_params(self) -> dict[str, Any]:
        """Return the identity as plain values that JSON can represent."""
        stated = {name: getattr(self, name) for name in names_of(type(self))}
        plain = {name: _plain(value) for name, value in stated.items() if value is not None}
        return {"version": IDENTITY_VERSION, **plain}

    @classmethod
    def from_params(cls, given: Mapping[str, Any]) -> Self:
        """Return the identity in *given*.

        Raises:
            SpecError: If *given* has another version, an unknown field, or a malformed value.
        """
        names = names_of(cls)
        params = dict(mapping(cls.KIND, given, f"the fields of a {cls.__name__}"))
        version = params.pop("version", None)
        if type(version) is not int or version != IDENTITY_VERSION:
            raise SpecError(f"{cls.KIND}.version", version, f"{IDENTITY_VERSION}")
        for name in params:
            if name not in names:
                raise SpecError(cls.KIND, name, f"one of {', '.join(names)}")
        for field in attrs.fields(cls):  # type: ignore[arg-type]  # A derived class is of attrs.
            if field.default is attrs.NOTHING and field.name not in params:
                raise SpecError(f"{cls.KIND}.{field.name}", None, "a stated value")
        try:
            return cls(**params)
        except SpecError as error:
            field_name = f"{cls.KIND}.{error.field}"
            raise SpecError(field_name, error.value, error.expected, rule=error.rule) from error


def names_of(kind: type[Stated]) -> tuple[str, ...]:
    """Return the names of the fields of an identity."""
    return tuple(field.name for field in attrs.fields(kind))  # type: ignore[arg-type]  # As above.


def _plain(value: Any) -> Any:  # noqa: ANN401 - the value of any field
    if isinstance(value, tuple):
        return [list(attrs.astuple(item)) for item in value]
    return value


def explain_difference(own: Stated, other: Stated) -> str:
    """Return why two identities are not known to be equal, or "" if they are.

    Args:
        own: The identity that is wanted.
        other: The identity that is offered. It must be of the same class.

    Returns:
        One sentence for each field that differs or is not stated.

    Raises:
        SpecError: If the identities are of two classes.

    >>> from kvspec.tickets import ContentIdentity
    >>> base = ContentIdentity.of_text([1], weights="1")
    >>> explain_difference(base, attrs.evolve(base, adapter="sql@1f3a"))
    "adapter: 'sql@1f3a' is offered, '' is wanted"
    >>> explain_difference(base, attrs.evolve(base, weights=None))
    'weights: not stated by the other side'
    """
    return "; ".join(difference for _, difference in differences(own, other))


def differences(own: Stated, other: Stated) -> tuple[tuple[str, str], ...]:
    """Return the fields that differ or are not stated, each with one sentence."""
    if type(own) is not type(other) or not isinstance(own, Stated):
        raise SpecError("other", other, f"an identity of the class of {type(own).__name__}")
    found = []
    for name in names_of(type(own)):
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
