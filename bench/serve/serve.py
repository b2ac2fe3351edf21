"""Serve prompts with two real engines behind a router, to clients that leave, and judge them.

Each row starts a prefill engine, a decode engine and the router of `examples/router.py`, sends
requests, waits for one lease after the last of them, and reads the engines' own metrics. A row is
right if no answer differs from that of one engine alone, no request is stuck, and neither engine
holds a block at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

import models
from servers import CONNECTORS, CONTEXT, Network, Server, router, running, toy_proxy, vllm
from traffic import VERDICTS, Outcome, Traffic, body_of, chosen, prompts, tokenizer, turns

LEASE = 10.0
"""Seconds of `hold` and `lease` of kvspec in all rows, so that a row ends soon."""
REST = {"KvspecConnector": LEASE + 5.0, "NixlConnector": 35.0}
"""Seconds from the last request in which the engines must release all. vLLM's lease is 30 s."""
POOL, LONGEST = 60, 1400


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
        fault: What happens after some requests, a key of `FAULTS`, or "".
        more: More arguments of both engines.
        multi: Whether each engine has its connector inside vLLM's MultiConnector.
        proxy: Whether vLLM's own toy proxy is the router.
        share: Share of the requests that this row sends.
        hits: Whether most prompts go on from another one, so that the decode engine finds their
            beginnings in its prefix cache. It must do so at least once.
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
    more: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    multi: tuple[bool, bool] = (False, False)
    proxy: bool = False
    share: float = 1.0
    hits: bool = False

    @property
    def engines(self) -> tuple[object, ...]:
        """The settings of the two engines and their router. Rows with equal settings share them."""
        cut = self.fault == "cut network"
        sizes = self.tp, self.block_sizes, self.blocks
        return self.model, *sizes, self.more, self.multi, self.proxy, cut, self.hits


# The ExampleConnector of vLLM stores whole prompts: it knows no chunks and no several groups.
_WHOLE = ("--max-num-batched-tokens", str(16 * CONTEXT), "--disable-hybrid-kv-cache-manager")
ROWS = (
    Row(name="one client", concurrency=1, share=0.3),
    Row(name="8 clients", concurrency=8),
    Row(name="16 clients", concurrency=16),
    Row(name="32 clients leave, small pool", concurrency=32, leaving=0.2, blocks=(128, 1024)),
    Row(name="32 clients leave, small decode pool", concurrency=32, leaving=0.2, blocks=(512, 96)),
    Row(name="rejected requests, small pool", concurrency=16, rejected=0.2, blocks=(128, 1024)),
    Row(name="blocks 128 to 64", block_sizes=(128, 64), leaving=0.2),
    Row(name="TP 2 to 1", tp=(2, 1), leaving=0.2),
    Row(name="TP 1 to 2", tp=(1, 2), leaving=0.2),
    Row(name="windows", model="gemma-2", leaving=0.2),
    Row(name="MLA", model="deepseek", leaving=0.2),
    Row(name="states", model="lfm2-2", leaving=0.2, hits=True),
    Row(
        name="states of Mamba2",
        model="falcon-h1-2",
        block_sizes=(64, 32),
        leaving=0.2,
        hits=True,
    ),
    Row(name="prefill killed and restarted", leaving=0.1, fault="kill prefill"),
    Row(name="decode killed and restarted", leaving=0.1, fault="kill decode"),
    Row(name="both killed and restarted", leaving=0.1, fault="kill both"),
    Row(name="TP rank killed", tp=(2, 1), leaving=0.1, fault="kill rank"),
    Row(name="network cut for 10 s", leaving=0.1, fault="cut network"),
    Row(name="DP 2 to 1", leaving=0.2, more=(("--data-parallel-size", "2"), ())),
    Row(name="prefill in MultiConnector", leaving=0.2, more=(_WHOLE, ()), multi=(True, False)),
    Row(name="decode in MultiConnector", leaving=0.2, more=((), _WHOLE), multi=(False, True)),
    Row(name="toy proxy of vLLM", leaving=0.2, proxy=True),
)


