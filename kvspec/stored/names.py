"""The names of stored pages: a digest of everything on which the values of a page depend.

Invariant: two pages whose values may differ have different names. A field that is not stated has no
name at all.

How it works:
    A *page* holds the cache of `page_tokens` tokens. Its *name* is a digest of the inputs, so it is
    known before the page is computed. The digest of its bytes, the checksum, is another number.

        space     the model, and how its cache is cut into objects     `space_of`
        seed      the space, the page size, adapter, embeddings, salt
        name 0    seed, the tokens of page 0, the media that begin in page 0
        name 1    name 0, the tokens of page 1, the media that begin in page 1

    So a name stands for all tokens up to the end of its page. A prompt of 5 tokens has two whole
    pages of 2 tokens, and so two names:

        >>> model = ModelIdentity(
        ...     model="org/m", revision="0e9e39f", weights="", quantization="", overrides=""
        ... )
        >>> space = space_of(model, placement_digest="0" * 64)
        >>> names = page_names(space, [7, 8, 9, 10, 11], 2, PromptIdentity.of_text())
        >>> [name[:8] for name in names]
        ['bb7ed0ea', '0665f01c']

    The tokens of the first page are equal in another prompt, so its first name is equal, too:

        >>> page_names(space, [7, 8, 0, 0], 2, PromptIdentity.of_text())[0] == names[0]
        True
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int
from kvspec.stored.objects import check_digest
from kvspec.tickets.identity import salt_digest, tokens_of
from kvspec.tickets.stated import MediaItem, Stated, media_items, sha256_of, text_or_none

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE_NAME_VERSION = 1
"""The version of the definition of a page's name. It is part of each name."""


@attrs.frozen(kw_only=True)
class ModelIdentity(Stated):
    """The weights and the code on which the values of a cache depend.

    The form of a cache belongs to the placement of stored pages: its type, the rotation of its keys
    and its scales.

    Attributes:
        model: Name of the model, such as its repository. Two engines must use the same text.
        revision: The version of the model's files and code, such as a commit.
        weights: Version of the weights, if an engine has loaded other weights than those of the
            revision. "" if it has not.
        quantization: How the engine changes the weights when it loads them, such as "fp8". "" if it
            uses them as they are stored.
        overrides: Settings that replace those of the model's configuration, as text or digest. ""
            if there are none.
    """

    KIND: ClassVar[str] = "model"

    model: str | None = attrs.field(default=None, validator=text_or_none)
    revision: str | None = attrs.field(default=None, validator=text_or_none)
    weights: str | None = attrs.field(default=None, validator=text_or_none)
    quantization: str | None = attrs.field(default=None, validator=text_or_none)
    overrides: str | None = attrs.field(default=None, validator=text_or_none)

    def __attrs_post_init__(self) -> None:
        for name in ("model", "revision"):
            if getattr(self, name) == "":
                raise SpecError(name, "", "a text, or None if it is not known")


@attrs.frozen(kw_only=True)
class PromptIdentity(Stated):
    """Everything but the tokens of a prompt on which the values of its cache depend.

    Attributes:
        adapter: Name of the LoRA adapter and a digest or version of its weights, joined by "@".
            "" for the base model.
        media: Images, videos and audio of the prompt. () for none.
        embeddings: Digest of the prompt embeddings. "" if the prompt consists of token ids.
        salt: Digest of the salt that separates tenants, as `of` makes it. "" for none.
    """

    KIND: ClassVar[str] = "prompt"

    adapter: str | None = attrs.field(default=None, validator=text_or_none)
    media: tuple[MediaItem, ...] | None = attrs.field(default=None, converter=media_items)
    embeddings: str | None = attrs.field(default=None, validator=text_or_none)
    salt: str | None = attrs.field(default=None, validator=text_or_none)

    @staticmethod
    def of(
        *,
        adapter: str | None = None,
        media: Iterable[MediaItem] | None = None,
        embeddings: str | None = None,
        salt: str | bytes | None = None,
    ) -> PromptIdentity:
        """Return the identity of a prompt. A field whose argument was left out is not stated.

        Args:
            adapter: As in `PromptIdentity`.
            media: As in `PromptIdentity`.
            embeddings: As in `PromptIdentity`.
            salt: The salt itself. "" for none. Only a digest of it is kept.

        Raises:
            SpecError: If an argument is wrong.
        """
        return PromptIdentity(
            adapter=adapter,
            media=media_items(media),
            embeddings=embeddings,
            salt=None if salt is None else salt_digest(salt),
        )

    @staticmethod
    def of_text(*, adapter: str = "", salt: str | bytes = "") -> PromptIdentity:
        """Return the identity of a prompt that is nothing but token ids.

        Args:
            adapter: As in `PromptIdentity`. The base model by default.
            salt: As in `of`. None by default.

        Raises:
            SpecError: As `of`.

        >>> PromptIdentity.of_text(adapter="sql@1f3a").unstated
        ()
        """
        return PromptIdentity.of(adapter=adapter, media=(), embeddings="", salt=salt)


