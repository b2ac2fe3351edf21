"""A prefill engine of one rank in a process of its own, which can be stopped.

It holds prompts of the tokens `PROMPT` under the rooms in its arguments, and prints the address of
its ticket server. Each following line of its input is a room that it holds, too.
"""

from __future__ import annotations

import subprocess
import sys
import time

from sglang_serving import Engine, pages_of, request, senders

from kvspec.adapters.sglang.backend import SUCCESS
from kvspec.adapters.sglang.tickets import TicketServer

PROMPT = list(range(100, 137))
PAGE = 16


def start() -> tuple[subprocess.Popen[str], str]:
    """Start the process. Return it, and the address of its ticket server."""
    process = subprocess.Popen(  # noqa: S603 - this file
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def serve(process: subprocess.Popen[str], room: int) -> None:
    """Let the process hold the prompt under *room*, and wait until it does."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{room}\n")
    process.stdin.flush()
    assert f"{room}" == process.stdout.readline().strip()


def main() -> None:
    """Run the process."""
    server = TicketServer("127.0.0.1", 0)
    engine = Engine(1, PAGE, int(server.address.rpartition(":")[2]))
    print(server.address, flush=True)  # noqa: T201
    own = pages_of(engine, len(PROMPT))
    open_ = []
    for line in sys.stdin:
        room = int(line)
        engine.fill(own, len(PROMPT), seed=room)
        (sender,) = senders(engine, server.address, room, request(PROMPT))
        sender.init(len(own), 0)
        sender.send(own, None, len(PROMPT))
        open_.append(sender)
        while server.found([room]) == b"{}":
            time.sleep(0.01)
        print(room, flush=True)  # noqa: T201
        for one in open_:
            if one.poll() == SUCCESS:
                one.clear()


if __name__ == "__main__":
    main()
