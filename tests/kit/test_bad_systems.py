"""A system may do anything: each misbehaviour is reported by law and case, and the run goes on."""

from __future__ import annotations

import ctypes
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import attrs
import numpy as np
import pytest

import kvspec
from kvspec.testing import laws
from kvspec.testing.kit import Judgement, Supports, System, Verdict
from kvspec.testing.kit.axes import AXES
from kvspec.testing.kit.guard import Guard, within
from kvspec.testing.kit.judging import Profile, judge, judge_axis
from kvspec.testing.laws import KVSPEC, Move
from kvspec.testing.world import PreparedLists, WrongFormError

TINY = Profile("tiny", examples=3, each=2, everything=3, seconds=1.0, shrinking=0.0)
NARROW = Supports.only(kinds=["full"], max_tp=2, equal_tp=False)
TP = next(axis for axis in AXES if axis.name == "tp")


def judged(system: System, *numbers: int) -> list[Judgement]:
    """Return the judgements of the laws *numbers* on the axis of TP sizes."""
    chosen = [law for law in laws.LAWS if law.number in numbers]
    return judge_axis(Guard(system, TINY.seconds), TP, TINY, laws=chosen)


def fault(system: System, number: int) -> str:
    """Return the fault of the smallest case in which a system breaks a law."""
    wrong = [j for j in judged(system, number) if j.verdict is Verdict.WRONG]
    assert wrong
    found = wrong[0].wrong_case
    assert found is not None
    return found.fault


def describing(**answers: Callable[..., Any]) -> System:
    """Return a system with these answers."""
    return System(name="bad", supports=NARROW, **answers)


def crash(*_: object) -> Any:
    """Fail as a wrong index does."""
    raise IndexError("list index out of range")


def test_judge_reports_a_crash_with_its_exception() -> None:
    system = describing(descriptors=crash)
    words = fault(system, 1)
    assert words.startswith("descriptors: raised IndexError")
    assert re.search(r"test_bad_systems\.py:\d+", words), "the message has no file and line"


def test_judge_reports_value_error_that_is_no_refusal() -> None:
    def wrong(*_: object) -> Any:
        raise ValueError("a shape that does not fit")

    assert "ValueError" in fault(describing(descriptors=wrong), 1)


@pytest.mark.parametrize("error", [kvspec.MismatchError([]), KeyError("own")])
def test_judge_counts_refusals_and_keeps_their_words(error: Exception) -> None:
    def refuse(*_: object) -> Any:
        raise error

    system = attrs.evolve(describing(moves=refuse), refuses=(KeyError,))
    (first, *_) = judged(system, 1)
    assert (Verdict.REFUSED, 0) == (first.verdict, first.wrong)
    assert first.words


def test_judge_reports_ids_of_no_row() -> None:
    def prepared(*arguments: Any) -> PreparedLists | None:
        right: Any = KVSPEC.prepared
        lists = right(*arguments)
        if lists is None or not len(lists.producer_ids):
            return lists
        return attrs.evolve(lists, producer_ids=lists.producer_ids + np.int32(1000))

    assert "ids" in fault(describing(prepared=prepared), 1)


def test_judge_reports_a_hang_and_goes_on() -> None:
    def hang(*_: object) -> Any:
        while True:
            time.sleep(0.01)

    system = describing(moves=KVSPEC.moves, descriptors=hang)
    judgements = judged(system, 1, 3, 10)
    verdicts = {j.law.number: j.verdict for j in judgements if j.value == "equal"}
    assert Verdict.WRONG in {j.verdict for j in judgements if j.law.number == 1}
    assert Verdict.EXACT is verdicts[3]
    assert Verdict.WRONG is not verdicts[10]  # asked no more, so not judged


def test_judge_reports_a_system_that_changes_its_mind() -> None:
    numbers = count()

    def moves(case: Any, role: Any) -> list[Any]:
        right: Any = KVSPEC.moves
        moved = list(right(case, role))
        return moved[next(numbers) % 2 :]

    assert "differ" in fault(describing(moves=moves), 5)


@pytest.mark.parametrize("question", ["moves", "descriptors"])
def test_order_of_an_answer_may_differ_between_two_calls(question: str) -> None:
    numbers = count()

    def answer(*arguments: Any) -> list[Any]:
        ask: Any = getattr(KVSPEC, question)
        return list(ask(*arguments))[:: 1 - next(numbers) % 2 * 2]

    judgements = judged(describing(**{question: answer}), 1, 5, 10)
    assert {Verdict.EXACT} == {j.verdict for j in judgements if j.words != "not drawn"}


