"""The header of a stored object: the safetensors format, read strictly.

Invariant: a header is accepted only if it covers the whole file, names the wanted object, and its
version is known. Nothing in it is executed or used as a path.

How it works:
    A file is a safetensors file, so the library of that name reads it, too:

        8 bytes         length of the JSON text, little endian
        JSON text       `__metadata__` first, then the tensors; spaces up to a multiple of 4 KiB
        payload         the tensors in order, without a hole

    The metadata are texts: `format`, `version`, the four fields of the key, `bytes` (of the
    payload), `checksum` (of the payload), and the facts of the contents.

    All objects of one group and chunk have the same tensors. So the text around page and checksum
    is made once for each `ObjectContents`, and the tensors are parsed once for each such text.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

from kvspec.errors import SpecError, StoreError
from kvspec.stored.objects import DTYPE_BYTES, ObjectContents, ObjectKey

PAGE_FORMAT = "kvspec page"
HEADER_VERSION = "2"
ALIGNMENT = 4096
"""The payload begins at a multiple of this many bytes, as direct input and output needs."""
MAX_HEADER = 1 << 20
LENGTH_BYTES = 8
_CHECKSUM_DIGITS = 32
_START = b'{"__metadata__":'


class Header(NamedTuple):
    """The contents of the header of an object.

    Attributes:
        key: Name of the object.
        start: First byte of the payload in the file.
        num_bytes: Bytes of the payload.
        checksum: Checksum of the payload.
        metadata: All texts of the header.
    """

    key: ObjectKey
    start: int
    num_bytes: int
    checksum: str
    metadata: dict[str, str]


def encode(key: ObjectKey, contents: ObjectContents, checksum: str) -> bytes:
    """Return the header of an object, up to the first byte of its payload."""
    before_page, before_checksum, after = _fixed_texts(key.space, key.group, key.chunk, contents)
    text = b"".join((before_page, key.page.encode(), before_checksum, checksum.encode(), after))
    size = LENGTH_BYTES + len(text)
    size += -size % ALIGNMENT
    return (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(size - LENGTH_BYTES)


def _own_texts(space: str, group: str, chunk: str) -> tuple[bytes, bytes]:
    """Return the text of a header before the page, and that between page and checksum."""
    key = ObjectKey(space, "", group, chunk)
    own = {"format": PAGE_FORMAT, "version": HEADER_VERSION, **key._asdict(), "checksum": ""}
    before, page, between = json.dumps(own).encode().removesuffix(b'"}').partition(b'"page": "')
    return _START + before + page, between


@lru_cache(maxsize=1024)
def _fixed_texts(
    space: str, group: str, chunk: str, contents: ObjectContents
) -> tuple[bytes, bytes, bytes]:
    """Return the texts before the page, before the checksum and behind it."""
    own = {"format", "version", *ObjectKey._fields, "checksum", "bytes"}
    if clash := own & contents.facts.keys():
        raise SpecError("facts", sorted(clash), "names that the header does not use itself")
    facts = {"bytes": str(contents.num_bytes), **contents.facts}
    begins = (0, *contents.ends)
    tensors = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for (name, dtype, shape), begin, end in zip(
            contents.tensors, begins, contents.ends, strict=False
        )
    }
    after = b'", ' + json.dumps(facts).encode()[1:] + b"," + json.dumps(tensors).encode()[1:]
    if len(after) > MAX_HEADER // 2:
        raise SpecError("contents", len(contents.tensors), "tensors with a header below 512 KiB")
    return *_own_texts(space, group, chunk), after


def header_bytes(first: bytes | memoryview, place: str) -> int:
    """Return the size of a header from the first bytes of a file.

    Raises:
        StoreError: If no object of kvspec begins so. A file without contents is damaged, any other
            is foreign.
    """
    if len(first) < LENGTH_BYTES or not any(first):
        # A crash of the machine leaves such a file: its name was on the disk before its bytes.
        raise StoreError("damaged", place, "header", "no text", "the header of an object")
    size = int.from_bytes(first[:LENGTH_BYTES], "little") + LENGTH_BYTES
    begins = bytes(first[LENGTH_BYTES : LENGTH_BYTES + len(_START)])
    if not _START.startswith(begins) or size % ALIGNMENT or size > MAX_HEADER:
        raise StoreError("foreign", place, "header", bytes(first[:24]), "that of a kvspec object")
    return size


def decode(head: bytes, file_bytes: int, place: str) -> Header:
    """Read a header.

    Args:
        head: The first bytes of the file, at least as many as `header_bytes` returns.
        file_bytes: Size of the file.
        place: Name of the file for the errors.

    Raises:
        StoreError: If the header is not valid, of another version, or does not cover the file.
    """
    start = header_bytes(head, place)
    try:
        text = head[LENGTH_BYTES:start].decode("ascii")
        metadata, end = json.JSONDecoder(object_pairs_hook=_once).raw_decode(text, len(_START))
        _check_version(metadata, place)
        key = ObjectKey(*(metadata[field] for field in ObjectKey._fields)).checked()
        num_bytes, covered = int(metadata["bytes"]), _covered(text[end:])
        checksum = metadata["checksum"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError("damaged", place, "header", str(error), "a valid header") from error
    if covered != num_bytes:
        raise StoreError("damaged", place, "tensors", covered, f"{num_bytes} bytes without a hole")
    if start + num_bytes != file_bytes:
        raise StoreError("damaged", place, "file size", file_bytes, f"{start + num_bytes} bytes")
    return Header(key, start, num_bytes, checksum, metadata)


class CommonHeader(NamedTuple):
    """The bytes that the headers of one space, group and chunk share: all but page and checksum.

    To compare bytes takes a tenth of the time that `decode` takes.
    """

    before_page: bytes
    before_checksum: bytes
    after: bytes
    start: int
    num_bytes: int

    @classmethod
    def of(cls, head: bytes, found: Header) -> CommonHeader | None:
        """Return the common bytes of a header that `decode` accepted, or None in another form.

        Args:
            head: The header.
            found: The result of `decode`.
        """
        key = found.key
        before_page, between = _own_texts(key.space, key.group, key.chunk)
        before_page = head[:LENGTH_BYTES] + before_page
        own = before_page + key.page.encode() + between + found.checksum.encode("ascii", "replace")
        if len(found.checksum) != _CHECKSUM_DIGITS or not head.startswith(own):
            return None
        after = head[len(own) : found.start]
        return cls(before_page, between, after, found.start, found.num_bytes)

    def checksum(self, head: bytes, page: str, file_bytes: int) -> str | None:
        """Return the checksum in a header that `decode` would accept, or None if it must be called.

        Args:
            head: The first `start` bytes of the file, or fewer if it has no more.
            page: Name of the page that the header must have.
            file_bytes: Size of the file.
        """
        begins = self.before_page + page.encode() + self.before_checksum
        end = len(begins) + _CHECKSUM_DIGITS
        same = head.startswith(begins) and head[end:] == self.after
        if not same or file_bytes != self.start + self.num_bytes:
            return None
        return head[len(begins) : end].decode("ascii", "replace")


def _check_version(metadata: object, place: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TypeError("the metadata are not texts")
    if metadata.get("format") != PAGE_FORMAT:
        raise StoreError("foreign", place, "format", metadata.get("format"), repr(PAGE_FORMAT))
    if metadata.get("version") != HEADER_VERSION:
        found = metadata.get("version")
        raise StoreError("version", place, "version", found, repr(HEADER_VERSION))


@lru_cache(maxsize=1024)
def _covered(text: str) -> int:
    """Return how many bytes the tensors cover. Raise `ValueError` if there is a hole."""
    tensors: dict[str, Any] = json.loads("{" + text.removeprefix(","), object_pairs_hook=_once)
    end = 0
    for name, tensor in tensors.items():
        size = DTYPE_BYTES[tensor["dtype"]] * math.prod(map(_length, tensor["shape"]))
        offsets = tensor["data_offsets"]
        if offsets != [end, end + size] or any(type(offset) is not int for offset in offsets):
            raise ValueError(f"tensor {name} has other bytes than its shape")
        end += size
    return end


def _length(value: object) -> int:
    if type(value) is not int or not 0 < value <= 1 << 48:
        raise ValueError(f"a length of {value!r}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object. Raise `ValueError` if a name is repeated."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name is repeated")
    return members
