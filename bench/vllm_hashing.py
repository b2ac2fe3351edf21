"""Measure kvspec's names and vLLM's block hashes in one interpreter, in turn.

`python bench/vllm_hashing.py TOKENS PAGE_TOKENS REPETITIONS` prints a JSON object: for each
algorithm of vLLM, the median seconds of both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from timing import clock, interleaved  # noqa: E402 - after the path
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402

from kvspec.stored import ModelIdentity, PromptIdentity, page_names, space_of  # noqa: E402


def main() -> None:
    """Print the figures."""
    count, size, repetitions = map(int, sys.argv[1:])
    tokens = [token * 7919 % 151_936 for token in range(count)]
    empty = dict.fromkeys(("weights", "quantization", "overrides"), "")
    space = space_of(ModelIdentity(model="m", revision="1", **empty), "0" * 64)
    prompt = PromptIdentity.of_text()
    figures = {}
    for algorithm in ("sha256", "sha256_cbor", "xxhash"):
        try:
            function = get_hash_fn_by_name(algorithm)
            function((b"", (1,), None))
        except (ModuleNotFoundError, ValueError):
            continue
        kv_cache_utils.init_none_hash(function)

        def hashes(function=function) -> None:  # noqa: ANN001 - a function of vLLM
            """Hash each block with the hash of the one before, as a request's hasher does."""
            parent = None
            for start in range(0, count - size + 1, size):
                block = tokens[start : start + size]
                parent = kv_cache_utils.hash_block_tokens(function, parent, block)

        figures[algorithm] = interleaved(
            repetitions,
            clock(lambda: page_names(space, tokens, size, prompt)),
            clock(hashes),
        )
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
