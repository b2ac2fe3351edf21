"""The result of the kit: one judgement for each law, axis and value, as JSON and as HTML.

Invariant: the same system, version, profile and seed give the same report, but for its seconds.
"""

from __future__ import annotations

import enum
import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.version import __version__

if TYPE_CHECKING:
    from kvspec.testing.case import Case
    from kvspec.testing.laws import Law
    from kvspec.testing.laws.release import Script


class Verdict(enum.StrEnum):
    """What the kit found out about one law. The worst one is last."""

    NOT_JUDGED = "not judged"
    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"


@attrs.frozen(kw_only=True)
class Counterexample:
    """The smallest case that was found in which a system breaks a law.

    Attributes:
        fault: The first difference, as a sentence.
        case: The case, or the script if the law is about releases.
        other: The second case, if the law compares two.
        code: Python code that judges the system in this case.
    """

    fault: str
    case: Case | Script
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
        counterexample: The smallest wrong case of the axis.
    """

    law: Law
    axis: str
    value: str
    exact: int = 0
    refused: int = 0
    wrong: int = 0
    words: str = ""
    counterexample: Counterexample | None = None

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
    """

    system: str
    version: str
    profile: str
    seed: int
    seconds: float
    judgements: tuple[Judgement, ...]

    @property
    def cells(self) -> dict[tuple[str, str, int], Judgement]:
        """The judgements by axis, value and number of the law."""
        return {(j.axis, j.value, j.law.number): j for j in self.judgements}

    @property
    def wrong(self) -> list[Judgement]:
        """The judgements of laws that the system breaks."""
        return [j for j in self.judgements if j.verdict is Verdict.WRONG]

    def to_json(self) -> str:
        """Return the report as JSON. `docs/test-your-connector.md` describes the fields."""
        facts = {name: getattr(self, name) for name in ("system", "version", "profile", "seed")}
        facts |= {"kvspec": __version__, "seconds": round(self.seconds, 1)}
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
    if judgement.counterexample is not None:
        plain |= {"fault": judgement.counterexample.fault, "code": judgement.counterexample.code}
    return plain


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { border: 1px solid #8884; padding: .25rem .5rem; text-align: center }
th { font-weight: 600 } tbody th { text-align: left; font-weight: 400 }
.exact { background: #2a93} .refused { background: #da03 } .wrong { background: #d336 }
pre { overflow-x: auto; background: #8881; padding: .75rem } :root { color-scheme: light dark }
""".strip()
_SIGNS = {
    Verdict.EXACT: "✓", Verdict.REFUSED: "refused", Verdict.WRONG: "✗", Verdict.NOT_JUDGED: ""
}  # fmt: skip


def _page(report: SystemReport) -> Iterator[str]:
    """Yield the lines of the page: the matrix, then faults, refusals and laws without answers."""
    title = html.escape(f"{report.system} {report.version}".strip())
    yield f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}: kvspec</title>'
    yield f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>'
    yield f"<h1>{title}</h1>\n<p>kvspec {__version__}, profile {report.profile}, seed {report.seed}"
    yield f", {report.seconds:.0f} s. Refusing is allowed. Being wrong is not.</p>"
    cells, laws = report.cells, {j.law.number: j.law for j in report.judgements}
    judged = [n for n in sorted(laws) if any(
        j.law.number == n and j.verdict is not Verdict.NOT_JUDGED for j in report.judgements
    )]  # fmt: skip
    heads = "".join(
        f'<th title="{html.escape(laws[n].sentence)}">{laws[n].name}</th>' for n in judged
    )
    yield f"<table><thead><tr><th>axis</th><th>value</th>{heads}</tr></thead><tbody>"
    for axis, value in dict.fromkeys((j.axis, j.value) for j in report.judgements if j.value):
        row = (_cell(cells.get((axis, value, number))) for number in judged)
        yield f"<tr><th>{html.escape(axis)}</th><th>{html.escape(value)}</th>{''.join(row)}</tr>"
    yield "</tbody></table>"
    yield from _details(report)


def _cell(judgement: Judgement | None) -> str:
    if judgement is None:
        return "<td></td>"
    counts = f"{judgement.exact} exact, {judgement.refused} refused, {judgement.wrong} wrong"
    sign = _SIGNS[judgement.verdict]
    return f'<td class="{judgement.verdict}" title="{counts}">{sign}</td>'


def _details(report: SystemReport) -> Iterator[str]:
    """Yield the words of refusals, the smallest wrong cases, and the laws that are not judged."""
    faults = {(j.law.number, j.axis): j for j in report.wrong if j.counterexample is not None}
    for judgement in faults.values():
        found = judgement.counterexample
        assert found is not None
        yield f"<h2>{judgement.law}: {html.escape(judgement.axis)}</h2>"
        yield f"<p>{html.escape(found.fault)}</p>\n<pre>{html.escape(found.code)}</pre>"
    refused = {j.words: j for j in report.judgements if j.verdict is Verdict.REFUSED}
    if refused:
        yield "<h2>Refusals</h2>\n<ul>"
        yield from (
            f"<li>{html.escape(j.axis)}, {html.escape(j.value)}: {html.escape(words)}</li>"
            for words, j in refused.items()
        )
        yield "</ul>"
    silent = [j for j in report.judgements if j.verdict is Verdict.NOT_JUDGED]
    if silent:
        yield "<h2>Not judged</h2>\n<ul>"
        yield from (f"<li>{j.law} {j.axis}: {html.escape(j.words)}</li>" for j in silent)
        yield "</ul>"
