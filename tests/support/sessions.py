"""Two engines whose ranks are sessions of one process, over the real NIXL or a fake one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import kvspec
from kvspec.nixl import NixlRank, Staging
from kvspec.session import Load, Session, new_remote_id
from kvspec.testing import oracle
from kvspec.wire.messages import key_of

if TYPE_CHECKING:
    import numpy as np

BLOCKS = 8


def engine(
    tp: int,
    heads: int = 2,
    block: int = 4,
    *,
    size: int = 4,
    state: bool = False,
    dtype: str = "uint8",
    **parallel: Any,
) -> kvspec.EngineSpec:
    """Return an engine with two full layers, a layer with a window, and an optional state."""
    sizes: dict[str, Any] = {"total_num_kv_heads": heads, "head_size": size, "dtype": dtype}
    full = kvspec.FullAttentionSpec(block_size=block, **sizes)
    window = kvspec.SlidingWindowSpec(block_size=block, sliding_window=8, **sizes)
    groups = [
        kvspec.KVCacheGroup(name="full", layers=["l.0", "l.1"], spec=full),
        kvspec.KVCacheGroup(name="window", layers=["w.0"], spec=window),
    ]
    if state:
        conv = kvspec.MambaSpec.short_conv(
            conv_dim=6, conv_kernel=3, dtype="uint8", block_size=block
        )
        groups.append(kvspec.KVCacheGroup(name="state", layers=["s.0"], spec=conv))
    sizes = kvspec.ParallelConfig(tp_size=tp, **parallel)
    return kvspec.EngineSpec(groups=groups, parallel=sizes)


class Direct:
    """A channel inside this process. A message arrives at once."""

    channels: ClassVar[dict[str, Direct]] = {}

    def __init__(self, address: str) -> None:
        self.address, self.came = address, list[tuple[str, bytes]]()
        self.channels[address] = self

    def send(self, route: str, data: bytes) -> None:
        """Append *data* to the messages of the receiver."""
        if route in self.channels:
            self.channels[route].came.append((self.address, data))

    def receive(self) -> list[tuple[str, bytes]]:
        """Return the messages that have arrived."""
        came, self.came = self.came, []
        return came

    def wait(self, timeout: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Remove the channel, so that later messages to it are lost."""
        self.channels.pop(self.address, None)


class Side:
    """One engine of this process: a session and a storage for each rank."""

    def __init__(
        self,
        name: str,
        spec: kvspec.EngineSpec,
        *,
        epoch: int = 1,
        polled: bool,
        staging: Staging | None = None,
        **session: Any,
    ) -> None:
        self.name, self.spec = name, spec
        self.sessions: dict[kvspec.RankId, Session] = {}
        self.storage: dict[kvspec.RankId, dict[str, np.ndarray]] = {}
        self.before: dict[kvspec.RankId, dict[str, np.ndarray]] = {}
        for rank in spec.parallel.ranks:
            cache, storage = kvspec.allocate(spec, rank, num_blocks=BLOCKS)
            nixl = NixlRank(prefix=f"{name}-{rank}-", polled=polled, staging=staging)
            self.sessions[rank] = Session(
                nixl, cache, engine_id=name, epoch=epoch, owner=storage, **session
            )
            self.storage[rank] = storage

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def introductions(self) -> list[bytes]:
        """The introductions of all ranks, which the other side connects with."""
        return [session.introduction for session in self.sessions.values()]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the ranks' channels."""
        return [session.channel.address for session in self.sessions.values()]

    def connect(self, other: Side) -> None:
        """Connect every rank with a producer."""
        for session in self.sessions.values():
            session.connect(other.introductions)

    def hold(self, remote_id: str, **more: Any) -> None:
        """Hold a request on every rank."""
        for session in self.sessions.values():
            session.hold(remote_id, **more)

    def load(self, request: kvspec.TransferRequest, remote_id: str, **more: Any) -> list[Load]:
        """Load a request on every rank."""
        options = {"timeout": 10.0, "remote_id": remote_id} | more
        return [session.load(request, **options) for session in self.sessions.values()]

    def poll(self) -> None:
        """Poll every rank once."""
        for session in self.sessions.values():
            session.poll()

    def fill(self, request: kvspec.TransferRequest, seed: int = 0) -> None:
        """Write a request's true bytes into the producer's ranks, and random bytes elsewhere."""
        for rank, storage in self.storage.items():
            tables = request.producer_blocks
            oracle.fill(self.spec, rank, storage, BLOCKS, tables, request, seed=seed)

    def spoil(self, request: kvspec.TransferRequest, seed: int = 0) -> None:
        """Write wrong bytes into the consumer's ranks where the request must write."""
        for rank, storage in self.storage.items():
            tables = request.consumer_blocks
            oracle.spoil(self.spec, rank, storage, BLOCKS, tables, request, seed=seed)
            self.before[rank] = {name: flat.copy() for name, flat in storage.items()}

    def wrong(self, request: kvspec.TransferRequest, seed: int = 0) -> list[str]:
        """Return every difference between the consumer's bytes and the oracle's."""
        return [
            f"{rank}: {line}"
            for rank, storage in self.storage.items()
            for line in oracle.check(
                self.spec, rank, self.before[rank], storage, BLOCKS, request.consumer_blocks,
                request, seed=seed,
            )
        ]  # fmt: skip

    def settled(self) -> tuple[list[str], list[str]]:
        """Return the request ids that any rank has freed: first as done, then otherwise."""
        settled = [session.settled() for session in self.sessions.values()]
        done = [key_of(name).request_id for some in settled for name in some.done]
        other = [
            key_of(name).request_id for some in settled for name in (*some.expired, *some.aborted)
        ]
        return sorted(done), sorted(other)

    def close(self) -> None:
        """Close all sessions and NIXL ranks."""
        for session in self.sessions.values():
            session.close(drain=0.0)
            session.nixl.close(drain=0.0)


def request(name: str = "r", tokens: int = 14, cached: int = 0, **more: Any) -> Any:
    """Return a request of *tokens* in blocks 1, 2, 3, ... of both sides, 4 tokens each.

    The consumer's table is reversed, so that a swap of the two tables is noticed.
    """
    blocks = list(range(1, -(-tokens // 4) + 1))
    tables: dict[str, Any] = {
        "producer_blocks": {"full": blocks, "window": blocks},
        "consumer_blocks": {"full": blocks[::-1], "window": blocks[::-1]},
    }
    return kvspec.TransferRequest(
        request_id=name, num_tokens=tokens, cached_tokens=cached, **tables | more
    )


def until(true: Callable[[], Any], *sides: Side, seconds: float = 20.0) -> None:
    """Poll the *sides* until *true* returns a true value."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"the condition stayed false for {seconds} s"
        for side in sides:
            side.poll()
        time.sleep(2e-4)  # Other threads and processes of the test need the core.


__all__ = ["Side", "engine", "new_remote_id", "request", "until"]
