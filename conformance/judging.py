"""Judge a connector of another project on grids of transfers, and write the report.

How it works:
    Each folder beside this file has a module `connector` with these names:

        NAME, VERSION    of the connector
        AXES             what is judged: each `Axis` is a grid of cases and a part of the connector
        FINDINGS         what is known to be wrong, with the function, the reach and the issue
        KIT              optional: a `System` that the kit judges, too, on cases that it draws

    The grids are complete and begin with the smallest case, so the first wrong case is the smallest
    one. A case has one of three outcomes:

        exact      each live byte arrived, and no other byte but unused padding has changed
        refused    the connector raised an error before it moved a byte. Its words are counted
        wrong      law 1: a byte is missing or false, a byte of a producer has changed, or the
                   connector crashed after its first copy. Law 11: it moved bytes, then refused

    An axis with wrong cases needs a finding, and a finding needs a wrong case. Otherwise the run
    fails: a new version of the connector is better or worse, and a person must look.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from refusal import RefusedError
from toy import describe

from kvspec.testing import Case, kit, logical_views
from kvspec.testing.laws import KVSPEC, LAWS, System, broken
from kvspec.testing.laws.whole import changed_producers
from kvspec.testing.world import World, snapshot, world

HERE = Path(__file__).parent


@attrs.frozen(kw_only=True)
class Axis:
    """One grid of cases.

    Attributes:
        name: What varies.
        cases: The cases, the smallest first.
        system: The part of the connector that is judged.
        laws: Numbers of the laws that judge it.
        count: Yields a sentence for each fault that no law of ours is about.
    """

    name: str
    cases: Callable[[], Iterable[Case]]
    system: System
    laws: tuple[int, ...] = (1,)
    count: Callable[[Case], Iterable[str]] | None = None


@attrs.frozen(kw_only=True)
class Finding:
    """One way in which the connector is wrong.

    Attributes:
        axis: Name of the axis on which it is found.
        function: The function that computes the wrong number.
        result: What happens, in one sentence.
        reach: Whether and how a user can meet it.
        issue: Address of the upstream issue, or "none known".
    """

    axis: str
    function: str
    result: str
    reach: str
    issue: str = "none known"


# Refusals that differ only in numbers and layouts are counted together.
NUMBERS = re.compile(r"\d+")
LAYOUTS = re.compile(r"\b(?:L?B|B?L)[LHN]+C\b|\bLH\w+C\b")
Outcome = tuple[str, int, str]
# How often the same words of a refusal were met.
Words = Counter[str]


def outcome(axis: Axis, case: Case) -> Outcome:
    """Return the verdict of one case, the number of the law, and a sentence."""
    try:
        if axis.system.connector is not None:
            for law, fault in faults_of_connector(axis.system.connector, world(case)):
                return "wrong", law, fault
        of = [law for law in LAWS if law.number in axis.laws]
        asked = attrs.evolve(axis.system, connector=None)
        for law, fault in broken(asked, case, of=of):
            return "wrong", law.number, fault
        for fault in () if axis.count is None else axis.count(case):
            return "wrong", 7, fault
    except RefusedError as error:
        return "refused", 0, str(error).splitlines()[0]
    # Whatever a connector raises is a judgement.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return "wrong", (*axis.laws, 1)[0], f"crash: {type(error).__name__}: {error}"
    return "exact", 0, ""


def faults_of_connector(
    connector: Callable[[World], object], here: World
) -> Iterator[tuple[int, str]]:
    """Yield the law and a sentence for each fault of *connector*, which moves the bytes itself."""
    before = snapshot(here.producers)
    try:
        connector(here)
    except RefusedError as error:
        ignore_padding(here)
        if not here.changed():
            raise
        yield 11, f"bytes have moved before this refusal: {error}"
        return
    ignore_padding(here)
    for fault in (*here.differences(), *changed_producers(here, before)):
        yield 1, fault


def ignore_padding(here: World) -> None:
    """Restore the bytes of the consumers that no part holds: to overwrite them does no harm."""
    case = here.case
    for rank, (_, storage) in here.consumers.items():
        used: Any = {name: np.zeros(flat.size, np.uint8) for name, flat in storage.items()}
        first = next(iter(used.values()))
        used = dict.fromkeys(used, first) if case.shared else used
        for view in logical_views(case.consumer, rank, used, case.consumer_pool).values():
            view[...] = 1
        for name, flat in storage.items():
            unused = used[name] == 0
            flat[unused] = here.before[rank][name][unused]


def judge(axis: Axis) -> dict[str, Any]:
    """Return the row of one axis in the report."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    words: Words = Counter()
    smallest: dict[str, Any] = {}
    right = attrs.evolve(
        KVSPEC,
        name="kvspec",
        **{q: None for q in ("moves", "tells") if getattr(axis.system, q) is None},
        **dict.fromkeys(("descriptors", "prepared", "steps")),
    )
    for case in axis.cases():
        verdict, law, sentence = outcome(axis, case)
        counts[verdict] += 1
        if verdict == "refused":
            words[NUMBERS.sub("N", LAYOUTS.sub("LAYOUT", sentence))] += 1
        elif verdict == "wrong" and not smallest:
            smallest = {"case": describe(case), "law": law, "fault": sentence}
            if verdicts := broken(right, case, of=[LAWS[law - 1]]):
                raise SystemExit(f"kvspec is wrong too: {describe(case)}: {verdicts}")
    return {
        "axis": axis.name,
        **{verdict: counts[verdict] for verdict in ("exact", "refused", "wrong")},
        "refusals": dict(words.most_common()),
        "smallest wrong case": smallest or None,
        "seconds": round(time.monotonic() - began, 1),
    }


