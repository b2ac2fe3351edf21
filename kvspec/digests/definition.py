"""Define the digest of contents. Layouts, sizes and splits do not affect it.

Invariant: equal contents have equal digests. A digest is a sum over the rows of contents, so the
digests of ranks that hold different rows add up.

How it works:
    A content is the bytes of one row of one unit, in the common order of
    `kvspec.specs.key_content`, padded with zeros to 8-byte words:

        content sum      = sum over the words of the content of weight * fold(weight * word)
        digest           = sum over rows of mix(content sum ^ name of the row)
        name of a row    = mix(row ^ hash of layer, part and unit)

    All numbers are modulo 2**64. Each position of a word in the content has an odd *weight* of its
    own, and fold(x) = x ^ (x >> 47).
    *row* is the first token of the row, or the number of a state's row.

    The fold between two multiplications matters. Without it, a change of bit 63 adds 2**63 in any
    word, so an even number of flipped signs cancels. With it, the same change adds
    weight * (2**63 +- 2**16). The sign depends on the content, and the weight on the position.

    Every step is a bijection of the word, so a single changed word always changes the digest.
    More changes cancel only by chance.

    The digest finds faults, not attackers: everybody who chooses the bytes can make two digests
    equal. The seals of messages keep strangers out.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvspec.errors import SpecError
from kvspec.inputs import instance

if TYPE_CHECKING:
    import torch

Words = npt.NDArray[np.uint64]

# Multipliers and shift of the finalizer of MurmurHash3.
MULTIPLIERS = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
SHIFT = 33
# Moves the highest bit of a product to bit 16. The second multiplication spreads it upwards.
FOLD = 47
WORD = 8
"""Bytes of a word."""


def mix(word: Words) -> Words:
    """Return every word mixed: one changed input bit changes about half of the output bits."""
    for multiplier in MULTIPLIERS:
        word = (word ^ (word >> np.uint64(SHIFT))) * np.uint64(multiplier)
    return word ^ (word >> np.uint64(SHIFT))


@lru_cache(maxsize=64)
def weights_of(words: int) -> Words:
    """Return the weight of each word of a content of so many *words*."""
    return mix(np.arange(1, words + 1, dtype=np.uint64)) | np.uint64(1)


@lru_cache(maxsize=1 << 16)
def unit_hash(layer: str, part: str, unit: int) -> int:
    """Return the hash of a layer, a part and a unit of the model."""
    name = f"{layer}\0{part}\0{unit}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=WORD).digest(), "little")


def content_sums(words: Words, products: Words) -> Words:
    """Return the content sum of each content. The module docstring has the formula.

    Args:
        words: The contents, of shape (contents, words). The function overwrites them.
        products: Memory for as many words.
    """
    count, size = words.shape
    weights = weights_of(size)
    # Operations on one long axis are twice as fast as operations on rows of 32 words.
    np.multiply(words.ravel(), _tiled(count, size), out=words.reshape(-1))
    np.right_shift(words, np.uint64(FOLD), out=products)
    np.bitwise_xor(products, words, out=products)
    # `einsum` multiplies and adds in one pass. `sum` of the products needs 1.5 times as long.
    return np.asarray(np.einsum("ij,j->i", products, weights), np.uint64)


@lru_cache(maxsize=8)
def _tiled(count: int, size: int) -> Words:
    return np.tile(weights_of(size), count)


def row_digests(sums: Words, numbers: Words, hashes: Words) -> Words:
    """Return the digest of each row of each unit, of shape (rows, units).

    Args:
        sums: The content sums, of shape (rows, units).
        numbers: First token of each row, or the number of a state's row.
        hashes: The `unit_hash` of each unit.
    """
    return mix(sums ^ mix(numbers[:, None] ^ hashes))


def tensor_digest(
    contents: torch.Tensor, rows: torch.Tensor, *, layer: str, part: str, unit: int = 0
) -> list[int]:
    """Return the digest of a tensor on any device, for each unit.

    This is a reference of the definition in torch. Its sums equal those of `digest`, so a tensor in
    the memory of a GPU can be compared with the cache of another engine.

    Args:
        contents: The contents, of shape (rows, units, elements) and any dtype. The elements are in
            the common order of `kvspec.specs.key_content`.
        rows: First token of each row, or the number of a state's row. An int64 tensor on the same
            device.
        layer: Name of the layer.
        part: Name of the part.
        unit: Number of the first unit in the model.

    Returns:
        One digest for each unit.

    Raises:
        SpecError: If an argument is not a tensor, *rows* are not ints, or the shapes do not fit
            each other.

    >>> import torch
    >>> keys, tokens = torch.arange(24, dtype=torch.bfloat16).view(3, 2, 4), torch.arange(3)
    >>> whole = tensor_digest(keys, tokens, layer="l.0", part="k")
    >>> halves = [
    ...     tensor_digest(keys[some], tokens[some], layer="l.0", part="k")
    ...     for some in (slice(0, 1), slice(1, 3))
    ... ]
    >>> whole == [sum(unit) % 2**64 for unit in zip(*halves)]
    True
    """
    import torch  # noqa: PLC0415 - slow, and often absent

    instance("contents", contents, torch.Tensor)
    instance("rows", rows, torch.Tensor)
    rank = 3
    if contents.dim() != rank or not contents.shape[2]:
        raise SpecError("contents", tuple(contents.shape), "a shape of (rows, units, elements)")
    if rows.dtype.is_floating_point or rows.dtype.is_complex:  # A fraction would be lost.
        raise SpecError("rows", str(rows.dtype), "a tensor of ints")
    if tuple(rows.shape) != contents.shape[:1]:
        raise SpecError("rows", tuple(rows.shape), f"one row for each of {len(contents)} contents")
    totals = unit_totals(contents, rows, layer, part, unit)
    return [total % (1 << 64) for total in totals.tolist()]


def unit_totals(
    contents: torch.Tensor, rows: torch.Tensor, layer: str, part: str, unit: int
) -> torch.Tensor:
    """Return the digest of each unit as an int64 tensor on the device of *contents*."""
    import torch  # noqa: PLC0415 - slow, and often absent

    def words(values: Words) -> torch.Tensor:
        return torch.from_numpy(values.view(np.int64)).to(contents.device)

    def shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
        # torch has no unsigned product. `>>` copies the sign, which the mask removes.
        return (word >> bits) & ((1 << 64 - bits) - 1)

    def mixed(word: torch.Tensor) -> torch.Tensor:
        for multiplier in MULTIPLIERS:
            word = (word ^ shifted(word, SHIFT)) * (multiplier - (1 << 64))
        return word ^ shifted(word, SHIFT)

    units = contents.shape[1]
    # An axis of length 1 may have any stride, also in a contiguous tensor. `view` needs the usual.
    stored = contents.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    stored = torch.nn.functional.pad(stored, (0, -stored.shape[2] % WORD))
    content = stored.view(torch.int64)
    weights = words(weights_of(content.shape[2]))
    products = content * weights
    sums = ((products ^ shifted(products, FOLD)) * weights).sum(dim=2)
    hashes = [unit_hash(layer, part, number) for number in range(unit, unit + units)]
    names = mixed(rows.to(torch.int64)[:, None] ^ words(np.array(hashes, np.uint64)))
    return mixed(sums ^ names).sum(dim=0)
