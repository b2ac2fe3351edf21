"""What a digest of a request costs, beside copying as many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import works
from timing import Options, Row, clock, interleaved, told

import kvspec
from kvspec.digest import digest, wanted


def digested(options: Options) -> Iterator[Row]:
    """Digest one rank's share of requests of short and of long contents."""
    for name, spec in (("heads of 256 bytes", works.heads(8, 16)), ("latents", works.LATENT)):
        work = works.Work(name=name, layers=8, spec=spec, tp_sizes=(4, 4), tokens=4096)
        producer, consumer = work.engines()
        rank = kvspec.RankId()
        cache, storage = kvspec.allocate(producer, rank, work.pools[0])
        plan = kvspec.plan_transfer(producer, consumer)
        request = work.request()
        asked = wanted(plan, request)
        flats = [flat[: flat.size * work.used[0] // work.pools[0]] for flat in storage.values()]
        copies = [np.empty_like(flat) for flat in flats]
        nbytes = sum(flat.size for flat in flats)

        def copied(copies: list[np.ndarray] = copies, flats: list[np.ndarray] = flats) -> None:
            for copy, flat in zip(copies, flats, strict=True):
                copy[:] = flat

        ours, other = interleaved(
            options.times(16),
            clock(lambda c=cache, r=request, a=asked: digest(c, r.producer_blocks, a)),
            clock(copied),
        )
        speed = f"{nbytes / ours / 1e9:.2f} GB/s"
        what = f"digest of {nbytes >> 20} MiB, {name}; other: copying as many"
        ratio = f"{ours / other:.3g}"
        ours_told = f"{told(ours)}, {speed}"
        yield Row(budget="DIGEST", what=what, ours=ours_told, other=told(other), ratio=ratio)
