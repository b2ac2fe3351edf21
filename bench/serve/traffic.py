"""Clients: they ask, read, leave, and are judged against the answers of one engine alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import attrs

TOKENS = 8
CLOSE = 1e-3
"""Log probabilities that differ by less are equal."""
PATH = "/v1/completions"
VERDICTS = ("same", "different", "stuck", "failed", "left", "rejected")


def chosen(
    parser: argparse.ArgumentParser, names: list[str], write: Callable[[str], object]
) -> argparse.Namespace | None:
    """Add the options that all tables have, parse the command line, and make the folder.

    Returns:
        The options, or None if only the *names* of the rows had to be written.
    """
    parser.add_argument("--row", nargs="+", choices=names, default=names)
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--folder", type=Path, help="for models, answers and logs")
    options = parser.parse_args()
    if options.list:
        write("\n".join(names))
        return None
    options.folder = (options.folder or Path(tempfile.mkdtemp(prefix="kvspec-serve-"))).resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def tokenizer(model: Path, vocabulary: int) -> None:
    """Write a tokenizer into the folder of a model: the words ``t3``, ``t4`` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - an engine has it
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    # A special word is found inside longer ones too, so it must not begin as they do.
    special = {"unk_token": "[0]", "bos_token": "[1]", "eos_token": "[2]"}
    words = {word: number for number, word in enumerate(special.values())}
    words |= {f"t{number}": number for number in range(len(special), vocabulary)}
    whole = Tokenizer(models.WordLevel(words, unk_token=special["unk_token"]))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=whole, **special).save_pretrained(model)


