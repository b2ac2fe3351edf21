"""`kvspec check` and `kvspec verify` with engines that run, and with everything else at a port."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

os.environ.setdefault("UCX_NET_DEVICES", "lo")
pytest.importorskip("typer", reason="needs the cli extra")

from two_engines import Side, engine
from typer.testing import CliRunner, Result

import kvspec
from kvspec.cli import app as cli
from kvspec.cli.running import addresses
from kvspec.descriptors.table import DescriptorTable
from kvspec.errors import SpecError
from kvspec.nixl import agent as binding
from kvspec.session import TcpChannel
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.wire.versions import OWN

REPO = Path(kvspec.__file__).parents[1]
KEY = "the secret of these tests"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPEC_SECRET", KEY)


def run(*arguments: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, arguments, prog_name="kvspec", env={"COLUMNS": "120"})


def named(producer: Side | None, consumer: Side | None) -> list[str]:
    """Return the options with the addresses of two engines."""
    sides = {"--producer": producer, "--consumer": consumer}
    return [f"{option}={','.join(side.addresses)}" for option, side in sides.items() if side]


@contextmanager
def running(
    producer: kvspec.EngineSpec | None = None,
    consumer: kvspec.EngineSpec | None = None,
    **changed: dict[str, Any],
) -> Iterator[tuple[Side, Side]]:
    """Yield two engines that poll in the background and were never connected.

    *changed*: arguments of the sessions, by the name of the engine.
    """
    options: dict[str, dict[str, Any]] = {
        "P": {"polled": False, "background": True, "model": "llama"},
        "D": {"polled": True, "background": True, "model": "llama"},
    }
    made = {name: more | changed.get(name, {}) for name, more in options.items()}
    with (
        FakeNixl(),
        Side("P", producer or engine(2), **made["P"]) as first,
        Side("D", consumer or engine(1), **made["D"]) as other,
    ):
        yield first, other


def test_check_accepts_engines_that_fit() -> None:
    with running() as sides:
        result = run("check", *named(*sides))
    assert 0 == result.exit_code, result.output
    assert "producer P: 2 ranks, TP 2" in result.stdout
    assert "consumer D: 1 rank, TP 1" in result.stdout
    assert 2 == result.stdout.count(f"kvspec {kvspec.__version__}, wire versions {OWN}")
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["tp0"]]
    assert [["tp0", "tp0", "3"], ["tp0", "tp1", "3"]] == [row[:3] for row in rows]
    assert "no byte was moved" in result.stdout


def test_check_leaves_nothing_in_the_engines() -> None:
    """A readiness probe calls it every few seconds."""
    with running() as (producer, consumer):
        before = [side.first.stats() for side in (producer, consumer)]
        peers = producer.first.nixl.stats()
        for _ in range(3):
            assert 0 == run("check", *named(producer, consumer)).exit_code
        assert before == [side.first.stats() for side in (producer, consumer)]
        assert peers == producer.first.nixl.stats()


def test_check_moves_bytes_of_each_producer_rank() -> None:
    with running() as sides:
        size = sum(
            memory.length
            for session in sides[0].sessions.values()
            for memory in session.cache.memory
        )
        result = run("check", *named(*sides), "--move")
    assert 0 == result.exit_code, result.output
    assert f"moved: {size:,} B of 2 producer ranks" in result.stdout
    assert "not moved: anything into the consumer" in result.stdout


def test_check_fails_when_nothing_can_be_moved() -> None:
    """The ranks answer, but the NIXL agent of one is gone."""
    with running() as (producer, consumer):
        list(producer.sessions.values())[1].nixl.close()
        result = run("check", *named(producer, consumer), "--move", "--timeout=2")
    assert 1 == result.exit_code
    assert "NO: moving from tp1" in result.stdout


def test_check_reads_from_all_ranks_at_the_same_time() -> None:
    """No read ends before both ranks are read, so one silent rank delays no other."""
    flights: list[FakeFlight] = []

    def land(flight: FakeFlight) -> None:
        flights.append(flight)
        for each in flights if len(flights) > 1 else ():
            each.land()

    with running() as (producer, consumer):
        binding.bindings().fate = land
        result = run("check", *named(producer, consumer), "--move", "--timeout=5")
    assert 0 == result.exit_code, result.output
    assert "of 2 producer ranks into" in result.stdout


def test_check_of_one_side_accepts_an_engine_with_all_ranks() -> None:
    with running() as (producer, consumer):
        for side in (named(producer, None), named(None, consumer)):
            assert 0 == run("check", *side).exit_code
        assert 1 == run("check", *named(None, consumer), "--move").exit_code


@pytest.mark.parametrize("command", ["check", "verify"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"consumer": engine(1, dtype="int8")}, "dtype"),
        ({"D": {"model": "qwen"}}, "model: producer 'llama', consumer 'qwen'"),
        ({"D": {"revision": "2"}}, "revision"),
        ({"D": {"heartbeat": 29.0}}, "heartbeat"),
        ({"consumer": engine(1, heads=4)}, "total_num_kv_heads"),
    ],
)
def test_engines_that_do_not_fit_are_refused(
    command: str, other: dict[str, Any], words: str
) -> None:
    with running(**other) as sides:
        result = run(command, *named(*sides))
    assert 1 == result.exit_code, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("NO:")]
    assert words in line


def test_every_difference_is_a_line() -> None:
    with running(D={"model": "qwen", "revision": "2"}) as sides:
        result = run("check", *named(*sides))
    assert 2 == result.stdout.count("NO: producer and consumer:")


def test_missing_rank_is_named() -> None:
    with running() as (producer, consumer):
        result = run("check", f"--producer={producer.addresses[0]}", *named(None, consumer))
    assert 1 == result.exit_code
    assert "NO: producer: the engine has 2 ranks: pass the address of tp1 too" in result.stdout


def test_same_engine_on_both_sides_is_refused() -> None:
    with running() as (producer, _):
        result = run("check", *named(producer, producer))
    assert 1 == result.exit_code
    assert "an engine cannot connect to itself" in result.stdout


def test_ranks_of_two_engines_on_one_side_are_refused() -> None:
    with running() as (producer, consumer):
        both = ",".join([*producer.addresses, *consumer.addresses])
        result = run("check", f"--producer={both}")
    assert 1 == result.exit_code
    assert "all ranks of one engine have the same name" in result.stdout


def test_rank_at_two_addresses_is_named() -> None:
    """An old process of the rank still runs."""
    with (
        running() as (producer, _),
        Side("P", engine(2), polled=False, background=True, model="llama") as old,
    ):
        result = run("check", *named(producer, None), *named(old, None))
    assert 1 == result.exit_code
    assert "rank tp0 is at several addresses" in result.stdout


def test_another_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (producer, _):
        monkeypatch.setenv("KVSPEC_SECRET", "another secret, as long")
        result = run("check", *named(producer, None), "--timeout=2")
    assert 1 == result.exit_code
    assert 2 == result.stdout.count("by the process there: it has another secret")


def test_missing_secret_is_invalid_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSPEC_SECRET")
    result = run("check", "--producer=127.0.0.1:9")
    assert 2 == result.exit_code
    assert "KVSPEC_SECRET" in result.stderr


def test_no_secret_reads_engines_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sessions were opened with ``secret=b""``, which the environment cannot express."""
    with FakeNixl(), closing(TcpChannel()) as channel:
        cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=4)
        from kvspec.nixl import NixlRank  # noqa: PLC0415
        from kvspec.session import Session  # noqa: PLC0415

        monkeypatch.delenv("KVSPEC_SECRET")
        with (
            NixlRank(secret=b"") as nixl,
            Session(
                nixl, cache, engine_id="P", owner=storage, channel=channel, background=True
            ) as session,
        ):
            address = session.channel.address
            assert 0 == run("check", f"--producer={address}", "--no-secret").exit_code