def space_of(model: ModelIdentity, placement_digest: str) -> str:
    """Return the name of the space of all pages of one model and one placement.

    Args:
        model: The model. Each field must be stated.
        placement_digest: Digest of everything that decides the bytes of a page, as 64 hexadecimal
            digits.

    Returns:
        64 hexadecimal digits. Pages of two spaces never have the same name.

    Raises:
        SpecError: If a field of the model is not stated, or the digest is malformed.

    >>> model = dict(model="org/m", weights="", quantization="", overrides="")
    >>> spaces = [space_of(ModelIdentity(revision=r, **model), "0" * 64) for r in ("1", "2")]
    >>> spaces[0] == spaces[1]
    False
    """
    instance("model", model, ModelIdentity)
    return sha256_of(
        {
            "version": PAGE_NAME_VERSION,
            "model": model.digest,
            "placement": check_digest("placement_digest", placement_digest),
        }
    )


class PageNames:
    """The names of the whole pages of one prompt, which may grow.

    A prompt that grows by generated tokens keeps its names, and gets one for each new page.

    Attributes:
        names: The names so far, of 64 hexadecimal digits each.

    >>> growing = PageNames("0" * 64, 2, PromptIdentity.of_text())
    >>> for token in (7, 8, 9, 10):
    ...     growing.extend([token])
    >>> growing.names == page_names("0" * 64, [7, 8, 9, 10], 2, PromptIdentity.of_text())
    True
    """

    def __init__(self, space: str, page_tokens: int, prompt: PromptIdentity) -> None:
        """Start with no token.

        Args:
            space: Space of the pages, from `space_of`.
            page_tokens: Number of tokens of a page.
            prompt: Everything else on which the values depend. Each field must be stated.

        Raises:
            SpecError: If an argument is wrong, or a field is not stated.
        """
        instance("prompt", prompt, PromptIdentity).check_stated()
        seed = {
            "version": PAGE_NAME_VERSION,
            "space": check_digest("space", space),
            "page_tokens": positive_int("page_tokens", page_tokens),
            "adapter": prompt.adapter,
            "embeddings": prompt.embeddings,
            "salt": prompt.salt,
        }
        self.names: tuple[str, ...] = ()
        self._page_tokens = page_tokens
        self._last = bytes.fromhex(sha256_of(seed))
        self._rest = b""  # Bytes of the tokens behind the last whole page.
        self._media = _media_by_page(prompt.media or (), page_tokens)

    def extend(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Add *token_ids* to the end of the prompt.

        Raises:
            SpecError: If the tokens are not ints of 64 bits with a sign.
        """
        tokens = self._rest + tokens_of(token_ids).astype("<i8").tobytes()
        width, first = 8 * self._page_tokens, len(self.names)
        names = _chain(self._last, tokens, width, self._media, first)
        if names:
            self._last, self._rest = bytes.fromhex(names[-1]), tokens[width * len(names) :]
        else:
            self._rest = tokens
        self.names += names


def _chain(
    last: bytes, tokens: bytes, width: int, media: Mapping[int, bytes], page: int
) -> tuple[str, ...]:
    """Return the names of the whole pages of *tokens*, the first of which has number *page*."""
    names = list[str]()
    for number, start in enumerate(range(0, len(tokens) - width + 1, width), page):
        content = tokens[start : start + width] + media.get(number, b"")
        last = hashlib.sha256(last + content).digest()
        names.append(last.hex())
    return tuple(names)


def next_names(
    last: str, token_ids: Sequence[int] | npt.NDArray[Any], page_tokens: int
) -> tuple[str, ...]:
    """Return the names of the whole pages behind a page, in which no media item begins.

    The name of a page stands for everything before its end, so nothing else is needed.

    Args:
        last: Name of the page.
        token_ids: The tokens behind it.
        page_tokens: Number of tokens of a page.

    Raises:
        SpecError: If an argument is wrong.

    >>> names = page_names("0" * 64, [7, 8, 9, 10], 2, PromptIdentity.of_text())
    >>> next_names(names[0], [9, 10], 2) == names[1:]
    True
    """
    width = 8 * positive_int("page_tokens", page_tokens)
    tokens = tokens_of(token_ids).astype("<i8").tobytes()
    return _chain(bytes.fromhex(check_digest("last", last)), tokens, width, {}, 0)


def page_names(
    space: str,
    token_ids: Sequence[int] | npt.NDArray[Any],
    page_tokens: int,
    prompt: PromptIdentity,
) -> tuple[str, ...]:
    """Return the name of each whole page of a prompt.

    A name depends on all tokens up to the end of its page, and on the media items that begin there.
    Media items behind the last whole page change no name.

    Args:
        space: Space of the pages, from `space_of`.
        token_ids: The tokens of the prompt. A media item has one or more placeholders among them.
        page_tokens: Number of tokens of a page.
        prompt: Everything else on which the values depend. Each field must be stated.

    Returns:
        Names of 64 hexadecimal digits, one for each page that the tokens fill.

    Raises:
        SpecError: If an argument is wrong, or a field is not stated.

    >>> len(page_names("0" * 64, [1] * 7, 2, PromptIdentity.of_text()))
    3
    """
    growing = PageNames(space, page_tokens, prompt)
    growing.extend(token_ids)
    return growing.names


def _media_by_page(media: Iterable[MediaItem], page_tokens: int) -> dict[int, bytes]:
    """Return the bytes by which the items that begin in a page enter its name."""
    pages = defaultdict[int, list[tuple[Any, ...]]](list)
    for item in media:
        pages[item.start // page_tokens].append(attrs.astuple(item))
    return {
        page: json.dumps(items, separators=(",", ":")).encode("ascii")
        for page, items in pages.items()
    }
