"""Test that transfers share a bounded staging buffer, and that failed reads change no cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nixl_world import keep
from slotted import Slotted

from kvspec import SpecError, TransferError, TransferState
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import NixlRank, Staging, Transfer
from kvspec.nixl.merging import Operation
from kvspec.nixl.staging import copying, stage
from kvspec.nixl.staging.ranges import Moves
from kvspec.testing.fake_nixl import FakeFlight, FakeNixl

RUN, RUNS = 64, 256
SIZE = 4 * RUN * RUNS
SLOT_BYTES = 4096


class Pair:
    """Two ranks over a fake NIXL. Runs are adjacent on the far side, with gaps on the near side."""

    def __init__(
        self, buffer: Any = SLOT_BYTES, slot_bytes: int = SLOT_BYTES, **options: Any
    ) -> None:
        settings = Slotted(buffer=buffer, slot_bytes=slot_bytes, always=True)
        self.near = NixlRank(secret=b"", **{"staging": settings} | options)
        self.far = NixlRank(secret=b"")
        drawn = np.random.default_rng(0)
        self.remote = drawn.integers(1, 256, SIZE, dtype=np.uint8)
        self.local = np.zeros(SIZE, np.uint8)
        for rank, array in ((self.near, self.local), (self.far, self.remote)):
            rank.register([Memory(array.ctypes.data, SIZE)], owner=array)
        self.peer = self.near.connect(self.far.metadata())
        rows = [
            np.array([(array.ctypes.data, RUN, 0, stride, RUNS)], np.uint64)
            for array, stride in ((self.local, 4 * RUN), (self.remote, RUN))
        ]
        self.lists = [self.near.prepare(rows[0]), self.near.prepare(rows[1], peer=self.peer)]

    def move(
        self, ids: range, operation: Operation = "READ", timeout: float = 10, name: str = "r"
    ) -> Transfer:
        """Start to move the runs *ids*. The near side has them in reverse order."""
        order = np.array(ids, np.int32)
        move = self.near.read if operation == "READ" else self.near.write
        sides = self.lists[0], order[::-1], self.lists[1], order
        return move(*sides, request=name, timeout=timeout)

    def right(self, *moved: range) -> bool:
        """Return whether the near side contains the runs that were read, and no other byte."""
        expected = np.zeros(SIZE, np.uint8).reshape(RUNS, 4, RUN)
        for ids in moved:
            order = np.array(ids)
            expected[order[::-1], 0] = self.remote[: RUN * RUNS].reshape(RUNS, RUN)[order]
        return expected.tobytes() == self.local.tobytes()


def in_flight(net: FakeNixl) -> FakeFlight:
    """Return the only handle in flight."""
    [flight] = net.moving
    return flight


ONE, OTHER = range(64), range(64, 128)  # Each needs one slot.
LONG = range(192)  # It needs three slots.


def test_two_transfers_use_one_slot_in_turn(net: FakeNixl) -> None:
    """The second transfer waits, and receives the slot when the first one is done."""
    pair = Pair()
    net.fate = keep
    first, second = pair.move(ONE), pair.move(OTHER, name="s")
    assert (1, 0) == (first.live_handles, second.live_handles)
    assert "PROC" == second.poll()
    in_flight(net).land()
    second.poll()  # This polls the first transfer as well.
    second.poll()
    assert ("DONE", 1) == (first.state, second.live_handles)
    in_flight(net).land()
    assert "DONE" == second.poll()
    assert pair.right(ONE, OTHER)


def test_short_transfer_ends_before_a_long_one(net: FakeNixl) -> None:
    """A short transfer is done before a long one that began earlier and is polled more."""
    pair = Pair()
    net.fate = keep
    long, short = pair.move(LONG), pair.move(range(192, 200), name="s")
    for _ in range(3):
        in_flight(net).land()
        long.poll()
        long.poll()
        short.poll()
        if short.state == "DONE":
            break
    assert ("PROC", "DONE") == (long.state, short.state)
    while long.poll() == "PROC":
        if net.moving:
            in_flight(net).land()
    assert pair.right(LONG, range(192, 200))


def test_waiting_transfer_polls_the_others(net: FakeNixl) -> None:
    """The last transfer polls those that have the slot or wait for it before itself."""
    pair = Pair()
    others = [pair.move(range(64 * at, 64 * at + 64), name=f"{at}") for at in range(3)]
    pair.move(range(192, 256), name="last").wait()
    assert ["DONE"] * 3 == [transfer.state for transfer in others]
    assert pair.right(*(range(64 * at, 64 * at + 64) for at in range(4)))


def test_late_read_keeps_its_slot_and_is_never_copied(net: FakeNixl) -> None:
    """Late bytes stay in the buffer. The slot is free when all of them have arrived."""
    pair = Pair()
    net.fate = keep
    late = pair.move(ONE, timeout=0.01)
    with pytest.raises(TransferError, match="quarantine"):
        late.wait()
    flight = in_flight(net)
    other = pair.move(OTHER, timeout=0.01, name="s")
    with pytest.raises(TransferError) as caught:
        other.wait()
    assert ("overdue", True) == (caught.value.state, other.over)
    assert (0, (late,)) == (other.handles, pair.near.transfers)
    flight.land()
    assert () == pair.near.transfers
    net.fate = FakeFlight.land
    pair.move(OTHER, name="t").wait()
    assert pair.right(OTHER)


@pytest.mark.parametrize("failure", ["peer lost", "cancelled"])
def test_failed_read_never_reaches_the_cache(net: FakeNixl, failure: str) -> None:
    """The bytes in a slot are not copied after a failure, although all of them arrived."""
    pair = Pair()
    net.fate = keep
    transfer = pair.move(ONE)
    if failure == "peer lost":
        in_flight(net).fail(part=0.9)  # All bytes of the only range arrive.
    else:
        transfer.cancel("the test stops it", TransferState.CANCELLED)
        in_flight(net).land()
    with pytest.raises(TransferError):
        transfer.wait()
    assert () == pair.near.transfers
    assert (0, True) == (transfer.live_handles, pair.right())


def test_failed_write_writes_only_posted_slots(net: FakeNixl) -> None:
    """Batches that were not posted are not written."""
    pair = Pair()
    pair.local[:] = 7
    before = pair.remote.copy()
    net.fate = keep
    transfer = pair.move(LONG, "WRITE")
    in_flight(net).land()
    transfer.poll()
    in_flight(net).fail()
    with pytest.raises(TransferError) as caught:
        transfer.wait()
    assert "peer_lost" == caught.value.state
    expected = before.copy()
    expected[: 64 * RUN] = 7
    assert expected.tobytes() == pair.remote.tobytes()


def test_interrupted_copy_from_a_slot_is_repeated(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle is released only after its bytes are copied to the cache."""
    pair = Pair()
    net.fate = keep
    transfer = pair.move(ONE)
    in_flight(net).land()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "copy_runs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transfer.poll()
    assert (1, True) == (transfer.live_handles, pair.right())
    transfer.wait()
    assert pair.right(ONE)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_copy_that_fails_ends_its_transfer_alone(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    """If the memory of a GPU is exhausted, torch raises `RuntimeError`."""
    pair = Pair()

    def refuse(*_: object, **__: object) -> None:
        message = "out of memory"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "copy_runs", refuse)
        transfer = pair.move(ONE, operation)
        with pytest.raises(TransferError) as caught:
            transfer.wait()
    assert "cancelled" == caught.value.state
    assert "out of memory" in str(caught.value)
    assert (True, 0) == (transfer.over, transfer.live_handles)
    pair.move(ONE, operation).wait()
    assert pair.right(ONE)
    assert (operation == "READ") == pair.remote[: len(ONE) * RUN].any()  # The near side was zero.


