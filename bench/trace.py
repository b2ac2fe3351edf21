"""Count what Python executes in kvspec for one warm load of two layers.

`python bench/trace.py [CHECKOUT] [--list]` prints four numbers: the functions that run, their
files, how often execution changes from one file of kvspec to another, and the calls that validate
values. With the path of another checkout, the same work runs there in a process of its own, for
comparison. With `--list`, the calls are printed as well, each with its number.

The load reads one request of 40 tokens from one producer rank over NIXL. It is the second load of
its session, so that caches are warm. Both sessions are in one process and one thread, so the
work of the producer's session is counted too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve()
# Functions that only check values: the helpers of `inputs`, the validators and converters of attrs
# classes, and the functions that attrs calls after construction.
CHECKS = ("__attrs_post_init__", "check", "_check", "is_name")


class Trace:
    """The calls of functions in *package*, in order."""

    def __init__(self, package: Path) -> None:
        self.package = str(package)
        self.functions: set[tuple[str, str, int]] = set()
        self.files: set[str] = set()
        self.changes = 0
        self.checks: list[str] = []
        self.calls: list[str] = []
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count one event of `sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.package):
            return
        if code.co_name.startswith("<"):  # A comprehension or a lambda is a part of its function.
            return
        if event == "return":
            back = frame.f_back
            file = back.f_code.co_filename if back is not None else ""
            if not file.startswith(self.package):
                return
        else:
            file = code.co_filename
            self.functions.add((file, code.co_qualname, code.co_firstlineno))
            self.files.add(file)
            name = code.co_name
            called = f"{Path(file).relative_to(self.package)}:{code.co_qualname}"
            self.calls.append(called)
            # `Frozen` of `inputs` is a mapping.
            validates = file.endswith("inputs.py") and not code.co_qualname.startswith("Frozen")
            if validates or name.startswith(CHECKS):
                back = frame.f_back
                self.checks.append(f"{called} from {back.f_code.co_qualname if back else ''}")
        self.changes += event == "call" and file != self._last
        self._last = file

    def show(self) -> None:
        """Print the numbers, and with `--list` the calls."""
        counts = len(self.functions), len(self.files), self.changes, len(self.checks)
        print("{:9} {:5} {:7} {:6}".format(*counts), end="  ")
        if os.environ["KVSPEC_TRACED"] == "list":
            for title, names in ("checks", self.checks), ("calls", self.calls):
                print(f"\n{title}:")
                for name, count in sorted(Counter(names).items()):
                    print(f"{count:6} {name}")


def main() -> None:
    """Trace the load and print the counts."""
    import kvspec  # noqa: PLC0415 - that of the checkout on the path
    from kvspec.nixl import NixlRank  # noqa: PLC0415
    from kvspec.session import Session, new_remote_id  # noqa: PLC0415

    def engine() -> kvspec.EngineSpec:
        spec = kvspec.FullAttentionSpec(
            block_size=16, total_num_kv_heads=4, head_size=64, dtype="float16"
        )
        group = kvspec.KVCacheGroup(name="full", layers=["layers.0", "layers.1"], spec=spec)
        return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=1))

    def session(name: str) -> Session:
        cache, storage = kvspec.allocate(engine(), kvspec.RankId(), 64)
        return Session(NixlRank(), cache, engine_id=name, epoch=1, owner=storage)

    producer, consumer = session("producer"), session("consumer")
    # An older checkout has other names: `meet`, and `expect` of a ledger.
    getattr(consumer, "connect", getattr(consumer, "meet", None))([producer.introduction])
    trace = Trace(Path(kvspec.__file__).parent)
    for number in range(2):
        remote_id = new_remote_id(f"r{number}")
        (getattr(producer, "hold", None) or producer.ledger.expect)(remote_id)
        request = kvspec.TransferRequest(
            request_id=f"r{number}",
            num_tokens=40,
            producer_blocks={"full": kvspec.BlockTable([5, 9, 2])},
            consumer_blocks={"full": kvspec.BlockTable([11, 12, 40])},
        )
        if number:
            sys.setprofile(trace)
        load = consumer.load(request, remote_id=remote_id, timeout=30)
        while load.poll() == "moving":
            producer.poll()
            sys.setprofile(None)
            time.sleep(0.01)  # NIXL and the sockets work meanwhile, so that few polls are counted
            if number:
                sys.setprofile(trace)
        sys.setprofile(None)
        if load.state != "done":
            sys.exit(f"the load failed: {load.error}")
    trace.show()
    for one in (consumer, producer):
        one.close()
        one.nixl.close()


if __name__ == "__main__":
    if os.environ.get("KVSPEC_TRACED"):
        main()
    else:
        print("functions files changes checks  checkout")
        others = [path for path in sys.argv[1:] if path != "--list"]
        traced = "list" if "--list" in sys.argv else "count"
        for root in (HERE.parents[1], *map(Path, others)):
            paths = {"PYTHONPATH": str(root.resolve()), "KVSPEC_TRACED": traced}
            environment = os.environ | {"KVSPEC_SECRET": "a secret of this run"} | paths
            subprocess.run([sys.executable, HERE], env=environment, check=True)
            print(root.resolve().name, flush=True)
