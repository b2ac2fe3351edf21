"""Let a real pair of vLLM engines on a CPU answer prompts, and compare with a single engine.

A producer prefills each prompt, a consumer reads its KV cache through a connector and decodes; both
are vLLM engines with every rank a process. One row a scenario and connector: *same*, if tokens and
log probabilities are those of a single engine and the prompt was read and not computed again;
*refused*, with the reason; *different*. Processes end with this one, whatever ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import engine
from models import VOCABULARY, WINDOW, make

TOKENS = 16
CLOSE = 1e-3
"""Log probabilities that differ by less are equal: ranks add up in another order."""
STARTING, ANSWERING, FREEING, ENDING = 600.0, 300.0, 20.0, 5.0
"""Seconds."""

CONNECTORS: dict[str, dict[str, Any]] = {
    "NixlConnector": {"kv_connector": "NixlConnector"},
    "KvspecConnector": {
        "kv_connector": "KvspecConnector",
        "kv_connector_module_path": "kvspec.adapters.vllm.connector",
        "kv_connector_extra_config": {"lease": 120.0},  # machines that do more than this are slow
    },
}


class Failed(Exception):  # noqa: N818 - an outcome, not an error of this program
    """An engine that does not start, or does not answer, and what it said."""


@attrs.frozen
class Scenario:
    """A model, and TP and block sizes of producer and consumer."""

    name: str
    model: str
    tp: tuple[int, int]
    blocks: tuple[int, int] = (32, 32)


SCENARIOS = (
    Scenario("base: TP 1 -> 1", "llama-6", (1, 1)),
    Scenario("6 KV heads, TP 2 -> 3", "llama-6", (2, 3)),
    Scenario("6 KV heads, TP 3 -> 2", "llama-6", (3, 2)),
    Scenario("2 KV heads, TP 4 -> 1", "llama-2", (4, 1)),
    Scenario("2 KV heads, TP 4 -> 2", "llama-2", (4, 2)),
    Scenario("blocks 32 -> 64", "llama-6", (1, 1), (32, 64)),
    Scenario("blocks 64 -> 32, TP 2 -> 1", "llama-2", (2, 1), (64, 32)),
    Scenario("window and full, TP 1 -> 1", "gemma-2", (1, 1)),
    Scenario("window and full, TP 2 -> 1", "gemma-2", (2, 1)),
    Scenario("MLA, TP 1 -> 1", "deepseek", (1, 1), (16, 16)),
    Scenario("MLA, TP 2 -> 3", "deepseek", (2, 3), (16, 16)),
)


def prompts() -> list[list[int]]:
    """Return prompts of token ids.

    The second begins as the first, the third is the first again, all of which but the last token
    fills whole blocks of 32; of the fourth and fifth the window begins one token before and at a
    block's begin; the last is shorter than a block.
    """
    draw = random.Random(7)  # noqa: S311 - the same each time

    def fresh(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    first = fresh(97)
    return [first, first[:64] + fresh(50), first, fresh(WINDOW + 31), fresh(WINDOW + 32), fresh(20)]


_SAID = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)


def reason(log: Path) -> str | None:
    """Return the first error that *log* tells of."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    found = [line for line in _SAID.findall(text) if "Tokenizer not available" not in line]
    return found[0] if found else None