def test_close_deregisters_the_buffer(net: FakeNixl) -> None:
    """The buffer is one registration of the rank."""
    pair = Pair()
    before = pair.near.stats().registrations
    pair.move(LONG).wait()
    assert before + 1 == pair.near.stats().registrations
    pair.near.close()
    assert 0 == pair.near.stats().registrations


def test_threshold_decides_what_is_staged(net: FakeNixl) -> None:
    """Many short runs that are adjacent on the far side are staged. Few or long runs are not."""
    for options, choice in (
        (Staging(), [True, False]),
        (1 << 20, [True, False]),
        (None, [False] * 2),
    ):
        pair = Pair(staging=options)
        assert choice == [pair.move(ids).staged for ids in (LONG, range(192, 194))]
    # 192 runs of 64 bytes are one range. 95 descriptors count, with 129.3 bytes for each.
    for below, staged in ((129, False), (130, True), (0, False)):
        assert staged == Pair(staging=Staging(stage_below=below)).move(LONG).staged


def test_run_longer_than_a_slot_is_not_staged(net: FakeNixl) -> None:
    """The transfer moves the run without the buffer."""
    pair = Pair(slot_bytes=RUN - 1)
    transfer = pair.move(LONG)
    transfer.wait()
    assert (False, True) == (transfer.staged, pair.right(LONG))


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ({"buffer": 4095}, "staging.buffer", 4095),
        ({"buffer": True}, "staging.buffer", True),
        ({"buffer": "1 MiB"}, "staging.buffer", "1 MiB"),
        ({"buffer": np.zeros(SLOT_BYTES, np.uint8)}, "staging.buffer", ...),
        ({"stage_below": -1}, "staging.stage_below", -1),
        ({"stage_below": 1.5}, "staging.stage_below", 1.5),
        ({"always": 1}, "staging.always", 1),
    ],
)
def test_staging_rejects_wrong_settings(more: dict[str, Any], field: str, value: Any) -> None:
    """`Staging` raises the error, before a rank exists."""
    with pytest.raises(SpecError) as caught:
        Staging(**more)
    assert field == caught.value.field
    assert value is ... or value == caught.value.value


