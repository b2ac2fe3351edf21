"""Digests of the contents of a request: equal contents have equal digests on both engines."""

from kvspec.digests.compiled import compile_digest
from kvspec.digests.definition import tensor_digest
from kvspec.digests.ranks import digest, wanted

__all__ = [
    "compile_digest",
    "digest",
    "tensor_digest",
    "wanted",
]
