"""Two real engines of SGLang on a CPU serve requests as behind a router.

A nightly workflow runs these tests. Each answer is compared with that of one engine alone.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sgl_kernel", reason="SGLang is not installed for a CPU")
pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang_engines import Engine, model, prepare

from kvspec.adapters.sglang import tickets

pytestmark = [pytest.mark.adapters, pytest.mark.nixl]

PROMPT = list(range(10, 310))
rooms = itertools.count(1)
# A half that did not learn of an error would wait for "waiting" seconds.
SOON = 30.0
SHORT = {"hold": 3.0, "lease": 3.0, "waiting": 60.0, "timeout": 60.0}


class Pair:
    """A prefill engine, a decode engine, and one that computes all alone."""

    def __init__(self, folder: Path, prefill: Any = None, decode: Any = None, **both: Any) -> None:
        self.folder, self.path = folder, model(folder / "model")
        own = {"page_size": 16, "backend": SHORT} | both
        make = lambda role, more: Engine(role, self.path, folder, **own | (more or {}))  # noqa: E731
        self.alone = Engine("null", self.path, folder, page_size=16)
        self.prefill, self.decode = make("prefill", prefill), make("decode", decode)
        for engine in self.engines:
            engine.ready()

    @property
    def engines(self) -> tuple[Engine, Engine, Engine]:
        """All engines."""
        return self.alone, self.prefill, self.decode

    def both(
        self, prompt: list[int], count: int, room: Any = None, **more: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the answers of both halves of a request."""
        begun = self.begin(prompt, count, room, **more)
        return begun[0].result(200), begun[1].result(200)

    def begin(self, prompt: list[int], count: int, room: Any = None, **more: Any) -> Any:
        """Begin both halves of a request."""
        own = next(rooms) if room is None else room
        address = self.prefill.address
        return [
            engine.generate(prompt, count, own, address, **more)
            for engine in (self.prefill, self.decode)
        ]

    def works(self, prompt: list[int] = PROMPT) -> None:
        """Check that a request is answered as by one engine alone."""
        want = self.alone.generate(prompt, 6).result(60)
        _, got = self.both(prompt, 6)
        assert want["tokens"] == got.get("tokens"), got

    def idle(self, seconds: float = 20.0) -> None:
        """Wait until the prefill engine holds nothing: then it can flush its cache."""
        deadline = time.monotonic() + seconds
        while not self.flushed(self.prefill):
            assert time.monotonic() < deadline, "the prefill engine still holds memory"
            time.sleep(0.3)

    def flushed(self, engine: Engine) -> bool:
        """Return whether *engine* could flush its cache."""
        done = engine.call("manage", method="flush_cache", kind=None).result(20)
        return bool(done.success)

    def close(self) -> None:
        """End all engines."""
        for engine in self.engines:
            engine.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """Yield a function that starts a pair."""
    prepare()
    pairs: list[Pair] = []

    def start(**settings: Any) -> Pair:
        pairs.append(Pair(tmp_path, **settings))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Yield a pair that all tests share that leave it as it was."""
    prepare()
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


def test_aborted_load_never_writes_the_memory_of_other_requests(
    started: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others grow while its bytes are late, and would get its memory if it was freed too early."""
    # Through shared memory, a stopped process can still be read.
    monkeypatch.setenv("UCX_TLS", "tcp")
    room = {"max_total_tokens": 1280, "num_reserved_decode_tokens": 32, "decode_log_interval": 4}
    pair = started(decode=room, backend=SHORT | {"hold": 60.0, "lease": 60.0})
    prompts = [[first, *range(30, 129)] for first in (5, 6, 7)]
    wanted = [each.result(200)["tokens"] for each in
              [pair.alone.generate(prompt, 400) for prompt in prompts]]  # fmt: skip
    others = [pair.begin(prompt, 400) for prompt in prompts]
    for begun in others:  # The prefill half ends when the prompt was read.
        begun[0].result(60)
    victim, prompt, address = next(rooms), [8, *range(10, 409)], pair.prefill.address
    pair.prefill.generate(prompt, 4, victim, address)
    wait(lambda: victim in tickets.get(address, [victim]))
    pair.prefill.signal_schedulers(signal.SIGSTOP)
    begun_at = len(pair.decode.log)
    aborted = pair.decode.generate(prompt, 4, victim, address, rid="victim")
    wait(lambda: "#transfer-req: 1" in pair.decode.log[begun_at:])
    pair.decode.call("abort", rid="victim").result(20)
    assert "Decode transfer failed" in aborted.result(20)["error"], "its load had not begun"
    deadline = time.monotonic() + 2.5

    def late() -> bool:
        used = [int(tokens) for tokens in re.findall(r"#token: (\d+)", pair.decode.log)]
        return used[-1] > 1050 and (time.monotonic() > deadline or others[0][1].done())

    wait(late, 60.0)
    pair.prefill.signal_schedulers(signal.SIGCONT)
    assert wanted == [begun[1].result(200).get("tokens") for begun in others]
    pair.works()


