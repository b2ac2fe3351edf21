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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import vllm_like as like

import kvspec
from kvspec.adapters.vllm import from_vllm
from kvspec.testing import oracle

BLOCKS, SIZE = 12, 8
FULL, WINDOW = ("model.layers.0.attn", "model.layers.1.attn"), ("model.layers.2.attn",)

CONNECTOR = "kvspec.adapters.vllm.connector"

FIRST: dict[str, int] = {}
"""What the first worker of an engine has broadcast."""


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
    group = SimpleNamespace(broadcast_object=lambda given: FIRST.setdefault("said", given))
    modules = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": base
        | {"KVConnectorTransferResults": Results},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: group},
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


def configs(name: str, rank: int, tp: int, block: int, extra: dict[str, Any]) -> tuple[Any, Any]:
    """Return the VllmConfig and KVCacheConfig of a worker: two full layers, one with a window."""
    heads = {"block_size": block, "num_kv_heads": 6 // tp, "head_size": SIZE, "dtype": "uint8"}
    full, window = (
        like.FullAttentionSpec(**heads),
        like.SlidingWindowSpec(sliding_window=8, **heads),
    )
    config: Any = like.config((FULL, full), (WINDOW, window), num_blocks=BLOCKS)
    config.kv_cache_layout, config.transfer_group_ids = "LBHNC", (0, 1)
    config.needs_kv_cache_zeroing = extra.pop("zeroing", False)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, rank=rank),
        model_config=SimpleNamespace(
            model="tiny", revision=None, get_total_num_kv_heads=lambda: 6, hf_text_config=None
        ),
        cache_config=None,
        compilation_config=SimpleNamespace(
            static_forward_context=dict.fromkeys((*FULL, *WINDOW), Layer())
        ),
        kv_transfer_config=SimpleNamespace(engine_id=name, kv_connector_extra_config=extra),
        speculative_config=None,
    )
    return vllm_config, config


class Engine:
    """An engine: connectors of its scheduler and of each worker, and the workers' memory."""

    def __init__(self, name: str, tp: int = 1, block: int = 4, **extra: Any) -> None:
        self.block, self.workers, self.storage = block, [], {}
        self.before: dict[kvspec.RankId, Any] = {}
        extra = {"timeout": 5.0, **extra}
        FIRST.clear()
        for number in range(tp):
            vllm_config, config = configs(name, number, tp, block, dict(extra))
            worker = made(vllm_config, "WORKER", config)
            self.spec, rank = from_vllm(vllm_config, config), kvspec.RankId(tp=number)
            _, self.storage[rank] = kvspec.allocate(self.spec, rank, BLOCKS)
            worker.register_kv_caches(self._tensors(self.storage[rank], 6 // tp))
            self.workers.append(worker)
        self.scheduler = made(vllm_config, "SCHEDULER", config)
        known = {(0, n): w.get_handshake_metadata() for n, w in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(known)
        self.sent, self.received, self.failed = (dict[str, int]() for _ in range(3))

    def _tensors(self, storage: dict[str, Any], heads: int) -> dict[str, Any]:
        shape = (BLOCKS, heads, self.block, 2 * SIZE)
        full = storage["group0"].reshape(2, *shape)
        return {FULL[0]: full[0], FULL[1]: full[1], WINDOW[0]: storage["group1"].reshape(shape)}

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
