"""Write a plan as a traffic matrix for KVBench, the benchmark of NIXL.

Invariant: a cell is the number of bytes that the plan moves, exactly. Nothing is rounded.

How it works:
    KVBench replays a square matrix. Cell [i][j] is the number of bytes that rank i sends to rank j.
    The ranks of the producer come first, then those of each consumer engine. This is one head on
    two ranks, read by one rank, with 6 bytes in each of 10 tokens:

                       producer tp0    producer tp1    consumer tp0
        producer tp0   0               0               60
        producer tp1   0               0               0
        consumer tp0   0               0               0
"""

from __future__ import annotations

import json

import attrs
import numpy as np

from kvspec.analysis.flows import flows
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan, plan_transfer

# A matrix has a cell for each pair of ranks, so its size grows with the square of this number.
MOST_RANKS = 4096


def traffic_matrix(plan: TransferPlan, num_tokens: int, consumers: int = 1) -> Ints:
    """Return the bytes that each rank sends to each rank when consumer engines read at once.

    Args:
        plan: The plan between the producer and one consumer engine.
        num_tokens: Length of the request of each consumer engine. None of it is cached.
        consumers: Number of consumer engines. Engine e chooses replicas with the salt of the plan
            plus e.

    Returns:
        A square int64 array: one row for each sender, one column for each receiver. The ranks of
        the producer come first, in the order of `ParallelConfig.ranks`.

    Raises:
        SpecError: If an argument is not valid, or there are more than `MOST_RANKS` ranks.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
    >>> spec = MLAAttentionSpec(block_size=16, head_size=3, dtype="bfloat16")
    >>> group = KVCacheGroup(name="latent", layers=("layers.0",), spec=spec)
    >>> producer = EngineSpec(groups=(group,), parallel=ParallelConfig(tp_size=2))
    >>> traffic_matrix(plan_transfer(producer, EngineSpec(groups=(group,))), 10).tolist()
    [[0, 0, 60], [0, 0, 0], [0, 0, 0]]
    """
    sources = len(instance("plan", plan, TransferPlan).producer.parallel.ranks)
    targets = len(plan.consumer.parallel.ranks)
    ranks = sources + targets * positive_int("consumers", consumers)
    if ranks > MOST_RANKS:
        raise SpecError("consumers", consumers, rule=f"{ranks} ranks are more than {MOST_RANKS}")
    matrix = np.zeros((ranks, ranks), np.int64)
    for engine in range(consumers):
        policy = attrs.evolve(plan.replica_policy, salt=plan.salt + engine)
        moved = flows(plan_transfer(plan.producer, plan.consumer, policy), num_tokens)
        into = sources + engine * targets + moved.consumer
        np.add.at(matrix, (moved.producer, into), moved.moved)
    return matrix


def matrix_text(matrix: Ints) -> str:
    r"""Return the text of a matrix file of KVBench: cells in bytes, one line for each sender.

    >>> matrix_text(np.array([[0, 60], [0, 0]]))
    '0 60\n0 0\n'
    """
    return "".join(" ".join(map(str, row)) + "\n" for row in matrix.tolist())


def pattern_text(matrix_file: str, num_tokens: int) -> str:
    """Return the configuration of ``kvbench sequential-ct-perftest`` for one matrix file.

    KVBench reads YAML. JSON is YAML too, and needs no other package.
    """
    pattern = {"matrix_file": matrix_file, "metadata": {"isl": num_tokens}}
    return json.dumps({"traffic_patterns": [pattern]}, indent=1) + "\n"
