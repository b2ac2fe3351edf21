"""The NIXL connector of vLLM 0.33 in pull mode: what is judged, and what is known to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import attrs
import grids
from judging import Axis, Finding
from refusal import RefusedError
from toy import gqa, latent, mamba2, transfer, window
from workers import VERSION, run, tells

from kvspec.testing import Case
from kvspec.testing.kit import Supports, System

NAME = "vLLM NIXL connector (pull)"
JUDGED = (
    "`NixlPullConnectorWorker` of the wheel: registration, handshake checks, TP mapping, descriptor"
    " rows and ids, pairing of blocks, and post-processing of received blocks. NIXL is replaced by"
    " copies in host memory, and the attention backend is replaced by one that accepts any block"
    " size. *Keys and values as two head slots* are pages with one plane of keys and one of values,"
    " which vLLM describes as two heads."
)
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
BYTES = System(name=NAME, version=VERSION, connector=run)
BOTH = attrs.evolve(BYTES, tells=tells)
KIT = attrs.evolve(
    BOTH,
    refuses=(RefusedError,),
    supports=Supports.only(
        kinds=["full", "MLA"], max_tp=8, equal_tp=False, even_heads=True, equal_blocks=False,
        equal_layouts=False, prefixes="blocks", layouts=(*LAYOUTS, "LBKNHC"),
    ),
)  # fmt: skip

POWERS = (1, 2, 4, 8)
TWO = ("l.0", "l.1"), ("l.0", "l.1")


def told() -> Iterator[Case]:
    """Heads and latents between TP sizes up to 8, to count notifications."""
    for p, d in product(POWERS, repeat=2):
        for spec in (gqa(8), gqa(2), latent()):
            yield transfer(spec, tp=(p, d))


def layouts() -> Iterator[Case]:
    """Each pair of vLLM's layouts, at equal and unequal TP."""
    for tp, pair in product(((1, 1), (1, 2), (2, 1)), product(LAYOUTS, repeat=2)):
        yield transfer(gqa(2), tp=tp, tokens=5, layouts=pair, layers=TWO)


def equal_prefixes() -> Iterator[Case]:
    """Cached prefixes of whole blocks, with equal block sizes."""
    for tokens, cached, tp in product(range(1, 18), (0, 4, 8, 12), ((1, 1), (1, 2), (2, 1))):
        if cached < tokens:
            yield transfer(gqa(2), tokens=tokens, cached=cached, tp=tp)


def unequal_blocks() -> Iterator[Case]:
    """Unequal block sizes without a cached prefix."""
    for tokens, pair in product(range(1, 33), ((4, 8), (4, 16), (8, 4), (4, 6), (6, 4))):
        yield transfer(gqa(2), tokens=tokens, blocks=pair)


def unequal_prefixes() -> Iterator[Case]:
    """Unequal block sizes with a cached prefix of whole blocks of the consumer."""
    for tokens, cached in product(range(1, 33), (8, 16, 24)):
        if cached < tokens:
            yield transfer(gqa(2), tokens=tokens, cached=cached, blocks=(4, 8))


def windows() -> Iterator[Case]:
    """Sliding windows with equal block sizes."""
    for size, tokens in product((1, 3, 4, 6, 8), range(1, 24)):
        yield transfer(window(size), tokens=tokens)


def unequal_windows() -> Iterator[Case]:
    """Sliding windows with unequal block sizes."""
    for size, tokens in product((4, 8, 12), range(1, 41)):
        yield transfer(window(size), tokens=tokens, blocks=(4, 8))


def full_and_window() -> Iterator[Case]:
    """A group of full attention and a group of windows in one memory."""
    for tokens, cached, tp in product(range(1, 20), (0, 4), ((1, 1), (2, 2))):
        if cached < tokens:
            specs = gqa(2), attrs.evolve(window(6), total_num_kv_heads=2)
            yield transfer(*specs, tokens=tokens, cached=cached, tp=tp, shared=True)


