"""Test that interrupts, signals, exits and wrong settings cause no crash, hang or wrong byte.

Each test runs its code in a process of its own, because a failure may end that process.
"""

from __future__ import annotations

import pytest

pytest.importorskip("nixl_cu13", reason="needs nixl")

from nixl_pair import run_script

pytestmark = pytest.mark.nixl

INTERRUPTED = """
import numpy as np
from kvspec.nixl import NixlRank, merging
from kvspec.nixl.agent import Agent
from nixl_pair import Pair

merging.MAX_DESCRIPTORS = 1
release = Agent.release

def interrupted(agent, handle):
    release(agent, handle)
    raise KeyboardInterrupt  # A signal handler may raise at this moment.

with NixlRank(polled=True) as near, NixlRank() as far:
    ranks = Pair(near, far)
    transfer = ranks.read(0, 20)
    Agent.release = interrupted
    try:
        transfer.poll()
    except KeyboardInterrupt:
        print("interrupted")
    Agent.release = release
    {then}
print(near.stats().handles)
"""


@pytest.mark.parametrize(
    "then",
    ["transfer.wait(); assert ranks.right(0, 20)", "near.close()"],
    ids=["goes on", "closes"],
)
def test_interrupted_release_leaves_no_freed_handle(then: str) -> None:
    """The transfer drops a handle before NIXL frees it, so nothing uses the handle again."""
    done = run_script(INTERRUPTED.format(then=then))
    assert (0, "interrupted\n0\n") == (done.returncode, done.stdout), done.stderr


UNANSWERED = """
import threading, time
from kvspec.nixl import NixlRank, merging
from kvspec.nixl.agent import Agent
from nixl_pair import Pair

near, far = NixlRank(), NixlRank(polled=True)  # The far rank is never polled, so nothing arrives.
ranks = Pair(near, far)
"""


def test_interrupted_close_is_completed_by_a_second_close() -> None:
    """The second `close` releases everything that the first one left."""
    code = """
release = Agent.release

def interrupted(agent, handle):
    release(agent, handle)
    raise KeyboardInterrupt

transfer = ranks.read(0, 20)
assert (transfer.state, near.stats().handles) == ("PROC", 1)
Agent.release = interrupted
try:
    near.close()
except KeyboardInterrupt:
    print("interrupted")
Agent.release = release
near.close()
far.close()
print(near.stats().handles)
"""
    done = run_script(UNANSWERED + code, UCX_TLS="tcp")
    assert (0, "interrupted\n0\n") == (done.returncode, done.stdout), done.stderr


def test_transfer_interrupted_by_signals_releases_its_handles() -> None:
    """A signal handler raises at random moments. Each transfer moves right bytes or fails."""
    code = """
import random, signal, sys
from kvspec.errors import TransferError
from kvspec.nixl import NixlRank, merging
from nixl_pair import Pair
import time

class Alarm(Exception):
    pass

armed = False
def ring(*_):
    if armed:
        raise Alarm

merging.MAX_DESCRIPTORS = 2
signal.signal(signal.SIGALRM, ring)
end, alarms, done = time.monotonic() + 60, 0, 0
with NixlRank(polled=True) as near, NixlRank() as far:
    ranks = Pair(near, far)
    rows = [(0, 512, 1024, 40)]
    lists, ids = ranks.lists(rows, rows), __import__("numpy").arange(40)
    while alarms < 1000 and time.monotonic() < end:  # A busy machine has fewer in a second.
        ranks.local[:] = 0
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
        try:
            armed = True
            transfer = near.read(lists[0], ids, lists[1], ids, request="r", timeout=5)
            transfer.wait()
            armed = False
            done += 1
            assert ranks.right(0, 40)
        except Alarm:
            armed = False
            alarms += 1
        except TransferError as error:
            armed = False
            assert error.state == "interrupted", error
        signal.setitimer(signal.ITIMER_REAL, 0)
        for left in near.transfers:  # The caller has no transfer if `read` was interrupted.
            try:
                left.wait()
            except TransferError as error:
                assert error.state == "interrupted", error
    print(alarms > 100, near.stats().handles, near.stats().transfers)
"""
    done = run_script(code)
    assert (0, "True 0 0\n") == (done.returncode, done.stdout), done.stderr


