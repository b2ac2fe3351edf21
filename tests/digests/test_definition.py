"""The digest of a tensor in torch, and what changes a digest."""

from __future__ import annotations

import builders
import numpy as np
import numpy.typing as npt
import pytest

import kvspec
from kvspec.digests import digest, tensor_digest
from kvspec.digests.definition import unit_totals
from kvspec.digests.ranks import Wanted
from kvspec.testing import logical_views

torch = pytest.importorskip("torch")

LAYER, PART = "l.0", "k"
ROWS, UNITS, SIZE = 12, 4, 16


def contents() -> npt.NDArray[np.uint8]:
    """Return contents of ROWS rows and UNITS units, no two of them equal."""
    return np.random.default_rng(1).integers(0, 256, (ROWS, UNITS, SIZE), np.uint8)


def total(changed: npt.NDArray[np.uint8], layer: str = LAYER) -> int:
    """Return the digest of all units of one layer."""
    units = tensor_digest(torch.from_numpy(changed), torch.arange(ROWS), layer=layer, part=PART)
    return sum(units) % 2**64


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_tensor_digest_equals_digest_of_the_cache(dtype: str, size: int) -> None:
    spec = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=3, head_size=size, dtype=dtype)
    engine = builders.engine(spec, layers=(LAYER,))
    cache, storage = kvspec.allocate(engine, kvspec.RankId(), 4)
    for array in storage.values():
        array[:] = np.random.default_rng(size).integers(0, 256, array.shape, np.uint8)
    (view,) = (
        view
        for key, view in logical_views(engine, kvspec.RankId(), storage, 4).items()
        if key[2] == PART
    )
    (group,) = engine.groups
    table, asked = kvspec.BlockTable([2, 1]), {(LAYER, PART): Wanted(range(1, 7))}
    sums = digest(cache, {group.name: table}, asked)
    rows = np.concatenate([view[2], view[1]], axis=1)[:, 1:7].transpose(1, 0, 2)
    tensor = torch.from_numpy(np.ascontiguousarray(rows)).view(getattr(torch, dtype))
    units = tensor_digest(tensor, torch.arange(1, 7), layer=LAYER, part=PART)
    assert [sums[LAYER, PART, unit, 0] for unit in range(3)] == units


def test_tensor_digest_moves_nothing_from_the_device() -> None:
    """A tensor of the device `meta` has no data, so a copy to the host would fail."""
    tensor, rows = torch.empty(ROWS, UNITS, SIZE, device="meta"), torch.empty(ROWS, device="meta")
    totals = unit_totals(tensor, rows, LAYER, PART, 0)
    assert ("meta", (UNITS,), torch.int64) == (
        totals.device.type,
        tuple(totals.shape),
        totals.dtype,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensor_digest_of_a_gpu_equals_that_of_the_host() -> None:
    tensor = torch.from_numpy(contents())
    sides = [
        tensor_digest(tensor.to(device), torch.arange(ROWS).to(device), layer=LAYER, part=PART)
        for device in ("cpu", "cuda")
    ]
    assert sides[0] == sides[1]


@pytest.mark.parametrize("elements", [1, 3, 8])
def test_tensor_digest_does_not_depend_on_strides(elements: int) -> None:
    """An axis of one element may have any stride, and torch calls the tensor contiguous."""
    plain = torch.from_numpy(contents()).view(torch.int16)[..., :elements].contiguous()
    turned = plain.mT.clone(memory_format=torch.contiguous_format).mT
    for view in (torch.stack([plain, plain], dim=3)[..., 0], turned, turned[:, :1]):
        same = view, view.clone(memory_format=torch.contiguous_format)
        sums = [tensor_digest(each, torch.arange(ROWS), layer=LAYER, part=PART) for each in same]
        assert sums[0] == sums[1]


def test_tensor_digest_rejects_what_is_no_tensor_of_contents() -> None:
    tensor, rows = torch.from_numpy(contents()), torch.arange(ROWS)
    for wrong, numbers, field in (
        (tensor[0], rows, "contents"),
        (tensor[..., :0], rows, "contents"),
        (contents(), rows, "contents"),
        (tensor, torch.arange(ROWS + 1), "rows"),
        (tensor, rows + 0.5, "rows"),
        (tensor, [*range(ROWS)], "rows"),
    ):
        with pytest.raises(kvspec.SpecError) as raised:
            tensor_digest(wrong, numbers, layer=LAYER, part=PART)
        assert field == raised.value.field


def test_digest_of_any_changed_byte_differs() -> None:
    """Each byte of each row is changed, alone, in its highest and its lowest bit."""
    right = contents()
    before, seen = total(right), set[int]()
    for at in np.ndindex(right.shape):
        for bit in (0x80, 0x01):
            changed = right.copy()
            changed[at] ^= bit
            seen.add(total(changed))
    assert before not in seen
    assert right.size * 2 == len(seen)


def swapped(axis: int, first: int, second: int) -> npt.NDArray[np.uint8]:
    changed = contents()
    order = np.arange(changed.shape[axis])
    order[[first, second]] = second, first
    return changed.take(order, axis=axis)


CHANGES = {
    "two rows": swapped(0, 3, 11),
    "neighbours": swapped(0, 0, 1),
    "two units": swapped(1, 0, 3),
    "two elements": swapped(2, 0, 8),
    "shifted by a token": np.roll(contents(), 1, axis=0),
    "a row of zeros": np.concatenate([contents()[:5], 0 * contents()[5:6], contents()[6:]]),
    "a row twice": np.concatenate([contents()[:5], contents()[4:5], contents()[6:]]),
    "the last row absent": np.concatenate([contents()[:-1], 0 * contents()[-1:]]),
    "all signs": contents() ^ np.uint8(0x80),
    "the highest bits": contents() ^ np.array([0] * 7 + [0x80] + [0] * 8, np.uint8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_digest_of_a_faulty_transfer_differs(change: str) -> None:
    assert total(contents()) != total(CHANGES[change])


def test_digest_of_swapped_layers_differs() -> None:
    """The sum over both layers does not change if both have equal contents."""
    one, other = contents(), swapped(0, 0, 1)
    right = total(one, "l.0") + total(other, "l.1")
    assert right != total(other, "l.0") + total(one, "l.1")
    assert total(one, "l.0") != total(one, "l.1")
