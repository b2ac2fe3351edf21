"""Stored pages of prompts under a LoRA adapter: found under the same weights, and only there.

The first engine stores prompts under the adapter `sql` in the folder `at/sql`. Then other weights
replace those in that folder, and `copy/sql` has the first ones. So pages that were named by the
name or the path of an adapter would be found under the wrong weights.

At last, other weights replace those of an adapter after the scheduler has found pages under it, and
before the workers need it. Then all values must be of one of the two.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pair
from models import RANK, make, make_adapter
from process import Failed, Process, started
from scenarios import beginnings
from stored import PAGE, Stored, side

# The name, the number and the folder of an adapter.
Adapter = tuple[str, int, str]

SCENARIO = Stored("adapter", "llama-6", (2, 1), (32, 64))
NAME = "stored: adapter, TP 2 -> 1, blocks 32 -> 64"
FIRST: Adapter = ("sql", 1, "at/sql")
SAME: Adapter = ("sql", 5, "copy/sql")
MISSES: dict[str, Adapter | None] = {
    "stored: another adapter": ("chat", 6, "chat"),
    "stored: no adapter": None,
    "stored: an adapter of the same name and path, other weights": ("sql", 7, "at/sql"),
}
_SETTINGS = {"enable_lora": True, "max_loras": 4, "max_lora_rank": RANK}
# vLLM applies only the parts of an adapter that belong to these modules.
_FEWER = {**_SETTINGS, "lora_target_modules": ["o_proj"]}
FEWER = "stored: the adapter in fewer modules"
RACE: Adapter = ("sql", 8, "race/sql")
REPLACED = "stored: an adapter whose files change before it is needed"
_WHY = re.compile(r": (0 of \d+ pages? are stored .*)")


def outcomes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what becomes of the prompts in an engine of other sizes, under each adapter."""
    model = make(SCENARIO.model, folder.parent)
    for seed, name in enumerate(("at/sql", "chat")):
        make_adapter(model, folder / name, seed)
    for copy in ("copy", "race"):
        shutil.copytree(folder / "at", folder / copy)
    prompts = beginnings()[:2]
    try:
        with started(*side(SCENARIO, 0, folder, settings=_SETTINGS)) as first:
            store(first, prompts, folder)
        make_adapter(model, folder / "at/sql", len(MISSES))
        asks = (SAME, *MISSES.values())
        expected = alone(model, prompts, folder, asks, _SETTINGS)
        with started(*side(SCENARIO, 1, folder, settings=_SETTINGS)) as second:
            yield NAME, hit(second, prompts, expected, folder)
            for name, adapter in MISSES.items():
                yield name, miss(second, prompts[0], adapter, expected[adapter][0], folder)
        with started(*side(SCENARIO, 1, folder, settings=_SETTINGS)) as second:
            yield REPLACED, replaced(second, prompts[0], expected, folder)
        fewer = alone(model, prompts, folder, (SAME,), _FEWER)[SAME][0]
        if fewer["tokens"] == expected[SAME][0]["tokens"]:
            raise Failed("fewer modules give the same answer")  # noqa: TRY301
        with started(*side(SCENARIO, 1, folder, settings=_FEWER)) as second:
            yield FEWER, miss(second, prompts[0], SAME, fewer, folder)
    except Failed as failed:
        yield NAME, pair.refused(folder, str(failed))


def store(engine: Process, prompts: list[list[int]], folder: Path) -> None:
    """Let *engine* answer *prompts* under the first adapter, until it has stored their pages."""
    for prompt in prompts:
        asked(engine, prompt, FIRST, folder, 1)
    if held := engine.held():
        raise Failed(f"{held} requests or saves have not ended")


def asked(
    engine: Process,
    prompt: list[int],
    adapter: Adapter | None,
    folder: Path,
    count: int,
    replaced_by: str | None = None,
) -> dict[str, Any]:
    """Return the answer of *engine* under *adapter*."""
    placed = adapter and (*adapter[:2], str(folder / adapter[2]))
    source = replaced_by and str(folder / replaced_by)
    return engine.generate(prompt, count, None, None, placed, source)


def alone(
    model: Path,
    prompts: list[list[int]],
    folder: Path,
    asks: tuple[Adapter | None, ...],
    more: dict[str, Any],
) -> dict[Adapter | None, list[dict[str, Any]]]:
    """Return the answers of a single engine without a connector. No two adapters give the same."""
    settings = pair.settings(model, 1, 32) | more
    with started(folder / "alone.log", {}, settings, None) as single:
        answers = {
            adapter: [asked(single, prompt, adapter, folder, pair.TOKENS) for prompt in prompts]
            for adapter in asks
        }
    if len({tuple(each[0]["tokens"]) for each in answers.values()}) < len(answers):
        raise Failed("two adapters give the same answer")
    return answers


def hit(
    second: Process, prompts: list[list[int]], expected: dict[Any, list[Any]], folder: Path
) -> str:
    """Return the outcome of the stored prompts under the adapter with the same weights."""
    loaded, differences = 0, [0.0]
    for prompt, answer in zip(prompts, expected[SAME], strict=True):
        actual = asked(second, prompt, SAME, folder, pair.TOKENS)
        differences += pair.distances(answer, actual)
        stored = (len(prompt) - 1) // PAGE * PAGE
        if (computed := actual["computed"] - pair.TOKENS + 1) > len(prompt) - stored:
            return f"computed again: {computed} of {len(prompt)} tokens, {stored} stored"
        loaded += stored
    if max(differences) > pair.CLOSE:
        return f"different: log probabilities differ by {max(differences):.0e}"
    return f"same: {loaded} tokens not computed, log probabilities within {max(differences):.0e}"


def miss(
    second: Process,
    prompt: list[int],
    adapter: Adapter | None,
    expected: dict[str, Any],
    folder: Path,
) -> str:
    """Return the outcome of a stored prompt under another *adapter*: it is computed."""
    log = folder / "second.log"
    before = log.stat().st_size
    actual = asked(second, prompt, adapter, folder, pair.TOKENS)
    if max(pair.distances(expected, actual)) > pair.CLOSE:
        return "different: another answer than that of a single engine"
    if actual["computed"] != len(prompt) + pair.TOKENS - 1:
        return f"different: {actual['computed']} tokens were computed"
    why = _WHY.search(log.read_bytes()[before:].decode(errors="replace"))
    return f"same: all computed, because {why[1]}" if why else "different: no word in the log"


def replaced(
    second: Process, prompt: list[int], expected: dict[Any, list[Any]], folder: Path
) -> str:
    """Return the outcome of a stored prompt while the files of its adapter are replaced."""
    found = asked(second, prompt, RACE, folder, pair.TOKENS, "chat")
    (other,) = (key for key in expected if key and key[2] == "chat")
    for name, adapter in (("old", SAME), ("new", other)):
        if max(pair.distances(expected[adapter][0], found)) <= pair.CLOSE:
            loaded = len(prompt) + pair.TOKENS - 1 - found["computed"]
            return f"same: all values of the {name} files, {loaded} tokens not computed"
    return "different: values of two adapters are mixed"
