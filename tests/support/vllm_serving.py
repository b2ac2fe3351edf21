"""An engine with one connector in the scheduler and one in each worker.

Only vLLM's base class and its callers are imitated. Sessions, NIXL and memory are real.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Self

import attrs
import vllm_like as like

import kvspec
from kvspec.adapters.vllm.worker_info import WorkerInfo, whole_engine
from kvspec.testing import oracle

BLOCKS, SIZE = 12, 8
KEYS = kvspec.KeyContent(rotary="halves", rotary_size=SIZE)
"""What the keys mean. The layers of these workers are in no module that would show it."""
FULL, WINDOW = ("model.layers.0.attn", "model.layers.1.attn"), ("model.layers.2.attn",)
RING = ("model.layers.2.indexer.tail_cache",)

CONNECTOR = "kvspec.adapters.vllm.connector"

# Worlds of the engines that were created. vLLM's code finds the last one.
WORLDS: list[World] = []


class World:
    """The workers of one engine, each in its own thread, and their broadcasts."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self._barrier, self._own = threading.Barrier(size), threading.local()
        self._objects: dict[int, bytes] = {}

    @property
    def rank_in_group(self) -> int:
        """The rank of the calling thread."""
        return int(self._own.rank)

    def broadcast_object(self, own: Any, src: int) -> Any:
        """Return the object of rank *src*."""
        if self.rank_in_group == src:
            self._objects[src] = pickle.dumps(own)
        self._barrier.wait(60)
        return pickle.loads(self._objects[src])  # noqa: S301

    def run(self, calls: list[Callable[[], Any]]) -> None:
        """Run the *calls*, one in each worker. If one raises, the others wait no longer."""
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self._own.rank = rank
            try:
                calls[rank]()
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as threads:
            wait([threads.submit(work, rank) for rank in range(self.world_size)])
        if errors:  # The first one broke the barrier of the others.
            raise errors[0]