@contextmanager
def silent() -> Iterator[str]:
    """Yield the address of a process that accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def web() -> Iterator[str]:
    """Yield the address of an HTTP server."""

    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def babbling() -> Iterator[str]:
    """Yield the address of a process that sends random bytes to everybody."""
    server = socket.create_server(("127.0.0.1", 0))
    noise = np.random.default_rng(0).bytes(1 << 16)

    def serve() -> None:
        with closing(server):
            while True:
                try:
                    made, _ = server.accept()
                except OSError:
                    return
                with made:
                    try:
                        made.sendall(noise)
                        made.recv(1)
                    except OSError:
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    thread.join(5.0)


@contextmanager
def nobody() -> Iterator[str]:
    """Yield an address where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (nobody, "no process accepts connections there"),
        (silent, "silent"),
        (web, "is no session"),
        (babbling, "is no session"),
    ],
)
def test_whatever_is_at_an_address_is_named_in_time(there: Any, words: str) -> None:
    start = time.monotonic()
    with running() as (_, consumer), there() as address:
        result = run("check", f"--producer={address}", *named(None, consumer), "--timeout=3")
    assert 1 == result.exit_code
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("NO:")]
    assert words in line
    assert address in line
    assert time.monotonic() - start < 20.0


@pytest.mark.parametrize(("there", "words"), [(web, "is no session"), (silent, "silent")])
def test_slow_machine_does_not_change_the_words(
    monkeypatch: pytest.MonkeyPatch, there: Any, words: str
) -> None:
    """The command gets the CPU so seldom that each look at its connections takes seconds."""
    receive = TcpChannel.receive

    def slow(channel: TcpChannel) -> list[tuple[str, bytes]]:
        time.sleep(1.3)
        return receive(channel)

    monkeypatch.setattr(TcpChannel, "receive", slow)
    with there() as address:
        result = run("check", f"--producer={address}", "--timeout=1.5")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("NO:")]
    assert words in line
    assert "host name" not in line


