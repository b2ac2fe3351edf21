"""A toy connector, as an engine may have one: it knows heads, ranks and blocks, but not kvspec.

`toy_system.py` describes it to the kit, and docs/test-your-connector.md explains how.
"""


class CannotServeError(Exception):
    """The two engines, or the blocks of a request, do not fit."""


def heads(total, size, rank):
    """Return the heads of a rank: an even share, or one head if there are more ranks."""
    first = rank * total // size
    return range(first, max(first + 1, (rank + 1) * total // size))


def reads(total, producers, consumers):
    """Yield (head, producer rank, place on it, consumer rank, place on it) for each read."""
    for target in range(consumers):
        for target_place, head in enumerate(heads(total, consumers, target)):
            source = next(r for r in range(producers) if head in heads(total, producers, r))
            source_place = head - heads(total, producers, source).start
            yield head, source, source_place, target, target_place


def copies(pairs, tensors, tables, pools, size, tokens, starts):
    """Yield (source address, target address, bytes). Adjacent copies of one memory become one.

    *pairs* are the places of a head on both ranks, *tensors* pairs of a source and a target, and
    *starts* the addresses where memories begin.
    """
    for ids, pool in zip(tables, pools, strict=True):
        used = ids[tokens.start // size :]
        if len(ids) * size < tokens.stop or len({*used}) < len(used) or {*used} - {*range(pool)}:
            raise CannotServeError(f"impossible blocks of group full: {ids}")
    last = (0, 0, 0)
    for copy in sorted(
        (
            source.address(tables[0][token // size], source_place, token % size),
            target.address(tables[1][token // size], target_place, token % size),
            source.content_bytes,
        )
        for source_place, target_place in pairs
        for source, target in tensors
        for token in tokens
    ):
        adjacent = last[0] + last[2] == copy[0] and last[1] + last[2] == copy[1]
        if adjacent and not starts & {*copy[:2]}:
            last = (*last[:2], last[2] + copy[2])
            continue
        yield from [last] if last[2] else []
        last = copy
    yield from [last] if last[2] else []