def ended(*_: object) -> Any:
    """End the process as if all were well."""
    sys.exit(0)


def changing() -> Callable[..., Any]:
    """Return `descriptors` of kvspec, without the first copy in every other call."""
    numbers = count()
    right: Any = KVSPEC.descriptors
    return lambda *arguments: list(right(*arguments))[next(numbers) % 2 :]


@pytest.mark.parametrize(
    ("answer", "word"),
    [(ended, "SystemExit"), (changing(), "differ"), (lambda *_: time.sleep(9), "no answer")],
)
def test_printed_code_shows_a_fault_that_only_the_guard_finds(
    answer: Callable[..., Any], word: str
) -> None:
    system = describing(descriptors=answer)
    report = judge(system, profile=attrs.evolve(TINY, seconds=0.3), axes=[TP], laws=laws.LAWS[:1])
    found = report.wrong[0].wrong_case
    assert found is not None
    assert word in found.fault
    with pytest.raises(AssertionError, match=re.escape(found.fault)):
        exec(  # noqa: S102 - the code that a report prints
            found.code.replace("system = ...  # your system", ""), {"system": system}
        )


def test_script_of_a_protocol_that_ends_the_process_is_a_fault_and_its_code_shows_it() -> None:
    system = describing(release=ended)
    report = judge(system, profile=TINY, axes=["release"])
    found = report.wrong[0].wrong_case
    assert found is not None
    with pytest.raises(AssertionError, match="SystemExit"):
        exec(  # noqa: S102 - the code that a report prints
            found.code.replace("system = ...  # your system", ""), {"system": system}
        )


def test_judge_catches_a_copy_outside_of_the_memory_before_it_is_done() -> None:
    def copies(here: Any, producer: Any, consumer: Any) -> Iterator[Any]:
        right: Any = KVSPEC.descriptors
        yield from ((a, 16, n) for a, _, n in right(here, producer, consumer))

    # Address 16 is not mapped, so executing the copy would end this process.
    words = fault(describing(descriptors=copies), 1)
    assert words.startswith("consumer tp0, copy (")
    assert "0x10" in words


def test_fault_of_two_writes_names_the_place_and_both_copies() -> None:
    def twice(*arguments: Any) -> list[Any]:
        right: Any = KVSPEC.descriptors
        return [copy for copy in right(*arguments) for _ in range(2)]

    words = fault(describing(descriptors=twice), 1)
    assert re.search(r"layer full\.0, part [kv], unit 0, block \d+, row 0, byte 0", words)
    assert words.count("from producer tp0, address 0x") == 2


def of_copies(change: Callable[[int, int, int], object]) -> Callable[..., Any]:
    """Return `descriptors` of kvspec, with *change* of each copy."""

    def answer(*arguments: Any) -> list[object]:
        right: Any = KVSPEC.descriptors
        return [change(*copy) for copy in right(*arguments)]

    return answer


def of_moves(**fields: object) -> Callable[..., Any]:
    """Return `moves` of kvspec, with *fields* of each move."""

    def answer(*arguments: Any) -> list[object]:
        right: Any = KVSPEC.moves
        return [attrs.evolve(move, **fields) for move in right(*arguments)]

    return answer


def of_lists(**changes: Callable[[Any], object]) -> Callable[..., Any]:
    """Return `prepared` of kvspec, with the fields that *changes* return."""

    def answer(*arguments: Any) -> object:
        right: Any = KVSPEC.prepared
        lists = right(*arguments)
        fields: Any = {name: change(getattr(lists, name)) for name, change in changes.items()}
        return lists and attrs.evolve(lists, **fields)

    return answer