def test_transfers_are_direct_if_the_buffer_cannot_be_allocated(
    net: FakeNixl, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank tries once, and logs one warning."""
    pair = Pair(buffer=1 << 60)
    moved = [pair.move(LONG) for _ in range(2)]
    assert ([False] * 2, True) == ([transfer.staged for transfer in moved], pair.right(LONG))
    [warning] = caplog.records
    assert ("kvspec.nixl", "WARNING") == (warning.name, warning.levelname)
    assert "staging.buffer" in warning.message


def move_on_gpu(pair: Pair) -> Transfer:
    """Move all runs to memory that counts as that of a GPU."""
    pair.near.register([Memory(pair.local.ctypes.data, SIZE, "VRAM")], owner=pair.local)
    rows = np.array([(pair.local.ctypes.data, RUN, 0, 4 * RUN, RUNS)], np.uint64)
    pair.lists[0] = pair.near.prepare(rows, "VRAM")
    return pair.move(range(RUNS))


def out_of_memory(*_: object, **__: object) -> None:
    """Raise what torch raises if the memory of a GPU is exhausted."""
    message = "CUDA out of memory"
    raise RuntimeError(message)


def not_compiled(*_: object, **__: object) -> None:
    """Raise what torch raises if it was built without CUDA."""
    message = "Torch not compiled with CUDA enabled"
    raise AssertionError(message)


@pytest.mark.parametrize("torch", [None, out_of_memory, not_compiled])
def test_transfers_of_a_gpu_are_direct_if_torch_cannot_allocate(
    net: FakeNixl,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    torch: Callable[..., None] | None,
) -> None:
    """None: torch is not installed."""
    made = torch and SimpleNamespace(empty=torch, uint8=None)
    monkeypatch.setitem(sys.modules, "torch", made)
    pair = Pair()
    assert not move_on_gpu(pair).staged
    assert pair.right(range(RUNS))
    assert 1 == len(caplog.records)


def test_buffer_of_a_gpu_is_used_after_all_queued_kernels(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator may return memory that a queued kernel still writes. NIXL does not wait."""
    done = list[str]()

    class Tensor:
        memory = np.zeros(SLOT_BYTES, np.uint8)

        def data_ptr(self) -> int:
            return self.memory.ctypes.data

    def empty(*_: object, **__: object) -> Tensor:
        done.append("empty")
        return Tensor()

    cuda = SimpleNamespace(synchronize=lambda _: done.append("synchronize"))
    torch = SimpleNamespace(empty=empty, uint8=None, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(stage, "copy_runs", lambda *_, **__: done.append("copy"))
    pair = Pair()
    move_on_gpu(pair).wait()
    assert ["empty", "synchronize", "copy"] == done[:3]


def test_host_memory_with_a_device_number_is_staged(net: FakeNixl) -> None:
    """NIXL also numbers devices of host memory. The buffer has the number of the local list."""
    pair = Pair()
    array = np.zeros(SIZE, np.uint8)
    pair.near.register([Memory(array.ctypes.data, SIZE, "DRAM", 3)], owner=array)
    pair.lists[0] = pair.near.prepare(
        np.array([(array.ctypes.data, RUN, 3, 4 * RUN, RUNS)], np.uint64)
    )
    transfer = pair.move(LONG)
    transfer.wait()
    pair.local = array
    assert (True, True) == (transfer.staged, pair.right(LONG))


@pytest.mark.parametrize("length", [1, 6, 64, 256])
@pytest.mark.parametrize("inward", [True, False])
def test_torch_copies_the_same_bytes_as_numpy(length: int, inward: bool) -> None:
    """The code of a GPU runs over tensors of host memory."""
    pytest.importorskip("torch")
    drawn = np.random.default_rng(length)
    near, slot = drawn.integers(0, 256, (2, 64 * length), dtype=np.uint8)
    moves = Moves(
        offset=length * drawn.permutation(32),
        near=near.ctypes.data + length * (2 * drawn.permutation(32)),
        length=length,
    )
    expected = near.copy(), slot.copy()
    same_moves = Moves(
        offset=moves.offset,
        near=moves.near - near.ctypes.data + expected[0].ctypes.data,
        length=length,
    )
    copying.copy_runs(expected[1].ctypes.data, same_moves, inward=inward)
    copying.copy_by_torch(slot.ctypes.data, moves, inward=inward, device="cpu")
    assert expected[0].tobytes() == near.tobytes()
    assert expected[1].tobytes() == slot.tobytes()


@pytest.mark.parametrize("length", [3, 64, 4096])
@pytest.mark.parametrize("side", ["below", "above", "both"])
def test_bytes_between_runs_are_copied_to_scratch(length: int, side: str) -> None:
    """Runs of a slot with gaps arrive, copied in one pass or in two. Other bytes do not change."""
    spare, items = copying.SCRATCH_BYTES, 40
    sizes = [items * length, spare, items * length, spare, items * length]
    below, _, base, above, end = np.cumsum([0, *sizes[:-1]]).tolist()
    held = np.random.default_rng(length).integers(0, 256, sum(sizes), dtype=np.uint8)
    item = np.delete(np.arange(items), [3, 4, 20, 33])
    order = np.random.default_rng(1).permutation(items)[: len(item)]
    place = {"below": below + 0 * item, "above": end + 0 * item, "both": (item % 2) * end}[side]
    expected = held.copy()
    for run, target in zip(item, place + order * length, strict=True):
        start = base + run * length
        expected[target : target + length] = held[start : start + length]
    address = held.ctypes.data
    moves = Moves(offset=item * length, near=address + place + order * length, length=length)
    scratch = address + sizes[0], address + above
    copying.copy_runs(address + base, moves, inward=True, scratch=scratch)
    for checked in (slice(0, sizes[0]), slice(base, above), slice(end, None)):
        assert expected[checked].tobytes() == held[checked].tobytes()
    # Only a copy in one pass writes the bytes between the runs to the scratch bytes.
    assert (side != "both") == (expected.tobytes() != held.tobytes())