def prompts(count: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Return random prompts of 1 to *longest* tokens. A third begins as another one does."""
    drawn = random.Random(7)  # noqa: S311 - no secret
    found: list[list[int]] = []
    for _ in range(count):
        size = drawn.choice([drawn.randint(1, 64), drawn.randint(65, longest)])
        prompt = [drawn.randrange(3, vocabulary) for _ in range(size)]
        if found and drawn.random() < 0.33:
            other = drawn.choice(found)
            shared = other[: drawn.randint(1, len(other))]
            prompt = (shared + prompt)[:longest]
        found.append(prompt)
    return found


def turns(count: int, vocabulary: int, longest: int, block: int = 64) -> list[list[int]]:
    """Return random prompts of at most *longest* tokens. Two of three go on from the one before.

    A model with recurrent states resumes only where its cache has a state. A consumer loads all
    tokens of a prompt but the last. So the first of three has one token more than fills blocks.
    """
    drawn = random.Random(11)  # noqa: S311 - no secret
    found: list[list[int]] = []
    for number in range(count):
        shared = found[-(number % 3)][:-1] if number % 3 else []
        size = block * drawn.randint(1, longest // block // 2) + 1
        if shared:
            size = drawn.randint(1, longest - len(shared))
        found.append(shared + [drawn.randrange(3, vocabulary) for _ in range(size)])
    return found


def body_of(prompt: list[int]) -> dict[str, Any]:
    """Return the greedy request of a prompt."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@attrs.define
class Outcome:
    """The end of one request.

    Attributes:
        kind: What the client does: "stay", "leave" or "reject".
        verdict: "same", "different", "left", "rejected", "failed" or "stuck".
        first: Seconds until the first token, for answers that stream.
        seconds: Seconds until the end.
        why: More about a failure.
    """

    kind: str
    verdict: str
    first: float | None = None
    seconds: float = 0.0
    why: str = ""


@attrs.define
class Traffic:
    """The requests of one row.

    Attributes:
        url: The router.
        pool: The prompts.
        answers: The tokens and log probabilities of one engine alone, for each prompt.
        concurrency: Clients at the same time.
        leaving: Share of clients that leave.
        rejected: Share of requests that the decode engine rejects.
        patience: Seconds after which a request is stuck.
        name: Name of the row. It is the seed of the draws.
        salted: Whether half of the requests get a salt, so that no engine has them in its cache.
    """

    url: str
    pool: list[list[int]]
    answers: list[tuple[list[int], list[float]]]
    concurrency: int
    leaving: float = 0.0
    rejected: float = 0.0
    patience: float = 120.0
    name: str = ""
    salted: bool = True

    async def run(self, numbers: range) -> list[Outcome]:
        """Send the requests of these numbers, and return how each has ended."""
        places = asyncio.Semaphore(self.concurrency)
        limits = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=limits, timeout=aiohttp.ClientTimeout(total=None)
        ) as client:
            works = [
                self._one(client, places, random.Random(f"{self.name} {number}"), number)  # noqa: S311
                for number in numbers
            ]
            return [*await asyncio.gather(*works)]

    async def _one(
        self,
        client: aiohttp.ClientSession,
        places: asyncio.Semaphore,
        drawn: random.Random,
        number: int,
    ) -> Outcome:
        which = drawn.randrange(len(self.pool)) if drawn.random() < 0.5 else number
        which %= len(self.pool)
        body, stream = body_of(self.pool[which]), drawn.random() < 0.5
        if self.salted and drawn.random() < 0.5:
            body["cache_salt"] = f"{self.name} {number}"
        kind = drawn.choices(
            ["leave", "reject", "stay"],
            [self.leaving, self.rejected, 1 - self.leaving - self.rejected],
        )[0]
        if kind == "reject":
            # The prefill half, with one token, is accepted.
            body["max_tokens"] = 99_999
        async with places:
            begun = time.monotonic()
            asked = asyncio.ensure_future(self._ask(client, body, stream=stream))
            limit = self.patience
            if kind == "leave":
                # Before, between and after the two halves, as it happens.
                limit = drawn.choice([0.0, 0.02, 0.1, 0.3, 1.0, 3.0])
            done, _ = await asyncio.wait({asked}, timeout=limit)
            took = time.monotonic() - begun
            if not done:
                asked.cancel()
                await asyncio.wait({asked})
                return Outcome(kind, "left" if kind == "leave" else "stuck", seconds=took)
            return self._judge(kind, which, asked, took)

    def _judge(self, kind: str, which: int, asked: Any, took: float) -> Outcome:  # noqa: ANN401
        if (error := asked.exception()) is not None:
            return Outcome(kind, "failed", seconds=took, why=f"{type(error).__name__}: {error}")
        status, first, tokens, logprobs, why = asked.result()
        if kind == "reject":
            return Outcome(kind, "rejected" if status == 400 else "different", why=why)
        if status != 200:
            return Outcome(kind, "failed", seconds=took, why=f"{status} {why}")
        expected, likely = self.answers[which]
        same, why = tokens == expected and len(likely) == len(logprobs), ""
        if same:
            apart = max(abs(a - b) for a, b in zip(likely, logprobs, strict=True))
            same, why = apart < CLOSE, f", log probabilities {apart:.1g} apart"
        why = "" if same else f"prompt {which}: {tokens} for {expected}{why}"
        return Outcome(kind, "same" if same else "different", first, took, why)

    async def _ask(
        self, client: aiohttp.ClientSession, body: dict[str, Any], *, stream: bool
    ) -> tuple[int, float | None, list[int], list[float], str]:
        """Return the status, the seconds until the first token, tokens and log probabilities."""
        begun = time.monotonic()
        async with client.post(self.url + PATH, json={**body, "stream": stream}) as answer:
            if answer.status != 200:
                return answer.status, None, [], [], (await answer.text())[:300]
            tokens, logprobs, first = list[int](), list[float](), None
            if not stream:
                (choice,) = (await answer.json(content_type=None))["choices"]
                return 200, None, choice["token_ids"], choice["logprobs"]["token_logprobs"], ""
            async for line in answer.content:
                text = line.decode().removeprefix("data: ").strip()
                if not text or text == "[DONE]":
                    continue
                event = json.loads(text)
                if "error" in event:
                    return 500, first, [], [], text[:300]
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        first = first or time.monotonic() - begun
                        tokens += choice["token_ids"]
                        logprobs += choice["logprobs"]["token_logprobs"]
            return 200, first, tokens, logprobs, ""