def serving_model(name: str, folder: Path) -> Path:
    """Return the folder of a model with a tokenizer, for prompts that are longer than elsewhere."""
    model = models.make(name, folder)
    config = json.loads((model / "config.json").read_text())
    if config["max_position_embeddings"] < CONTEXT:
        (model / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": CONTEXT})
        )
    if not (model / "tokenizer.json").is_file():
        tokenizer(model, models.VOCABULARY)
    return model


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

    The gauges change when an engine steps, so requests come first, several at once for engines with
    data parallel ranks. Each needs a block, so the least of three readings counts, and the number
    at rest is compared with that of the same call before the first request.
    """
    ask = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}
    least = float("inf")
    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for answer in [pool.submit(server.post, "/v1/completions", ask) for _ in range(4)]:
                answer.result()
        usage = server.metrics().get("vllm:kv_cache_usage_perc", float("nan"))
        least = min(least, float(round(usage * blocks)))
    return least


def connector(name: str, role: str, place: Path, *, multi: bool, host: str) -> dict[str, Any]:
    """Return the ``--kv-transfer-config`` of one engine."""
    config = CONNECTORS[name] | {"kv_role": f"kv_{role}", "engine_id": role}
    if name == "KvspecConnector":
        more = {"hold": LEASE, "lease": LEASE, "timeout": 60.0, "host": host}
        config["kv_connector_extra_config"] = more
    if not multi:
        return config
    stored = {"shared_storage_path": str(place / f"{role}-stored")}
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    del config["engine_id"]  # vLLM gives its own to each.
    both = [config, other | {"kv_connector_extra_config": stored}]
    outer = {"kv_connector": "MultiConnector", "kv_role": f"kv_{role}", "engine_id": role}
    return outer | {"kv_connector_extra_config": {"connectors": both}}


def served(
    rows: list[Row], name: str, folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Serve rows with the same two engines and the connector *name*, and yield their numbers."""
    first = rows[0]
    model = serving_model(first.model, folder)
    pool = (turns if first.hits else prompts)(POOL, models.VOCABULARY, LONGEST)
    answers = reference(model, folder, pool)
    place = folder / f"{first.name.replace(' ', '-').replace(',', '')}-{name}"
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network()) if first.fault == "cut network" else None
        engines = [
            vllm(
                role,
                place,
                model,
                connector(name, role, place, multi=first.multi[side], host=host),
                blocks=first.blocks[side],
                tp=first.tp[side],
                block_size=first.block_sizes[side],
                more=first.more[side],
                host=host,
                inside=network.names[side] if network else "",
            )
            for side, role in enumerate(("producer", "consumer"))
            for host in [network.HOSTS[side] if network else "127.0.0.1"]
        ]
        proxy = options.proxy if first.proxy else None
        front = toy_proxy(proxy, place, *engines) if proxy else router(place, *engines)
        stack.enter_context(running(*engines, front))
        for row in rows:
            clients = row.concurrency, row.leaving, row.rejected
            traffic = Traffic(front.url, pool, answers, *clients, name=row.name)
            yield _row(row, name, traffic, engines, network, place / "consumer.samples", options)