def report(name: str) -> dict[str, Any]:
    """Return the report of the connector in the folder *name*."""
    sys.path.insert(0, str(HERE / name))
    connector: Any = importlib.import_module("connector")
    began = time.monotonic()
    rows = [judge(axis) for axis in connector.AXES]
    return {
        "connector": connector.NAME,
        "version": connector.VERSION,
        "judged": connector.JUDGED,
        "axes": rows,
        "findings": [attrs.asdict(finding) for finding in connector.FINDINGS],
        "kit": kit_rows(connector.KIT) if hasattr(connector, "KIT") else [],
        "seconds": round(time.monotonic() - began, 1),
    }


def kit_rows(system: System) -> list[dict[str, Any]]:
    """Return what the kit finds by the laws of bytes, notifications and bounds, by axis and value.

    The laws of refusals and of meaning are left out: the adapters pass sizes alone, so no connector
    can see a dtype or the meaning of a key.
    """
    of = [law for law in LAWS if law.number in {1, 7, 10}]
    return [
        {
            "axis": found.axis,
            "value": found.value,
            "law": found.law.number,
            "exact": found.exact,
            "refused": found.refused,
            "wrong": found.wrong,
            "fault": found.wrong_case.fault if found.wrong_case else "",
        }
        for found in kit.judge(system, laws=of).judgements
        if found.value
    ]


def surprises(made: Mapping[str, Any]) -> list[str]:
    """Return the axes that are wrong without a finding, and the findings that are gone."""
    wrong = {row["axis"] for row in made["axes"] if row["wrong"]}
    known = {finding["axis"] for finding in made["findings"]}
    return [f"wrong, but no finding: {axis}" for axis in sorted(wrong - known)] + [
        f"a finding, but nothing is wrong: {axis}" for axis in sorted(known - wrong)
    ]


def to_markdown(made: Mapping[str, Any], folder: str) -> str:
    """Return the report of one connector as a page."""
    lines = [
        f"# {made['connector']} {made['version']}",
        "",
        f"{made['judged']}",
        "",
        f"`conformance/run {folder}` installs this version, judges it and writes this page.",
        "",
        *matrix(made),
        "",
    ]
    refusals: dict[str, list[str]] = {}
    for row in made["axes"]:
        for words in row["refusals"]:
            refusals.setdefault(words, []).append(row["axis"])
    if refusals:
        lines += ["## What it refuses", ""]
        lines += [f"- {', '.join(axes)}: `{words}`" for words, axes in refusals.items()]
        lines += [""]
    lines += ["## What is wrong", ""]
    by_axis = {row["axis"]: row for row in made["axes"]}
    for finding in made["findings"]:
        smallest = by_axis[finding["axis"]]["smallest wrong case"]
        if smallest is None:
            continue
        lines += [
            f"### {finding['axis']}",
            "",
            f"- function: `{finding['function']}`",
            f"- input: {smallest['case']}",
            f"- result: {finding['result']}",
            f"- law {smallest['law']}: {smallest['fault']}",
            f"- reach: {finding['reach']}",
            f"- issue: {finding['issue']}",
            "",
        ]
    if not made["findings"]:
        lines += ["Nothing on these grids.", ""]
    if made["kit"]:
        lines += ["## Drawn by the kit", ""]
        lines += ["`kit.judge` draws cases of what the connector supports. The seed is 0.", ""]
        lines += ["| axis | value | law | exact | refused | wrong |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {row['axis']} | {row['value']} | {row['law']} | {row['exact']} | {row['refused']} |"
            f" {row['wrong']} |"
            for row in made["kit"]
        ]
        lines += [""]
    return "\n".join(lines)


