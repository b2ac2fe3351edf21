"""Measure what SGLang gains if its decode engine reads chunks while the next ones are computed.

It starts two pairs of real servers, with and without the setting `overlap`, and sends prompts of 8
and of 32 chunks to both in turns. It prints the share of each prompt that was loaded
before the load of the last chunk began, and the time to the first token.

    python bench/serve/overlap.py --folder FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

import aiohttp
import models
from servers import running
from sglang_servers import SGLang
from traffic import PATH, body_of, tokenizer

PAGE, CHUNK, CHUNKS = 16, 32, (8, 32)
ARRIVED = Path(__file__).with_name("arrived")


class Pair:
    """A prefill and a decode engine.

    Args:
        folder: Folder of the logs.
        model: Folder of the model.
        overlap: The setting of kvspec.
    """

    def __init__(self, folder: Path, model: Path, *, overlap: bool) -> None:
        folder.mkdir(exist_ok=True)
        self.arrived = folder / "arrived"
        self.arrived.write_text("")
        more = ("--chunked-prefill-size", str(CHUNK), "--disable-radix-cache")
        own: dict[str, Any] = {"page": PAGE, "settings": {"overlap": overlap}, "more": more}
        environment = {"ARRIVED": str(self.arrived)}
        self.prefill, self.decode = (
            SGLang(role, folder, model, role, plugins=(ARRIVED,), environment=environment, **own)
            for role in ("prefill", "decode")
        )

    async def first(self, client: aiohttp.ClientSession, prompt: list[int]) -> float:
        """Return the seconds until the first token of a prompt."""
        room = random.SystemRandom().randint(1, 1 << 62)
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap}
        body = body_of(prompt) | where | {"bootstrap_room": room, "max_tokens": 2, "stream": True}
        begun, seconds = time.monotonic(), float("nan")

        async def ask(url: str, *, measured: bool) -> None:
            nonlocal seconds
            async with client.post(url + PATH, json=body) as answer:
                async for line in answer.content:
                    if measured and b'"token_ids":[' in line.replace(b" ", b""):
                        seconds = time.monotonic() - begun
                        measured = False

        decoding = ask(self.decode.url, measured=True)
        await asyncio.gather(ask(self.prefill.url, measured=False), decoding)
        return seconds

    def shares(self) -> list[float]:
        """Return the shares of the prompts since the last call."""
        pairs = [[int(each) for each in line.split()] for line in self.arrived.open()]
        self.arrived.write_text("")
        return [arrived / tokens for arrived, tokens in pairs]


async def measure(pairs: dict[bool, Pair], chunks: int, count: int) -> dict[str, Any]:
    """Send *count* prompts of *chunks* chunks to each pair, in turns."""
    drawn = random.Random(chunks)  # noqa: S311 - no secret
    seconds: dict[bool, list[float]] = {overlap: [] for overlap in pairs}
    async with aiohttp.ClientSession() as client:
        for number in range(count + 1):
            size = chunks * CHUNK - PAGE  # The last chunk is shorter.
            prompt = [drawn.randrange(3, models.VOCABULARY) for _ in range(size)]
            for overlap, pair in pairs.items():
                took = await pair.first(client, prompt)
                if number:  # The first one connects the engines.
                    seconds[overlap].append(took)
                else:
                    pair.shares()
    return {"chunks": chunks, "shares": pairs[True].shares(), "with": seconds[True],
            "without": seconds[False]}  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """Return one row of the table."""
    shares, cells = sorted(found["shares"]), [str(found["chunks"])]
    cells += [f"{shares[0]:.0%} to {shares[-1]:.0%}, median {statistics.median(shares):.0%}"]
    for name in ("with", "without"):
        times = sorted(found[name])
        cells += [f"{statistics.median(times):.3f} ({times[0]:.3f} to {times[-1]:.3f})"]
    return f"| {' | '.join(cells)} |"


def main(write: Callable[[str], object] = print) -> None:
    """Start the engines, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=15, help="prompts of each size")
    parser.add_argument("--folder", type=Path, help="for the model and the logs")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="kvspec-overlap-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = models.make("llama-6", folder)
    tokenizer(model, models.VOCABULARY)
    pairs = {each: Pair(folder / f"overlap-{each}", model, overlap=each) for each in (True, False)}
    found = []
    with running(*(side for pair in pairs.values() for side in (pair.prefill, pair.decode))):
        write("| chunks | loaded before the last chunk | first token with, s | without, s |")
        write("|---|---|---|---|")
        for chunks in CHUNKS:
            found.append(asyncio.run(measure(pairs, chunks, options.prompts)))
            write(line(found[-1]))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
