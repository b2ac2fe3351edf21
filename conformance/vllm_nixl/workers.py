"""Run the workers of vLLM's NIXL connector in one process, on the memory of a `World`.

All of vLLM's own code runs: the specs, `register_kv_caches`, the handshake with its checks, the TP
mapping, the descriptor rows, the pairing of blocks, the descriptor ids, and what a decode worker
does to received blocks. No GPU is used. These things are replaced:

- NIXL. `Agents` keeps prepared lists, and copies bytes in host memory.
- the configuration of an engine, by a namespace with the fields that the worker reads.
- the attention backend, by one that accepts any block size.
- the scheduler, except for its clipping of block lists. The adapter passes the block ids that a
  scheduler would pass: the prefill side has all blocks of the prompt, and the decode side has those
  after its cached prefix.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import msgspec
import numpy as np
import torch
import vllm
from refusal import RefusedError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.utils import torch_utils
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvspec
from kvspec import RankId
from kvspec.testing.world import World, world

VERSION = vllm.__version__
# Memory can be pinned only for an accelerator.
torch_utils.PIN_MEMORY = False
# A layout of kvspec with one plane for keys and one for values is, to vLLM, a layout whose axis H
# has two head slots.
SLOTS = {"LBKNHC": "LBHNC", "BLKNHC": "BLHNC"}


class AnyBackend:
    """An attention backend that takes any block size."""

    @staticmethod
    def get_name() -> str:
        """Return the name that the handshake compares."""
        return "FLASH_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(_spec: object = None) -> list[Any]:
        """Return that each block size is supported."""
        return [MultipleOf(1)]


class Agents:
    """All NIXL agents of one transfer, in one process."""

    def __init__(self, here: World) -> None:
        self.world = here
        self.lists: list[tuple[RankId, np.ndarray]] = []
        self.transfers: list[list[tuple[tuple[RankId, RankId], list[Any]]]] = []
        self.notified: list[tuple[RankId, RankId, bytes]] = []
        self.moved = False

    def agent(self, rank: RankId) -> Any:
        """Return a class with which the worker of *rank* makes its agent."""
        return lambda *_: Agent(self, rank)


class Agent:
    """One NIXL agent. Only the methods that the worker calls exist."""

    def __init__(self, agents: Agents, rank: RankId) -> None:
        self.agents, self.rank = agents, rank

    def get_reg_descs(self, ranges: Any, _memory: str) -> Any:
        """Return *ranges*."""
        return ranges

    def register_memory(self, _descs: Any, backends: Any = None) -> None:
        """Do nothing: host memory needs no registration."""

    def get_agent_metadata(self) -> bytes:
        """Return the rank as the metadata of its agent."""
        return str(self.rank.tp).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Return the name of the remote agent."""
        return metadata.decode()

    def prep_xfer_dlist(self, agent: str, rows: np.ndarray, mem_type: str = "") -> int:
        """Keep rows of (address, bytes, device, stride, count)."""
        owner = self.rank if agent == "NIXL_INIT_AGENT" else RankId(tp=int(agent))
        self.agents.lists.append((owner, np.array(rows)))
        return len(self.agents.lists) - 1

    def make_prepped_xfer(
        self, kind: str, local: int, local_ids: Any, remote: int, remote_ids: Any, notif_msg: bytes
    ) -> int:
        """Compute the copies of a READ. The notification is sent with it."""
        (here, rows), (there, remote_rows) = self.agents.lists[local], self.agents.lists[remote]
        copies = [
            (source, target, length)
            for (source, length), (target, _) in zip(
                picked(remote_rows, remote_ids), picked(rows, local_ids), strict=True
            )
        ]
        lengths = zip(picked(remote_rows, remote_ids), picked(rows, local_ids), strict=True)
        if any(a[1] != b[1] for a, b in lengths):
            raise RuntimeError("NIXL refuses descriptors of unequal lengths")
        self.agents.transfers.append([((there, here), copies)])
        self.agents.notified.append((there, here, notif_msg))
        return len(self.agents.transfers) - 1

    def transfer(self, handle: int) -> None:
        """Copy the bytes at once."""
        for pair, copies in self.agents.transfers[handle]:
            self.agents.moved = True
            self.agents.world.copy(pair, copies)

    def check_xfer_state(self, _handle: int) -> str:
        """Return that the transfer is done."""
        return "DONE"

    def get_xfer_telemetry(self, _handle: int) -> Any:
        """Return the numbers that the worker's statistics need."""
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def _nothing(self, *_: object) -> None:
        """Do nothing: nothing is allocated."""

    release_xfer_handle = release_dlist_handle = _nothing
    remove_remote_agent = deregister_memory = _nothing

    def send_notif(self, agent: str, notif_msg: bytes = b"") -> None:
        """Record the notification."""
        self.agents.notified.append((RankId(tp=int(agent)), self.rank, notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return none: producers are not asked."""
        return {}


def picked(rows: np.ndarray, ids: Any) -> Iterator[tuple[int, int]]:
    """Yield the address and the bytes of each descriptor of *ids*."""
    starts = np.cumsum(rows[:, 4].astype(np.int64))
    for number in np.asarray(ids).tolist():
        if not 0 <= number < starts[-1]:
            raise AssertionError(f"descriptor {number}: expected 0 to {starts[-1] - 1}")
        row = int(np.searchsorted(starts, number, side="right"))
        address, length, _, stride, count = map(int, rows[row])
        yield address + (number - (int(starts[row]) - count)) * stride, length


def vllm_spec(side: kvspec.EngineSpec, rank: RankId, group: kvspec.KVCacheGroup) -> Any:
    """Return the spec of vLLM for one rank. All sizes are in bytes of uint8."""
    spec: Any = group.spec
    tp_size = side.parallel.tp_size
    if isinstance(spec, kvspec.MambaSpec):
        return _mamba(spec, tp_size)
    content = sum(part.content_bytes for part in spec.parts)
    fields: dict[str, Any] = {"block_size": spec.block_size, "dtype": torch.uint8}
    if spec.page_size_padded is not None:
        fields["page_size_padded"] = spec.page_size_padded
    if isinstance(spec, kvspec.MLAAttentionSpec):
        return vllm_specs.MLAAttentionSpec(num_kv_heads=1, head_size=content, **fields)
    heads = max(1, spec.total_num_kv_heads // tp_size)
    fields |= {"num_kv_heads": heads, "head_size": content // 2}
    if side.layout in SLOTS:
        fields |= {"num_head_slots": 2, "state_content_bytes": heads * content // 2}
    if isinstance(spec, kvspec.SlidingWindowSpec):
        return vllm_specs.SlidingWindowSpec(sliding_window=spec.sliding_window, **fields)
    return vllm_specs.FullAttentionSpec(**fields)


def _mamba(spec: kvspec.MambaSpec, tp_size: int) -> Any:
    """Return the spec of a Mamba2 state, whose shapes vLLM computes."""
    conv, groups, _, ssm = spec.parts
    state_size = groups.granularity
    shapes = MambaStateShapeCalculator.mamba2_state_shape(
        tp_world_size=tp_size,
        intermediate_size=conv.units,
        n_groups=groups.units // state_size,
        num_heads=ssm.units,
        head_dim=conv.granularity,
        state_size=state_size,
        conv_kernel=conv.states + 1,
    )
    return vllm_specs.MambaSpec(
        block_size=spec.block_size, shapes=shapes, dtypes=(torch.uint8, torch.uint8),
        page_size_padded=spec.page_size_padded, mamba_type=MambaAttentionBackendEnum.MAMBA2,
    )  # fmt: skip


def tensors(cache: kvspec.RankCache, storage: Any, side: kvspec.EngineSpec) -> dict[str, Any]:
    """Return vLLM's tensors of one rank: (blocks, heads, tokens, content) for each layer."""
    views = {}
    flat = {name: torch.from_numpy(array) for name, array in storage.items()}
    for group in side.groups:
        for layer in group.layers:
            regions = [region for region in cache.regions if region.layer == layer]
            first = min(regions, key=lambda region: region.base)
            buffer, base = next(
                (buffer, first.base - buffer.data_ptr())
                for buffer in flat.values()
                if 0 <= first.base - buffer.data_ptr() < buffer.numel()
            )
            content = sum(region.content_bytes for region in regions)
            if isinstance(group.spec, kvspec.MambaSpec):
                size = sum(r.units * r.states * r.content_bytes for r in regions)
                shape: tuple[int, ...] = (first.num_blocks, 1, 1, size)
                strides: tuple[int, ...] = (first.block_stride, size, size, 1)
            elif side.layout in SLOTS and len(regions) > 1:
                slot = regions[1].base - regions[0].base
                shape = (first.num_blocks, 2, first.states, first.units * first.content_bytes)
                strides = (first.block_stride, slot, first.state_stride, 1)
            else:
                shape = (first.num_blocks, first.units, first.states, content)
                strides = (first.block_stride, first.unit_stride, first.state_stride, 1)
            views[layer] = torch.as_strided(buffer, shape, strides, base)
    return views


def config_of(side: kvspec.EngineSpec) -> Any:
    """Return the fields of a `VllmConfig` that the worker and the scheduler read."""
    specs: list[Any] = [group.spec for group in side.groups]
    heads = max(getattr(spec, "total_num_kv_heads", 1) for spec in specs)
    layout = KVCacheLayout[SLOTS.get(side.layout, side.layout)]
    transfer = SimpleNamespace(
        get_from_extra_config=lambda _name, default: default,
        kv_buffer_device="cuda",
        kv_role="kv_both",
        enable_permute_local_kv=False,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=side.parallel.tp_size,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        model_config=SimpleNamespace(
            enable_sleep_mode=False,
            use_mla=any(isinstance(spec, kvspec.MLAAttentionSpec) for spec in specs),
            get_total_num_kv_heads=lambda: heads,
            get_head_size=lambda: 1,
            get_total_num_hidden_layers=lambda: sum(len(g.layers) for g in side.groups),
            model="model",
            dtype="uint8",
        ),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            block_size=side.groups[0].spec.block_size,
            cache_dtype="auto",
            enable_prefix_caching=True,
        ),
        speculative_config=None,
    )


def _platform() -> Any:
    return SimpleNamespace(
        device_type="cuda",
        get_nixl_memory_type=lambda: "DRAM",
        is_rocm=lambda: False,
    )


def worker(
    agents: Agents, side: kvspec.EngineSpec, name: str, rank: RankId, held: Any
) -> NixlPullConnectorWorker:
    """Return the worker of one rank, with its caches registered."""
    cache, storage = held
    blocks = max(region.num_blocks for region in cache.regions)
    config = vllm_specs.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            vllm_specs.KVCacheGroupSpec(list(group.layers), vllm_spec(side, rank, group))
            for group in side.groups
        ],
    )
    replaced = {
        "NixlWrapper": agents.agent(rank),
        "nixl_agent_config": None,
        "check_nixl_version": lambda _version: None,
        "current_platform": _platform(),
        "get_tensor_model_parallel_rank": lambda: rank.tp,
        "get_tensor_model_parallel_world_size": lambda: side.parallel.tp_size,
        "get_current_attn_backends": lambda _config: [AnyBackend],
        "get_current_attn_backends_and_specs": lambda *_: ([AnyBackend], [None]),
    }
    for attribute, value in replaced.items():
        setattr(base_worker, attribute, value)
    made = NixlPullConnectorWorker(config_of(side), name, config)
    made.register_kv_caches(tensors(cache, storage, side))
    return made


