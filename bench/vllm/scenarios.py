"""The pairs of engines that are compared, and their prompts."""

from __future__ import annotations

import random

import attrs
from models import VOCABULARY, WINDOW


@attrs.frozen
class Scenario:
    """A model, and the TP sizes, block sizes and pipeline stages of producer and consumer.

    *draft* is the model that drafts tokens in both engines. If it is the target itself, nearly all
    of its tokens are accepted, unless its cache is wrong.

    *hits* is the least number of prompts of which the consumer must have a beginning in its prefix
    cache and load the rest.
    """

    name: str
    model: str
    tp: tuple[int, int]
    blocks: tuple[int, int] = (32, 32)
    stages: tuple[int, int] = (1, 1)
    hits: int = 0
    draft: str = ""


SCENARIOS = (
    Scenario("base: TP 1 -> 1", "llama-6", (1, 1)),
    Scenario("6 KV heads, TP 2 -> 3", "llama-6", (2, 3)),
    Scenario("6 KV heads, TP 3 -> 2", "llama-6", (3, 2)),
    Scenario("2 KV heads, TP 4 -> 1", "llama-2", (4, 1)),
    Scenario("2 KV heads, TP 4 -> 2", "llama-2", (4, 2)),
    Scenario("blocks 32 -> 64", "llama-6", (1, 1), (32, 64)),
    Scenario("blocks 64 -> 32, TP 2 -> 1", "llama-2", (2, 1), (64, 32)),
    Scenario("stages 2 -> 1, TP 1 -> 2", "llama-2", (1, 2), stages=(2, 1)),
    Scenario("stages 1 -> 2", "llama-2", (1, 1), stages=(1, 2)),
    Scenario("drafts, TP 1 -> 2", "llama-6", (1, 2), draft="llama-6"),
    Scenario("drafts, blocks 32 -> 64, TP 2 -> 1", "llama-2", (2, 1), (32, 64), draft="llama-2"),
    Scenario("window and full, TP 1 -> 1", "gemma-2", (1, 1)),
    Scenario("window and full, TP 2 -> 1", "gemma-2", (2, 1)),
    Scenario("window and full, blocks 32 -> 64", "gemma-2", (1, 1), (32, 64)),
    Scenario("states and full, TP 1 -> 2", "lfm2-2", (1, 2)),
    Scenario("states and full, TP 2 -> 1", "lfm2-2", (2, 1)),
    Scenario("states of Mamba2, prefix hits", "falcon-h1-2", (1, 1), hits=3),
    Scenario(
        "states of Mamba2, blocks 32 -> 64, TP 1 -> 2", "falcon-h1-2", (1, 2), (32, 64), hits=2
    ),
    Scenario(
        "states of Mamba2, blocks 64 -> 32, TP 2 -> 1", "falcon-h1-2", (2, 1), (64, 32), hits=3
    ),
    Scenario("chunks and full, TP 1 -> 2", "llama4-2", (1, 2)),
    Scenario("chunks and full, TP 2 -> 1", "llama4-2", (2, 1)),
    Scenario("MLA, TP 1 -> 1", "deepseek", (1, 1), (16, 16)),
    Scenario("MLA, TP 2 -> 3", "deepseek", (2, 3), (16, 16)),
    Scenario("MLA of DeepSeek-V3, TP 2 -> 1", "deepseek-3", (2, 1), (16, 16)),
)


def beginnings() -> list[list[int]]:
    """Return prompts of token ids, without their last tokens.

    The second prompt begins like the first. The third is the first again, and its tokens fill whole
    blocks of 32. The fourth, with its last token, has the length at which a window begins at a
    block boundary. The fifth is one token longer. The sixth is shorter than a block.

    Two more are a long prompt and its first 128 tokens. In blocks of 64, the window of the long
    one begins inside the second block. If the consumer took that block from its prefix cache for
    the short one, it would read tokens that were never moved.

    The last ones go on from a prompt whose tokens fill blocks: of a hybrid model, the consumer has
    a state at their end. The very last one begins like the one before it, and its hit is longer.
    """
    draw = random.Random(7)  # noqa: S311 - the same each time

    def fresh(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    first, other, window = fresh(96), fresh(50), fresh(WINDOW + 30)
    later, short, long = fresh(WINDOW + 31), fresh(19), fresh(164)
    turns = [[*long[:128], *fresh(20)], [*long[:128], *fresh(64)]]
    turns.append([*turns[1], *fresh(41)])
    return [first, first[:64] + other, first, window, later, short, long, long[:128], *turns]