def test_rank_keeps_the_signal_handler_of_python() -> None:
    """UCX replaces the handler of SIGHUP unless a variable is set before it is loaded."""
    code = """
import os, signal
from kvspec.nixl import NixlRank

signal.signal(signal.SIGHUP, lambda *_: print("hung up", flush=True))
with NixlRank(polled=True):
    os.kill(os.getpid(), signal.SIGHUP)
"""
    done = run_script(code)
    assert (0, "hung up\n") == (done.returncode, done.stdout), done.stderr


@pytest.mark.parametrize("tls", ["all", pytest.param("tcp", marks=pytest.mark.slow)])
def test_interpreter_exits_cleanly_while_threads_wait(tls: str) -> None:
    """The ranks are closed before the interpreter, so the exit status is that of the script."""
    code = """
import threading, time
import numpy as np
from kvspec.nixl import NixlRank
from nixl_pair import memory, table
from notified import notifications

near, far = NixlRank(), NixlRank()
local, remote = np.zeros(1 << 26, np.uint8), np.ones(1 << 26, np.uint8)
near.register([memory(local)], local)
far.register([memory(remote)], remote)
rows, count = [(0, 2048, 4096, 1 << 14)], 1 << 12
lists = [near.prepare(table(local.ctypes.data, rows))]
lists.append(near.prepare(table(remote.ctypes.data, rows), peer=near.connect(far.metadata())))

def work(number):
    ids = np.arange(count) + count * number
    while True:
        near.read(lists[0], ids, lists[1], ids, request="r", timeout=60).wait()

def listen():
    while True:
        notifications(far)

for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
for _ in range(2):
    threading.Thread(target=listen, daemon=True).start()
time.sleep(0.3)
raise SystemExit(7)
"""
    assert [7] * 3 == [run_script(code, UCX_TLS=tls).returncode for _ in range(3)]


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_rank_with_unknown_network_device_is_refused(tls: str) -> None:
    """The message names the setting. UCX prints the devices of the machine before."""
    code = "from kvspec.nixl import NixlRank; NixlRank('never', polled=True)"
    done = run_script(code, UCX_NET_DEVICES="nowhere0", UCX_TLS=tls)
    assert 1 == done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert "UCX_NET_DEVICES" in last
    assert "state=unavailable" in last
    assert "'nowhere0'" in done.stdout
    assert "'lo'" in done.stdout


@pytest.mark.parametrize(
    ("zeros", "environment"),
    [
        (True, {"UCX_TLS": "tcp"}),
        (True, {"UCX_TLS": "tcp,self"}),
        (False, {"UCX_TLS": "all"}),
        (False, {"UCX_TLS": "tcp", "MALLOC_PERTURB_": "0"}),
        (False, {"UCX_TLS": "tcp", "GLIBC_TUNABLES": "glibc.malloc.perturb=0"}),
    ],
)
def test_malloc_returns_zeros_to_ucx_only_over_tcp(
    zeros: bool, environment: dict[str, str]
) -> None:
    """UCX over tcp reads a field that it has not set. A user who tunes malloc decides instead."""
    code = """
import ctypes
from kvspec.nixl import NixlRank

SIZE = 41048  # as much as UCX allocates for a pool
OWN = 64  # bytes of free memory in which the allocator keeps its lists
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
with NixlRank(polled=True):
    used = libc.malloc(SIZE)
    ctypes.memset(used, 7, SIZE)
    libc.free(ctypes.c_void_p(used))
    again = libc.malloc(SIZE)
    assert used == again
    print(set(ctypes.string_at(again + OWN, SIZE - OWN)))
"""
    done = run_script(code, **environment)
    assert (0, f"{ {0} if zeros else {7} }\n") == (done.returncode, done.stdout), done.stderr