def scheduled(side: kvspec.EngineSpec, config: Any, ids: list[list[int]]) -> Any:
    """Return the block ids after the clipping of vLLM's scheduler."""
    scheduler = base_scheduler.NixlBaseConnectorScheduler(config_of(side), "engine", config)
    return scheduler.get_exchange_clipped_blocks(tuple(ids))


def block_ids(side: kvspec.EngineSpec, request: kvspec.TransferRequest, role: str) -> Any:
    """Return the blocks that one side's block manager holds for the request, by group."""
    lists = []
    for group in side.groups:
        tables = request.producer_blocks if role == "producer" else request.consumer_blocks
        table = tables[group.name]
        ids = table.block_ids.tolist()
        if isinstance(group.spec, kvspec.MambaSpec):
            lists.append(ids[-1:])
            continue
        size = group.spec.block_size
        cached = request.cached_tokens if role == "consumer" else 0
        cached = cached.get(group.name, 0) if not isinstance(cached, int) else cached
        first = table.first_token // size
        end = -(-request.num_tokens // size)
        if role == "producer":
            ids = ids[: end - first]
        lists.append(ids[max(0, min(cached, request.num_tokens) // size - first) :])
    return lists


def prepare(here: World, agents: Agents) -> tuple[list[Any], Any]:
    """Return all decode workers after the handshake, and the prefill side's clipped block ids."""
    case = here.case
    prefill = {
        rank: worker(agents, case.producer, "P", rank, held)
        for rank, held in here.producers.items()
    }
    decode = []
    for rank, held in here.consumers.items():
        made = worker(agents, case.consumer, "D", rank, held)
        tp_size = case.producer.parallel.tp_size
        for remote in made.transfer_topo.handshake_target_ranks(tp_size):
            payload = prefill[RankId(tp=remote)].xfer_handshake_metadata
            if payload.compatibility_hash != made.compat_hash:
                raise RuntimeError("the compatibility hashes differ")
            metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
            name = made.add_remote_agent(metadata, remote, tp_size)
            made._remote_agents["P"][0, remote] = name
        decode.append(made)
    first = next(iter(prefill.values()))
    ids = block_ids(case.producer, case.request, "producer")
    return decode, scheduled(case.producer, first.kv_cache_config, ids)


def place_of(error: Exception) -> str:
    """Return the kind and the place of an error without words."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name}"


def run(here: World) -> Agents:
    """Move the request of *here* with vLLM's workers. Raise `RefusedError` if vLLM refuses."""
    agents, case = Agents(here), here.case
    try:
        decode, remote_ids = prepare(here, agents)
        for made in decode:
            ids = block_ids(case.consumer, case.request, "consumer")
            ids = scheduled(case.consumer, made.kv_cache_config, ids)
            metadata = NixlConnectorMetadata()
            metadata.add_new_req_to_recv(
                "d",
                ids,
                {
                    "tp_size": case.producer.parallel.tp_size,
                    "remote_block_ids": [list(group) for group in remote_ids],
                    "remote_engine_id": "P",
                    "remote_request_id": "p",
                    "remote_host": "host",
                    "remote_port": 0,
                },
                local_num_computed_blocks=tuple(0 for _ in ids),
                awaiting_kvs=True,
            )
            made.start_load_kv(metadata)
    except (AssertionError, RuntimeError, NotImplementedError, ValueError) as error:
        if agents.moved:
            raise
        raise RefusedError(str(error) or place_of(error)) from error
    for made in decode:
        results = made.get_transfer_results()
        if results.failed_recving:
            raise RefusedError("the request is reported as failed")
        if "d" not in results.finished_recving and any(map(len, remote_ids)):
            raise AssertionError("the request is never reported as received")
    return agents


def tells(case: Any, role: str) -> Iterator[tuple[RankId, RankId]]:
    """Yield the notifications that decode workers send, or as many as prefill workers wait for."""
    agents = run(world(case))
    if role == "consumer":
        yield from ((p, c) for p, c, _ in agents.notified)
        return
    for rank in case.producer.parallel.ranks:
        sent = [(c, int(text.rsplit(b":", 1)[1])) for p, c, text in agents.notified if p == rank]
        expected = sent[0][1] if sent else 0
        yield from ((rank, c) for c, _ in sent[:expected])
        yield from ((rank, RankId(tp=1000 + n)) for n in range(expected - len(sent)))
