"""Serve prompts with two real engines behind a router, to clients that leave, and judge them.

Each row starts a prefill engine, a decode engine and the router of `examples/router.py`, sends
requests, waits for one lease after the last of them, and reads the engines' own metrics. A row is
right if no answer differs from that of one engine alone, no request is stuck, and neither engine
holds a block at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

import models
from servers import CONNECTORS, Server, router, running, vllm
from traffic import Outcome, Traffic, body_of, prompts, tokenizer

LEASE = 10.0
"""Seconds of `hold` and `lease` of kvspec in all rows, so that a row ends soon."""
REST = {"KvspecConnector": LEASE + 5.0, "NixlConnector": 35.0}
"""Seconds after the last request until the engines must hold nothing. vLLM's lease is 30 s."""
POOL, LONGEST = 60, 900


@attrs.frozen(kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        name: The name of the row.
        model: The model of `bench/vllm/models.py`.
        tp: Tensor parallel sizes of both engines.
        block_sizes: Tokens of a block of both engines.
        blocks: Blocks of the pools of both engines.
        concurrency: Clients at the same time.
        leaving: Share of clients that leave.
        rejected: Share of requests that the decode engine rejects.
        fault: What happens after some requests: "", "kill prefill" or "kill decode".
    """

    name: str
    model: str = "llama-6"
    tp: tuple[int, int] = (1, 1)
    block_sizes: tuple[int, int] = (32, 32)
    blocks: tuple[int, int] = (1024, 1024)
    concurrency: int = 16
    leaving: float = 0.0
    rejected: float = 0.0
    fault: str = ""


ROWS = (
    Row(name="one client", concurrency=1),
    Row(name="16 clients", concurrency=16),
    Row(name="32 clients leave, small pool", concurrency=32, leaving=0.2, blocks=(128, 1024)),
    Row(name="32 clients leave, small decode pool", concurrency=32, leaving=0.2, blocks=(512, 96)),
    Row(name="rejected requests, small pool", concurrency=16, rejected=0.2, blocks=(128, 1024)),
    Row(name="blocks 128 to 64", block_sizes=(128, 64), leaving=0.2),
    Row(name="TP 2 to 1", tp=(2, 1), leaving=0.2),
    Row(name="TP 1 to 2", tp=(1, 2), leaving=0.2),
    Row(name="windows", model="gemma-2", leaving=0.2),
    Row(name="MLA", model="deepseek", leaving=0.2),
    Row(name="states", model="lfm2-2", leaving=0.2),
    Row(name="prefill killed and restarted", leaving=0.1, fault="kill prefill"),
    Row(name="decode killed and restarted", leaving=0.1, fault="kill decode"),
)


def reference(model: Path, folder: Path, pool: list[list[int]]) -> list[tuple[Any, Any]]:
    """Return the answers of one engine alone. They are kept beside the model."""
    known = model / "answers.json"
    if known.is_file():
        return [tuple(each) for each in json.loads(known.read_text())]  # type: ignore[misc]
    single = vllm(f"single-{model.name}", folder, model, None, blocks=1024)
    with running(single):
        found = []
        for prompt in pool:
            (choice,) = single.post("/v1/completions", body_of(prompt))["choices"]
            found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    known.write_text(json.dumps(found))
    return found


def held(server: Server, blocks: int) -> float:
    """Return the blocks in use, from the engine's own metrics.

    The gauges change when an engine steps, so two requests come first. The last one needs a block.
    So the number at rest is compared with that of the same call before the first request.
    """
    for _ in range(2):
        server.post("/v1/completions", {"model": "tiny", "prompt": [5, 6], "max_tokens": 1})
    usage = server.metrics().get("vllm:kv_cache_usage_perc", float("nan"))
    return float(round(usage * blocks))


def connector(name: str, role: str) -> dict[str, Any]:
    """Return the ``--kv-transfer-config`` of one engine."""
    config = CONNECTORS[name] | {"kv_role": f"kv_{role}", "engine_id": role}
    if name == "KvspecConnector":
        config["kv_connector_extra_config"] = {"hold": LEASE, "lease": LEASE, "timeout": 60.0}
    return config


def served(row: Row, name: str, folder: Path, count: int) -> dict[str, Any]:
    """Serve one row with the connector *name*, and return its numbers."""
    model = models.make(row.model, folder)
    if not (model / "tokenizer.json").is_file():
        tokenizer(model, models.VOCABULARY)
    pool = prompts(POOL, models.VOCABULARY, LONGEST)
    answers = reference(model, folder, pool)
    place = folder / f"{row.name.replace(' ', '-').replace(',', '')}-{name}"
    place.mkdir(parents=True, exist_ok=True)
    engines = [
        vllm(role, place, model, connector(name, role), blocks=blocks, tp=tp, block_size=size)
        for role, blocks, tp, size in zip(
            ("producer", "consumer"), row.blocks, row.tp, row.block_sizes, strict=True
        )
    ]
    front = router(place, *engines)
    with running(*engines, front):
        traffic = Traffic(
            front.url, pool, answers, row.concurrency, row.leaving, row.rejected, seed=len(row.name)
        )
        empty = [held(each, blocks) for each, blocks in zip(engines, row.blocks, strict=True)]
        begun = time.monotonic()
        fault = threading.Thread(target=_fault, args=(row.fault, engines, begun), daemon=True)
        fault.start()
        outcomes = asyncio.run(traffic.run(range(count)))
        took = time.monotonic() - begun
        fault.join()
        time.sleep(REST[name])
        at_rest = [
            max(0.0, held(each, blocks) - before)
            for each, blocks, before in zip(engines, row.blocks, empty, strict=True)
        ]
        alive = all(each.alive for each in engines)
        tracebacks = sum(each.tracebacks for each in engines)
    return _numbers(row, name, outcomes, took, at_rest, alive=alive, tracebacks=tracebacks)


def _fault(fault: str, engines: list[Server], begun: float) -> None:
    """Kill an engine after ten seconds, and start it again."""
    if fault:
        time.sleep(max(0.0, begun + 10.0 - time.monotonic()))
        engine = engines[fault == "kill decode"]
        engine.kill()
        engine.start()
        engine.ready()


def _numbers(
    row: Row,
    name: str,
    outcomes: list[Outcome],
    took: float,
    at_rest: list[float],
    *,
    alive: bool,
    tracebacks: int,
) -> dict[str, Any]:
    verdicts = Counter(each.verdict for each in outcomes)
    firsts = sorted(each.first for each in outcomes if each.first is not None)
    # Requests that a killed engine served may fail. They must not hang or differ.
    right = not verdicts["different"] and not verdicts["stuck"] and not any(at_rest) and alive
    right &= bool(verdicts["same"]) and (bool(row.fault) or not verdicts["failed"])
    right &= bool(row.fault) or not tracebacks
    return {
        "row": row.name,
        "connector": name,
        **{each: verdicts[each] for each in VERDICTS},
        "held": at_rest,
        "tracebacks": tracebacks,
        "first median": statistics.median(firsts) if firsts else None,
        "first p99": firsts[int(0.99 * (len(firsts) - 1))] if firsts else None,
        "a second": len(outcomes) / took,
        "right": right,
        "why": [each.why for each in outcomes if each.verdict in ("different", "failed")][:3],
    }


VERDICTS = ("same", "different", "stuck", "failed", "left", "rejected")


def line(numbers: dict[str, Any]) -> str:
    """Return one row of the table."""
    first, last = numbers["first median"], numbers["first p99"]
    cells = [
        numbers["row"], numbers["connector"], *(numbers[each] for each in VERDICTS),
        "/".join(f"{blocks:.0f}" for blocks in numbers["held"]), numbers["tracebacks"],
        "-" if first is None else f"{first:.3f}", "-" if last is None else f"{last:.3f}",
        f"{numbers['a second']:.1f}", "right" if numbers["right"] else "WRONG",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| row | connector | same | different | stuck | failed | left | rejected | held at rest "
    "| tracebacks | first token median s | p99 s | requests/s | |\n" + "|---" * 14 + "|"
)


def main(write: Callable[[str], object] = print) -> int:
    """Serve the rows, and return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [row.name for row in ROWS]
    parser.add_argument("--row", nargs="+", choices=names, default=names)
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--requests", type=int, default=100, help="requests of each row")
    parser.add_argument("--connector", nargs="+", choices=[*CONNECTORS], default=[*CONNECTORS])
    parser.add_argument("--folder", type=Path, help="for models, answers and logs")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    if options.list:
        write("\n".join(names))
        return 0
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="kvspec-serve-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write(f"logs and models: {folder}\n\n{HEAD}")
    found = []
    for row in (row for row in ROWS if row.name in options.row):
        for name in options.connector:
            found.append(served(row, name, folder, options.requests))
            write(line(found[-1]))
            for why in found[-1]["why"]:
                write(f"    {why}")
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    wrong = [each for each in found if not each["right"] and each["connector"] == "KvspecConnector"]
    write(f"{len(found)} rows, {len(wrong)} of kvspec are wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
