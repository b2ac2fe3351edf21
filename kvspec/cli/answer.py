"""Answer what the page of `kvspec view` asks: who reads what, the bytes and the pictures.

Invariant: a question is text from a browser. An answer is plain data, also if the question is
wrong: then it has the field and the reason. No question opens a file or computes for minutes.

How it works:
    The page sends the words of the command line, such as ``tp=8,layout=NHD``. So `options` reads
    them as it reads those of `kvspec plan`, and the answer names the equivalent command.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from importlib import resources
from typing import Any

from kvspec.analysis import simulate
from kvspec.analysis.counts import Pair, traffic
from kvspec.analysis.explanation import edge_tokens, head_lines
from kvspec.cli import options
from kvspec.descriptors.table import build_table
from kvspec.draw import plan_svg, table_svg
from kvspec.engines.engine import EngineSpec
from kvspec.errors import KVSpecError, MismatchError, SpecError, nbytes
from kvspec.memory.allocation import plan_memory
from kvspec.models import catalogue
from kvspec.ownership.replicas import POLICIES
from kvspec.plan.plan import TransferPlan, plan_transfer

# With these sizes, an answer takes a few seconds and a picture has less than a megabyte.
MAX_PAGE_RANKS, MAX_PAGE_TOKENS, MAX_BLOCK = 256, 1 << 17, 1 << 12
# GB/s of each link for the predicted time. The page states the number.
DEFAULT_SPEED = 50
# A picture of a pair of ranks shows one block. Its cache needs only a few.
_DEFAULT_BLOCKS = 64
LAYOUTS = ("LBNHC", "LBHNC", "LBKNHC", "LBKHNC", "BLKNHC", "BLKHNC", "LKBNHC")
"""Layouts that the page offers: those of vLLM, SGLang, TensorRT-LLM and LMCache."""


def choices() -> dict[str, Any]:
    """Return what the page offers: models, layouts, policies, and the defaults of both sides.

    >>> choices()["policies"]
    ['spread', 'first', 'stripe']
    """
    # A policy that needs the nodes of all ranks would need more fields than the page has.
    policies = [name for name, policy in POLICIES.items() if not policy.needs_topology]
    return {
        "models": catalogue.names(),
        "model": catalogue.DEFAULT,
        "layouts": LAYOUTS,
        "policies": policies,
        "defaults": options.DEFAULTS,
    }


def page() -> str:
    """Return the page with the choices that it offers."""
    text = resources.files("kvspec").joinpath("data", "view.html").read_text(encoding="utf-8")
    # JSON inside a script may not contain the end of a script.
    return text.replace("/* CHOICES */ null", json.dumps(choices()).replace("</", "<\\/"))


def answer(question: Mapping[str, str]) -> dict[str, Any]:
    """Return the answer to a question, or its fault.

    Args:
        question: The texts *model*, *producer*, *consumer*, *tokens* and *policy*. With *pair*, the
            number of a pair of ranks, the answer is the picture of its memory.

    Returns:
        The answer as JSON data. If the question has a fault, it has only the key *fault*: the
        reasons, each with the *field*.

    >>> answer({"producer": "tp=0"})
    {'fault': [{'field': 'producer.tp_size', 'text': 'producer.tp_size=0: expected an int >= 1'}]}
    >>> answer({"producer": "tp=2", "consumer": "tp=4", "tokens": "1000"})["moved"]
    '109.4 MiB'
    """
    try:
        return _answer(question)
    except MismatchError as error:
        each = [{"field": mismatch.field, "text": str(mismatch)} for mismatch in error.mismatches]
        return {"fault": each}
    except KVSpecError as error:
        return {"fault": [{"field": getattr(error, "field", ""), "text": str(error)}]}


def _answer(question: Mapping[str, str]) -> dict[str, Any]:
    model = question.get("model", catalogue.DEFAULT)
    words = {side: question.get(side, "") for side in options.DEFAULTS}
    policy = question.get("policy", "spread")
    tokens = options.whole("tokens", question.get("tokens", "8192"), MAX_PAGE_TOKENS)
    config = catalogue.config(model)  # The command line would also read a file of this name.
    producer, consumer = (_engine(side, config, words[side]) for side in words)
    engines = producer, consumer
    chosen = options.replica_policy_of(policy, None, engines)
    plan = plan_transfer(producer, consumer, chosen)
    counts = traffic(plan, tokens)
    busiest = counts.busiest
    pairs = list(counts.pairs)
    if "pair" in question:
        number = options.whole("pair", question["pair"], len(pairs) - 1)
        return {"picture": _memory_picture(plan, pairs[number])}
    speed = DEFAULT_SPEED * 1e9
    loads = simulate(engines, num_tokens=tokens, out_speed=speed, in_speed=speed).policies
    predicted = next(load.seconds for load in loads if load.replica_policy == policy)
    return {
        "command": _command(model, words, tokens, policy),
        "moved": nbytes(counts.total.nbytes),
        "bytes": counts.total.nbytes,
        "descriptors": counts.total.descriptors,
        "busiest": f"{busiest.side} {busiest.rank}: {nbytes(busiest.load.nbytes)}",
        "predicted": f"{predicted * 1e3:,.2f} ms",
        "speed": DEFAULT_SPEED,
        "edges": [
            {
                "consumer": str(edge.consumer),
                "producer": str(edge.producer),
                "group": edge.group,
                "layers": len(edge.layers),
                "heads": [f"{line}{edge_tokens(plan, edge)}" for line in head_lines(plan, edge)],
            }
            for edge in plan.edges
        ],
        "pairs": [
            {
                "producer": str(pair[0]),
                "consumer": str(pair[1]),
                "bytes": load.nbytes,
                "descriptors": load.descriptors,
            }
            for pair, load in counts.pairs.items()
        ],
        "unread": [str(rank) for rank in plan.producer.parallel.ranks if not plan.targets(rank)],
        "picture": plan_svg(plan),
    }


def _engine(side: str, config: options.Model, words: str) -> EngineSpec:
    """Return the engine of one side, unless its sizes are too large for a page."""
    fields = options.engine_words(side, words)
    sizes = [fields.get(name, 1) for name in ("tp_size", "pp_size", "dcp_size", "pcp_size")]
    # Context ranks of decoding divide the TP ranks, so this product is an upper bound.
    if (ranks := math.prod(map(int, sizes))) > MAX_PAGE_RANKS:
        raise SpecError(side, ranks, f"sizes whose product is at most {MAX_PAGE_RANKS}")
    if int(fields.get("block_size", 1)) > MAX_BLOCK:
        raise SpecError(f"{side}.block_size", fields["block_size"], f"at most {MAX_BLOCK}")
    return options.engine(side, config, words)


def _command(model: str, words: Mapping[str, str], tokens: int, policy: str) -> str:
    """Return the command that prints the same plan."""
    given = [f"--{side}={text}" for side, text in words.items() if text]
    line = [f"--model={model}", *given, f"--tokens={tokens}", f"--replica-policy={policy}"]
    return shlex.join(["kvspec", "plan", *line])


def _memory_picture(plan: TransferPlan, pair: Pair) -> str:
    """Draw one block of both ranks of a *pair*, and the runs that move."""
    producer, consumer = pair
    return table_svg(
        build_table(
            plan,
            plan_memory(plan.producer, producer, _DEFAULT_BLOCKS),
            plan_memory(plan.consumer, consumer, _DEFAULT_BLOCKS),
        )
    )