def matrix(made: Mapping[str, Any]) -> list[str]:
    """Return the table of the axes."""
    head = ["| axis | exact | refused | wrong | smallest wrong case |", "|---|---|---|---|---|"]
    return head + [
        f"| {row['axis']} | {row['exact']} | {row['refused']} | {row['wrong']} |"
        f" {(row['smallest wrong case'] or {}).get('case', '')} |"
        for row in made["axes"]
    ]


def issues(made: Mapping[str, Any]) -> list[str]:
    """Return the upstream issue of each wrong axis."""
    known = {one["axis"]: one["issue"] for one in made["findings"] if "http" in one["issue"]}
    others = [f"*{one['axis']}*" for one in made["findings"] if one["axis"] not in known]
    lines = [f"- issue of *{axis}*: {issue}" for axis, issue in known.items()]
    lines += [f"- no issue is known for {'; '.join(others)}"] if others else []
    return [*lines, ""] if lines else []


HEAD = """\
# Connectors of other projects, judged by kvspec

Each connector runs its own installed code. No code of others is in this repository. The adapters
here call the functions that choose ranks, slices, blocks and descriptors, in one process and
without a GPU. [Test laws](../CONTRIBUTING.md#the-laws) compare the result with the correct bytes.

*Exact* means that the result is right. *Refused* is allowed: the connector raises an error before a
byte moves. *Wrong* is a defect: the request succeeds with false or missing bytes, the connector
crashes or refuses after its first copy, or a rank gets a wrong number of notifications. Counts are
cases of a complete grid. They do not say how often users meet them. Each report describes which
users are affected.

`conformance/run` installs the pinned versions, judges all of them and writes this page and the
reports. `conformance/run vllm_nixl` does it for one. From an empty environment to the report of
vLLM's NIXL connector, this took 108 s on two cores, with a warm pip cache. A nightly workflow runs
it.

To add a connector, make a folder like the others: `environment` names the file with its pinned
packages, and `connector.py` has the names that `judging.py` describes at its top.

`mooncake.reshard.kv_cache` ([Mooncake#3564](https://github.com/kvcache-ai/Mooncake/pull/3564)) is
not judged, since no wheel has it yet. The newest one, mooncake-transfer-engine 0.3.13.post1, has
only `mooncake.reshard.weight`.

[naming.md](naming.md) is another report: which facts of a request are in the names of the pages
that vLLM, SGLang and LMCache store.

The push mode of vLLM's NIXL connector (`NixlPushConnectorWorker`) is not judged. There, the
producer chooses descriptors and writes after a registration of the consumer, in a thread of its
own. The adapter here answers for the consumer of a pull only.
"""


def write_overview() -> None:
    """Write the page with the tables of all reports."""
    lines = [HEAD]
    for path in sorted(HERE.glob("*/report.json")):
        made = json.loads(path.read_text("utf-8"))
        folder = path.parent.name
        lines += [
            f"## [{made['connector']} {made['version']}]({folder}/report.md)",
            "",
            made["judged"],
            "",
            *matrix(made),
            "",
            *issues(made),
        ]
    (HERE / "README.md").write_text("\n".join(lines), "utf-8")


def main() -> int:
    """Judge one connector, or write the overview. Return 1 if something is new or gone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("connector", nargs="?", help="a folder; without it, write README.md")
    name = parser.parse_args().connector
    if name is None:
        write_overview()
        return 0
    made = report(name)
    text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    (HERE / name / "report.json").write_text(text, "utf-8")
    (HERE / name / "report.md").write_text(to_markdown(made, name), "utf-8")
    new = surprises(made)
    sys.stdout.write("\n".join([*matrix(made), *new, f"{made['seconds']} s", ""]))
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main())
