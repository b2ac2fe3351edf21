"""NAMES: the time to name the pages of a prompt, compared with vLLM's own block hashing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from timing import Options, Row, clock, interleaved, readable

from kvspec.engines.group import KVCacheGroup
from kvspec.specs import FullAttentionSpec, SlidingWindowSpec
from kvspec.stored import (
    ModelIdentity,
    PromptIdentity,
    longest_prefix,
    page_names,
    space_of,
)

PROGRAM = Path(__file__).with_name("vllm_hashing.py")
VARIABLE = "KVSPEC_VLLM_PYTHON"
PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
TOKENS, PAGES = 100_000, 1000
# A name may cost at most twice a block hash of vLLM.
MOST = 2
# A lookup may take as long.
MOST_SECONDS = 5e-3


def named(options: Options) -> Iterator[Row]:
    """Name the pages of a prompt in the interpreter of vLLM, and look up a prompt in this one."""
    python = os.environ.get(VARIABLE, str(PYTHON))
    required = f"at most {MOST} x"
    for size in (16, 64):
        what = f"names of {TOKENS:,} tokens, pages of {size}; other: vLLM's block hashes"
        if not Path(python).exists():
            ours, _ = interleaved(options.times(16), namer(size), clock(lambda: None))
            other = f"not installed ({VARIABLE})"
            yield Row(budget="NAMES", what=what, ours=readable(ours), other=other)
            continue
        command = [python, str(PROGRAM), str(TOKENS), str(size), str(options.times(16))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for algorithm, (ours, other) in json.loads(done.stdout.splitlines()[-1]).items():
            yield Row(
                budget="NAMES",
                what=f"{what} ({algorithm})",
                ours=readable(ours),
                other=readable(other),
                ratio=f"{ours / other:.3g}",
                required=required,
                met=ours <= MOST * other,
            )
    yield _looked_up(options)


def namer(page_tokens: int):  # noqa: ANN201 - a timer
    """Return a timer of the names of a prompt."""
    empty = dict.fromkeys(("weights", "quantization", "overrides"), "")
    space = space_of(ModelIdentity(model="m", revision="1", **empty), "0" * 64)
    prompt = PromptIdentity.of_text()
    tokens = [token * 7919 % 151_936 for token in range(TOKENS)]
    return clock(lambda: page_names(space, tokens, page_tokens, prompt))


def _looked_up(options: Options) -> Row:
    """Look up a prompt of which all pages but the last are stored, in three groups."""
    fields = {"block_size": 16, "total_num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    specs = [FullAttentionSpec(**fields), SlidingWindowSpec(sliding_window=4096, **fields)]
    groups = [KVCacheGroup(name=str(n), layers=[f"l.{n}"], spec=s) for n, s in enumerate(specs)]
    stored = {(group.name, page) for group in groups for page in range(PAGES - 1)}
    ours, _ = interleaved(
        options.times(64),
        clock(lambda: longest_prefix(groups, PAGES, 64, lambda *key: key in stored)),
        clock(lambda: None),
    )
    return Row(
        budget="NAMES",
        what=f"longest prefix of {PAGES:,} pages, full attention and a window, in memory",
        ours=readable(ours),
        required=f"at most {readable(MOST_SECONDS)}",
        met=ours <= MOST_SECONDS,
    )