def _row(
    row: Row,
    name: str,
    traffic: Traffic,
    engines: list[Server],
    network: Network | None,
    sampled: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Send the requests of one row, and return its numbers."""
    empty = [held(each, blocks) for each, blocks in zip(engines, row.blocks, strict=True)]
    before, loaded, process = samples(sampled), loads(engines[1]), engines[1].process
    found = hits(engines[1])
    failures = sum(each.tracebacks for each in engines)
    count = int(row.share * (options.requests if name == "KvspecConnector" else options.others))
    parts = _parts(count, int(row.share * options.others), fault=bool(row.fault))
    outcomes, begun = [], time.monotonic()
    for number, part in enumerate(parts):
        work = None
        if number == FAULT and row.fault:
            work = threading.Thread(target=_fault, args=(row.fault, engines, network))
            work.start()
        outcomes.append(asyncio.run(traffic.run(part)))
        if not number:
            took = time.monotonic() - begun
        if work is not None:
            work.join()
    share = spent(before, samples(sampled))
    rest = at_rest(engines, row.blocks, empty, REST[name])
    # The counters of an engine that has started again begin at 0.
    done = loads(engines[1]) - (loaded if engines[1].process is process else 0.0)
    alive = all(each.alive for each in engines)
    tracebacks = sum(each.tracebacks for each in engines) - failures
    numbers = _numbers(row, name, outcomes, took, rest, alive=alive, tracebacks=tracebacks)
    # Without a load, D has computed all prompts itself, and the answers are the same, too.
    right = numbers["right"] and done > 0
    cached = hits(engines[1]) - found
    if row.hits and not cached:
        right = False
        numbers["why"].append("the decode engine had no prefix hit")
    return numbers | {"share": share, "loads": done, "prefix hits": cached, "right": right}


def at_rest(
    engines: list[Server], blocks: tuple[int, int], empty: list[float], seconds: float
) -> list[float]:
    """Return the blocks that each engine still holds, at most *seconds* after the last request."""
    end = time.monotonic() + seconds
    while True:
        last = time.monotonic() > end
        rest = [
            max(0.0, held(each, number) - before)
            for each, number, before in zip(engines, blocks, empty, strict=True)
        ]
        if last or not any(rest):
            return rest
        time.sleep(1.0)


def loads(server: Server) -> float:
    """Return how many prompts the decode engine has read, by its metrics."""
    metrics = server.metrics()
    return sum(metrics.get(each, 0.0) for each in LOADS)


def hits(server: Server) -> float:
    """Return how many tokens an engine has found in its own prefix cache, by its metrics."""
    return server.metrics().get("vllm:prefix_cache_hits_total", 0.0)


LOADS = ("vllm:kvspec_load_seconds_count", "vllm:nixl_xfer_time_seconds_count")
"""The metrics of D that count what it has read."""
FAULTS: dict[str, Callable[[list[Server], Network | None], object]] = {
    "kill prefill": lambda engines, _: _restart(engines[0]),
    "kill decode": lambda engines, _: _restart(engines[1]),
    "kill both": lambda engines, _: _restart(*engines),
    "kill rank": lambda engines, _: (engines[0].kill_rank(), _restart(engines[0])),
    "cut network": lambda _, network: network and network.cut(10.0),
}


def _restart(*engines: Server) -> None:
    for engine in engines:
        engine.kill()
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.ready()


FAULT = 1
"""The part of the requests in which the fault happens."""


def _parts(count: int, others: int, *, fault: bool) -> list[range]:
    """Return the requests in parts that are sent one after the other.

    With a fault, they are the requests before, while and after it happens. Those after it must not
    fail. Otherwise, the first part has the requests that all connectors serve. Times are measured
    there.
    """
    first = count // 3 if fault else min(count, others)
    second = 2 * count // 3 if fault else count
    ends = (0, first, second, count)
    return [range(*each) for each in itertools.pairwise(ends)]


def _fault(fault: str, engines: list[Server], network: Network | None) -> None:
    """Do the fault of the row while requests are served."""
    time.sleep(0.5)
    FAULTS[fault](engines, network)


def samples(folder: Path) -> Counter[str]:
    """Return the sums of all samples of an engine's workers: see `site/sitecustomize.py`."""
    sums = Counter[str]()
    for file in folder.glob("*.json"):
        with contextlib.suppress(ValueError):  # Half written, or of a killed process.
            sums.update(json.loads(file.read_text()))
    return sums


def spent(before: Counter[str], after: Counter[str]) -> float | None:
    """Return the share of the connector in the samples in which the main thread worked."""
    connector, other = (after[name] - before[name] for name in ("connector", "other"))
    return connector / (connector + other) if connector + other else None


def _numbers(
    row: Row,
    name: str,
    parts: list[list[Outcome]],
    took: float,
    at_rest: list[float],
    *,
    alive: bool,
    tracebacks: int,
) -> dict[str, Any]:
    outcomes = [*itertools.chain(*parts)]
    verdicts = Counter(each.verdict for each in outcomes)
    firsts = sorted(each.first for each in parts[0] if each.first is not None)
    # Requests that a killed engine served may fail. They must not hang or differ.
    failed = [each for each in (parts[-1] if row.fault else outcomes) if each.verdict == "failed"]
    right = not verdicts["different"] and not verdicts["stuck"] and not any(at_rest) and alive
    right &= bool(verdicts["same"]) and not failed
    right &= bool(row.fault) or not tracebacks
    return {
        "row": row.name,
        "connector": name,
        **{each: verdicts[each] for each in VERDICTS},
        "held": at_rest,
        "tracebacks": tracebacks,
        "first median": statistics.median(firsts) if firsts else None,
        "first p99": firsts[int(0.99 * (len(firsts) - 1))] if firsts else None,
        "a second": len(parts[0]) / took,
        "right": right,
        "why": [each.why for each in outcomes if each.verdict in ("different", "failed")][:3],
    }


def line(numbers: dict[str, Any]) -> str:
    """Return one row of the table. A row that could not end has no numbers."""
    if "same" not in numbers:
        return f"| {numbers['row']} | {numbers['connector']} | {'- | ' * 13}WRONG |"
    first, last = numbers["first median"], numbers["first p99"]
    cells = [
        numbers["row"], numbers["connector"], *(numbers[each] for each in VERDICTS),
        f"{numbers['loads']:.0f}",
        "/".join(f"{blocks:.0f}" for blocks in numbers["held"]), numbers["tracebacks"],
        "-" if first is None else f"{first:.3f}", "-" if last is None else f"{last:.3f}",
        f"{numbers['a second']:.1f}",
        "-" if numbers["share"] is None else f"{numbers['share']:.1%}",
        "right" if numbers["right"] else "WRONG",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| row | connector | same | different | stuck | failed | left | rejected | loads "
    "| held at rest | tracebacks | first token median s | p99 s | requests/s | connector in D | |\n"
    + "|---" * 16
    + "|"
)


def _missing(row: Row, options: argparse.Namespace) -> str | None:
    """Return why this row cannot run here, or None."""
    if row.proxy and options.proxy is None:
        return "--proxy is not given"
    if row.fault == "cut network" and not Network.possible():
        return "network namespaces need the rights of root"
    return None


def _survived(
    rows: list[Row], name: str, folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the numbers of *rows*. If a row ends the engines, the others get new ones."""
    left = list(rows)
    while left:
        try:
            for numbers in served(left, name, folder, options):
                left = left[1:]
                yield numbers
        except (OSError, RuntimeError) as error:  # An engine has ended, or answers no more.
            broken, left = left[0].name, left[1:]
            why = [f"{type(error).__name__}: {error}"]
            yield {"row": broken, "connector": name, "right": False, "why": why}


def main(write: Callable[[str], object] = print) -> int:
    """Serve the rows, and return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests of a row of kvspec")
    parser.add_argument("--others", type=int, default=60, help="requests of another connector")
    parser.add_argument("--connector", nargs="+", choices=[*CONNECTORS], default=[*CONNECTORS])
    parser.add_argument("--proxy", type=Path, help="vLLM's toy_proxy_server.py, for its row")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    if (options := chosen(parser, [row.name for row in ROWS], write)) is None:
        return 0
    folder = options.folder
    write(f"logs and models: {folder}\n\n{HEAD}")
    found = []
    rows = {row.name: row for row in ROWS}
    runnable = []
    for row in (rows[each] for each in options.row):
        if (missing := _missing(row, options)) is not None:
            write(f"    {row.name}: not run: {missing}")
        else:
            runnable.append(row)
    for _, group in itertools.groupby(runnable, lambda row: row.engines):
        several = list(group)
        for name in options.connector:
            for numbers in _survived(several, name, folder, options):
                found.append(numbers)
                write(line(numbers))
                for why in numbers["why"]:
                    write(f"    {why}")
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1))
    wrong = [each for each in found if not each["right"] and each["connector"] == "KvspecConnector"]
    write(f"{len(found)} rows, {len(wrong)} of kvspec are wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
