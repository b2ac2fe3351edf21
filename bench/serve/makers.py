"""Serve prompts with SGLang behind routers, alone and together with vLLM, and judge the answers.

Each row sends requests over HTTP to two engines and a router, and waits until all prompts must be
free. Rows with equal engines share them. A row is right if no answer differs from that of one
engine alone, no request is stuck, neither engine holds anything at rest, both engines live, and
their logs have no traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

import models
from serve import serving_model
from servers import CONNECTORS, ROOT, Server, running, vllm
from sglang_servers import SGLang, sglang_router
from traffic import VERDICTS, Outcome, Traffic, body_of, chosen, prompts

LEASE = 30.0
"""Seconds of `hold` and `lease` of kvspec, as by default."""
IDENTITY = {"model": "tiny", "revision": "1"}
KVSPEC = {**IDENTITY, "hold": LEASE, "lease": LEASE, "timeout": 60.0, "staging": 64}
POOL, LONGEST, CONTEXT = 60, 900, 1024
BLOCKS = 1024
"""Blocks of vLLM's pools."""
NO_SERVERS = 503
FAULT_AFTER = 3.0
"""Seconds from the first request until an engine is killed."""


@attrs.frozen(kw_only=True)
class Engines:
    """Two engines and their router.

    Attributes:
        makers: The makers of both engines.
        tp: Their tensor parallel sizes.
        pages: Tokens of a page, or of a block.
        tokens: Tokens of the pools of SGLang.
        decode_context: The most tokens of a request at the decode engine.
    """

    makers: tuple[str, str] = ("sglang", "sglang")
    tp: tuple[int, int] = (1, 1)
    pages: tuple[int, int] = (16, 16)
    tokens: tuple[int, int] = (32_768, 32_768)
    decode_context: int = CONTEXT

    @property
    def router(self) -> str:
        """The name of the router."""
        return "SGLang's" if self.makers == ("sglang", "sglang") else "makers_router.py"


