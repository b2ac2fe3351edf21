"""An engine as its connectors see it: one in the scheduler, one in each worker, and requests.

Of vLLM only the base class is made up here, and what calls its methods; sessions, NIXL and memory
are real.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import vllm_like as like

import kvspec
from kvspec.adapters.vllm.worker_info import WorkerInfo, whole_engine
from kvspec.testing import oracle

BLOCKS, SIZE = 12, 8
FULL, WINDOW = ("model.layers.0.attn", "model.layers.1.attn"), ("model.layers.2.attn",)

CONNECTOR = "kvspec.adapters.vllm.connector"

WORLDS: list[World] = []
"""Of the engines that were made, the last one's."""


class World:
    """The workers of one engine, each in a thread of its own, as they talk to each other."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self._barrier, self._own = threading.Barrier(size), threading.local()
        self._said: dict[int, bytes] = {}

    @property
    def rank_in_group(self) -> int:
        """Who asks."""
        return int(self._own.rank)

    def broadcast_object(self, own: Any, src: int) -> Any:
        """Return what *src* gives."""
        if self.rank_in_group == src:
            self._said[src] = pickle.dumps(own)
        self._barrier.wait(20)
        return pickle.loads(self._said[src])  # noqa: S301

    def run(self, calls: list[Callable[[], Any]]) -> None:
        """Run the *calls*, one in each worker."""

        def work(rank: int) -> None:
            self._own.rank = rank
            calls[rank]()

        with ThreadPoolExecutor(self.world_size) as threads:
            for _ in threads.map(work, range(self.world_size)):
                pass


class Base:
    """What the connector uses of vLLM's `KVConnectorBase_V1`."""

    def __init__(self, _: Any, __: Any, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._kv_cache_config = kv_cache_config

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Hold what the scheduler says, for a step."""
        self._connector_metadata = connector_metadata


@dataclass
class Results:
    """`KVConnectorTransferResults`."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let `import vllm` find the little that the connector imports of it."""
    base = {"KVConnectorBase_V1": Base, "SupportsHMA": type("SupportsHMA", (), {})}
    modules = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": base
        | {"KVConnectorTransferResults": Results},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: WORLDS[-1]},
    }
    found: dict[str, ModuleType] = {}
    for path, contents in modules.items():
        names = path.split(".")
        for count in range(1, len(names) + 1):
            name = ".".join(names[:count])
            found.setdefault(name, ModuleType(name))
            if count > 1:
                setattr(found[".".join(names[: count - 1])], names[count - 1], found[name])
        vars(found[path]).update(contents)
    sys.modules.pop(CONNECTOR, None)
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in (*found, CONNECTOR):
            sys.modules.pop(name, None)


def made(vllm_config: Any, role: str, config: Any) -> Any:
    """Return the connector that vLLM would have made."""
    cls = importlib.import_module(CONNECTOR).KvspecConnector
    return cls(vllm_config, SimpleNamespace(name=role), config)


