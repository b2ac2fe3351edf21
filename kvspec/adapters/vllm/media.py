"""The images, videos and audio of vLLM's requests, each with a digest of what its encoder reads.

Invariant: an item is stated only if its digest describes the content with which the engine computes
it. Otherwise its prompt has no names, and the log names the item.

How it works:
    vLLM has an *identifier* for each item. Its caches know an item by the identifier alone. But the
    identifier does not always describe the content:

        identifier                           the same one for
        a UUID that a client has given       whatever the client gives later, or another client
        the UUID in the EXIF of a picture    all pictures with this UUID
        a hash of the picture's file         the outputs of two processors, such as those of
                                             torchvision and of PIL

    So the name of a page contains a digest of the *processed* item instead: of all arrays that the
    encoder of the model reads. Two engines state the same item in the same way, whatever its
    identifiers are, and settings that change the arrays change the digest.

    Within an engine, vLLM may compute a request with an older content of the same identifier: its
    caches of prefixes and of encoder outputs have it. So an identifier that had another content
    before is not stated any more while the engine runs.
"""

# ruff: noqa: ANN401 - features and configs are of vLLM's classes, which are not imported
from __future__ import annotations

import hashlib
import logging
import weakref
from operator import index
from typing import Any

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.tickets import MediaItem
from kvspec.tickets.stated import sha256_of

log = logging.getLogger(__name__)

# Identifiers that are remembered for each block of the engine. An item that vLLM's prefix cache
# knows is in one of its blocks. Smaller items share a block.
REMEMBERED_PER_BLOCK = 2
REMEMBERED_AT_LEAST = 1 << 14
_SCALARS = bool, int, float, str


@attrs.frozen
class _FirstContent:
    """The first content of an identifier.

    Attributes:
        digest: Its digest. None if it is not known, or another content came later.
        data: A weak reference to the arrays. vLLM passes the same ones if they are in its cache.
    """

    digest: str | None
    data: Any


class MediaContents:
    """The media items that the requests of one scheduler have had."""

    def __init__(self, vllm_config: Any, num_blocks: int) -> None:
        """Take the settings with which vLLM encodes items.

        Args:
            vllm_config: vLLM's `VllmConfig`.
            num_blocks: Number of blocks of its cache.
        """
        self._first: dict[str, _FirstContent] = {}
        self._most = max(REMEMBERED_AT_LEAST, REMEMBERED_PER_BLOCK * num_blocks)
        # Other engines encode the items then, and pass them on by their identifiers.
        self._remote = getattr(vllm_config, "ec_transfer_config", None) is not None

    def stated(self, features: Any) -> list[MediaItem] | None:
        """Return the media items of a request, each with a digest of its content.

        Args:
            features: Its `mm_features`.

        Returns:
            None if the content of an item is not known.
        """
        try:
            for each in features or ():
                self._note(each)
            found = zip(features or (), self.digests(features), strict=True)
            places = [(digest, each.mm_position) for each, digest in found]
            return [
                MediaItem(digest or "", index(at.offset), index(at.length)) for digest, at in places
            ]
        except (AttributeError, TypeError, SpecError):  # An item is not known.
            return None

    def digests(self, features: Any) -> list[str | None]:
        """Return the digests of the items of a request. None for each whose content is not known.

        A digest may become unknown while the request runs: another request brings another content
        with the same identifier, and vLLM computes both with either of them.
        """
        known = [self._first.get(each.identifier) for each in features or ()]
        return [None if content is None else content.digest for content in known]

    def came_from_elsewhere(self, features: Any) -> None:
        """State the items of a request no more: another engine has computed their tokens.

        That engine knows them by their identifiers, so its contents may be others. vLLM's prefix
        cache has the tokens now.
        """
        for each in features or ():
            self._first[each.identifier] = _FirstContent(None, None)

    def _note(self, feature: Any) -> None:
        """Compare an item with the first one of its identifier."""
        name, data = feature.identifier, feature.data
        first = self._first.pop(name, None)
        if data is not None and first is not None and first.data and first.data() is data:
            digest = first.digest
        else:
            digest = None if self._remote else digest_of(feature)
            if first is not None and first.digest != digest:
                digest = None
        # The identifiers that came last are forgotten last.
        self._first[name] = _FirstContent(digest, weakref.ref(data) if digest else None)
        if len(self._first) > self._most:
            del self._first[next(iter(self._first))]
        if digest is None:
            why = "another content came with it" if first else "its arrays are not here"
            log.info("the %s %r is not stated: %s", feature.modality, name, why)


def digest_of(feature: Any) -> str | None:
    """Return a digest of everything that the encoder reads of an item, as 64 hexadecimal digits.

    Args:
        feature: vLLM's `MultiModalFeatureSpec`.

    Returns:
        None if the arrays are not in this process, or a value has an unknown type.
    """
    try:
        fields = {name: _described(field.data) for name, field in feature.data.items()}
        # Positions of the item whose tokens are no part of it, such as ends of lines.
        mask = getattr(feature.mm_position, "is_embed", None)
        facts = {
            "modality": feature.modality,
            "fields": fields,
            "mask": None if mask is None else _described(mask),
        }
    except (AttributeError, TypeError, RuntimeError):
        return None
    # Without an array, these are facts about where the item is.
    return sha256_of(facts) if any(map(_has_array, fields.values())) else None


def _described(value: Any) -> list[Any]:
    """Return *value* with a digest in the place of each array.

    Raises:
        TypeError: If its type is not known.
    """
    if isinstance(value, (list, tuple)):
        return ["list", *map(_described, value)]
    if isinstance(value, _SCALARS):
        return [type(value).__name__, repr(value)]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        array = np.ascontiguousarray(value)
        return ["array", array.dtype.str, list(value.shape), _digest(array)]
    if not hasattr(value, "detach"):
        raise TypeError(type(value))
    import torch  # noqa: PLC0415 - kvspec imports torch only inside functions

    rows = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return ["array", str(value.dtype), list(value.shape), _digest(rows)]


def _digest(array: Any) -> str:
    # Without instructions for SHA-256, the processor needs half the time for this one.
    return hashlib.blake2b(array.data if array.size else b"", digest_size=32).hexdigest()


def _has_array(described: list[Any]) -> bool:
    kind, *rest = described
    return kind == "array" or (kind == "list" and any(map(_has_array, rest)))
