"""The result of the kit: one judgement for each law, axis and value, as JSON and as HTML.

Invariant: the same system, version, profile and seed give the same report, but for its seconds.
"""

from __future__ import annotations

import enum
import html
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.draw import plan_svg
from kvspec.errors import KVSpecError
from kvspec.testing.case import Case
from kvspec.testing.kit.words import described
from kvspec.testing.supports import EVERYTHING, Supports
from kvspec.testing.world import plan_of
from kvspec.version import __version__

if TYPE_CHECKING:
    from kvspec.testing.laws import Judged, Law


class Verdict(enum.StrEnum):
    """What the kit found out about one law. The worst one is last."""

    NOT_JUDGED = "not judged"
    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"


@attrs.frozen(kw_only=True)
class WrongCase:
    """The smallest case that was found in which a system breaks a law.

    Attributes:
        fault: The first difference, as a sentence.
        case: The case, or the script, the prompts or the stored prompt that the law judges.
        other: The second case, if the law compares two.
        code: Python code that judges the system in this case.
    """

    fault: str
    case: Judged
    other: Case | None = None
    code: str = ""


@attrs.frozen(kw_only=True)
class Judgement:
    """The judgement of one law, for one value of an axis.

    Attributes:
        law: The law.
        axis: Name of the axis.
        value: The value on the axis.
        exact: Number of cases in which the law holds.
        refused: Number of cases that the system refused.
        wrong: Number of cases in which the system breaks the law.
        words: Words of the first refusal, or the reason why the law is not judged.
        wrong_case: The smallest wrong case of the axis.
        known: The comment of the line that expects this failure. None if no line expects it.
    """

    law: Law
    axis: str
    value: str
    exact: int = 0
    refused: int = 0
    wrong: int = 0
    words: str = ""
    wrong_case: WrongCase | None = None
    known: str | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all cases: wrong, else refused, else exact."""
        if self.wrong:
            return Verdict.WRONG
        if self.refused:
            return Verdict.REFUSED
        return Verdict.EXACT if self.exact else Verdict.NOT_JUDGED


@attrs.frozen(kw_only=True)
class SystemReport:
    """What the kit found out about one system.

    Attributes:
        system: Name of the system.
        version: Version of the system.
        profile: Name of the profile.
        seed: The seed of the drawn cases.
        seconds: Duration of the run.
        judgements: A judgement for each law, axis and value that was drawn, in order.
        supports: What the system supports. No other cases were drawn.
        left_out: Number of tests that were not run, because an option selected others.
    """

    system: str
    version: str
    profile: str
    seed: int
    seconds: float
    judgements: tuple[Judgement, ...]
    supports: Supports = EVERYTHING
    left_out: int = 0

    @property
    def cells(self) -> dict[tuple[str, str, int], Judgement]:
        """The judgements by axis, value and number of the law."""
        return {(j.axis, j.value, j.law.number): j for j in self.judgements}

    @property
    def wrong(self) -> list[Judgement]:
        """The judgements of laws that the system breaks."""
        return [j for j in self.judgements if j.verdict is Verdict.WRONG]

    def counts(self) -> str:
        """Return how many cells have which verdict. A cell is one law for one value of an axis.

        Refusing is allowed, so a system that refuses everything breaks no law. The words then state
        that it moved nothing.
        """
        verdicts = Counter(judgement.verdict for judgement in self.judgements if judgement.axis)
        known = sum(judgement.known is not None for judgement in self.wrong)
        words = [f"{verdicts[v]} {v}" for v in (Verdict.EXACT, Verdict.REFUSED, Verdict.WRONG)]
        words[-1] += f" ({known} known)" if known else ""
        silent = verdicts[Verdict.NOT_JUDGED]
        words += [f"{silent} {Verdict.NOT_JUDGED}"] if silent else []
        words += ["moved nothing: every case was refused"] if self._moved_nothing() else []
        return ", ".join(words)

    def _moved_nothing(self) -> bool:
        covers = [j for j in self.judgements if j.law.number == 1 and j.axis]
        return any(j.refused for j in covers) and not any(j.exact or j.wrong for j in covers)

    def reasons(self, verdict: Verdict) -> list[str]:
        """Return why cells have *verdict*: each law and reason once, with its first cell."""
        first: dict[tuple[int, str], str] = {}
        for j in self.judgements:
            if j.verdict is verdict:
                where = ", ".join(filter(None, (str(j.law), j.axis, j.value)))
                first.setdefault((j.law.number, j.words), f"{where}: {j.words}")
        return list(first.values())

    def to_json(self) -> str:
        """Return the report as JSON. `docs/test-your-connector.md` describes the fields."""
        facts = {name: getattr(self, name) for name in ("system", "version", "profile", "seed")}
        facts |= {"kvspec": __version__, "seconds": round(self.seconds, 1)}
        facts |= {"left_out": self.left_out, "supports": attrs.asdict(self.supports)}
        judgements = [_plain(judgement) for judgement in self.judgements]
        return json.dumps(facts | {"judgements": judgements}, indent=1, ensure_ascii=False) + "\n"

    def to_html(self) -> str:
        """Return the report as one HTML page without other files."""
        return "\n".join(_page(self)) + "\n"

    def save(self, file: str | Path) -> None:
        """Write the report to *file*, as HTML if its name ends with .html, else as JSON."""
        path = Path(file)
        text = self.to_html() if path.suffix in (".html", ".htm") else self.to_json()
        path.write_text(text, encoding="utf-8")


def _plain(judgement: Judgement) -> dict[str, Any]:
    plain = {
        "law": judgement.law.number,
        "name": judgement.law.name,
        "axis": judgement.axis,
        "value": judgement.value,
        "verdict": str(judgement.verdict),
        "exact": judgement.exact,
        "refused": judgement.refused,
        "wrong": judgement.wrong,
    }
    if judgement.words:
        plain["words"] = judgement.words
    if judgement.known is not None:
        plain["known"] = judgement.known
    if judgement.wrong_case is not None:
        plain |= {"fault": judgement.wrong_case.fault, "code": judgement.wrong_case.code}
    return plain


_STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem }
p, ul, h2, pre { max-width: 60rem } .wide { overflow-x: auto }
table { border-collapse: collapse; margin-bottom: 1.5rem }
th, td { border: 1px solid #8884; padding: .2rem .5rem; text-align: center; white-space: nowrap }
th { font-weight: 600 } tbody th { text-align: left; font-weight: 400; vertical-align: top }
thead th:nth-child(n+3) { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left }
.exact { background: #2a93 } .refused { background: #da03 } .wrong { background: #d336 }
.known { background: #8883 } td small { opacity: .7 } td a { color: inherit }
.fault { white-space: pre-wrap } pre { overflow-x: auto; background: #8881; padding: .75rem }
@media (max-width: 40rem) { tbody th { white-space: normal; max-width: 7rem } }
svg { max-width: 100%; height: auto; background: #fff }
""".strip()
_SIGNS = {Verdict.EXACT: "✓", Verdict.REFUSED: "r", Verdict.WRONG: "✗", Verdict.NOT_JUDGED: "-"}
_LEGEND = (
    "✓ exact, r refused, ✗ wrong, each with its number of cases. Grey ✗: a known failure. "
    "- nothing to judge, or no answer. Empty: no such case was drawn for this law."
)