def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until *condition* is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_request_with_other_sampling_than_the_ticket_is_refused(pair: Pair) -> None:
    room, address = next(rooms), pair.prefill.address
    pair.prefill.generate(PROMPT, 4, room, address, sampling={"logit_bias": {"7": 50.0}})
    got = pair.decode.generate(PROMPT, 4, room, address).result(60)
    assert "remote_sampling" in got["error"]
    pair.works()


def test_only_one_of_two_requests_gets_the_ticket_of_a_room(pair: Pair) -> None:
    room, address = next(rooms), pair.prefill.address
    want = pair.alone.generate(PROMPT, 4).result(60)["tokens"]
    begun = [pair.decode.generate(PROMPT, 4, room, address) for _ in range(2)]
    pair.prefill.generate(PROMPT, 4, room, address)
    got = [each.result(60) for each in begun]
    assert [want] == [each["tokens"] for each in got if "tokens" in each]
    assert ["bootstrap_room" in each["error"] for each in got if "error" in each] == [True]


def test_request_of_sglang_itself_takes_no_room(pair: Pair) -> None:
    """SGLang tests its health with requests that need no other engine."""
    room = next(rooms)
    got = pair.prefill.generate(PROMPT, 2, room, "2.2.2.2:1").result(60)
    assert "tokens" in got
    want = pair.alone.generate(PROMPT, 4).result(60)["tokens"]
    assert want == pair.both(PROMPT, 4, room)[1].get("tokens")


@pytest.mark.parametrize("room", [0, -1, 10**20, "none"])
def test_room_out_of_range_fails_both_halves_at_once(room: Any, pair: Pair) -> None:
    innocent = next(rooms)
    waits = pair.decode.generate(PROMPT, 4, innocent, pair.prefill.address)
    begun = time.monotonic()
    halves = pair.both(PROMPT, 4, room) if room != "none" else pair.both(PROMPT, 4, [None])
    assert all("bootstrap_room" in half["error"] for half in halves), halves
    assert time.monotonic() - begun < SOON
    pair.prefill.generate(PROMPT, 4, innocent, pair.prefill.address)
    assert "tokens" in waits.result(60)


def test_request_without_a_host_is_refused_and_harms_no_other(pair: Pair) -> None:
    """It would end the scheduler of the decode engine."""
    got = pair.decode.call(
        "generate",
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 4},
        bootstrap_room=next(rooms),
    ).result(20)
    assert "bootstrap_host" in got["error"]
    pair.works()


def test_several_answers_to_one_prompt_are_refused_and_nothing_is_held(pair: Pair) -> None:
    halves = pair.both(PROMPT, 4, sampling={"n": 2})
    assert all("n=2" in half["error"] for half in halves), halves
    pair.idle(2.5)


def test_too_many_log_probabilities_are_refused(pair: Pair) -> None:
    halves = pair.both(PROMPT, 4, return_logprob=True, top_logprobs_num=200)
    assert all("top_logprobs_num" in half["error"] for half in halves), halves
    pair.works()


def test_decode_half_that_never_comes_pins_the_prompt_for_a_short_hold(pair: Pair) -> None:
    got = pair.prefill.generate(PROMPT, 4, next(rooms), pair.prefill.address).result(20)
    assert "expired" in got["error"]
    pair.idle()


def test_prompt_waits_for_a_decode_engine_with_a_long_queue(
    started: Callable[..., Pair],
) -> None:
    """The queue is longer than the prompt is held without messages."""
    pair = started(decode={"max_total_tokens": 640, "num_reserved_decode_tokens": 32})
    least = SHORT["hold"] + SHORT["lease"] + 1
    pair.alone.generate(PROMPT, 200).result(200)  # The first prompt takes longer.
    begun = time.monotonic()
    pair.alone.generate(PROMPT, 200).result(200)
    # The decode engine has memory for one prompt. A fast machine needs a longer queue, and this one
    # may be faster soon.
    count = 2 + int(3 * least / (time.monotonic() - begun))
    prompts = [[first, *PROMPT[1:]] for first in range(3, 3 + count)]
    wanted = [each.result(200)["tokens"] for each in
              [pair.alone.generate(prompt, 200) for prompt in prompts]]  # fmt: skip
    begun = time.monotonic()
    halves = [pair.begin(prompt, 200) for prompt in prompts]
    # The prefill half ends when the decode half has read.
    read = [half[0].result(200) for half in halves]
    waited = time.monotonic() - begun
    assert wanted == [half[1].result(200).get("tokens") for half in halves], read
    assert waited > least, "the queue was too short for this test"


