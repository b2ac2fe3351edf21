"""Calls between the driver and the programs of the engines: one JSON value a line.

The driver writes `{"call": name, ...arguments}` to the standard input of a program. The program
writes `{"value": ...}`, or `{"error": text}`, to its standard output. All else that it prints goes
to its standard error, which is a log.

Each program has these calls. *engine* names one of its engines.

    start(engine, ...)                         begin to start an engine
    ready(engine)                              wait until it is ready
    alone(engine, prompt, count)               compute a prompt, and *count* greedy tokens
    prefill(engine, prompt)                    compute a prompt, and hold it: {"ticket": params}
    decode(engine, prompt, count, ticket)      load a prompt, and generate *count* greedy tokens
    clear(engine, value)                       forget cached prompts, and write *value* into all
                                               memory of the cache; False if a prompt is held
    save(engine, prompt)                       compute a prompt, and store its pages
    resume(engine, prompt, count)              load what is stored of a prompt, and generate
    held(engine)                               the number of prompts that are held
    stop(engine)                               end an engine
    kill(engine)                               end an engine without warning
    version()                                  the versions of its packages

`alone` and `decode` return a dict of `tokens`, `logprobs` (for each token a dict from a token id to
its log probability), `finish` ("length" if all went well), `computed` (the number of tokens that
went through the model) and `why` (the reason of a refusal, or None). `prefill` returns `ticket`:
`PrefillTicket.to_params()`, or None, and then `why`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

# The connectors' words for a prompt that is not stored, and for the pages of other engines.
_MISSED = re.compile(r"(0 of \d+ pages? are stored under .*)")
_OTHERS = re.compile(r"pages of another space: (.*)")


class Failed(Exception):  # noqa: N818 - an outcome, not an error of this program
    """A program has ended, does not answer, or has answered with an error."""


def serve(load: Callable[[], tuple[Callable[..., Any], str]]) -> None:
    """Answer calls until the standard input ends.

    *load* returns what makes an engine from its name and settings, and the versions of packages. An
    engine has the other calls as methods, and `close`. *load* is called after the standard output
    was redirected, so it may import what prints.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    make, versions = load()
    engines: dict[str, Any] = {}

    def value(call: str, engine: str = "", **arguments: Any) -> Any:  # noqa: ANN401
        match call:
            case "version":
                return versions
            case "start":
                engines[engine] = make(engine, **arguments)
            case "stop":
                engines.pop(engine).close()
            case _:
                return getattr(engines[engine], call)(**arguments)
        return None

    for line in sys.stdin:
        try:
            answer = {"value": value(**json.loads(line))}
        except Exception as error:  # noqa: BLE001 - the driver decides
            answer = {"error": reason(error)}
        print(json.dumps(answer), file=answers, flush=True)
    for engine in engines.values():
        engine.close()


def missed(log: Path) -> dict[str, str]:
    """Return why a prompt was not found, and what other engines have stored, by a *log*."""
    text = log.read_text(errors="replace")
    others = dict.fromkeys(_OTHERS.findall(text))
    return {"why": ["", *_MISSED.findall(text)][-1], "others": "; ".join(others)}


def reason(error: BaseException) -> str:
    """Return the type and message of the cause of *error*, or of *error* itself."""
    error = error.__cause__ or error
    return f"{type(error).__name__}: {error}"


class Program:
    """A program that answers calls, in a process of its own.

    Args:
        command: The Python of its environment, the file, and arguments.
        log: Where its other output goes.
        environment: Additional environment variables.
    """

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        self._answers: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def call(self, name: str, timeout: float = 600.0, **arguments: Any) -> Any:  # noqa: ANN401
        """Return the result of a call, or raise `Failed` after *timeout* seconds."""
        self.send(name, **arguments)
        return self.answer(timeout)

    def send(self, name: str, **arguments: Any) -> None:  # noqa: ANN401
        """Send a call without waiting for its answer."""
        try:
            print(json.dumps({"call": name, **arguments}), file=self._process.stdin, flush=True)
        except OSError:
            raise Failed("the program has ended") from None

    def answer(self, timeout: float = 600.0) -> Any:  # noqa: ANN401
        """Return the next answer."""
        try:
            line = self._answers.get(timeout=timeout)
        except Empty:
            raise Failed(f"no answer in {timeout:.0f} s") from None
        if not line:
            raise Failed("the program has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["value"]

    @property
    def ended(self) -> bool:
        """Whether the program has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the program without warning."""
        self._process.kill()
        self._process.wait()

    def end(self, rest: float = 20.0) -> None:
        """End the program. Kill it after *rest* seconds."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # The program has ended.
                self._process.stdin.close()
        try:
            self._process.wait(rest)
        except subprocess.TimeoutExpired:
            self.kill()
