"""A session with a low priority beside busy processes still answers in time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

SPIN = "while True: pass"
LOADS = """
import os, sys, time
from tickets_kept import ASKED, kept, ticket_of
from two_engines import Side, engine, until
from kvspec.testing import FakeNixl

os.nice(19)
# A heartbeat each half second, and a lease of four: the threads get little of the CPU.
with (
    FakeNixl(),
    Side("P", engine(1), polled=False, lease=4.0, background=True) as producer,
    Side("D", engine(1), polled=True, heartbeat=0.5, background=True) as consumer,
):
    producer.fill(ASKED)
    consumer.spoil(ASKED)
    tickets = [ticket_of(producer, f"p{number}", lease=6.0) for number in range(3)]
    for ticket in tickets:
        kept(consumer, ticket)
    time.sleep(9.0)
    for ticket in tickets:
        load = consumer.first.load(ASKED, ticket=ticket, timeout=30.0)
        assert load.wait(60.0), load
        assert [] == consumer.wrong(ASKED)
    assert consumer.first.stats().counters.loads_done == 3
print("all are done")
"""


ASKS = """
import os, socket, sys, threading
from kvspec.session.deployment import ask
from kvspec.wire.seal import Secret

server = socket.create_server(("127.0.0.1", 0))

def babble():
    while True:
        made, _ = server.accept()
        made.sendall(b"x" * (1 << 16))
        made.close()

threading.Thread(target=babble, daemon=True).start()
os.nice(19)
address = f"127.0.0.1:{server.getsockname()[1]}"
(answer,) = ask([address], Secret(b"of sixteen bytes"), 1.0).values()
assert "is no session" in str(answer), answer
print("all are done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [LOADS, ASKS], ids=["loads", "asks"])
def test_process_that_gets_little_of_the_cpu_does_all_of_its_work(code: str) -> None:
    """Prompts stay kept for longer than a lease. A process that is no session is named so."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            spinner = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", SPIN])  # noqa: S603 - our own code
            )
            stack.callback(spinner.kill)
        done = subprocess.run(  # noqa: S603 - our own code
            [sys.executable, "-c", code],
            env=environment, capture_output=True, text=True, timeout=120.0, check=False,
        )  # fmt: skip
    assert (0, "all are done\n") == (done.returncode, done.stdout), done.stderr