@pytest.mark.parametrize(
    ("question", "answer", "got"),
    [
        ("descriptors", lambda *_: None, "None"),
        ("descriptors", lambda *_: 5, "5"),
        ("descriptors", of_copies(lambda a, b, n: (a, b, n, "x")), "'x'"),
        ("descriptors", of_copies(lambda a, b, n: (a, b, n / 1)), ".0)"),
        ("descriptors", of_copies(lambda a, b, n: (a, b, -n)), ", -"),
        ("descriptors", of_copies(lambda a, b, n: (a, b, n - n)), ", 0)"),
        ("prepared", lambda *_: [(0, 0, 1)], "[(0, 0, 1)]"),
        ("prepared", of_lists(producer_ids=lambda ids: ids.tolist()), "producer_ids"),
        ("moves", lambda *_: None, "None"),
        ("moves", lambda *_: [1], "1"),
        ("moves", of_moves(producer=0), "producer=0"),
        ("moves", of_moves(part="key"), "'key'"),
        ("moves", of_moves(layer="other"), "'other'"),
        ("moves", of_moves(units=[0]), "units=[0]"),
    ],
)
def test_judge_reports_an_answer_of_wrong_form(
    question: str, answer: Callable[..., Any], got: str
) -> None:
    words = fault(describing(**{question: answer}), 1)
    assert words.startswith(question)
    assert " at <" not in words, "the place is not in the code of the system"
    assert got in words
    assert "expected" in words or "The engines have" in words


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("producer", "tp0"),
        ("layer", ["full.0"]),
        ("part", 1),
        ("units", None),
        ("producer_units", np.arange(2)),
        ("consumer_units", range(-1, 1)),
        ("consumer_units", range(1, -2, -1)),
        ("stripe", None),
        ("stripe", [0, 1]),
        ("stripe", (0, 0)),
        ("stripe", (2, 2)),
        ("stripe", (-1, 2)),
        ("stripe", (0, 1, 2)),
    ],
)
def test_move_refuses_a_field_of_wrong_form(field: str, value: object) -> None:
    """Laws compare moves as sets, and count the virtual blocks of a stripe."""
    rank, place = kvspec.RankId(), range(1)
    move = Move(
        producer=rank, consumer=rank, layer="full.0", part="k", units=place, producer_units=place,
        consumer_units=place,
    )  # fmt: skip
    changes: Any = {field: value}
    with pytest.raises(WrongFormError, match=f"a Move has {field}="):
        attrs.evolve(move, **changes)


@pytest.mark.parametrize("field", ["producer_rows", "consumer_rows", "producer_ids"])
@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.tolist(),
        lambda array: array.astype(np.int64),
        lambda array: array[:, None],
        lambda array: array.reshape(-1)[:0].reshape(0, 3),
        lambda array: array[0],
    ],
    ids=["list", "other dtype", "one axis more", "three columns", "one axis less"],
)
def test_prepared_lists_refuse_arrays_of_wrong_form(
    field: str, change: Callable[[Any], object]
) -> None:
    rows, ids = np.ones((2, 5), np.uint64), np.zeros(1, np.int32)
    lists = PreparedLists(rows, rows, ids, ids)
    changes: Any = {field: change(getattr(lists, field))}
    with pytest.raises(WrongFormError, match=f"{field}: expected an array"):
        attrs.evolve(lists, **changes)


@pytest.mark.parametrize("wrong", [None, [1], [(0, 0)]])
def test_judge_reports_pairs_of_wrong_form(wrong: object) -> None:
    assert repr(wrong)[1:-1] in fault(describing(tells=lambda *_: wrong), 7)


def copying(change: Callable[[int, int, int], tuple[int, int, int]]) -> Callable[[Any], None]:
    """Return a connector that copies as kvspec describes it, but for *change*."""

    def connector(here: Any) -> None:
        right: Any = KVSPEC.descriptors
        for producer in here.producers:
            for consumer in here.consumers:
                for copy in right(here, producer, consumer):
                    source, target, size = change(*copy)
                    ctypes.memmove(target, source, size)

    return connector


def test_whole_connector_that_copies_exactly_keeps_its_laws() -> None:
    system = describing(connector=copying(lambda a, b, n: (a, b, n)))
    judgements = judged(system, 1, 10, 11)
    assert {1, 10, 11} == {j.law.number for j in judgements}
    assert {Verdict.EXACT} == {j.verdict for j in judgements if j.words != "not drawn"}


def test_guard_bytes_find_a_write_after_the_memory() -> None:
    def past(source: int, target: int, size: int) -> tuple[int, int, int]:
        return source, target + 2000, size

    words = fault(describing(connector=copying(past)), 10)
    assert "after it" in words


def test_law_1_finds_a_connector_that_changes_the_producer() -> None:
    words = fault(describing(connector=copying(lambda a, b, n: (b, a, n))), 1)
    assert "producer" in words or "consumer" in words


def test_law_11_finds_a_connector_that_moves_bytes_before_it_refuses() -> None:
    copy = copying(lambda a, b, n: (a, b, n))

    def connector(here: Any) -> None:
        try:
            copy(here)
        except kvspec.KVSpecError:
            next(iter(here.consumers.values()))[1]["full"][:] ^= 255
            raise

    assert "bytes have moved" in fault(describing(connector=connector), 11)