def test_request_that_sglang_would_compute_again_fails_by_name(pair: Pair) -> None:
    """SGLang retracts all requests of a decode engine before it updates the weights."""
    begun_at = len(pair.decode.log)
    _, running = pair.begin(PROMPT, 300)
    wait(lambda: "#running-req: 1" in pair.decode.log[begun_at:], 60.0)
    for method, kind, fields in (
        ("pause_generation", "PauseGenerationReqInput", {"mode": "retract"}),
        ("continue_generation", "ContinueGenerationReqInput", {}),
    ):
        pair.decode.call("manage", method=method, kind=kind, **fields).result(20)
    assert "is_rebootstrap" in running.result(20)["error"]
    pair.works()


def test_memory_is_not_released_while_other_engines_use_it(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        released = engine.call("manage", method="release_memory_occupation",
                               kind="ReleaseMemoryOccupationReqInput")  # fmt: skip
        with pytest.raises(RuntimeError, match="release_memory_occupation"):
            released.result(20)
    pair.works()


def test_decode_half_learns_at_once_that_its_prompt_is_too_long(
    started: Callable[..., Pair],
) -> None:
    """The prefill engine's server refuses one, and its scheduler the other."""
    pair = started(
        prefill={"max_total_tokens": 256, "context_length": 4096},
        decode={"max_total_tokens": 8192},
    )
    for length in (300, 5000):
        prompt = [1 + place % 900 for place in range(length)]
        begun = time.monotonic()
        first, second = pair.both(prompt, 2)
        assert "error" in first
        assert "the prefill engine" in second["error"], second
        assert time.monotonic() - begun < SOON
    pair.works(PROMPT[:100])


def test_killed_producer_is_named(started: Callable[..., Pair]) -> None:
    pair = started()
    pair.works()
    waits = pair.decode.generate(PROMPT, 4, next(rooms), pair.prefill.address)
    time.sleep(0.5)
    pair.prefill.signal(signal.SIGKILL)
    got = waits.result(40)
    assert "prefill engine has probably ended" in got["error"]
    assert "another rank" not in got["error"]


def update(engine: Engine, path: str, **more: Any) -> Any:
    """Load other weights from *path*."""
    names = {"method": "update_weights_from_disk", "kind": "UpdateWeightFromDiskReqInput"}
    return engine.call("manage", **names, model_path=path, **more).result(60)


def test_prompts_are_refused_while_the_weights_of_both_engines_differ(
    started: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = started()
    other = model(tmp_path / "other", seed=1)
    pair.works()
    held = pair.prefill.generate(PROMPT, 4, next(rooms), pair.prefill.address)
    assert not update(pair.prefill, str(tmp_path / "missing"))[0]
    assert "error" in held.result(20)
    pair.works()  # A failed update changes nothing.
    assert update(pair.prefill, other)[0]
    assert "weight_version" in pair.both(PROMPT, 4)[1]["error"]
    assert update(pair.prefill, other, weight_version="two")[0]
    got = pair.both(PROMPT, 4)[1]
    assert "remote_content.weights" in got["error"], got
    assert update(pair.decode, other, weight_version="two", flush_cache=False)[0]
    assert "flush_cache" in pair.both(PROMPT, 4)[1]["error"]
    assert pair.flushed(pair.decode)
    assert update(pair.alone, other)[0]
    pair.works()
    for engine in (pair.prefill, pair.decode, pair.alone):
        assert update(engine, pair.path)[0]
    for engine in (pair.prefill, pair.decode):
        engine.call("manage", method="update_weight_version", kind="UpdateWeightVersionReqInput",
                    new_version="three", abort_all_requests=False).result(20)  # fmt: skip
    pair.works()


def test_metrics_are_in_the_registry_of_sglang(started: Callable[..., Pair]) -> None:
    pair = started(enable_metrics=True)
    pair.works()
    declined = next(rooms)
    pair.prefill.generate(PROMPT, 4, declined, pair.prefill.address)
    pair.decode.generate(PROMPT[::-1], 4, declined, pair.prefill.address).result(20)

    def number(text: str, name: str) -> float:
        found = re.search(rf"^sglang:kvspec_{name}\S* (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else -1.0

    def scraped() -> bool:
        texts[:] = [engine.call("scrape").result(20) for engine in (pair.prefill, pair.decode)]
        counts = number(texts[0], holds), number(texts[1], "declined_total")
        return counts[0] >= 2 and counts[1] >= 1

    texts, holds = list[str](), r"holds_total\{[^}]*outcome=\"done\""
    wait(scraped)
    assert 2 == number(texts[0], holds)
    assert 1 == number(texts[1], r"loads_total\{[^}]*state=\"done\"")
    assert 1 == number(texts[1], "declined_total")
    layers, heads, size = 3, 6, 16
    assert len(PROMPT) * layers * 2 * heads * size * 4 == number(texts[1], "bytes_read_total")
    assert 0 == number(texts[0], "held"), pair.prefill.log


def test_log_lines_have_the_format_of_sglang(pair: Pair) -> None:
    pair.works()
    line = next(each for each in pair.decode.log.splitlines() if "connected to" in each)
    assert re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] connected to ", line)
