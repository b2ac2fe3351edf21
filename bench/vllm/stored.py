"""Stored pages: one engine stores the pages of its prompts and ends, another one continues.

The second engine has other sizes. It must give the answers of a single engine, and compute only the
tokens behind the last whole page. An engine whose names differ computes
everything, and its log names the reason. `stored_adapters` does the same with LoRA adapters, and
`stored_images` with images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pair
from models import make
from process import Failed, Process, started
from scenarios import Scenario

PAGE = 32
"""Tokens of a page."""


@attrs.frozen
class Stored(Scenario):
    """A scenario with a store: the head groups of a page, and its layer ranges.

    Objects of these models are small, so the default is one head group. TP ranks need more.
    """

    head_groups: int = 6
    layer_ranges: int = 1


SCENARIOS = (
    Stored("stored: TP 2 -> 1, blocks 32 -> 64", "llama-6", (2, 1), (32, 64)),
    Stored("stored: TP 1 -> 3, blocks 64 -> 32", "llama-6", (1, 3), (64, 32)),
    Stored(
        "stored: stages 2 -> 1", "llama-2", (1, 1), stages=(2, 1), head_groups=2, layer_ranges=2
    ),
    Stored("stored: window and full, TP 2 -> 1", "gemma-2", (2, 1), head_groups=2),
    Stored("stored: MLA, TP 2 -> 1", "deepseek", (2, 1), (16, 16), head_groups=1),
    Stored("stored: states of Mamba2, TP 2 -> 1", "falcon-h1-2", (2, 1), head_groups=2),
)
# What differs in the second engine, and the field that its log names.
MISSES: dict[str, dict[str, Any]] = {
    "revision": {"revision": "2"},
    "weights": {"weights": "step-2"},
    "salt": {"salt": "tenant-2"},
}
_WHY = {
    "salt": re.compile(r": (0 of \d+ pages? are stored under .*)"),
    "": re.compile(r"pages of another space: (.*)"),
}


def side(scenario: Stored, which: int, folder: Path, **changed: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the arguments that start the first engine (0) or the second (1).

    *changed* is another revision or version of the weights, or more *settings* of vLLM.
    """
    name = ("first", "second")[which]
    store: dict[str, Any] = {"directory": str(folder / "pages"), "page_tokens": PAGE}
    store |= {name: getattr(scenario, name) for name in ("head_groups", "layer_ranges")}
    if "weights" in changed:
        store["weights"] = changed["weights"]
    extra = {"store": store, "model": scenario.model, "revision": changed.get("revision", "1")}
    connector = pair.CONNECTORS["KvspecConnector"] | {
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    model = make(scenario.model, folder.parent)
    sizes = scenario.tp[which], scenario.blocks[which], scenario.stages[which]
    # A prompt that is not found is only a line for debugging.
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG"} if changed else {}
    own = pair.settings(model, *sizes) | changed.get("settings", {})
    return folder / f"{name}.log", environment, own, connector


def store(engine: Process, expected: list[Any]) -> None:
    """Let an engine answer all prompts, until it has stored their pages."""
    for prompt, _ in expected:
        engine.generate(prompt, 1, None)
    if held := engine.held():
        raise Failed(f"{held} requests or saves have not ended")


def outcome(scenario: Stored, expected: list[Any], folder: Path) -> str:
    """Return the outcome of a scenario, and the number of tokens that were loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    differences: list[float] = []
    loaded = 0
    try:
        with started(*side(scenario, 0, folder)) as first:
            store(first, expected)
        with started(*side(scenario, 1, folder)) as second:
            for number, (prompt, answer) in enumerate(expected):
                actual = second.generate(prompt, pair.TOKENS, None)
                differences += pair.distances(answer, actual)
                if max(differences) > pair.CLOSE:
                    return f"different: prompt {number}"
                stored = (len(prompt) - 1) // PAGE * PAGE
                if (computed := actual["computed"] - pair.TOKENS + 1) > len(prompt) - stored:
                    return f"computed again: {computed} of {len(prompt)} tokens, {stored} stored"
                loaded += stored
            if held := second.held():
                return f"different: the second engine still holds {held} requests"
    except Failed as failed:
        return pair.refused(folder, str(failed))
    return f"same: {loaded} tokens not computed, log probabilities within {max(differences):.0e}"


def miss(scenario: Stored, changed: dict[str, str], expected: list[Any], folder: Path) -> str:
    """Return the outcome of an engine whose pages have other names in the same directory."""
    salt = changed.get("salt")
    try:
        with started(*side(scenario, 1, folder, **changed)) as second:
            for number, (prompt, answer) in enumerate(expected[:1]):
                actual = second.generate(prompt, pair.TOKENS, None, salt)
                if max(pair.distances(answer, actual)) > pair.CLOSE:
                    return f"different: prompt {number}"
                if actual["computed"] != len(prompt) + pair.TOKENS - 1:
                    return f"different: {actual['computed']} tokens were computed"
            log = (folder / "second.log").read_text(errors="replace")
    except Failed as failed:
        return pair.refused(folder, str(failed))
    why = _WHY["salt" if salt else ""].search(log)
    return f"same: all computed{f', because {why[1]}' if why else ''}"


def rows(folder: Path, only: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the connector and the outcome of each scenario with *only* in its name."""
    import stored_adapters  # noqa: PLC0415 - they use this module
    import stored_images  # noqa: PLC0415

    known: dict[str, list[Any]] = {}
    for place, scenario in enumerate(each for each in SCENARIOS if only in each.name):
        if scenario.model not in known:
            known[scenario.model] = pair.reference(scenario, folder)
        logs = folder / f"stored-{place}"
        expected = known[scenario.model]
        yield scenario.name, "KvspecConnector", outcome(scenario, expected, logs)
        for field, changed in MISSES.items() if not place else ():
            name = f"stored: another {field}"
            yield name, "KvspecConnector", miss(scenario, changed, expected, logs)
    for module in (stored_adapters, stored_images):
        if only in module.NAME:
            for name, found in module.outcomes(folder / module.__name__):
                yield name, "KvspecConnector", found