def test_connector_that_moves_bytes_before_it_refuses_a_legal_case_is_wrong() -> None:
    copy = copying(lambda a, b, n: (a, b, n))

    def connector(here: Any) -> None:
        copy(here)
        raise kvspec.MismatchError([])

    report = judge(describing(connector=connector), profile=TINY, axes=[TP], laws=laws.LAWS[:1])
    assert report.wrong
    assert "moved nothing" not in report.counts()
    assert "bytes have moved" in fault(describing(connector=connector), 11)


def test_connector_that_returns_before_its_copies_have_arrived_is_wrong() -> None:
    copy = copying(lambda a, b, n: (a, b, n))

    def connector(here: Any) -> None:
        threading.Timer(0.01, copy, [here]).start()

    assert "connector: consumer" in fault(describing(connector=connector), 1)


def test_report_states_that_half_of_law_7_was_not_judged() -> None:
    system = describing(tells=KVSPEC.tells)
    report = judge(system, profile=TINY, axes=[TP], laws=laws.LAWS[6:7])
    assert Verdict.EXACT in {judgement.verdict for judgement in report.judgements}
    assert any("half" in reason for reason in report.reasons(Verdict.NOT_JUDGED))


def test_judge_does_not_call_a_law_exact_that_had_nothing_to_try() -> None:
    """The first case that is drawn has keys of one element, which have no order."""
    one = attrs.evolve(TP, values=lambda case: [str(case.producer.groups[0].spec.head_size)])
    guard = Guard(describing(descriptors=KVSPEC.descriptors), TINY.seconds)
    cells = {j.value: j for j in judge_axis(guard, one, TINY, laws=laws.LAWS[13:])}
    assert (Verdict.NOT_JUDGED, 0) == (cells["1"].verdict, cells["1"].exact)
    assert "rotated" in cells["1"].words


def test_law_11_lists_all_wrong_requests_of_a_case_at_once() -> None:
    def careless(*arguments: Any) -> Any:
        right: Any = KVSPEC.descriptors
        try:
            return right(*arguments)
        except kvspec.SpecError as error:
            if error.value == -1:
                raise IndexError("a crash does not hide the others") from error
            return []

    lines = fault(describing(descriptors=careless), 11).splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("consumer_blocks['full']=") for line in lines)
    assert sum("IndexError" in line for line in lines) == 1


@pytest.mark.parametrize(
    "field", ["head_size", "total_num_kv_heads", "head_size_v", "tokens_per_state", "layer"]
)
def test_law_11_finds_a_system_that_does_not_compare_a_field(field: str) -> None:
    def careless(*arguments: Any) -> Any:
        right: Any = KVSPEC.descriptors
        try:
            return right(*arguments)
        except kvspec.MismatchError as error:
            if any(mismatch.field.endswith(f".{field}") for mismatch in error.mismatches):
                return []
            raise

    lines = fault(describing(descriptors=careless), 11).splitlines()
    change = "without layer full.0" if field == "layer" else f"{field}="
    assert any(change in line and line.startswith("producer, ") for line in lines)


def test_report_of_a_system_that_refuses_everything_states_that_nothing_was_moved() -> None:
    def refuse(here: Any, *_: object) -> Any:
        raise KeyError(f"cannot serve {here.case!r}")

    system = attrs.evolve(describing(descriptors=refuse), refuses=(KeyError,))
    report = judge(system, profile=TINY, axes=[TP])
    assert Verdict.EXACT not in {judgement.verdict for judgement in report.judgements}
    assert "moved nothing" in report.counts()
    right = judge(describing(descriptors=KVSPEC.descriptors), profile=TINY, axes=[TP])
    assert "moved nothing" not in right.counts()


def test_judge_goes_on_after_each_fault_and_reports_all_laws() -> None:
    system = describing(moves=lambda *_: [], descriptors=crash)
    report = judge(system, profile=TINY, axes=[TP])
    judged_laws = {j.law.number for j in report.wrong}
    assert {1, 8, 10, 11} <= judged_laws
    silent = {
        j.law.number
        for j in report.judgements
        if j.verdict is Verdict.NOT_JUDGED and j.words != "not drawn"
    }
    assert {2, 7, 12, 13, 15, 16} == silent


def test_within_restores_the_timer_of_a_test_runner() -> None:
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        assert within(1.0, lambda: 5) == 5
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 90
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_within_limits_the_time_in_other_threads() -> None:
    ended: list[str] = []

    def run() -> None:
        try:
            within(0.1, lambda: time.sleep(5))
        except BaseException as error:  # noqa: BLE001 - its class is private
            ended.append(type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(3)
    assert ended == ["_OverdueError"]