@dataclass
class Request:
    """vLLM's `Request`, of so many tokens."""

    request_id: str
    tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    max_tokens: int = 16
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_LENGTH_CAPPED"))

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(range(self.tokens))
        self._all_token_ids = list(range(self.tokens))
        self.num_prompt_tokens = self.tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those that were generated."""
        return len(self._all_token_ids)


class Layer:
    """An attention layer of a worker."""

    @staticmethod
    def get_attn_backend() -> Any:
        """Return the backend."""
        return SimpleNamespace(full_cls_name=lambda: tuple(like.FLASH.rsplit(".", 1)))


def configs(
    name: str, rank: int, tp: int, block: int, extra: dict[str, Any], pp: int = 1
) -> tuple[Any, Any]:
    """Return the VllmConfig and KVCacheConfig of a worker: two full layers, one with a window.

    Of two stages, the second has the window alone.
    """
    heads = {"block_size": block, "num_kv_heads": 6 // tp, "head_size": SIZE, "dtype": "uint8"}
    full, window = (
        like.FullAttentionSpec(**heads),
        like.SlidingWindowSpec(sliding_window=8, **heads),
    )
    stage = rank // tp
    layers = (FULL if not stage else (), WINDOW if stage == pp - 1 else ())
    config: Any = like.config((layers[0], full), (layers[1], window), num_blocks=BLOCKS)
    config.kv_cache_layout, config.transfer_group_ids = "LBHNC", (0, 1)
    config.needs_kv_cache_zeroing = extra.pop("zeroing", False)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank, world_size=tp * pp
        ),
        model_config=SimpleNamespace(
            model="tiny",
            revision=None,
            get_total_num_kv_heads=lambda: 6,
            get_total_num_hidden_layers=lambda: 3,
            hf_text_config=None,
        ),
        cache_config=None,
        compilation_config=SimpleNamespace(
            static_forward_context=dict.fromkeys((*layers[0], *layers[1]), Layer())
        ),
        kv_transfer_config=SimpleNamespace(engine_id=name, kv_connector_extra_config=extra),
        speculative_config=None,
    )
    return vllm_config, config


class Engine:
    """An engine: connectors of its scheduler and of each worker, and the workers' memory."""

    def __init__(self, name: str, tp: int = 1, block: int = 4, pp: int = 1, **extra: Any) -> None:
        self.block, self.workers, self.storage = block, [], {}
        self.before: dict[kvspec.RankId, Any] = {}
        given = [
            configs(name, number, tp, block, {"timeout": 5.0, **extra}, pp)
            for number in range(tp * pp)
        ]
        self.workers = [made(vllm_config, "WORKER", config) for vllm_config, config in given]
        told = [WorkerInfo.of(*both) for both in given]
        self.spec = whole_engine(given[0][0], told, {})
        WORLDS.append(World(len(given)))
        calls = []
        for rank, worker in zip(self.spec.parallel.ranks, self.workers, strict=True):
            _, self.storage[rank] = kvspec.allocate(self.spec, rank, BLOCKS)
            tensors = self._tensors(self.storage[rank], 6 // tp)
            calls.append(partial(worker.register_kv_caches, tensors))
        WORLDS[-1].run(calls)
        self.scheduler = made(given[0][0], "SCHEDULER", given[0][1])
        known = {(n // tp, n % tp): w.get_handshake_metadata() for n, w in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(known)
        self.sent, self.received, self.failed = (dict[str, int]() for _ in range(3))

    def _tensors(self, storage: dict[str, Any], heads: int) -> dict[str, Any]:
        shape = (BLOCKS, heads, self.block, 2 * SIZE)
        found = {}
        for group, layers in (("group0", FULL), ("group1", WINDOW)):
            if group in storage:
                views = storage[group].reshape(len(layers), *shape)
                found |= dict(zip(layers, views, strict=True))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for one in (*self.workers, self.scheduler):
            one.shutdown()

    def step(self) -> None:
        """Do what vLLM does in a step: tell the workers, hear what they have to say."""
        said = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(None)))  # noqa: S301
        for worker in self.workers:
            worker.bind_connector_metadata(said)
            worker.start_load_kv(None)
            results = worker.get_transfer_results(set())
            for heard, names in (
                (self.sent, results.finished_sending),
                (self.received, results.finished_recving),
                (self.failed, results.failed_recving),
            ):
                heard.update({name: heard.get(name, 0) + 1 for name in names})

    def prefill(self, request: Request, *tables: list[int]) -> dict[str, Any] | None:
        """Serve a prompt for another engine; return what a router passes on."""
        request.kv_transfer_params = {"do_remote_decode": True}
        self.scheduler.on_new_request(request)
        request.num_computed_tokens = request.num_prompt_tokens
        held, params = self.scheduler.request_finished_all_groups(request, tables)
        assert held is (params is not None)
        return json.loads(json.dumps(params))  # type: ignore[no-any-return]

    def decode(self, request: Request, *tables: list[int], cached: int = 0) -> tuple[int, bool]:
        """Take a request, *cached* tokens of which are here; return what vLLM has to wait for."""
        self.scheduler.on_new_request(request)
        count, waits = self.scheduler.get_num_new_matched_tokens(request, cached)
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        self.scheduler.update_state_after_alloc(request, blocks, count)
        self.scheduler.update_state_after_alloc(request, blocks, 0)  # when it is to run
        return count, waits

    def fill(self, asked: kvspec.TransferRequest) -> None:
        """Give the ranks the true bytes of a request, as a producer."""
        for rank, storage in self.storage.items():
            oracle.fill(self.spec, rank, storage, BLOCKS, asked.producer_blocks, asked)

    def spoil(self, asked: kvspec.TransferRequest) -> None:
        """Give the ranks wrong bytes wherever a request has to be written, as a consumer."""
        for rank, storage in self.storage.items():
            oracle.spoil(self.spec, rank, storage, BLOCKS, asked.consumer_blocks, asked)
            self.before[rank] = {name: flat.copy() for name, flat in storage.items()}

    def wrong(self, asked: kvspec.TransferRequest) -> list[str]:
        """Return what is wrong with the bytes of a consumer."""
        tables = asked.consumer_blocks
        return [
            f"{rank}: {line}"
            for rank, storage in self.storage.items()
            for line in oracle.check(
                self.spec, rank, self.before[rank], storage, BLOCKS, tables, asked
            )
        ]


def until(true: Callable[[], Any], *engines: Engine, seconds: float = 30.0) -> None:
    """Step the *engines* until something is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        for engine in engines:
            engine.step()
        time.sleep(1e-3)