class Base:
    """The part of vLLM's `KVConnectorBase_V1` that the connector uses."""

    _cache_hit_source: Any = None

    def __init__(self, _: Any, __: Any, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._kv_cache_config = kv_cache_config

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Keep the scheduler's metadata for one step."""
        self._connector_metadata = connector_metadata

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the scheduler's manager of the caches."""

    def request_finished(self, _: Any, __: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Hold nothing, as a connector that does not override it."""
        return False, None


@dataclass
class Manager:
    """The part of vLLM's manager of one group that chooses the blocks of the prefix cache.

    *num_cached_block* is the number of hashed blocks of each request.
    """

    block_size: int
    num_cached_block: dict[str, int] = field(default_factory=dict)

    def allocate(self, request_id: str, ids: list[int], cached: int) -> None:
        """Count the cached blocks and the null blocks before the window as hashed."""
        nulls = next((place for place, block in enumerate(ids) if block), len(ids))
        self.num_cached_block[request_id] = max(nulls, cached // self.block_size)

    def cache_blocks(self, request_id: str, ids: list[int], num_tokens: int) -> list[int]:
        """Return the blocks of a request of *num_tokens* that vLLM hashes now."""
        places = range(self.num_cached_block[request_id], num_tokens // self.block_size)
        return [ids[place] for place in places if ids[place]]


@dataclass
class Block:
    """A block of vLLM, and the number of its users."""

    block_id: int
    ref_cnt: int = 0

    @property
    def is_null(self) -> bool:
        """Return whether it stands for a block that was freed."""
        return self.block_id == 0


class Pool:
    """The part of vLLM's `BlockPool` that counts the users of blocks."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(BLOCKS)]

    def touch(self, blocks: list[Block]) -> None:
        """Add a user to *blocks*."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterator[Block]) -> None:
        """Remove a user from *blocks*."""
        for block in blocks:
            block.ref_cnt -= 1

    def used(self) -> list[int]:
        """Return the blocks that have users."""
        return [block.block_id for block in self.blocks if block.ref_cnt]


@dataclass
class Results:
    """The class `KVConnectorTransferResults`."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@dataclass
class Stats:
    """The class `KVConnectorStats`."""

    data: dict[str, Any] = field(default_factory=dict)


class PromBase:
    """The class `KVConnectorPromMetrics`: it keeps the classes of the metrics."""

    def __init__(self, _: Any, types: Any, __: Any, labels: dict[int, list[Any]]) -> None:
        self._gauge_cls, self._counter_cls, self._histogram_cls = types
        self.per_engine_labelvalues = labels


class Factory:
    """The part of `KVConnectorFactory` by which MultiConnector finds the class of its numbers."""

    registry: ClassVar[dict[str, str]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a class by its name."""
        if name in cls.registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.registry[name] = f"{module_path}.{class_name}"


class Source(enum.Enum):
    """The class `CacheHitSource`."""

    P2P = "p2p"
    DISK = "disk"
    EXTERNAL = "external_unspecified"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make `import vllm` find the few names that the connector imports."""
    Base._cache_hit_source = Source.EXTERNAL
    base = {"KVConnectorBase_V1": Base, "SupportsHMA": type("SupportsHMA", (), {})}
    modules = {
        "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": Factory},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": base
        | {"KVConnectorTransferResults": Results},
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorStats": Stats,
            "KVConnectorPromMetrics": PromBase,
        },
        "vllm.distributed.parallel_state": {"get_world_group": lambda: WORLDS[-1]},
        "vllm.v1.worker.gpu_worker": {"Worker": type("Worker", (), {"reload_weights": id})},
    }
    created: dict[str, ModuleType] = {}
    for path, contents in modules.items():
        names = path.split(".")
        for count in range(1, len(names) + 1):
            name = ".".join(names[:count])
            created.setdefault(name, ModuleType(name))
            if count > 1:
                setattr(created[".".join(names[: count - 1])], names[count - 1], created[name])
        vars(created[path]).update(contents)
    sys.modules.pop(CONNECTOR, None)
    sys.modules.update(created)
    try:
        yield
    finally:
        for name in (*created, CONNECTOR):
            sys.modules.pop(name, None)


def made(vllm_config: Any, role: str, config: Any) -> Any:
    """Return the connector that vLLM would create."""
    cls = importlib.import_module(CONNECTOR).KvspecConnector
    return cls(vllm_config, SimpleNamespace(name=role), config)


@dataclass
class Request:
    """vLLM's `Request` with *tokens* tokens."""

    request_id: str
    tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    max_tokens: int = 16
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_LENGTH_CAPPED"))
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    cache_salt: str | None = None
    abort_immediately: bool = False

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(range(self.tokens))
        self._all_token_ids = list(range(self.tokens))
        self.num_prompt_tokens = self.tokens
        self.output_token_ids = [5]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated tokens."""
        return len(self._all_token_ids)


class Layer:
    """An attention layer of a worker."""

    @staticmethod
    def get_attn_backend() -> Any:
        """Return the backend."""
        return SimpleNamespace(full_cls_name=lambda: tuple(like.FLASH.rsplit(".", 1)))


class RingLayer(Layer):
    """A layer with the ring of GLM-5.3, which compresses four tokens together."""

    _index_kpool = 4

    @staticmethod
    def get_attn_backend() -> Any:
        """Return the backend."""
        name = "vllm.v1.attention.backends.mla.indexer", "KpoolTailBackend"
        return SimpleNamespace(full_cls_name=lambda: name)


def configs(
    name: str, rank: int, tp: int, block: int, extra: dict[str, Any], pp: int = 1
) -> tuple[Any, Any]:
    """Return the VllmConfig and KVCacheConfig of a worker: two full layers and one with a window.

    With two pipeline stages, the second stage has only the window.
    """
    heads = {"block_size": block, "num_kv_heads": 6 // tp, "head_size": SIZE, "dtype": "uint8"}
    full, window = (
        like.FullAttentionSpec(**heads),
        like.SlidingWindowSpec(sliding_window=8, **heads),
    )
    rows, stage = extra.pop("ring", 0), rank // tp
    layers = (FULL if not stage else (), WINDOW if stage == pp - 1 else ())
    groups = [(layers[0], full), (layers[1], window)]
    context = dict.fromkeys((*layers[0], *layers[1]), Layer())
    if rows:
        sizes = {"num_kv_heads": 2, "head_size": SIZE, "head_size_v": 0, "dtype": "uint8"}
        groups.append((RING, like.CircularBufferSpec(block_size=rows, **sizes)))
        context |= dict.fromkeys(RING, RingLayer())
    config: Any = like.config(*groups, num_blocks=BLOCKS)
    config.kv_cache_layout, config.transfer_group_ids = "LBHNC", tuple(range(len(groups)))
    config.needs_kv_cache_zeroing = extra.pop("zeroing", False)
    extra.setdefault("key_content", attrs.asdict(KEYS))
    speculative = extra.pop("speculative", None)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank, world_size=tp * pp
        ),
        model_config=SimpleNamespace(
            model="tiny",
            revision=None,
            quantization=None,
            get_total_num_kv_heads=lambda: 6,
            get_total_num_hidden_layers=lambda: 3,
            hf_text_config=None,
        ),
        cache_config=None,
        compilation_config=SimpleNamespace(static_forward_context=context),
        kv_transfer_config=SimpleNamespace(
            engine_id=name,
            kv_connector_extra_config=extra,
            kv_load_failure_policy=extra.pop("policy", "recompute"),
        ),
        speculative_config=speculative,
    )
    return vllm_config, config


class Engine:
    """An engine: the connectors of its scheduler and workers, and the workers' memory."""

    def __init__(
        self, name: str, tp: int = 1, block: int = 4, pp: int = 1, torch: Any = None, **extra: Any
    ) -> None:
        self.block, self.workers, self.storage = block, [], {}
        self.before: dict[kvspec.RankId, Any] = {}
        worker_configs = [
            configs(name, number, tp, block, {"timeout": 5.0, **extra}, pp)
            for number in range(tp * pp)
        ]
        self.workers = [
            made(vllm_config, "WORKER", config) for vllm_config, config in worker_configs
        ]
        workers = [WorkerInfo.of(*both) for both in worker_configs]
        self.spec = whole_engine(worker_configs[0][0], workers, {}, KEYS)
        WORLDS.append(World(len(worker_configs)))
        calls = []
        for rank, worker in zip(self.spec.parallel.ranks, self.workers, strict=True):
            _, self.storage[rank] = kvspec.allocate(self.spec, rank, BLOCKS)
            tensors = self._tensors(self.storage[rank], 6 // tp)
            if torch is not None:
                tensors = {layer: torch.from_numpy(view) for layer, view in tensors.items()}
            calls.append(partial(worker.register_kv_caches, tensors))
        WORLDS[-1].run(calls)
        self.scheduler = made(worker_configs[0][0], "SCHEDULER", worker_configs[0][1])
        known = {(n // tp, n % tp): w.get_handshake_metadata() for n, w in enumerate(self.workers)}
        self.managers = [Manager(block) for _ in worker_configs[0][1].kv_cache_groups]
        coordinator = SimpleNamespace(single_type_managers=self.managers)
        self.pool, self.tables = Pool(), dict[str, tuple[list[int], ...]]()
        self.scheduler.bind_kv_cache_manager(
            SimpleNamespace(
                enable_caching=True,
                coordinator=coordinator,
                block_pool=self.pool,
                get_blocks=self._blocks,
            )
        )
        self.scheduler.set_xfer_handshake_metadata_pp_aware(known)
        self.sent, self.received, self.failed = (dict[str, int]() for _ in range(3))

    def _blocks(self, request_id: str) -> Any:
        groups = self.tables[request_id]
        return SimpleNamespace(blocks=[[self.pool.blocks[each] for each in ids] for ids in groups])

    def _tensors(self, storage: dict[str, Any], heads: int) -> dict[str, Any]:
        shape = (BLOCKS, heads, self.block, 2 * SIZE)
        tensors = {}
        for group, layers in (("group0", FULL), ("group1", WINDOW)):
            if group in storage:
                views = storage[group].reshape(len(layers), *shape)
                tensors |= dict(zip(layers, views, strict=True))
        if "group2" in storage:
            tensors |= {RING[0]: storage["group2"].reshape(BLOCKS, 2, -1, SIZE)}
        return tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()

    def step(self, **scheduled: int) -> None:
        """Do one step as vLLM does: pass the metadata to the workers and collect their results.

        *scheduled* is the number of tokens that the model computes of each request.
        """
        # vLLM sends the metadata to its workers as a pickle.
        state = SimpleNamespace(boundary_state_offloads={})
        built = self.scheduler.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        )
        metadata = pickle.loads(pickle.dumps(built))  # noqa: S301
        before, meta = dict(self.received), None
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            own = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))  # noqa: S301
            meta = meta.aggregate(own) if meta and own else meta or own
            for counts, names in (
                (self.sent, results.finished_sending),
                (self.received, results.finished_recving),
                (self.failed, results.failed_recving),
            ):
                counts.update({name: counts.get(name, 0) + 1 for name in names})
        ended = {name for name, count in self.received.items() if count == len(self.workers)}
        self.scheduler.update_connector_output(
            SimpleNamespace(
                finished_recving=ended - {n for n, c in before.items() if c == len(self.workers)},
                failed_recving=ended & self.failed.keys(),
                kv_connector_worker_meta=meta,
            )
        )

    def prefill(self, request: Request, *tables: list[int]) -> dict[str, Any] | None:
        """Prefill a prompt for another engine. Return the parameters that a router forwards."""
        request.kv_transfer_params = {"do_remote_decode": True}
        self.scheduler.on_new_request(request)
        request.num_computed_tokens = request.num_prompt_tokens
        held, params = self.scheduler.request_finished_all_groups(request, tables)
        assert held is (params is not None)
        return json.loads(json.dumps(params))  # type: ignore[no-any-return]

    def decode(self, request: Request, *tables: list[int], cached: int = 0) -> tuple[int, bool]:
        """Accept a request with *cached* local tokens. Return the tokens that vLLM will load."""
        self.scheduler.on_new_request(request)
        return self.load(request, *tables, cached=cached)

    def load(self, request: Request, *tables: list[int], cached: int = 0) -> tuple[int, bool]:
        """Schedule a request that was accepted before. Return the tokens that vLLM will load."""
        count, waits = self.scheduler.get_num_new_matched_tokens(request, cached)
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        for manager, ids in zip(self.managers, tables, strict=True):
            manager.allocate(request.request_id, ids, cached)
        self.scheduler.update_state_after_alloc(request, blocks, count)
        # vLLM calls it a second time when the request is about to run.
        self.scheduler.update_state_after_alloc(request, blocks, 0)
        return count, waits

    def hashed(self, request_id: str, num_tokens: int, *tables: list[int]) -> list[list[int]]:
        """Return the blocks of each group that vLLM hashes after *num_tokens* were loaded."""
        return [
            manager.cache_blocks(request_id, ids, num_tokens)
            for manager, ids in zip(self.managers, tables, strict=True)
        ]

    def fill(self, request: kvspec.TransferRequest) -> None:
        """Write the true bytes of a request into the ranks, as a producer."""
        for rank, storage in self.storage.items():
            oracle.fill(self.spec, rank, storage, BLOCKS, request.producer_blocks, request)

    def spoil(self, request: kvspec.TransferRequest) -> None:
        """Write wrong bytes into the ranks wherever a request must write, as a consumer."""
        for rank, storage in self.storage.items():
            oracle.spoil(self.spec, rank, storage, BLOCKS, request.consumer_blocks, request)
            self.before[rank] = {name: flat.copy() for name, flat in storage.items()}

    def wrong(self, request: kvspec.TransferRequest) -> list[str]:
        """Return every difference between a consumer's bytes and the oracle's."""
        tables = request.consumer_blocks
        return [
            f"{rank}: {line}"
            for rank, storage in self.storage.items()
            for line in oracle.check(
                self.spec, rank, self.before[rank], storage, BLOCKS, tables, request
            )
        ]


def until(true: Callable[[], Any], *engines: Engine, seconds: float = 30.0) -> None:
    """Step the *engines* until *true* returns a true value."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"the condition stayed false for {seconds} s"
        for engine in engines:
            engine.step()
        time.sleep(1e-3)
