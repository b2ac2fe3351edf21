"""The plug-in of pytest: one test for each law and axis, a report, and known failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import InMemoryExampleDatabase

from kvspec.testing.kit import Supports, System, Verdict, judging
from kvspec.testing.laws import KVSPEC, LAWS

ROOT = Path(__file__).parents[2]
BAD = """
import attrs
from kvspec.testing.laws import KVSPEC
from toy_system import SYSTEM as RIGHT


def forgets(world, producer, consumer):
    copies = list(KVSPEC.descriptors(world, producer, consumer))
    unequal = world.case.producer.parallel.tp_size != world.case.consumer.parallel.tp_size
    return copies[1:] if unequal else copies


SYSTEM = attrs.evolve(RIGHT, name="forgetful", descriptors=forgets)
"""


RUNS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
import pytest

ended = []
for options in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        status = pytest.main(["-p", "pytest_kvspec", *options])
    ended.append((status, printed.getvalue()))
print(json.dumps(ended))
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in *folder* with the plug-in and *options*."""
    return started(folder, "-m", "pytest", "-p", "pytest_kvspec", *options)


def runs(folder: Path, every: list[tuple[str, ...]]) -> list[tuple[int, str]]:
    """Run pytest with each of the options in one process. Return the status and the output."""
    return [
        tuple(each) for each in json.loads(started(folder, "-c", RUNS, json.dumps(every)).stdout)
    ]


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in *folder*, which gets a configuration of pytest."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", folder)))
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    # An own configuration, which is as strict as that of this project.
    (folder / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\naddopts = --strict-markers --strict-config\n",
        encoding="utf-8",
    )
    return subprocess.run(  # noqa: S603 - pytest
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of a run of a system that forgets copies."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad_system.py").write_text(BAD, encoding="utf-8")
    lines = "# what is known\nlayout_invariance/tp  # two engines\n10/tp\nsymmetry/tp # holds\n"
    lines += "refusal # all axes\n5/tp/equal\n"
    (folder / "known.txt").write_text(lines, encoding="utf-8")
    done = run(
        folder, "--kvspec", "bad_system:SYSTEM", "--kvspec-xfail", "known.txt",
        "--kvspec-report", "report.json", "--kvspec-report", "report.html", "-ra",
        "-k", "release or tp and (exact_cover or bounds or symmetry or invariance or identity)",
    )  # fmt: skip
    return folder, done.stdout + done.stderr


def test_failure_shows_the_fault_a_table_a_picture_and_code(bad: tuple[Path, str]) -> None:
    folder, printed = bad
    failure = printed[printed.index("bad_system:SYSTEM::exact_cover[tp]") :]
    assert "forgetful breaks law 1, exact cover (tp: " in failure
    assert re.search(r"^yours:\n  consumer tp0 reads producer tp0, full.0: ", failure, re.MULTILINE)
    assert re.search(r"^ranks +TP \d+ +!= +TP \d+$", failure, re.MULTILINE)
    assert re.search(r"^table full +\[", failure, re.MULTILINE)
    assert (folder / ".pytest_cache/d/kvspec/exact_cover-tp.svg").read_text("utf-8")[:4] == "<svg"