def test_more_addresses_than_descriptors_for_each_are_asked() -> None:
    """A channel for each address would need seven descriptors for each, and a thread."""
    with ExitStack() as stack:
        words = ",".join(stack.enter_context(silent()) for _ in range(64))
        threads = threading.active_count()
        descriptors = Path("/proc/self/fd")
        before, counts = len([*descriptors.iterdir()]), list[tuple[int, int]]()
        receive = TcpChannel.receive

        def counted(channel: TcpChannel) -> list[tuple[str, bytes]]:
            counts.append((len([*descriptors.iterdir()]), threading.active_count()))
            return receive(channel)

        stack.enter_context(pytest.MonkeyPatch.context()).setattr(TcpChannel, "receive", counted)
        result = run("check", f"--producer={words}", "--timeout=1")
    assert 64 == result.stdout.count("silent")
    assert before + 80 > max(opened for opened, _ in counts)
    assert threads + 2 > max(active for _, active in counts)


def test_all_addresses_are_asked_at_once() -> None:
    """Eight silent processes take as long as one."""
    start = time.monotonic()
    with ExitStack() as stack:
        words = ",".join(stack.enter_context(silent()) for _ in range(8))
        result = run("check", f"--producer={words}", "--timeout=2")
    assert 8 == result.stdout.count("NO:")
    assert time.monotonic() - start < 20.0


def test_name_without_an_address_is_named_in_time() -> None:
    start = time.monotonic()
    result = run("check", "--producer=no-such-host.invalid:9000", "--timeout=2")
    assert 1 == result.exit_code
    assert "no-such-host.invalid:9000" in result.stdout
    assert time.monotonic() - start < 20.0


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "host", "host:", ":9000", "host:0", "host:0-3", "host:65536", "host:9-8", "host:x"),
        *("host:9000,", "host:1,host:1", "host:1-65535", "http://host:80/"),
    ],
)
def test_wrong_address_is_invalid_input(wrong: str) -> None:
    result = run("check", f"--producer={wrong}")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "producer" in result.stderr


def test_addresses_accept_names_ranges_and_ipv6() -> None:
    words = ["a:1-2", "[::1]:3,b:4", "fd00::5:6"]
    assert ("a:1", "a:2", "::1:3", "b:4", "fd00::5:6") == addresses("producer", words)
    with pytest.raises(SpecError):
        addresses("producer", ["a:1", "a:1"])


def test_commands_without_addresses_are_invalid_input() -> None:
    for arguments in (["check"], ["verify"], ["verify", "--producer=h:1"]):
        assert 2 == run(*arguments).exit_code
    for option in ("--timeout=0", "--timeout=nan", "--tokens=0", "--tokens=131073"):
        assert 2 == run("check", "--producer=127.0.0.1:9", option).exit_code


def test_check_reaches_engines_over_ipv6() -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    channel = lambda _: TcpChannel("::1")  # noqa: E731
    with running(P={"channel": channel}) as (producer, _):
        places = [address.rpartition(":") for address in producer.addresses]
        words = ",".join(f"[{host}]:{port}" for host, _, port in places)
        result = run("check", f"--producer={words}")
    assert 0 == result.exit_code, result.output


def test_verify_judges_the_memory_of_the_engines() -> None:
    with running(engine(2, heads=4), engine(3, heads=4, block=8)) as sides:
        result = run("verify", *named(*sides))
    assert 0 == result.exit_code, result.output
    assert "every byte would come once" in result.stdout


def test_verify_finds_a_wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that reads the first runs of each table from a place 4 bytes further."""
    real = DescriptorTable.tiles

    def shifted(*arguments: Any) -> Any:
        (numbered, tiles), *others = real(*arguments)
        rows = attrs.evolve(numbered.rows, producer_address=numbered.rows.producer_address + 4)
        return [(attrs.evolve(numbered, rows=rows), tiles), *others]

    monkeypatch.setattr(DescriptorTable, "tiles", shifted)
    with running() as sides:
        result = run("verify", *named(*sides))
    assert 1 == result.exit_code, result.output
    assert "NO: a request of" in result.stdout
    assert "read from other bytes" in result.stdout


@pytest.mark.nixl
def test_check_moves_bytes_between_processes() -> None:
    """Over the real NIXL, from another process, as an operator calls it."""
    with Side("P", engine(2), polled=False, background=True) as producer:
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", "kvspec.cli", "check", *named(producer, None), "--move"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=REPO,
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        assert "of 2 producer ranks into this process" in done.stdout
