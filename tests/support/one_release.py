"""One rank of an engine, with any release of the package. It obeys lines of JSON.

It uses only names that all releases since version 10 of the wire format have.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from typing import Any

import numpy as np

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Session, TcpChannel, new_remote_id
from kvspec.session.holds import Settled
from kvspec.wire import VERSION

TABLES = {"full": [1, 2, 3]}
# The option of a load that compares checksums. It was `verify` until version 11.
CHECKSUM = "checksum" if "checksum" in inspect.signature(Session.load).parameters else "verify"
# The field of the messages that changed nothing.
REFUSED = "refused" if hasattr(Settled(), "refused") else "foreign"
HEADS = (b"kvspec-message\n", b"kvspec-handshake\n")


class Recording(TcpChannel):
    """A channel that records the versions of what it sends."""

    versions: set[int] = set()  # noqa: RUF012 - one channel in a process

    def send(self, route: str, *messages: bytes) -> None:
        """Record the version of each message, and send it."""
        for data in messages:
            for head in HEADS:
                if (at := data.find(head)) >= 0:
                    start = at + len(head)
                    self.versions.add(int.from_bytes(data[start : start + 2], "big"))
        super().send(route, *messages)


def request(name: str) -> kvspec.TransferRequest:
    """Return a request of twelve tokens."""
    return kvspec.TransferRequest(
        request_id=name, num_tokens=12, producer_blocks=TABLES, consumer_blocks=TABLES
    )


def main(name: str) -> None:  # noqa: C901 - one branch for each command
    """Open the session and obey."""
    spec = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=4, dtype="uint8")
    group = kvspec.KVCacheGroup(name="full", layers=["l.0"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    cache, storage = kvspec.allocate(engine, kvspec.RankId(), num_blocks=8)
    flat: Any = next(iter(storage.values()))
    blocks = flat.reshape(8, -1)
    with (
        NixlRank(prefix=f"{name}-") as nixl,
        Session(
            nixl, cache, engine_id=name, owner=storage, channel=Recording(), background=True
        ) as session,
    ):

        def answer(value: object) -> None:
            sys.stdout.write(json.dumps(value) + "\n")
            sys.stdout.flush()

        def digest() -> str:
            return hashlib.sha256(np.ascontiguousarray(blocks[1:4]).tobytes()).hexdigest()

        freed: list[str] = []
        answer([session.channel.address, VERSION])
        for line in sys.stdin:
            command = json.loads(line)
            if "connect" in command:
                session.connect(session.fetch([command["connect"]], timeout=20.0))
                answer("connected")
            elif "hold" in command:
                blocks[:] = np.random.default_rng(command["seed"]).integers(0, 256, blocks.shape)
                remote_id = new_remote_id(command["hold"])
                session.hold(remote_id, blocks={"full": kvspec.BlockTable(TABLES["full"])})
                if command.get("progress"):
                    session.record_progress(remote_id, 12)  # Releases before version 12 alone.
                answer(remote_id)
            elif "follow" in command:
                remote_id = command["follow"]
                follows: dict[str, Any] = {"follow": True}
                load = session.load(request(remote_id), remote_id=remote_id, timeout=2.0, **follows)
                while load.poll() == "moving":
                    time.sleep(0.01)
                answer([load.state, load.error and load.error.state])
            elif "digest" in command:
                answer(digest())
            elif "load" in command:
                remote_id = command["load"]
                load = session.load(
                    request(remote_id), remote_id=remote_id, timeout=60.0, **{CHECKSUM: True}
                )
                load.wait()
                answer([load.state, digest()])
            elif "settled" in command:
                end = time.monotonic() + 20.0
                while len(freed) < command["settled"] and time.monotonic() < end:
                    freed += session.settled().done
                    time.sleep(0.01)
                answer(len(freed))
            elif "refused" in command:
                answer(list(getattr(session.settled(), REFUSED)))
            elif "spoken" in command:
                spoken = {*Recording.versions}
                # A message says which version a session speaks with this peer.
                answer(min(spoken) if spoken else VERSION)


main(sys.argv[1])
