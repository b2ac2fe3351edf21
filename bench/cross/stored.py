"""Stored pages between makers: one engine stores the pages of its prompts and ends, others go on.

Each row is a pair of engines of two makers or sizes. The second engine has never seen the first. It
must give the tokens of transformers, and compute only the tokens behind the last whole page. An
engine whose names differ must find nothing, and its log must say why.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from typing import Any

import cross
from lines import Failed
from models import VOCABULARY, make

MODEL = "llama-6"
PAGE = 32
"""Tokens of a page."""
# The engines: maker, TP size, and tokens of a block.
ENGINES: dict[str, tuple[str, int, int]] = {
    "vLLM TP 2": ("vllm", 2, 32),
    "vLLM TP 1": ("vllm", 1, 64),
    "SGLang TP 2": ("sglang", 2, 64),
    "SGLang TP 1": ("sglang", 1, 32),
    "transformers": ("transformers", 1, 16),
}
# What differs in an engine that must find nothing: its settings, or those of its request.
MISSES: dict[str, dict[str, str]] = {
    "revision": {"revision": "2"},
    "weights": {"weights": "step-2"},
    "salt": {"salt": "tenant-2"},
    "adapter": {"adapter": "sql@1f3a"},
}
# The settings of an engine. The others belong to a request.
OF_ENGINES = ("revision", "weights")
COLUMNS = ("stored by", "continued by", "outcome", "tokens computed", "to transformers")
PROMPTS = (70, 131, 64)
"""Numbers of tokens of the prompts."""
FIRST_TURN = 70
"""Tokens of the first turn of a longer prompt. The second turn stores only the pages behind it."""


def prompts() -> list[list[int]]:
    """Return prompts, of which the last one ends with a page."""
    draw = random.Random(9)  # noqa: S311 - the same each time
    return [[draw.randrange(3, VOCABULARY) for _ in range(size)] for size in PROMPTS]


class Stores:
    """Starts engines with a store, one after the other."""

    def __init__(self, engines: cross.Engines) -> None:
        self.engines, self._count = engines, 0
        make(MODEL, engines.folder)

    def start(self, name: str, directory: str, **changed: str) -> cross.Engine:
        """Return an engine that has started, with its pages in *directory*."""
        maker, tp, block = ENGINES[name]
        self._count += 1
        store = {"directory": str(self.engines.folder / directory), "page_tokens": PAGE}
        store |= {"head_groups": 2}
        more: dict[str, Any] = {"revision": changed.get("revision", cross.REVISION)}
        if "weights" in changed:
            store["weights"] = changed["weights"]
        if maker != "transformers":
            more["tp"] = tp
        label = f"stored-{self._count}-{name}".replace(" ", "-").lower()
        if maker == "sglang":
            more |= {"role": "null", "log": str(self.engines.folder / f"{label}.log")}
        # Each engine has a program of its own, so that it ends as a whole.
        found = self.engines.start(
            maker, MODEL, block, name=label, program=label, store=store, **more
        )
        found.program.answer()
        found.call("ready")
        return found

    def copied(self, directory: str) -> str:
        """Return a copy of *directory*. Each engine stores pages of its own, too."""
        self._count += 1
        copy = f"{directory}-{self._count}"
        shutil.copytree(self.engines.folder / directory, self.engines.folder / copy)
        return copy

    def stop(self, engine: cross.Engine) -> None:
        """End an engine and its program."""
        engine.call("stop")
        engine.program.end()


def outcome(
    reader: cross.Engine, name: str, expected: list[dict[str, Any]]
) -> tuple[str, str, str]:
    """Return how the answers of an engine that continues compare, and what it computed."""
    maker, _, block = ENGINES[name]
    # SGLang loads only whole pages of its own.
    page = max(PAGE, block) if maker == "sglang" else PAGE
    worst, computed, most = 0.0, 0, 0
    for prompt, answer in zip(prompts(), expected, strict=True):
        found = reader.call("resume", prompt=prompt, count=cross.TOKENS)
        if found["finish"] != "length":
            return f"different: {found['why']}", "", ""
        new = found["computed"] - cross.TOKENS + 1
        # The last token is computed, with its page if the prompt ends there.
        computed, most = computed + new, most + len(prompt) - (len(prompt) - 1) // page * page
        worst = max(worst, cross.distance(answer, found))
    shown = f"{computed} of {sum(PROMPTS)}", cross.shown(worst)
    if worst > cross.CLOSE:
        return ("different", *shown)
    return ("same" if computed <= most else "different: computed again", *shown)


def missed(
    reader: cross.Engine, expected: dict[str, Any], asked: dict[str, str], words: str
) -> str:
    """Return the outcome of a prompt that must not be found. *words* is where the reason is."""
    prompt = prompts()[0]
    found = reader.call("resume", prompt=prompt, count=cross.TOKENS, **asked)
    if found["computed"] != len(prompt) + cross.TOKENS - 1:
        return f"different: only {found['computed']} tokens were computed"
    if cross.distance(expected, found) > cross.CLOSE:
        return "different: other tokens"
    why = " ".join(found[words].split())
    return f"missed: {why}" if why else "different: missed without words"


def rows(engines: cross.Engines, only: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the word with which the outcome must begin, and the row."""
    stores = Stores(engines)
    names = [
        name
        for name, (maker, _, _) in ENGINES.items()
        if maker in (*engines.makers, "transformers")
    ]
    teacher = stores.start("transformers", "unused")
    expected = [teacher.call("alone", prompt=prompt, count=cross.TOKENS) for prompt in prompts()]
    stores.stop(teacher)
    writers = [name for name in ("vLLM TP 2", "SGLang TP 2", "transformers") if name in names]
    for number, writer in enumerate(writers):
        directory = f"pages-{number}"
        readers = [name for name in names if name != writer and only in f"{writer} -> {name}"]
        if not readers:
            continue
        first = stores.start(writer, directory)
        for prompt in prompts():
            for end in sorted({min(FIRST_TURN, len(prompt)), len(prompt)}):
                first.call("save", prompt=prompt[:end])
        stores.stop(first)
        for name in readers:
            try:
                second = stores.start(name, stores.copied(directory))
                found = outcome(second, name, expected)
                misses = [] if number else [*request_misses(second, name, expected[0])]
                stores.stop(second)
            except Failed as failed:
                found, misses = (f"different: {failed}", "", ""), []
            yield "same", (writer, name, *found)
            for row in misses:
                yield "missed", (writer, *row, "", "")
            # One engine of each maker is enough.
            if not number and "TP 2" not in name:
                for row in engine_misses(stores, name, directory, expected[0]):
                    yield "missed", (writer, *row, "", "")


def request_misses(
    engine: cross.Engine, name: str, expected: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield an engine and the outcome, for each request that differs."""
    for what, changed in MISSES.items():
        # Only this maker can name an adapter that does not exist.
        if what in OF_ENGINES or (what == "adapter" and name != "transformers"):
            continue
        yield f"{name}, another {what}", missed(engine, expected, changed, "why")


def engine_misses(
    stores: Stores, name: str, directory: str, expected: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield an engine and the outcome, for each engine that differs."""
    for what in OF_ENGINES:
        try:
            engine = stores.start(name, stores.copied(directory), **MISSES[what])
            found = missed(engine, expected, {}, "others")
            stores.stop(engine)
        except Failed as failed:
            found = f"different: {failed}"
        yield f"{name}, another {what}", found
