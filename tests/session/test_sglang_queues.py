"""SGLang's own queues free no memory that a load may still write. A nightly workflow runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_producer as producer
from sglang_serving import Engine, lowest, pages_of, receivers, request, until, wait

from kvspec.adapters.sglang import plugin
from kvspec.adapters.sglang.backend import SUCCESS, TRANSFERRING, WAITING
from kvspec.errors import SpecError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each kernel that a CPU does not have.
    sglang = pytest.importorskip("sglang", reason="SGLang is not installed")
    import torch
    from sglang.srt.disaggregation import decode, utils
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.register()
    HookRegistry.apply_hooks()

pytestmark = [pytest.mark.adapters, pytest.mark.nixl]

TOKENS = producer.PROMPT


class Queue(decode.DecodeTransferQueue):  # type: ignore[misc]
    """SGLang's queue of loads. It has a scheduler with what the queue uses of it."""

    def __init__(self, engine: Engine, rank: int, group: Any) -> None:
        manager = engine.ranks[rank]
        self.gloo_group, self.tp_rank = group, rank
        self.queue, self._deferred_releases = [], []
        self.metadata_buffers = manager.around.buffers
        self.req_to_metadata_buffer_idx_allocator = utils.ReqToMetadataIdxAllocator(4)
        self.scheduler = SimpleNamespace(
            enable_decode_hicache=False,
            output_streamer=SimpleNamespace(stream_output=lambda *_: None),
            metrics_reporter=SimpleNamespace(enable_metrics=False),
        )
        self.enable_staging = self.enable_host_receive = False
        self.enable_deferred_kv_release = manager.enable_deferred_decode_kv_release
        self.deferred_kv_release_timeout = float("inf")
        self.freed: list[int] = []

    def begin(self, receiver: Any, pages: list[int]) -> None:
        """Do what `pop_preallocated` does with a request that has memory."""
        receiver.request.rid = f"{receiver.bootstrap_room}"
        receiver.request.bootstrap_room = receiver.bootstrap_room
        receiver.request.bootstrap_host = "127.0.0.1"
        entry = decode.DecodeRequest(req=receiver.request, kv_receiver=receiver)
        entry.metadata_buffer_index = self.req_to_metadata_buffer_idx_allocator.alloc()
        receiver.send_metadata(pages, entry.metadata_buffer_index, [], 0)
        self.queue.append(entry)

    def _release_request(self, entry: Any) -> None:
        """Note the memory that SGLang frees."""
        self.freed.append(entry.req.bootstrap_room)

    def _clean_hicache_prefetch_resources(self, entry: Any) -> None:
        """Do nothing: the cache has one level."""


def buffers() -> Any:
    """Return SGLang's metadata buffers."""
    return utils.MetadataBuffers(4, 8, torch.float32, 8)


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a prefill engine in a process, and the address of its ticket server."""
    # Through shared memory, a stopped process can still be read.
    monkeypatch.setenv("UCX_TLS", "tcp")
    process, address = producer.start()
    yield process, address
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def moving(
    engine: Engine, prefill: tuple[subprocess.Popen[str], str], queues: list[Queue]
) -> list[Any]:
    """Begin a load from a process that is stopped, so that its bytes arrive later."""
    process, address = prefill
    for room in (1, 2):
        producer.serve(process, room)
    first = receivers(engine, address, 1, request(TOKENS))
    until(WAITING, first)
    own = pages_of(engine, len(TOKENS))
    for receiver in first:
        receiver.send_metadata(own, 3, [], 0)
    until(SUCCESS, first)
    second = receivers(engine, address, 2, request(TOKENS))
    until(WAITING, second)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    for queue, receiver in zip(queues, second, strict=True):
        queue.begin(receiver, own)
    # A load that has posted nothing yet may end at once.
    wait(lambda: all(manager.session.stats().steps > 0 for manager in engine.ranks))
    assert TRANSFERRING == lowest(second)
    return second


def groups(size: int) -> list[Any]:
    """Return the communication groups of *size* ranks, which are threads."""
    store = torch.distributed.HashStore()
    limit = timedelta(seconds=20)
    with ThreadPoolExecutor(size) as threads:
        return list(
            threads.map(
                lambda rank: torch.distributed.ProcessGroupGloo(store, rank, size, limit),
                range(size),
            )
        )


def on_all(queues: list[Queue], call: str) -> None:
    """Call a method of all queues at once, because they wait for each other."""
    with ThreadPoolExecutor(len(queues)) as threads:
        for done in [threads.submit(getattr(queue, call)) for queue in queues]:
            done.result(20)


@pytest.mark.parametrize(("ranks", "fails"), [(1, 0), (2, 0), (2, 1)])
def test_memory_of_failed_request_is_kept_while_bytes_arrive(
    ranks: int, fails: int, prefill: tuple[subprocess.Popen[str], str]
) -> None:
    """One rank fails. Then all ranks stop their loads, and keep the memory."""
    engine = Engine(ranks, 16, 1, buffers=buffers())
    queues = [Queue(engine, rank, group) for rank, group in enumerate(groups(ranks))]
    try:
        receivers_ = moving(engine, prefill, queues)
        if ranks == 1:
            receivers_[0].abort()  # As `Scheduler.abort_request`.
        else:
            receivers_[fails].fail(SpecError("anything", 1, "another"))
        on_all(queues, "pop_transferred")
        for _ in range(3):
            on_all(queues, "resolve_deferred_releases")
        assert [[]] * ranks == [queue.freed for queue in queues]
        assert all(receiver._load.error is not None for receiver in receivers_)
        os.kill(prefill[0].pid, signal.SIGCONT)

        def freed() -> bool:
            on_all(queues, "resolve_deferred_releases")
            return [[2]] * ranks == [queue.freed for queue in queues]

        wait(freed)
        assert all(receiver.kv_mgr.has_room(2) is False for receiver in receivers_)
    finally:
        engine.close()
