"""Compare the traffic matrices of KVBench's own generator with those of kvspec.

Usage: `python docs/compare_kvbench.py PATH`, where PATH is `inference_workload_matgen.py` of NIXL,
from `benchmark/kvbench/test`. The output is the table in docs/kvbench.md. Only the arithmetic of
the generator runs, so its packages need not be installed.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

import kvspec
from kvspec import models
from kvspec.analysis.kvbench import traffic_matrix
from kvspec.models import catalogue

TOKENS = 1000

# A title, a model of the catalogue, the preset of the generator, and the sizes of both engines. A
# preset of None stands for the model's true sizes.
CASES: list[tuple[str, str, str | None, dict[str, int], dict[str, int]]] = [
    ("equal TP", "Llama-3.1-70B", "deepseek-r1-distill-llama-70b", {"tp": 8}, {"tp": 8}),
    ("TP above 8 heads", "Llama-3.1-70B", None, {"tp": 8}, {"tp": 16}),
    ("TP above 8 heads", "Llama-3.1-70B", None, {"tp": 8}, {"tp": 32}),
    ("TP above 4 heads", "Qwen3-30B-A3B", None, {"tp": 4}, {"tp": 8}),
    ("TP above 4 heads", "Qwen3-30B-A3B", None, {"tp": 4}, {"tp": 16}),
    ("preset of Qwen3-30B", "Qwen3-30B-A3B", "qwen3-30B", {"tp": 4}, {"tp": 4}),
    ("preset of DeepSeek-R1 (MLA)", "DeepSeek-R1", "deepseek-r1", {"tp": 1}, {"tp": 1}),
    ("preset of DeepSeek-R1 (MLA)", "DeepSeek-R1", "deepseek-r1", {"tp": 8}, {"tp": 8}),
    ("preset of DeepSeek-R1 (MLA)", "DeepSeek-R1", "deepseek-r1", {"tp": 8}, {"tp": 16}),
    ("context parallelism", "Llama-3.1-70B", None, {"tp": 2, "cp": 2}, {"tp": 4}),
    ("context parallelism", "Llama-3.1-70B", None, {"tp": 1, "cp": 4}, {"tp": 8}),
    ("TP of prefill above decode", "Llama-3.1-70B", None, {"tp": 8}, {"tp": 4}),
]


def generator(path: Path) -> tuple[ModuleType, dict[str, Any]]:
    """Return the generator's module and its presets, without the packages that it imports."""
    for name in ("tqdm", "yaml", "nixl", "nixl.logging"):
        stub = ModuleType(name)
        stub.__dict__.update(tqdm=iter, get_logger=lambda _: None)
        sys.modules[name] = stub
    source = path.read_text(encoding="utf-8")
    module = ModuleType("inference_workload_matgen")
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - the file to compare
    # The presets are inside of `if __name__ == "__main__"`.
    presets = next(
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PREDEFINED_MODELS"
    )
    code = compile(ast.Expression(presets), str(path), "eval")
    return module, eval(code, module.__dict__)  # noqa: S307 - the file to compare


def generated(
    module: ModuleType, config: Any, prefill: dict[str, int], decode: dict[str, int]
) -> npt.NDArray[np.float64]:
    """Return the matrix of the generator: prefill ranks first."""
    sides = [range(side["tp"] * side.get("cp", 1)) for side in (prefill, decode)]
    world = len(sides[0]) + len(sides[1])
    batch = module.Batch(user_requests=[module.UserRequest(isl=TOKENS)])
    workers = [module.WorkerConfig(tp=s["tp"], cp=s.get("cp", 1)) for s in (prefill, decode)]
    ranks = list(sides[0]), list(range(len(sides[0]), world))
    matrix: npt.NDArray[np.float64] = module.gen_matrix(batch, world, *ranks, config, *workers)
    return matrix


def planned(
    model: str, prefill: dict[str, int], decode: dict[str, int]
) -> tuple[npt.NDArray[np.int64], kvspec.EngineSpec]:
    """Return the matrix of kvspec, and the consumer."""
    groups = models.from_config(catalogue.config(model))
    producer, consumer = (
        kvspec.EngineSpec(
            groups=groups,
            parallel=kvspec.ParallelConfig(
                tp_size=side["tp"], pcp_size=side.get("cp", 1), interleave_size=16
            ),
        )
        for side in (prefill, decode)
    )
    return traffic_matrix(kvspec.plan_transfer(producer, consumer), TOKENS), consumer


def main(path: Path) -> None:
    """Print the table."""
    module, presets = generator(path)
    print("| case | model, engines | busiest consumer rank: KVBench | kvspec | KVBench / kvspec |")
    print("| --- | --- | --- | --- | --- |")
    for title, model, preset, prefill, decode in CASES:
        matrix, consumer = planned(model, prefill, decode)
        parts = consumer.groups[0].spec.parts
        config = presets.get(preset)
        if config is None:
            heads, size = parts[0].units, parts[0].content_bytes // 2
            layers = len(consumer.groups[0].layers)
            config = module.ModelConfig(heads * size, layers, heads, heads)
        try:
            other = generated(module, config, prefill, decode)
        except ValueError:
            cells = ("refused", links(matrix), "")
        else:
            low, true = (int(side.sum(axis=0).max()) for side in (other, matrix))
            cells = (links(other), links(matrix), f"{low / true:.3g}")
        engines = " -> ".join(
            " ".join(f"{key.upper()} {size}" for key, size in side.items())
            for side in (prefill, decode)
        )
        print(f"| {title} | {model}, {engines} | {' | '.join(cells)} |")


def links(matrix: npt.NDArray[Any]) -> str:
    """Return the bytes into the busiest rank, and from how many ranks they come."""
    rank = int(matrix.sum(axis=0).argmax())
    sources = int(np.count_nonzero(matrix[:, rank]))
    return f"{int(matrix[:, rank].sum()):,} B from {sources}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
