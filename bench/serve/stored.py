"""Serve prompts with one real engine after another on one directory of stored pages.

The first engine stores pages while clients come and leave, and ends: at rest, or killed in the
middle. The second one has other sizes, and loads what it finds. A row is right if no answer differs
from that of one engine alone, no request is stuck, no engine holds a block at rest, and the second
one has loaded pages.

The row with a bucket needs obstore beside vLLM, and a Python with `pip install --group s3`, whose
path is in KVSPEC_S3_PYTHON. Without that variable it is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

import models
import serve
from servers import CONNECTORS, Server, free_port, running, vllm
from traffic import VERDICTS, Outcome, Traffic, chosen, prompts

PAGE = 64
S3_PYTHON, BUCKET = "KVSPEC_S3_PYTHON", "kvspec"
MAKE_BUCKET = """
import sys, time, boto3
client = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1")
for _ in range(100):
    try:
        client.create_bucket(Bucket=sys.argv[2])
        break
    except Exception as error:
        time.sleep(0.3)
else:
    raise error
"""
LOADED = "vllm:external_prefix_cache_hits_total"
"""The metric that counts the tokens that came from stored pages."""


@attrs.frozen(kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        name: The name of the row.
        model: The model of `bench/vllm/models.py`.
        tp: Tensor parallel sizes of both engines.
        block_sizes: Tokens of a block of both engines.
        blocks: Blocks of the pools of both engines.
        killed: Whether the first engine is killed while it serves.
        limit: Bytes that the directory may have, or None.
        bucket: Whether the pages are in a bucket of a local server, not in a directory.
        head_groups: Head groups of a page.
    """

    name: str
    model: str = "llama-6"
    tp: tuple[int, int] = (2, 1)
    block_sizes: tuple[int, int] = (32, 64)
    blocks: tuple[int, int] = (1024, 1024)
    killed: bool = False
    limit: int | None = None
    bucket: bool = False
    head_groups: int = 6


ROWS = (
    Row(name="stored"),
    Row(name="stored, first engine killed", killed=True),
    Row(name="stored, windows, small pools", model="gemma-2", blocks=(256, 192), head_groups=2),
    Row(name="stored, directory limited to 48 MB", limit=48 << 20),
    Row(name="stored, bucket", bucket=True),
)


def engine(row: Row, side: int, place: Path, model: Path) -> Server:
    """Start the first engine (0) or the second one (1)."""
    name = ("first", "second")[side]
    directory = f"s3://{BUCKET}/pages" if row.bucket else str(place / "pages")
    store: dict[str, Any] = {"directory": directory, "page_tokens": PAGE}
    store |= {"head_groups": row.head_groups} | ({"limit": row.limit} if row.limit else {})
    connector = CONNECTORS["KvspecConnector"] | {
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "model": row.model, "revision": "1"},
    }
    return vllm(
        name,
        place,
        model,
        connector,
        blocks=row.blocks[side],
        block_size=row.block_sizes[side],
        tp=row.tp[side],
    )


@contextmanager
def local_bucket() -> Iterator[None]:
    """Run a server with the protocol of S3, and state it in the environment of the engines."""
    url = f"http://127.0.0.1:{free_port()}"
    login = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    os.environ.update(login, AWS_ENDPOINT_URL=url, AWS_ALLOW_HTTP="true")
    python, quiet = os.environ[S3_PYTHON], subprocess.DEVNULL
    command = [python, "-m", "moto.server", "-p", url.rpartition(":")[2]]
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        subprocess.run([python, "-c", MAKE_BUCKET, url, BUCKET], check=True)
        yield
    finally:
        server.kill()
        server.wait()


def served(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Serve a row, and return its numbers."""
    model = serve.serving_model(row.model, options.folder)
    pool = prompts(serve.POOL, models.VOCABULARY, serve.LONGEST)
    answers = serve.reference(model, options.folder, pool)
    place = options.folder / row.name.replace(" ", "-").replace(",", "")
    place.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    rest: list[float] = []
    tracebacks = killed = 0
    for side in (0, 1):
        server = engine(row, side, place, model)
        with running(server):
            blocks = row.blocks[side]
            empty = serve.held(server, blocks)
            traffic = Traffic(server.url, pool, answers, 16, 0.2, name=row.name)
            kills = row.killed and not side
            third = options.requests // 3
            found = asyncio.run(traffic.run(range(third)))
            if kills:
                threading.Timer(0.5, server.kill).start()
            found += asyncio.run(traffic.run(range(third, options.requests)))
            if kills:
                killed = sum(each.verdict == "failed" for each in found)
                # Requests of an engine that was killed fail.
                found = [each for each in found if each.verdict != "failed"]
            else:
                # The local server of a bucket is slow, and a save holds its blocks.
                end = time.monotonic() + (120.0 if row.bucket else 20.0)
                while (left := serve.held(server, blocks) - empty) > 0 and time.monotonic() < end:
                    time.sleep(1.0)
                rest.append(max(0.0, left))
                tracebacks += server.tracebacks
            outcomes += found
            loaded = 0.0 if kills else server.metrics().get(LOADED, 0.0)
    verdicts = Counter(each.verdict for each in outcomes)
    wrong = verdicts["different"] + verdicts["stuck"] + verdicts["failed"] + sum(rest) + tracebacks
    return {
        "row": row.name,
        **{each: verdicts[each] for each in VERDICTS},
        "loaded": loaded,
        "held": rest,
        "tracebacks": tracebacks,
        "right": not wrong and loaded > 0 and (killed > 0) == row.killed,
        "why": [each.why for each in outcomes if each.verdict in ("different", "failed")][:3],
    }


HEAD = (
    "| row | same | different | stuck | failed | left | rejected | tokens loaded | held at rest "
    "| tracebacks | |\n" + "|---" * 11 + "|"
)


def line(numbers: dict[str, Any]) -> str:
    """Return one row of the table."""
    cells = [
        numbers["row"], *(numbers[each] for each in VERDICTS), f"{numbers['loaded']:.0f}",
        "/".join(f"{blocks:.0f}" for blocks in numbers["held"]), numbers["tracebacks"],
        "right" if numbers["right"] else "WRONG",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main(write: Callable[[str], object] = print) -> int:
    """Serve the rows, and return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100, help="requests to each engine")
    if (options := chosen(parser, [row.name for row in ROWS], write)) is None:
        return 0
    write(f"logs, models and pages: {options.folder}\n\n{HEAD}")
    wrong = 0
    for row in (row for row in ROWS if row.name in options.row):
        if row.bucket and S3_PYTHON not in os.environ:
            write(f"| {row.name} | left out: {S3_PYTHON} is not set |")
            continue
        with local_bucket() if row.bucket else nullcontext():
            numbers = served(row, options)
        wrong += not numbers["right"]
        write(line(numbers))
        for why in numbers["why"]:
            write(f"    {why}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