class Process:
    """An engine in a process of its own, with its workers, and its log."""

    def __init__(
        self,
        log: Path,
        environment: dict[str, str],
        settings: dict[str, Any],
        connector: dict[str, Any] | None,
    ) -> None:
        self._pipe, other = engine.FORK.Pipe()
        given = (other, log, environment, settings, connector)
        self._process = engine.FORK.Process(target=engine.run, args=given)
        self._process.start()
        other.close()

    def answer(self, timeout: float) -> Any:  # noqa: ANN401
        """Return the next answer."""
        try:
            if self._pipe.poll(timeout):
                return self._pipe.recv()
        except (EOFError, OSError):
            raise Failed("it ended") from None
        raise Failed(f"no answer in {timeout:.0f} s")

    def generate(self, *given: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return what `Engine.generate` does."""
        with contextlib.suppress(OSError):
            self._pipe.send(("generate", *given))
        found: dict[str, Any] = self.answer(ANSWERING)
        return found

    def held(self) -> int:
        """Return how many requests hold blocks, after some time in which they can be freed."""
        deadline = time.monotonic() + FREEING
        while True:
            self._pipe.send(("held",))
            held: int = self.answer(ANSWERING)
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.1)

    def end(self) -> None:
        """End it and its workers."""
        self._pipe.close()
        self._process.join(ENDING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()


@contextlib.contextmanager
def started(*given: Any) -> Iterator[Process]:  # noqa: ANN401
    """Start an engine that is ready; it ends with the block."""
    process = Process(*given)
    try:
        process.answer(STARTING)
        yield process
    finally:
        process.end()


def settings(model: Path, tp: int, block: int) -> dict[str, Any]:
    """Return what is an engine's own."""
    return {"model": str(model), "tensor_parallel_size": tp, "block_size": block}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def side(scenario: Scenario, connector: str, which: int, folder: Path) -> tuple[Any, ...]:
    """Return what makes the producer (0) or the consumer (1)."""
    role = ("producer", "consumer")[which]
    model = folder.parent / scenario.model
    return (
        folder / f"{role}.log",
        {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        settings(model, scenario.tp[which], scenario.blocks[which]),
        {**CONNECTORS[connector], "kv_role": f"kv_{role}", "engine_id": role},
    )


PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router tells a producer; it passes what the producer answers on to the consumer."""


def reference(model: str, folder: Path) -> list[dict[str, Any]]:
    """Return what a single engine says to the prompts."""
    block = 16 if model == "deepseek" else 32
    given = settings(make(model, folder), 1, block)
    with started(folder / f"{model}.log", {}, given, None) as one:
        said = [one.generate(prompt, TOKENS, None) for prompt in prompts()]
        longer = one.generate([*prompts()[0], *said[0]["tokens"][:1]], TOKENS - 1, None)
    if longer["tokens"] != said[0]["tokens"][1:]:
        raise Failed(f"{model}: vLLM prefills by other numbers than it decodes")
    return said


def answers(scenario: Scenario, connector: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the consumer of a pair says; at the end nobody may hold anything."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        started(*side(scenario, connector, 0, folder)) as producer,
        started(*side(scenario, connector, 1, folder)) as consumer,
    ):
        for prompt in prompts():
            prefilled = producer.generate(prompt, 1, PREFILL)
            yield consumer.generate(prompt, TOKENS, prefilled["transfer"])
        for process, name in ((producer, "producer"), (consumer, "consumer")):
            if held := process.held():
                raise Failed(f"the {name} holds {held} requests for ever")


def farthest(expected: dict[str, Any], actual: dict[str, Any]) -> float:
    """Return by how much two answers' log probabilities differ; infinity for other tokens."""
    if expected["tokens"] != actual["tokens"]:
        return float("inf")
    steps = zip(expected["logprobs"], actual["logprobs"], strict=True)
    return max(abs(a[token] - b[token]) for a, b in steps for token in a.keys() & b.keys())


def outcome(scenario: Scenario, connector: str, expected: list[Any], folder: Path) -> str:
    """Return what became of a scenario: one of the words of this program's docstring."""
    apart, computed = 0.0, []
    try:
        for number, actual in enumerate(answers(scenario, connector, folder)):
            if actual["finish"] != "length":
                return refused(folder, f"prompt {number} ended by {actual['finish']}")
            difference = farthest(expected[number], actual)
            if not difference < CLOSE:
                return f"different: prompt {number} of {len(expected)}"
            apart = max(apart, difference)
            computed.append(actual["computed"] - TOKENS + 1)
    except Failed as failed:
        return refused(folder, str(failed))
    return f"same: log probabilities within {apart:.0e}; computed {computed} tokens of the prompts"


def refused(folder: Path, why: str) -> str:
    """Return that it was refused, *why*, and what the logs say of it."""
    said = filter(None, map(reason, sorted(folder.glob("*.log"), reverse=True)))
    return f"refused: {why}: {next(said, 'without a word')}"


def main() -> None:
    """Run the scenarios that the arguments name; end with 1 unless kvspec's are all the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", action="append", choices=list(CONNECTORS))
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--folder", type=Path, help="keeps models and logs; else they are removed")
    chosen = parser.parse_args()
    os.environ.update({**engine.ENVIRONMENT, **os.environ})
    import vllm.v1.executor.multiproc_executor  # noqa: F401, PLC0415 - once, for all engines

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    failed = False
    with contextlib.ExitStack() as stack:
        folder = chosen.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        expected: dict[str, list[Any]] = {}
        for scenario in SCENARIOS:
            if chosen.only not in scenario.name:
                continue
            if scenario.model not in expected:
                expected[scenario.model] = reference(scenario.model, folder)
            for number, connector in enumerate(chosen.connector or CONNECTORS):
                place = folder / f"{SCENARIOS.index(scenario)}-{number}"
                became = outcome(scenario, connector, expected[scenario.model], place)
                failed |= connector == "KvspecConnector" and not became.startswith("same")
                print(f"| {scenario.name} | {connector} | {became} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
