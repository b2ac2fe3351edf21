"""Print for every architecture whether `models.from_config` is right, and how that was judged.

```sh
python bench/model_table.py             # every architecture that was recorded
python bench/model_table.py --counts    # only how many are right and refused
```

It needs neither vLLM nor transformers: `bench/architectures.py` and `bench/vllm_specs.py` recorded
what they make. An architecture is right if no judge contradicts the answer of kvspec.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvspec.models import catalogue, from_config
from kvspec.models.architectures import NOT_YET

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import vllm_specs  # noqa: E402
from model_caches import verdict_of  # noqa: E402


def recorded(name: str) -> dict[str, Any]:
    """Return a golden file."""
    path = ROOT / "tests" / "goldens" / f"{name}.json.gz"
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def rows() -> dict[str, tuple[str, str, str]]:
    """Return the class, the verdict, and the judges or the reason of each row of the table."""
    caches, specs = recorded("transformers_caches"), recorded("vllm_specs")
    judged: dict[str, list[tuple[str, str, str, str]]] = {}
    for name, each in (caches["types"] | caches["catalogue"]).items():
        verdict = verdict_of(each)
        judged.setdefault(name, []).append((each["class"], "transformers", *verdict))
    for name, each in specs["models"].items():
        kind = each["config"]["architectures"][0]
        judged.setdefault(name, []).append((kind, "vLLM", *vllm_specs.verdict(each)))
    found = {}
    for name, verdicts in judged.items():
        kind = verdicts[-1][0]
        wrong = [f"{judge}: {why}" for _, judge, verdict, why in verdicts if verdict == "WRONG"]
        right = [judge for _, judge, verdict, _ in verdicts if verdict == "right"]
        if wrong:
            found[name] = (kind, "WRONG", "; ".join(wrong))
        elif right:
            found[name] = (kind, "right", " and ".join(right))
        else:
            found[name] = (kind, "refused", verdicts[0][3])
    known = {kind for kind, *_ in found.values()} | set(found)
    for name, reason in NOT_YET.items():
        if name not in known and not name.islower():
            found[name] = (name, "refused", f"not yet: {reason}")
    return found


def slowest() -> tuple[float, str]:
    """Return the seconds that `from_config` took for the slowest model, and the model."""
    taken = []
    for name in catalogue.names():
        config = catalogue.config(name)
        start = time.perf_counter()
        from_config(config)
        taken.append((time.perf_counter() - start, name))
    return max(taken)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", action="store_true", help="print only the numbers")
    options = parser.parse_args()
    found = rows()
    if not options.counts:
        print("| model | class | answer | judged by, or why |\n|---|---|---|---|")
        for name, (kind, verdict, why) in found.items():
            print(f"| {name} | {kind} | {verdict} | {why} |")
    worst, name = slowest()
    print(f"the longest from_config: {worst * 1e3:.1f} ms ({name})")
    counts = Counter(verdict for _, verdict, _ in found.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int("WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())
