"""Print how many loads a session serves, and how long they take, beside another checkout.

`python bench/serving.py [CHECKOUT]` starts two processes for each row, which use NIXL: a producer
that holds requests, and a consumer that loads them. All rows run with both checkouts in turn,
several times. The best figure of each is printed, because other work on the machine disturbs them.

    row        the consumer
    ---------  ---------------------------------------------------------------------------
    small      keeps 64 loads of one block of 256 bytes in flight
    beside     loads such requests one after the other, while two reads of 256 MiB are always
               in flight
    large      keeps two reads of 256 MiB in flight, and nothing else
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FLYING, SERVING, MOST = 64, 5.0, 8000  # Small loads in flight, for so many seconds, and in all.
BLOCK, LARGE = 1 << 20, 256  # Bytes of a block, and blocks of a large read.
WIDTHS = 10, 40, 22, 22


def opened(stack: ExitStack, name: str, *, blocks: int, tokens: int, background: bool) -> Any:  # noqa: ANN401 - a session of any checkout
    """Open a session with a cache of *blocks* blocks of *tokens* tokens of 64 bytes."""
    import kvspec  # noqa: PLC0415 - that of the checkout on the path
    from kvspec.nixl import NixlRank  # noqa: PLC0415
    from kvspec.session import Session  # noqa: PLC0415

    spec = kvspec.FullAttentionSpec(
        block_size=tokens, total_num_kv_heads=2, head_size=16, dtype="uint8"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["l.0"], spec=spec)
    cache, storage = kvspec.allocate(kvspec.EngineSpec(groups=[group]), kvspec.RankId(), blocks)
    secret = b"the secret of this measurement"
    nixl = stack.enter_context(NixlRank(prefix=f"{name}-", secret=secret, polled=not background))
    session = Session(nixl, cache, engine_id=name, owner=storage, background=background)
    return stack.enter_context(session)


def produce(blocks: int, tokens: int) -> None:
    """Hold many requests until the input ends. Then print the seconds of CPU that it took."""
    from kvspec.session import new_remote_id  # noqa: PLC0415

    with ExitStack() as stack:
        producer = opened(stack, "P", blocks=blocks, tokens=tokens, background=True)
        names = [new_remote_id(f"r{number}") for number in range(MOST)]
        for name in names:
            # An older checkout has the name `expect`, of a ledger.
            (getattr(producer, "hold", None) or producer.ledger.expect)(name, lease=600.0)
        print(json.dumps([producer.channel.address, names]), flush=True)
        before = time.process_time()
        sys.stdin.read()
        print(time.process_time() - before, flush=True)


def consume(row: str) -> None:
    """Load requests of a producer for a while, and print the figures."""
    import kvspec  # noqa: PLC0415

    blocks, tokens = (FLYING, 4) if row == "small" else (2 * LARGE + 1, BLOCK // 64)
    with ExitStack() as stack:
        command = [sys.executable, __file__, "--produce", str(blocks), str(tokens)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        child = subprocess.Popen(command, text=True, **pipes)
        stack.callback(child.communicate)
        address, names = json.loads(child.stdout.readline())  # type: ignore[union-attr]
        consumer = opened(stack, "D", blocks=blocks, tokens=tokens, background=False)
        (getattr(consumer, "connect", None) or consumer.meet)(consumer.fetch([address], 20.0))

        def load(chosen: list[int], amount: int) -> Any:  # noqa: ANN401 - as above
            remote_id, tables = names.pop(), {"full": chosen}
            request = kvspec.TransferRequest(
                request_id=remote_id, num_tokens=amount,
                producer_blocks=tables, consumer_blocks=tables,
            )  # fmt: skip
            return consumer.load(request, remote_id=remote_id, timeout=60.0)

        free = {"small": [[block] for block in range(FLYING)], "beside": [[2 * LARGE]], "large": []}
        halves = [[*range(LARGE)], [*range(LARGE, 2 * LARGE)]]
        # Blocks and tokens of the loads that may begin.
        ready = [(some, 4) for some in free[row]]
        ready += [(half, LARGE * tokens) for half in halves if row != "small"]
        flying: list[tuple[Any, float, list[int], int]] = []
        calls, small, done = list[float](), list[float](), {4: 0, LARGE * tokens: 0}
        for chosen, amount in ready if row != "small" else ():  # The first touch of memory is slow.
            load(chosen, amount).wait()
        start, spent = time.monotonic(), time.process_time()
        while (now := time.monotonic()) < start + SERVING and names:
            for chosen, amount in ready[: len(names)]:
                before = time.monotonic()
                flying.append((load(chosen, amount), before, chosen, amount))
                if amount == 4:
                    calls.append(time.monotonic() - before)
            consumer.poll()
            now = time.monotonic()
            ended = [each for each in flying if each[0].state != "moving"]
            flying = [each for each in flying if each[0].state == "moving"]
            ready = [(chosen, amount) for _, _, chosen, amount in ended]
            for each, begun, _, amount in ended:
                each.wait()
                done[amount] += 1
                if amount == 4:
                    small.append(now - begun)
        taken, spent = time.monotonic() - start, time.process_time() - spent
        found = {}
        if row != "large":
            found["small loads done in a second"] = f"{len(small) / taken:.0f}"
            found["load(), 99th percentile"] = f"{percentile(calls):.2f} ms"
            found["small load until done, 99th percentile"] = f"{percentile(small):.2f} ms"
            other, _ = child.communicate()
            found["CPU of the consumer for a load"] = f"{spent / len(small) * 1e3:.2f} ms"
            found["CPU of the producer for a load"] = f"{float(other) / len(small) * 1e3:.2f} ms"
        if row != "small":
            moved = done[LARGE * tokens] * LARGE * BLOCK
            found["bytes of large reads"] = f"{moved / taken / 1e9:.2f} GB/s"
        print(json.dumps(found), flush=True)


def percentile(seconds: list[float]) -> float:
    """Return the 99th percentile of *seconds*, in milliseconds."""
    return sorted(seconds)[int(len(seconds) * 0.99)] * 1e3 if seconds else float("nan")


def number(figure: str) -> float:
    """Return the number of a figure."""
    return float(figure.split(maxsplit=1)[0])


def measured(checkout: Path, row: str) -> dict[str, str]:
    """Return the figures of one row with the package of *checkout*."""
    done = subprocess.run(
        [sys.executable, __file__, "--consume", row],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE, check=True, text=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> None:
    """Print all rows, or be one of the processes."""
    parser = argparse.ArgumentParser(description="Measure how many loads a session serves.")
    parser.add_argument("checkout", nargs="?", type=Path, help="another checkout of kvspec")
    parser.add_argument("--produce", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--consume", help=argparse.SUPPRESS)
    parser.add_argument("--row", action="append", help="only these rows")
    parser.add_argument("--repeat", type=int, default=3, help="print the best of so many runs")
    chosen = parser.parse_args()
    if chosen.produce:
        produce(*chosen.produce)
    elif chosen.consume:
        consume(chosen.consume)
    else:
        roots = [ROOT] + ([chosen.checkout.resolve()] if chosen.checkout else [])
        print(f"load: {os.getloadavg()[0]:.2f}")
        for row in chosen.row or ("small", "beside", "large"):
            runs = [[measured(root, row) for root in roots] for _ in range(chosen.repeat)]
            for what in runs[0][0]:
                best = min if what.endswith(("percentile", "for a load")) else max
                found = [
                    best((each[what] for each in some), key=number)
                    for some in zip(*runs, strict=True)
                ]
                cells = [row, what, *found]
                line = (cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False))
                print("".join(line), flush=True)


if __name__ == "__main__":
    main()