def _page(report: SystemReport) -> Iterator[str]:
    """Yield the lines of the page: the matrix, then faults, refusals and what is not judged."""
    title = html.escape(f"{report.system} {report.version}".strip())
    yield f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}: kvspec</title>'
    yield f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>'
    yield f"<h1>{title}</h1>\n<p>kvspec {__version__}, profile {report.profile}, seed"
    yield f"{report.seed}, {report.seconds:.0f} s: {report.counts()}. Refusing is allowed. Being"
    yield "wrong is not.</p>"
    if report.left_out:
        yield f"<p><strong>Partial: {report.left_out} tests were not selected.</strong></p>"
    judged: dict[str, set[int]] = {}
    for judgement in report.judgements:
        if judgement.axis:
            judged.setdefault(judgement.axis, set()).add(judgement.law.number)
    # An axis of one law would be a row of empty cells in the table of the others.
    several = [axis for axis, numbers in judged.items() if len(numbers) > 1]
    for axes in ([several] if several else []) + [[a] for a in judged if a not in several]:
        yield from _matrix(report, axes)
    yield f"<p>{_LEGEND}</p>"
    yield from _faults(report)
    yield from _silence(report)


def _matrix(report: SystemReport, axes: list[str]) -> Iterator[str]:
    """Yield a table with a row for each value of *axes*, and a column for each law."""
    judgements = [judgement for judgement in report.judgements if judgement.axis in axes]
    laws = {j.law.number: j.law for j in sorted(judgements, key=lambda j: j.law.number)}
    heads = "".join(
        f'<th title="{html.escape(law.sentence)}">{number} {law.name}</th>'
        for number, law in laws.items()
    )
    yield '<div class="wide"><table><thead><tr><th>axis</th><th>value</th>'
    yield f"{heads}</tr></thead><tbody>"
    for axis in axes:
        values = list(dict.fromkeys(j.value for j in judgements if j.axis == axis))
        for value in values:
            first = f'<th rowspan="{len(values)}">{axis}</th>' if value == values[0] else ""
            row = (_cell(report.cells.get((axis, value, number))) for number in laws)
            yield f"<tr>{first}<th>{html.escape(value)}</th>{''.join(row)}</tr>"
    yield "</tbody></table></div>"


