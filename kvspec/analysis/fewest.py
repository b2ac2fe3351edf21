"""Count the descriptors of a request without listing them.

Invariant: the smallest number is the length of `DescriptorTable.descriptors`.

How it works:
    A *cell* is what moves between one block of the producer and one block of the consumer. Most
    cells of a request have the same rows, so their descriptors join in the same way. For example,
    the producer's blocks 4 to 6 move to the consumer's blocks 1, 2 and 9, and each block is one
    descriptor. The cells (4, 1) and (5, 2) are adjacent on both sides, and join:

        cells            (4, 1)    (5, 2)    (6, 9)
        alike            3 times 1 descriptor
        neighbours       1 time 1 join                     3 - 1 = 2 descriptors

    So the descriptors are listed for one cell of each kind, and for one pair of neighbours of each
    kind. Neighbours begin in the same block or in the one after it, on both sides. After the last
    block comes the first one: the next head or layer may begin behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import attrs
import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.runs import Boundaries, coalesce
from kvspec.descriptors.selection import Picked
from kvspec.descriptors.table import DescriptorTable

# The groups of both sides, a block of the producer's table, and one of the consumer's.
_Groups = tuple[str, str]
_Place = tuple[_Groups, int, int]


def descriptor_counts(table: DescriptorTable, request: TransferRequest) -> tuple[int, int]:
    """Return the number of descriptors that NIXL posts, and the smallest possible number.

    NIXL joins neighbours in the list of ids if their ids are consecutive in one row and their
    bytes touch. It joins no ends.

    Args:
        table: The descriptor table.
        request: The request.

    Returns:
        The descriptors that NIXL posts for `table.select(request)`, and the length of
        `table.descriptors(request)`.

    Raises:
        SpecError: As `DescriptorTable.select`.
        MismatchError: As `DescriptorTable.select`.

    >>> import kvspec
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="uint8")
    >>> group = kvspec.KVCacheGroup(name="full", layers=["layer"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group])
    >>> caches = [kvspec.plan_memory(engine, kvspec.RankId(), 10, at) for at in (1 << 20, 1 << 30)]
    >>> table = kvspec.build_table(kvspec.plan_transfer(engine, engine), *caches)
    >>> descriptor_counts(table, kvspec.TransferRequest(
    ...     request_id="r", num_tokens=12, producer_blocks={"full": [4, 5, 6]},
    ...     consumer_blocks={"full": [1, 2, 9]}))
    (2, 2)
    """
    picked = table.tiles(request)
    posted = sum(
        len(numbered.rows) if numbered.is_end else numbered.rows.posted(tiles)
        for numbered, tiles in picked
    )
    return posted, fewest(picked, (table.producer.boundaries, table.consumer.boundaries))


@attrs.frozen(eq=False)
class _Cell:
    """The tiles between two blocks: their places in the list of picks, and how they look."""

    tiles: list[tuple[int, int]]
    look: tuple[object, ...]


def fewest(picked: Sequence[Picked], boundaries: Boundaries) -> int:
    """Return the number of descriptors that move *picked*, joined where they touch on both sides.

    Args:
        picked: The numbered rows of one pair of ranks, each with the tiles that move.
        boundaries: Addresses of each side over which no descriptor may lie.
    """
    cells, blocks = _cells(picked)
    alike, neighbours = Counter[object](), Counter[tuple[object, object, object]]()
    examples: dict[object, list[_Cell]] = {}
    for place, cell in cells.items():
        alike[cell.look] += 1
        examples.setdefault(cell.look, [cell])
        for step, other in _neighbours(place, blocks):
            # In a small pool, two cells may each come after the other. They are one pair.
            if other < place and any(place == next_ for _, next_ in _neighbours(other, blocks)):
                continue
            after = cells.get(other)
            if after is not None:
                pair = cell.look, after.look, step
                neighbours[pair] += 1
                examples.setdefault(pair, [cell, after])
    joins = {key: _joins(picked, example, boundaries) for key, example in examples.items()}
    total = sum(len(numbered.rows) * len(tiles) for numbered, tiles in picked)
    total -= sum(times * joins[look] for look, times in alike.items())
    for key, times in neighbours.items():
        total -= times * (joins[key] - joins[key[0]] - joins[key[1]])
    return total


def _cells(
    picked: Sequence[Picked],
) -> tuple[dict[_Place, _Cell], dict[_Groups, tuple[int, int]]]:
    """Return the cells by place, and the number of blocks of both sides by groups."""
    tiles_of: dict[_Place, list[tuple[int, int]]] = {}
    looks: list[list[object]] = []
    blocks: dict[_Groups, tuple[int, int]] = {}
    for number, (numbered, tiles) in enumerate(picked):
        rows, split, edge = numbered.rows, numbered.split_rows.token_split, numbered.edge
        groups = edge.producer_group, edge.group
        pagings = split.producer, split.consumer
        kernel = np.array([[paging.kernel_blocks_per_block] for paging in pagings])
        counts = np.array([rows.producer.num_blocks, rows.consumer.num_blocks]) // kernel[:, 0]
        blocks[groups] = int(counts[0]), int(counts[1])
        block, inner = np.divmod(tiles.block, kernel)
        for at, (source, target) in enumerate(zip(*block.tolist(), strict=True)):
            tiles_of.setdefault((groups, source, target), []).append((number, at))
        # Descriptors do not join over a boundary, and boundaries lie before first blocks.
        columns = [*inner, *tiles.tile, *(block == 0)]
        looks.append(list(zip(*(column.tolist() for column in columns), strict=True)))
    cells = {
        place: _Cell(found, tuple((number, looks[number][at]) for number, at in found))
        for place, found in tiles_of.items()
    }
    return cells, blocks


def _neighbours(
    place: _Place, blocks: dict[_Groups, tuple[int, int]]
) -> Iterator[tuple[object, _Place]]:
    """Yield the places that may begin where *place* ends, and the steps to them."""
    own, *at = place
    after = ((block, (block + 1) % count) for block, count in zip(at, blocks[own], strict=True))
    for source, target in product(*after):
        for groups in blocks:
            other = groups, source, target
            if other != place:
                yield (groups, source - at[0], target - at[1]), other


def _joins(picked: Sequence[Picked], cells: list[_Cell], boundaries: Boundaries) -> int:
    """Return how many descriptors of *cells* join to another one."""
    chosen: dict[int, list[int]] = {}
    for cell in cells:
        for number, at in cell.tiles:
            chosen.setdefault(number, []).append(at)
    rows = []
    for number, indices in chosen.items():
        numbered, tiles = picked[number]
        rows.append(numbered.addresses(tiles.take(np.array(indices))))
    return sum(map(len, rows)) - int(coalesce(rows, boundaries).shape[1])
