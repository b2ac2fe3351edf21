"""DIGEST: the cost of a digest of a request, compared with copying as many bytes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import numpy as np
import works
from timing import Options, Row, clock, cpu, interleaved, readable

import kvspec
from kvspec.digests import compile_digest, digest, wanted
from kvspec.nixl import NixlRank
from kvspec.session import Session, new_remote_id


def digested(options: Options) -> Iterator[Row]:
    """Digest with numpy, and then compiled if numba is installed, alone and in a load."""
    yield from _measured(options, "numpy")
    if compile_digest():
        yield from _measured(options, "compiled")


def _measured(options: Options, how: str) -> Iterator[Row]:
    """Digest one rank's share of requests with short and with long contents."""
    for name, spec in (("heads of 256 bytes", works.heads(8, 16)), ("latents", works.LATENT)):
        work = works.Work(name=name, layers=8, spec=spec, tp_sizes=(4, 4), tokens=4096)
        producer, consumer = work.engines()
        rank = kvspec.RankId()
        cache, storage = kvspec.allocate(producer, rank, work.pools[0])
        plan = kvspec.plan_transfer(producer, consumer)
        request = work.request()
        extents = wanted(plan, request)
        flats = [flat[: flat.size * work.used[0] // work.pools[0]] for flat in storage.values()]
        copies = [np.empty_like(flat) for flat in flats]
        nbytes = sum(flat.size for flat in flats)

        def copied(copies: list[np.ndarray] = copies, flats: list[np.ndarray] = flats) -> None:
            for copy, flat in zip(copies, flats, strict=True):
                copy[:] = flat

        ours, other = interleaved(
            options.times(16),
            clock(lambda c=cache, r=request, a=extents: digest(c, r.producer_blocks, a)),
            clock(copied),
        )
        speed = f"{nbytes / ours / 1e9:.2f} GB/s"
        what = f"{how}: digest of {nbytes >> 20} MiB, {name}; other: copying as many"
        ratio = f"{ours / other:.3g}"
        text = f"{readable(ours)}, {speed}"
        yield Row(budget="DIGEST", what=what, ours=text, other=readable(other), ratio=ratio)
    if find_spec("nixl_cu13") or find_spec("nixl_cu12"):
        yield _loaded(options, how)


def _loaded(options: Options, how: str) -> Row:
    """Load over NIXL with and without a digest, in CPU time; both ranks are in this process."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    work = works.Work(
        name="loaded", layers=8, spec=works.heads(8, 16), tp_sizes=(1, 1), tokens=4096, fragments=0
    )
    sessions, numbers, pools = dict[str, Session](), itertools.count(), work.pools
    with ExitStack() as stack:
        for name, engine, blocks in zip("PD", work.engines(), pools, strict=True):
            cache, storage = kvspec.allocate(engine, kvspec.RankId(), blocks)
            for flat in storage.values():
                flat[:] = 7
            nixl = stack.enter_context(NixlRank(prefix=f"{name}-", polled=name == "D", secret=b""))
            session = Session(nixl, cache, engine_id=name, owner=storage)
            sessions[name] = stack.enter_context(session)
        producer, consumer = sessions.values()
        consumer.connect([producer.introduction])

        def run(*, digest: bool) -> None:
            request, remote_id = work.request(), new_remote_id(f"{next(numbers)}")
            producer.hold(remote_id, blocks=request.producer_blocks)
            load = consumer.load(request, remote_id=remote_id, timeout=60.0, checksum=digest)
            # One thread polls both sides: the producer must answer for the digest.
            while load.poll() == "moving" or consumer.stats().loads:
                producer.poll()
                consumer.poll()
            if load.error is not None:
                raise load.error

        ours, other = interleaved(
            options.times(16), cpu(lambda: run(digest=True)), cpu(lambda: run(digest=False))
        )
    nbytes = 2 * work.layers * 8 * 128 * 2 * work.tokens  # K and V of 8 heads of 256 bytes
    what = f"{how}: a load of {nbytes >> 20} MiB that compares checksums"
    what += "; other: without, CPU time of both"
    ratio = f"{ours / other:.3g}"
    return Row(budget="DIGEST", what=what, ours=readable(ours), other=readable(other), ratio=ratio)