def test_printed_code_fails_with_the_same_fault(
    bad: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = bad
    failure = printed[printed.index("bad_system:SYSTEM::exact_cover[tp]") :]
    fault = failure.splitlines()[3]
    code, found = re.subn(r".*?(^import kvspec\n.*?# law 1, exact cover\n).*", r"\1", failure,
                          count=1, flags=re.DOTALL | re.MULTILINE)  # fmt: skip
    assert found
    for path in (folder, ROOT / "examples"):
        monkeypatch.syspath_prepend(str(path))
    with pytest.raises(AssertionError) as caught:
        exec(code, {})  # noqa: S102 - the code that the plug-in printed
    assert str(caught.value).endswith(fault)


def test_known_failures_are_expected_and_stale_lines_are_errors(bad: tuple[Path, str]) -> None:
    _, printed = bad
    assert re.search(r"^XFAIL .*layout_invariance\[tp\].*two engines", printed, re.MULTILINE)
    names = ("known.txt:3", "bounds"), ("known.txt:4", "symmetry"), ("known.txt:6", "identity")
    for line, name in names:
        assert re.search(rf"^FAILED .*{name}\[tp\] - .*{re.escape(line)}", printed, re.MULTILINE)
    assert "4 failed, 1 skipped" in printed


def test_laws_without_answer_are_skipped_with_the_reason(bad: tuple[Path, str]) -> None:
    _, printed = bad
    assert "not judged: the system does not answer release" in printed


def test_report_has_each_law_axis_and_value(bad: tuple[Path, str]) -> None:
    folder, _ = bad
    report = json.loads((folder / "report.json").read_text("utf-8"))
    cells = {(j["law"], j["axis"], j["value"]): j for j in report["judgements"]}
    assert ("forgetful", "1.0", "ci") == tuple(
        report[key] for key in ("system", "version", "profile")
    )
    assert "exact" == cells[1, "tp", "equal"]["verdict"]
    assert "exact" == cells[3, "tp", "equal"]["verdict"]
    (wrong, *_) = (j for j in report["judgements"] if j["verdict"] == "wrong" and j["law"] == 1)
    assert wrong["code"].startswith("import kvspec")
    assert "not judged" == cells[12, "", ""]["verdict"]
    (known, *_) = (j for j in report["judgements"] if j["verdict"] == "wrong" and j["law"] == 9)
    assert known["known"] == "two engines"
    assert report["supports"]["policies"] == ["first"]
    assert report["left_out"] > 0


def test_page_links_each_fault_and_states_what_is_known_and_not_supported(
    bad: tuple[Path, str],
) -> None:
    page = (bad[0] / "report.html").read_text("utf-8")
    links = set(re.findall(r'href="#([\w-]+)"', page))
    assert {"law-1-tp", "law-9-tp"} == links
    assert links == set(re.findall(r'id="(law[\w-]+)"', page))
    for text in ('class="wrong"', 'class="known"', "(known: two engines)", "Partial:", "<svg",
                 "policies=(&#x27;first&#x27;,)", "max_tp=8"):  # fmt: skip
        assert text in page


def test_summary_counts_cells_and_known_failures(bad: tuple[Path, str]) -> None:
    _, printed = bad
    assert re.search(r"^\d+ exact, 0 refused, \d+ wrong \(\d+ known\)", printed, re.MULTILINE)
    assert re.search(r"^partial: \d+ tests", printed, re.MULTILINE)
    assert re.search(r"^collected [1-9]\d+ items", printed, re.MULTILINE)


def test_fault_of_several_axes_is_shown_once(tmp_path: Path) -> None:
    idle = "from kvspec.testing.kit import *\n"
    idle += "SYSTEM = System(name='idle', moves=lambda *_: [], supports=Supports.only(max_pp=2))\n"
    (tmp_path / "idle.py").write_text(idle, encoding="utf-8")
    (tmp_path / ".pytest_cache/d/kvspec").mkdir(parents=True)
    (tmp_path / ".pytest_cache/d/kvspec/old.svg").touch()
    done = run(tmp_path, "--kvspec", "idle:SYSTEM", "-k", "exact_cover")
    assert done.stdout.count("import kvspec\n") == 1
    assert "exact_cover[kinds] has shown this fault above" in done.stdout
    assert not (tmp_path / ".pytest_cache/d/kvspec/old.svg").exists()


def test_plugin_refuses_a_line_without_test_and_a_missing_system(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("maximal/*\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("x = 1 / 0\n", encoding="utf-8")
    wrong = (
        (("toy_system:SYSTEM", "--kvspec-xfail", "known.txt"),
         ("known.txt:1", "'maximal/*'", "exact_cover", "layouts")),
        (("no.such.module:SYSTEM",), ("cannot import no.such.module", "No module named")),
        (("broken:SYSTEM",), ("cannot import broken", "x = 1 / 0", "ZeroDivisionError")),
        (("toy_system:NONE",), ("NONE",)),
        (("toy_system",), ("MODULE:NAME",)),
        (("",), ("MODULE:NAME",)),
        (("toy_system:SYSTEM", "--kvspec-report", "none/report.json"), ("none/report.json",)),
    )  # fmt: skip
    ended = runs(tmp_path, [("--kvspec", *options) for options, _ in wrong])
    for (_, words), (status, printed) in zip(wrong, ended, strict=True):
        assert pytest.ExitCode.USAGE_ERROR == status
        assert [word for word in words if word not in printed] == []
        assert "0 exact" not in printed


def test_tests_are_of_the_kind_that_hypofuzz_collects(tmp_path: Path) -> None:
    """HypoFuzz selects by this mark, and skips a test that suppresses the check for nesting."""
    mark = ("-m", "hypothesis", "--collect-only", "-q")
    done = run(tmp_path, "--kvspec", "toy_system:SYSTEM", *mark)
    assert "toy_system:SYSTEM::exact_cover[tp]" in done.stdout
    system = System(name="idle", moves=lambda *_: [], supports=Supports.only(kinds=["full"]))
    everything = judging.axis_of("everything")
    test = judging.law_test(system, LAWS[0], everything, judging.profile_of("ci"))
    chosen = getattr(test, "_hypothesis_internal_use_settings")  # noqa: B009 - private
    assert HealthCheck.nested_given not in chosen.suppress_health_check
    assert Phase.generate in chosen.phases


@pytest.fixture
def stored() -> Iterator[None]:
    """Let Hypothesis store what it finds in memory, until the end of the test."""
    before = settings.get_current_profile_name()
    settings.register_profile("stored", database=InMemoryExampleDatabase())
    settings.load_profile("stored")
    yield
    settings.load_profile(before)


def test_case_that_hypofuzz_has_stored_is_judged_again_until_it_is_right(stored: None) -> None:
    supports = Supports.only(kinds=["full"])
    idle = System(name="idle", moves=lambda *_: [], supports=supports)
    case = LAWS[0], judging.axis_of("everything"), judging.profile_of("ci")
    assert judging.replayed(idle, *case, "idle:SYSTEM::exact_cover") is None
    fuzzed: Any = judging.law_test(idle, *case, [Phase.generate])  # found, and not shrunk
    fuzzed.hypothesis.inner_test._hypothesis_internal_add_digest = b"idle:SYSTEM::exact_cover"
    with pytest.raises(judging.BrokenCaseError):
        fuzzed()
    again = judging.replayed(idle, *case, "idle:SYSTEM::exact_cover")
    assert again is not None
    assert Verdict.WRONG is again.verdict
    assert again.wrong_case is not None
    right = attrs.evolve(KVSPEC, supports=supports)
    assert judging.replayed(right, *case, "idle:SYSTEM::exact_cover") is None


def test_module_that_pytest_imports_always_is_light() -> None:
    """Every project that has kvspec installed imports it, in each run of pytest."""
    code = (
        "import sys; before = set(sys.modules); import pytest_kvspec;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(  # noqa: S603 - the line above
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"pytest_kvspec"} == packages - sys.stdlib_module_names