def _cell(judgement: Judgement | None) -> str:
    if judgement is None:
        return "<td></td>"
    counts = f"{judgement.exact} exact, {judgement.refused} refused, {judgement.wrong} wrong"
    verdict = judgement.verdict
    number = {
        Verdict.EXACT: judgement.exact, Verdict.REFUSED: judgement.refused,
        Verdict.WRONG: judgement.wrong, Verdict.NOT_JUDGED: "",
    }[verdict]  # fmt: skip
    text = f"{_SIGNS[verdict]} <small>{number}</small>"
    if judgement.wrong_case is not None:
        text = f'<a href="#{_anchor(judgement)}">{text}</a>'
    kind = verdict if judgement.known is None else "known"
    return f'<td class="{kind}" title="{counts}">{text}</td>'


def _anchor(judgement: Judgement) -> str:
    return f"law-{judgement.law.number}-{judgement.axis}"


def _faults(report: SystemReport) -> Iterator[str]:
    """Yield a section for each smallest wrong case. The first case of equal faults is shown."""
    sections: dict[tuple[int, str], list[Judgement]] = {}
    for judgement in report.wrong:
        if (found := judgement.wrong_case) is not None:
            key = judgement.law.number, found.fault
            sections.setdefault(key, []).append(judgement)
    # New faults come before those that are known.
    for judgements in sorted(sections.values(), key=lambda found: found[0].known is not None):
        law, found = judgements[0].law, judgements[0].wrong_case
        assert found is not None
        anchors = dict.fromkeys(map(_anchor, judgements))
        spans = "".join(f'<span id="{anchor}"></span>' for anchor in anchors)
        yield f"<h2>{spans}{law}</h2>\n<p>{html.escape(law.sentence)}</p>\n<ul>"
        for judgement in judgements:
            known = "" if judgement.known is None else f" (known: {judgement.known})"
            yield f"<li>{html.escape(f'{judgement.axis}: {judgement.value}{known}')}</li>"
        yield "</ul>"
        table = "\n".join(described(found.case, law))
        yield f'<pre class="fault">{html.escape(found.fault)}</pre>'
        yield f"<pre>{html.escape(table)}</pre>"
        yield f"{picture_of(found, law)}\n<pre>{html.escape(found.code)}</pre>"


def picture_of(found: WrongCase, law: Law) -> str:
    """Return the right plan as SVG, or "" if a refusal is right."""
    if not isinstance(found.case, Case) or law.alters:
        return ""
    try:
        return plan_svg(plan_of(found.case))
    except KVSpecError:
        return ""


def _silence(report: SystemReport) -> Iterator[str]:
    """Yield the words of refusals, the laws that are not judged, and what is not supported."""
    yield from _listed("Refusals", report.reasons(Verdict.REFUSED))
    yield from _listed("Not judged", report.reasons(Verdict.NOT_JUDGED))
    fields = [(f.name, getattr(report.supports, f.name), f.default) for f in attrs.fields(Supports)]
    narrow = [f"{name}={value!r}" for name, value, default in fields if value != default]
    yield from _listed("Not supported: all but these values, so no other cases were drawn", narrow)


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    lines = list(lines)
    if lines:
        items = "".join(f"\n<li>{html.escape(line)}</li>" for line in lines)
        yield f"<h2>{title}</h2>\n<ul>{items}\n</ul>"