@attrs.frozen(kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        name: The name of the row.
        engines: Its engines.
        concurrency: Clients at the same time.
        leaving: Share of clients that leave.
        rejected: Share of requests that the decode engine rejects.
        fault: The index of the engine that is killed and started again, or None.
    """

    name: str
    engines: Engines = Engines()
    concurrency: int = 16
    leaving: float = 0.0
    rejected: float = 0.0
    fault: int | None = None


SMALL = Engines(tokens=(2048, 2048), decode_context=960)
SIZES = Engines(tp=(1, 2), pages=(16, 4))
FROM_VLLM = Engines(makers=("vllm", "sglang"), pages=(32, 16))
TO_VLLM = Engines(makers=("sglang", "vllm"), pages=(16, 32))
ROWS = (
    Row(name="SGLang, one client", concurrency=1),
    Row(name="SGLang, 16 clients leave", leaving=0.2),
    Row(name="SGLang, prefill killed and restarted", leaving=0.1, fault=0),
    Row(name="SGLang, decode killed and restarted", leaving=0.1, fault=1),
    Row(name="SGLang, small pools, rejected", engines=SMALL, leaving=0.1, rejected=0.2),
    Row(name="SGLang, TP 1 to 2, pages 16 to 4", engines=SIZES, leaving=0.2),
    Row(name="vLLM to SGLang, one client", engines=FROM_VLLM, concurrency=1),
    Row(name="vLLM to SGLang, 16 clients leave", engines=FROM_VLLM, leaving=0.2, rejected=0.1),
    Row(name="vLLM to SGLang, prefill killed", engines=FROM_VLLM, leaving=0.1, fault=0),
    Row(name="vLLM to SGLang, decode killed", engines=FROM_VLLM, leaving=0.1, fault=1),
    Row(name="SGLang to vLLM, one client", engines=TO_VLLM, concurrency=1),
    Row(name="SGLang to vLLM, 16 clients leave", engines=TO_VLLM, leaving=0.2, rejected=0.1),
    Row(name="SGLang to vLLM, prefill killed", engines=TO_VLLM, leaving=0.1, fault=0),
    Row(name="SGLang to vLLM, decode killed", engines=TO_VLLM, leaving=0.1, fault=1),
)


class Clients(Traffic):
    """Clients of SGLang's router, which takes no token ids: they send words."""

    words = False

    async def _ask(self, client: Any, body: dict[str, Any], *, stream: bool) -> Any:  # noqa: ANN401
        if self.words:
            prompt = body["prompt"]
            body = {**body, "prompt": " ".join(f"t{token}" for token in prompt)}
            if body["max_tokens"] > CONTEXT:
                # SGLang's router sends it to both engines. The prefill engine has a larger context.
                body["max_tokens"] = CONTEXT - 10 - len(prompt)
        return await super()._ask(client, body, stream=stream)


def engine(engines: Engines, side: int, place: Path, model: Path) -> Server:
    """Start one engine."""
    role, page, tp = ("prefill", "decode")[side], engines.pages[side], engines.tp[side]
    context = engines.decode_context if side else CONTEXT
    if engines.makers[side] == "sglang":
        sizes: dict[str, Any] = {"page": page, "tp": tp, "context": context}
        own = {"tokens": engines.tokens[side], "settings": KVSPEC, **sizes}
        return SGLang(role, place, model, role, **own)
    kind = ("producer", "consumer")[side]
    config = CONNECTORS["KvspecConnector"] | {"kv_role": f"kv_{kind}", "engine_id": role}
    config["kv_connector_extra_config"] = KVSPEC
    return vllm(role, place, model, config, blocks=BLOCKS, tp=tp, block_size=page)


def router_of(place: Path, prefill: Server, decode: Server) -> Server:
    """Start the router of a pair."""
    if isinstance(prefill, SGLang) and isinstance(decode, SGLang):
        return sglang_router(place, prefill, decode)
    program = [sys.executable, str(ROOT / "examples" / "makers_router.py")]
    program += ["--prefill", prefill.url, "--decode", decode.url]
    if isinstance(prefill, SGLang):
        program += ["--bootstrap", f"127.0.0.1:{prefill.bootstrap}"]
    if isinstance(decode, SGLang):
        program += ["--rooms"]
    return Server("router", place, program, {"PYTHONPATH": str(ROOT)})


def held(server: Server) -> float:
    """Return what an engine holds, by its own metrics: tokens of SGLang, or blocks of vLLM."""
    if isinstance(server, SGLang):
        return server.held()
    for _ in range(2):  # The gauges change when an engine steps. The last request needs a block.
        server.post("/v1/completions", {"model": "tiny", "prompt": [5, 6], "max_tokens": 1})
    return round(server.metrics()["vllm:kv_cache_usage_perc"] * BLOCKS)


def reference(model: Path, folder: Path, pool: list[list[int]]) -> list[tuple[Any, Any]]:
    """Return the answers of one SGLang alone. They are kept beside the model."""
    known = model / "answers-sglang.json"
    if not known.is_file():
        single, found = SGLang("single", folder, model), []
        with running(single):
            for prompt in pool:
                (choice,) = single.post("/v1/completions", body_of(prompt))["choices"]
                found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        known.write_text(json.dumps(found))
    return [tuple(each) for each in json.loads(known.read_text())]  # type: ignore[misc]


def served(
    engines: Engines, rows: list[Row], model: Path, folder: Path, count: int
) -> Iterator[dict[str, Any]]:
    """Serve rows with equal engines, and yield the numbers of each."""
    pool = prompts(POOL, models.VOCABULARY, LONGEST)
    answers = reference(model, folder, pool)
    place = folder / rows[0].name.replace(" ", "-").replace(",", "")
    place.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        pair = [engine(engines, side, place, model) for side in (0, 1)]
        stack.enter_context(running(*pair))
        front = router_of(place, *pair)
        stack.enter_context(running(front))
        _warm(front)
        for row in rows:
            empty = [held(each) for each in pair]
            before = sum(each.tracebacks for each in pair)
            settings = row.concurrency, row.leaving, row.rejected
            traffic = Clients(front.url, pool, answers, *settings, name=row.name, salted=False)
            traffic.words = engines.router == "SGLang's"
            begun = time.monotonic()
            killed = threading.Thread(target=_kill, args=(row.fault, pair), daemon=True)
            killed.start()
            outcomes = asyncio.run(traffic.run(range(count)))
            took = time.monotonic() - begun
            killed.join()
            if row.fault is not None:
                # A row that never recovers is wrong.
                _warm(front)
                outcomes += asyncio.run(traffic.run(range(count, count + 10)))
            time.sleep(LEASE + 5.0)
            rest = [max(0.0, held(each) - was) for each, was in zip(pair, empty, strict=True)]
            numbers = _numbers(row, outcomes, took, rest)
            numbers["tracebacks"] = sum(each.tracebacks for each in pair) - before
            numbers["right"] &= all(each.alive for each in pair)
            numbers["right"] &= row.fault is not None or not numbers["tracebacks"]
            yield numbers


def _warm(front: Server) -> None:
    """Wait for the first answer. SGLang's router is healthy before it has found the engines."""
    end = time.monotonic() + 60.0
    while True:
        try:
            front.post("/v1/completions", {"model": "tiny", "prompt": "t5 t6", "max_tokens": 1})
        except urllib.error.HTTPError as error:
            if error.code != NO_SERVERS or time.monotonic() > end:
                raise
            time.sleep(0.5)
        else:
            return


def _kill(fault: int | None, pair: list[Server]) -> None:
    """Kill an engine after some seconds, and start it again."""
    if fault is not None:
        time.sleep(FAULT_AFTER)
        pair[fault].kill()
        pair[fault].start()
        pair[fault].ready()


def _numbers(row: Row, outcomes: list[Outcome], took: float, rest: list[float]) -> dict[str, Any]:
    """Return the numbers of a row."""
    verdicts = Counter(each.verdict for each in outcomes)
    firsts = sorted(each.first for each in outcomes if each.first is not None)
    # Requests that a killed engine served may fail. They must not hang or differ.
    late = outcomes[-10:] if row.fault is not None else outcomes
    right = not verdicts["different"] and not verdicts["stuck"] and not any(rest)
    right &= verdicts["same"] > 0 and not any(each.verdict == "failed" for each in late)
    bad = [each.why for each in outcomes if each.verdict in ("different", "failed", "stuck")]
    return {
        "row": row.name,
        "router": row.engines.router,
        **{each: verdicts[each] for each in VERDICTS},
        "held": rest,
        "first median": statistics.median(firsts) if firsts else None,
        "longest": max(each.seconds for each in outcomes),
        "a second": len(outcomes) / took,
        "right": right,
        "why": sorted(set(bad))[:3],
    }


def line(numbers: dict[str, Any]) -> str:
    """Return one row of the table."""
    first = numbers["first median"]
    cells = [
        numbers["row"], numbers["router"], *(numbers[each] for each in VERDICTS),
        "/".join(f"{held:.0f}" for held in numbers["held"]), numbers["tracebacks"],
        "-" if first is None else f"{first:.3f}", f"{numbers['longest']:.1f}",
        f"{numbers['a second']:.1f}", "right" if numbers["right"] else "WRONG",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| row | router | same | different | stuck | failed | left | rejected | held at rest "
    "| tracebacks | first token median s | longest s | requests/s | |\n" + "|---" * 14 + "|"
)


def main(write: Callable[[str], object] = print) -> int:
    """Serve the rows, and return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=250, help="requests of each row")
    if (options := chosen(parser, [row.name for row in ROWS], write)) is None:
        return 0
    folder = options.folder
    model = serving_model("llama-6", folder)
    write(f"logs and models: {folder}\n\n{HEAD}")
    wrong, rows = 0, [row for row in ROWS if row.name in options.row]
    for engines, equal in itertools.groupby(rows, lambda row: row.engines):
        for numbers in served(engines, list(equal), model, folder, options.requests):
            write(line(numbers))
            for why in numbers["why"]:
                write(f"    {why}")
            wrong += not numbers["right"]
    write(f"{len(rows)} rows, {wrong} are wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
