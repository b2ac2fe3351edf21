"""A request moves on between live engines: to a prefill engine for its next turn, and to others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Session, new_remote_id
from kvspec.testing import FakeNixl, logical_views

LAYERS, HEADS, BLOCKS, VOCABULARY = ("layers.0", "layers.1"), 4, 40, 97


class Model:
    """An engine whose next token depends on each byte of its cache.

    Attributes:
        sessions: The sessions of its ranks.
        blocks: The blocks of the request.
        known: Number of its tokens in the cache.
        computed: Number of tokens that went through the model.
    """

    def __init__(self, stack: ExitStack, name: str, tp: int, block: int, seed: int) -> None:
        spec = kvspec.FullAttentionSpec(
            block_size=block, total_num_kv_heads=HEADS, head_size=8, dtype="uint8"
        )
        group = kvspec.KVCacheGroup(name="full", layers=LAYERS, spec=spec)
        self.engine = kvspec.EngineSpec(
            groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp), layout="LBHNC"
        )
        self.sessions, self._heads = [], list[dict[Any, Any]]()
        for rank in self.engine.parallel.ranks:
            cache, storage = kvspec.allocate(self.engine, rank, num_blocks=BLOCKS)
            nixl = stack.enter_context(NixlRank())
            own: dict[str, Any] = {"engine_id": name, "epoch": seed, "owner": storage}
            own["background"] = True
            self.sessions.append(stack.enter_context(Session(nixl, cache, **own)))
            views = logical_views(self.engine, rank, storage, BLOCKS)
            parts = [(layer, part) for layer in LAYERS for part in "kv"]
            self._heads += [
                {part: views["full", *part][:, place] for part in parts}
                for place in range(HEADS // tp)
            ]
        self._size = block
        draw = np.random.default_rng(seed)
        self.blocks = draw.permutation(BLOCKS)[: -(-64 // block)].tolist()
        self.known = self.computed = 0

    def _digest(self) -> bytes:
        """Return a digest of all bytes of the cache."""
        found = hashlib.sha256()
        for layer in LAYERS:
            for part in "kv":
                for head in self._heads:
                    rows = np.asarray(head[layer, part])[self.blocks]
                    found.update(rows.reshape(-1, 8)[: self.known].tobytes())
        return found.digest()

    def compute(self, tokens: list[int]) -> int:
        """Compute *tokens*, and return the next one."""
        for token in tokens:
            hidden = self._digest()
            block, row = divmod(self.known, self._size)
            for layer in LAYERS:
                for part in "kv":
                    for number, head in enumerate(self._heads):
                        text = f"{token} {layer} {part} {number}".encode()
                        value = hashlib.sha256(hidden + text).digest()[:8]
                        head[layer, part][self.blocks[block], row] = np.frombuffer(value, np.uint8)
            self.known += 1
            self.computed += 1
        return int.from_bytes(self._digest()[:4]) % VOCABULARY

    def generate(self, given: list[int], count: int) -> list[int]:
        """Return *count* tokens after *given*. The last one is not computed."""
        found = [self.compute(given)]
        while len(found) < count:
            found.append(self.compute(found[-1:]))
        return found


def move(producer: Model, consumer: Model) -> None:
    """Let *consumer* load what *producer* has, behind its own tokens."""
    remote_id = new_remote_id("r")
    for session in consumer.sessions:
        session.connect(session.fetch([peer.channel.address for peer in producer.sessions]))
    for session in producer.sessions:
        session.hold(remote_id)
    used = [-(-producer.known // each._size) for each in (producer, consumer)]
    request = kvspec.TransferRequest(
        request_id=remote_id,
        num_tokens=producer.known,
        cached_tokens=consumer.known,
        producer_blocks={"full": producer.blocks[: used[0]]},
        consumer_blocks={"full": consumer.blocks[: used[1]]},
    )
    loads = [s.load(request, remote_id=remote_id, timeout=10) for s in consumer.sessions]
    for load in loads:
        load.wait()
    consumer.known = producer.known


@contextmanager
def engines(*sizes: tuple[int, int]) -> Iterator[list[Model]]:
    """Yield an engine for each TP size and block size."""
    with FakeNixl(), ExitStack() as stack:
        yield [Model(stack, f"e{n}", *size, seed=n + 1) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(("prefill", "decode"), [((1, 4), (2, 8)), ((4, 8), (1, 4))])
def test_next_turn_begins_with_what_the_decode_engine_has(
    prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    turns = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]
    with engines((1, 8), prefill, decode) as (alone, first, second):
        history: list[int] = []
        for number, turn in enumerate(turns):
            # The last token of an answer was not computed: it begins the next turn.
            given = [*history[alone.known :], *turn]
            expected = alone.generate(given, 6)
            before = first.computed
            if number:
                move(second, first)
            token = first.compute(given)
            assert first.computed - before == len(given)  # Nothing of the last turn.
            move(first, second)
            answer = [token, *second.generate([token], 5)]
            assert answer == expected
            history += [*turn, *answer]
        # A decode engine computes only tokens that it has sampled.
        assert second.computed == len(turns) * 5


@pytest.mark.parametrize("count", [1, 2, 5])
def test_request_moves_to_engines_of_other_sizes_while_it_generates(count: int) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2]
    with engines((1, 8), (1, 4), (2, 8), (4, 4)) as (alone, *others):
        expected = alone.generate(prompt, 3 * count)
        answer: list[int] = []
        for number, each in enumerate(others):
            if number:
                move(others[number - 1], each)
            answer += each.generate(answer[-1:] or prompt, count)
        assert answer == expected
        assert sum(each.computed for each in others) == alone.computed