def mamba(groups: tuple[int, ...]) -> Iterator[Case]:
    """Full attention and Mamba2 in one memory. The pages of both are equal, as vLLM makes them."""
    for count, p, d in product(groups, (1, 2, 4), (1, 2, 4)):
        sides = [(gqa(4), attrs.evolve(mamba2(count), page_size_padded=64 // tp)) for tp in (p, d)]
        yield transfer(*sides[0], other=sides[1], tp=(p, d), tokens=5, shared=True)


def slots() -> Iterator[Case]:
    """Keys and values as two head slots, as some backends store them."""
    for count, p, d in product((2, 4, 8), (1, 2, 4), (1, 2, 4)):
        if grids.legal(count, p) and grids.legal(count, d):
            pair = ("LBKNHC", "LBKNHC")
            yield transfer(gqa(count), tp=(p, d), tokens=5, layouts=pair)


def padded(layers: int, layout: str) -> Iterator[Case]:
    """Pages of attention with unused bytes at their end."""
    names = tuple(f"l.{number}" for number in range(layers))
    for p, d, more in product((1, 2), (1, 2), (0, 8)):
        specs = [gqa(2, page_size_padded=(32 + more) // tp) for tp in (p, d)]
        yield transfer(
            specs[0], other=specs[1:], tp=(p, d), tokens=5,
            layouts=(layout, layout), layers=(names, names),
        )  # fmt: skip


def hybrid_windows() -> Iterator[Case]:
    """Full attention and windows with unequal block sizes, in one memory."""
    for tokens in range(1, 25):
        yield transfer(gqa(), window(8), tokens=tokens, blocks=(4, 8), shared=True)


AXES = [
    Axis(name="attention heads, TP up to 16", cases=grids.heads, system=BYTES),
    Axis(name="latent (MLA), TP up to 8", cases=grids.latents, system=BYTES),
    Axis(name="notifications", cases=told, system=BOTH, laws=(7,)),
    Axis(name="layouts", cases=layouts, system=BYTES),
    Axis(name="cached prefixes, equal blocks", cases=equal_prefixes, system=BYTES),
    Axis(name="unequal blocks", cases=unequal_blocks, system=BYTES),
    Axis(name="cached prefixes, unequal blocks", cases=unequal_prefixes, system=BYTES),
    Axis(name="sliding windows, equal blocks", cases=windows, system=BYTES),
    Axis(name="sliding windows, unequal blocks", cases=unequal_windows, system=BYTES),
    Axis(name="full attention and windows", cases=full_and_window, system=BYTES),
    Axis(name="Mamba2, a group for each rank", cases=lambda: mamba((4,)), system=BYTES),
    Axis(name="Mamba2, fewer groups than ranks", cases=lambda: mamba((1, 2)), system=BYTES),
    Axis(name="keys and values as two head slots", cases=slots, system=BYTES),
    Axis(name="padded pages, one layer", cases=lambda: padded(1, "LBHNC"), system=BYTES),
    Axis(name="padded pages, blocks outermost", cases=lambda: padded(2, "BLHNC"), system=BYTES),
    Axis(name="padded pages, layers outermost", cases=lambda: padded(2, "LBHNC"), system=BYTES),
]

NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
FINDINGS = [
    Finding(
        axis="cached prefixes, unequal blocks",
        function=f"{NIXL}/base_worker.py: _map_block_ids_for_block_size_ratio, then"
        " _apply_prefix_caching",
        result="The consumer's blocks are cut to the producer's size and clipped to the length of"
        " the producer's list. Then the last blocks of that list are paired with them, so tokens"
        " arrive at places of other tokens.",
        reach="A decode engine with larger blocks than the prefill engine, and a prefix cache,"
        " which is on by default. The request ends without an error.",
        issue="https://github.com/vllm-project/vllm/pull/51527 (open): it refuses such requests",
    ),
    Finding(
        axis="sliding windows, unequal blocks",
        function=f"{NIXL}/base_scheduler.py: get_exchange_clipped_blocks, then"
        " base_worker.py: _map_block_ids_for_block_size_ratio",
        result="Each side keeps the last blocks of the window in its own block size. The lists then"
        " begin at different tokens, but they are paired from the start.",
        reach="A model with sliding windows, the hybrid cache manager on, and a decode engine with"
        " larger blocks. No cached prefix is needed.",
    ),
    Finding(
        axis="Mamba2, fewer groups than ranks",
        function="vllm/distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py:"
        " remote_conv_offsets",
        result="B and C are replicated on ranks that share a group, but their offsets and sizes are"
        " scaled by the ratio of the TP sizes. B is filled with bytes of C, or of x.",
        reach="Models with one group of B and C, such as Granite 4, Bamba and Falcon-H1, at unequal"
        " TP. The request ends without an error.",
        issue="https://github.com/vllm-project/vllm/issues/55208 (open), with #55306",
    ),
    Finding(
        axis="keys and values as two head slots",
        function=f"{NIXL}/base_worker.py: _build_fa_remote and _build_local_splits_from_plan",
        result="A page is divided by heads as if each slot were a head. Some ranks get all keys and"
        " others all values. The checks compare lengths, and these agree.",
        reach="Backends that publish `num_head_slots=2`, such as B12X and ROCm's shuffled pages, at"
        " unequal TP. No engine with such a GPU was run.",
    ),
    Finding(
        axis="padded pages, one layer",
        function=f"{NIXL}/base_worker.py: register_kv_caches, then _build_fa_remote",
        result="The region is the page with its padding, and the slices are equal parts of it.",
        reach="Attention pages that are padded, at unequal TP, in an allocation that is one run of"
        " blocks. All layers of an engine share one allocation, so a real model has the next case.",
    ),
    Finding(
        axis="padded pages, blocks outermost",
        function=f"{NIXL}/base_worker.py: register_kv_caches, then _build_fa_remote",
        result="The region is the row of all layers, since a padded page is not contiguous. It is"
        " registered once, and its head slices are equal parts of the row.",
        reach="Attention pages that are padded, at unequal TP, in a layout with blocks outermost."
        " With layers outermost, the registration refuses them.",
    ),
]
