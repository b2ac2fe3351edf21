"""Test transfers between engines on a GPU. Several ranks share one device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest

from kvspec import (
    EngineSpec,
    FullAttentionSpec,
    KVCacheGroup,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    ParallelConfig,
)
from kvspec.adapters.vllm.gpu import submitted_work
from kvspec.nixl.staging import copying
from kvspec.nixl.staging.ranges import Moves
from kvspec.run.job import Job
from kvspec.run.local import run_transfer


@functools.cache
def why_not() -> str:
    """Return why the test cannot use a GPU, or an empty text if it can."""
    if find_spec("torch") is None:
        return "torch is not installed"
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    package = f"nixl_cu{torch.version.cuda.split('.')[0]}"
    return "" if find_spec(package) else f"{package} is not installed"


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip without a GPU. torch is imported only when a test runs."""
    if why_not():
        pytest.skip(f"needs a GPU: {why_not()}")


pytestmark = [pytest.mark.gpu, pytest.mark.nixl]


def test_copy_does_not_wait_for_the_kernels_of_the_engine() -> None:
    """The engine's kernels are queued on another stream."""
    torch = importlib.import_module("torch")
    slot, cache = (torch.arange(64, dtype=torch.uint8, device="cuda:0") * at for at in (1, 0))
    place = 16 * np.arange(3, -1, -1)
    moves = Moves(offset=16 * np.arange(4), near=place + cache.data_ptr(), length=16)

    def copy() -> None:
        copying.copy_by_torch(slot.data_ptr(), moves, inward=True, device="cuda:0")

    torch.cuda.synchronize()
    copy()  # The first copy loads the kernels.
    slot.add_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # About a second.
    queued = torch.cuda.Event()
    queued.record()
    copy()
    assert not queued.query()
    torch.cuda.synchronize()
    assert cache.reshape(4, 16).flip(0).flatten().tolist() == slot.tolist()


def test_worker_waits_for_the_kernels_that_its_gpu_was_given() -> None:
    """A draft may still write the keys of a request that has ended."""
    torch = importlib.import_module("torch")
    cache = torch.zeros(64, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # About a second.
    cache.add_(1)
    written = torch.cuda.Event()
    written.record()
    wait = submitted_work(0)
    assert not written.query()
    wait()
    assert written.query()


HEADS_8 = FullAttentionSpec(block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
HEADS_6 = FullAttentionSpec(block_size=16, total_num_kv_heads=6, head_size=128, dtype="bfloat16")
MLA = MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16")
MAMBA2 = MambaSpec.mamba2(
    num_heads=8, head_dim=64, n_groups=1, state_size=128, conv_kernel=4, dtype="bfloat16"
)
CASES: dict[str, tuple[Sequence[LayerSpec], tuple[int, int], tuple[str, str]]] = {
    "8 heads, 4 to 2": ([HEADS_8], (4, 2), ("LBHNC", "LBHNC")),
    "6 heads, 2 to 3, NHD to HND": ([HEADS_6], (2, 3), ("LBNHC", "LBHNC")),
    "MLA, 3 to 2": ([MLA], (3, 2), ("LBHNC", "LBHNC")),
    "attention and Mamba2 of one group, 1 to 2": (
        [HEADS_6, MAMBA2],
        (1, 2),
        ("LBKNHC", "LBKHNC"),
    ),
}


@pytest.mark.parametrize("staging", [0, 4], ids=["direct", "staged"])
@pytest.mark.parametrize("case", CASES)
def test_transfer_on_a_gpu_moves_every_byte(case: str, staging: int) -> None:
    """Each rank of both engines is a process, and all device memory is compared.

    If the transfer is staged, the device permutes the bytes with one gather and one scatter kernel.
    """
    specs, tp_sizes, layouts = CASES[case]
    groups = [
        KVCacheGroup(name=f"g{at}", layers=[f"g{at}.0", f"g{at}.1"], spec=spec)
        for at, spec in enumerate(specs)
    ]
    producer, consumer = (
        EngineSpec(groups=groups, parallel=ParallelConfig(tp_size=size), layout=layout)
        for size, layout in zip(tp_sizes, layouts, strict=True)
    )
    job = Job(
        producer=producer,
        consumer=consumer,
        tokens=300,
        device="cuda:0",
        timeout=180.0,
        staging=staging,
    )
    report = run_transfer(job)
    assert () == report.faults
    assert all(rank.torch for rank in report.ranks)
