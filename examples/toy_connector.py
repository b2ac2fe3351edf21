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
    """Yield (head, producer rank, place there, consumer rank, place there) for each read."""
    for rank in range(consumers):
        for place, head in enumerate(heads(total, consumers, rank)):
            source = next(r for r in range(producers) if head in heads(total, producers, r))
            yield head, source, head - heads(total, producers, source).start, rank, place


def copies(pairs, tensors, tables, pools, size, tokens, starts):
    """Yield (source address, target address, bytes). Adjacent copies of one memory become one.

    *pairs* are places of heads, *tensors* pairs of a source and a target, and *starts* the
    addresses where memories begin.
    """
    for ids, pool in zip(tables, pools, strict=True):
        used = ids[tokens.start // size :]
        if len(ids) * size < tokens.stop or len({*used}) < len(used) or {*used} - {*range(pool)}:
            raise CannotServeError(f"impossible blocks of group full: {ids}")
    last = (0, 0, 0)
    for copy in sorted(
        (
            source.address(tables[0][token // size], there, token % size),
            target.address(tables[1][token // size], here, token % size),
            source.content_bytes,
        )
        for there, here in pairs
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
