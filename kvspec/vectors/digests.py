"""Test vectors of the digest: contents as bytes, and their right sums.

Invariant: rule 9 of `docs/spec.md`, followed word by word, gives each sum. The tests follow it.

How it works:
    The file is JSON without compression. Each vector has the name of a layer and a part, a unit,
    and rows with their numbers and contents. Contents of zeros, of equal bytes, with flipped signs
    and without any pattern occur in many sizes, also in sizes that are no multiple of a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvspec.digests.definition import WORD, content_sums, row_digests, unit_hash

DIGESTS_FORMAT, DIGESTS_VERSION = "kvspec-digests", 1
# 1 to 9 bytes: words that are not full. 128 to 576: heads and latents of published models.
SIZES = 1, 2, 7, 8, 9, 16, 31, 64, 128, 256, 576
# First tokens of the rows. The last is the highest position that a message may name.
ROW_NUMBERS = (0,), (7,), (0, 1, 2), (2**31 - 1, 2**31), (2**62,)
BYTE_PATTERNS = "zeros", "equal", "signs", "random"
NAMES = ("model.layers.0.self_attn.attn", "k", 0), ("l.1", "v", 7), ("\u5c64.2", "latent", 1023)


def vectors() -> Iterator[dict[str, Any]]:
    """Yield the vectors. They are the same on each machine."""
    for size in SIZES:
        for at, numbers in enumerate(ROW_NUMBERS):
            for pattern in BYTE_PATTERNS:
                layer, part, unit = NAMES[(at + size) % len(NAMES)]
                contents = [_content(pattern, size, number) for number in numbers]
                yield {
                    "layer": layer,
                    "part": part,
                    "unit": unit,
                    "rows": list(numbers),
                    "contents": [content.hex() for content in contents],
                    "digest": f"{_digest(contents, numbers, unit_hash(layer, part, unit)):016x}",
                }


def encoded() -> bytes:
    """Return the file of the vectors."""
    head = json.dumps({"format": DIGESTS_FORMAT, "version": DIGESTS_VERSION})[:-1]
    lines = ",\n".join(json.dumps(vector) for vector in vectors())
    return f'{head}, "vectors": [\n{lines}\n]}}\n'.encode()


def _content(pattern: str, size: int, number: int) -> bytes:
    if pattern == "zeros":
        return bytes(size)
    if pattern == "equal":
        return b"\x80\x3f" * (size // 2) + b"\x80" * (size % 2)
    drawn = hashlib.shake_256(f"{size} {number}".encode()).digest(size)
    # The sign of each bfloat16 is in its last byte.
    flips = 0x80 if pattern == "signs" else 0
    return bytes(byte ^ flips * (at % 2) for at, byte in enumerate(drawn))


def _digest(contents: list[bytes], numbers: tuple[int, ...], name: int) -> int:
    padded = b"".join(content + bytes(-len(content) % WORD) for content in contents)
    words = np.frombuffer(padded, "<u8").reshape(len(contents), -1).copy()
    sums = content_sums(words, np.empty_like(words))[:, None]
    rows = row_digests(sums, np.array(numbers, np.uint64), np.array([name], np.uint64))
    return int(rows.sum(dtype=np.uint64))
