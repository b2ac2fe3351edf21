"""The cases that each run judges on each axis, whatever it draws.

Random cases of a small profile leave whole classes out, such as a TP size of 7, or a prefix of a
latent. Connectors were wrong in just one class. So `kvspec.testing.kit.recipes` lists each class.

Invariant: each case moves tokens, has its blocks in another order on each side, and lies inside of
what the system supports.

How it works:
    `must_cases` builds a case of each recipe of an axis. A recipe that the system does not support,
    or that is not legal for the kind of layers, has no case:

        axis         kinds of layers             recipes
        groups       each kind with the next     groups in another order, excluded, in one memory
        everything   all kinds in turn           many sizes differ at once
        the others   those of the axis           one way in which engines or requests differ
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from math import lcm
from typing import Any

import attrs

from kvspec.check.counting import context_of
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import NAMED_LAYOUTS
from kvspec.errors import KVSpecError
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.replicas import ReplicaPolicy, Topology
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KeyContent,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvspec.testing.case import Case
from kvspec.testing.engines import layouts_of, page_bytes
from kvspec.testing.kinds import kinds_of
from kvspec.testing.kit.recipes import (
    COMBINED,
    DRAWN_TOKENS,
    FORMAT_RECIPES,
    RECIPES,
    Recipe,
    everything,
)
from kvspec.testing.pairs import FULL_KIND_OF
from kvspec.testing.parallels import has_one_block, parts_of
from kvspec.testing.requests import needed
from kvspec.testing.rotary import may_rotate, reorders
from kvspec.testing.supports import Supports

NULL = 0
"""The null block. No table of a listed case names it as a block."""


def must_cases(axis: str, narrow: Supports) -> Iterator[Case]:
    """Yield the listed cases of the axis that *narrow* allows.

    Args:
        axis: Name of the axis.
        narrow: What the system supports on this axis.

    >>> narrow = Supports.only(kinds=["full"], max_tp=4, equal_tp=False)
    >>> [case.producer.parallel.tp_size for case in must_cases("kinds", narrow)]
    [2, 4]
    """
    kinds = kinds_of(narrow)
    if axis == "everything":
        for number, kind in enumerate(kinds):
            made = (_case(narrow, [kind], each) for each in everything(7 * number))
            yield from islice(filter(None, made), max(2, DRAWN_TOKENS // len(kinds)))
            special = [*COMBINED[number % 2 :][:1], *(FORMAT_RECIPES if "full" in kind else [])]
            yield from filter(None, (_case(narrow, [kind], each) for each in special))
        return
    chosen = [[kind] for kind in kinds]
    if axis == "groups":
        several = narrow.hybrid and len(kinds) > 1
        chosen = [[kind, kinds[n - 1]] if several else [kind] for n, kind in enumerate(kinds)]
    for names in chosen:
        for recipe in RECIPES.get(axis, ()):
            if (case := _case(narrow, names, recipe)) is not None:
                yield case


def moves_nothing(case: Case) -> bool:
    """Return whether the consumer of *case* lacks no token: every answer to it is right."""
    return not any(needed(each, case.request, case.consumer) for each in case.consumer.groups)


def _case(narrow: Supports, kinds: Sequence[str], recipe: Recipe) -> Case | None:
    """Return the case of *recipe*, or None if *narrow* does not allow it or it is not legal."""
    uniform = any(kind.startswith("uniform") for kind in kinds)
    if not _allows(narrow, recipe) or (recipe.shared and uniform):
        return None
    # Not each kind has each layout, page format, block size or rotation.
    with suppress(KVSpecError):
        sides = _Side(narrow, kinds, recipe, 0).engine(), _Side(narrow, kinds, recipe, 1).engine()
        if not (all(_even(narrow, side) for side in sides) and narrow.fit(*sides)):
            return None
        return _with_request(narrow, recipe, *sides)
    return None


def _allows(narrow: Supports, recipe: Recipe) -> bool:
    """Return whether *narrow* allows the numbers of *recipe* that need no engine to judge."""
    same = recipe.blocks[0] == recipe.blocks[1]
    return (
        max(recipe.tp) <= narrow.max_tp
        and max(recipe.pp) <= narrow.max_pp
        and not (recipe.odd and narrow.equal_pp)
        and (narrow.dcp or max(recipe.dcp) == 1)
        and (narrow.pcp or max(recipe.pcp) == 1)
        and (same or not narrow.equal_blocks)
        and (narrow.kernel_blocks or not any(recipe.kernel))
        and (narrow.compressed or recipe.rows == 1)
        and (narrow.padding or max(recipe.padding) < 0)
        and (narrow.transposed or not any(recipe.page_format))
        and (narrow.null_blocks or not any(recipe.null))
        and (narrow.late_tables or not (any(recipe.late) or any(recipe.spare)))
        and (narrow.retention or not any(recipe.keeps))
        and (narrow.key_content or not any(recipe.rotary))
        and (narrow.regrouped or not recipe.reverse)
        and (narrow.drafts or not (recipe.draft or recipe.named))
        and (narrow.shared or not recipe.shared)
        and (narrow.prefixes != "none" or not recipe.cached)
    )


def _even(narrow: Supports, engine: EngineSpec) -> bool:
    """Return whether the TP size divides each number of units, if *narrow* requires it."""
    size = engine.parallel.tp_size
    packs = {part.units // part.granularity for part in parts_of(engine.groups)}
    return not narrow.even_heads or all(n % size == 0 or size % n == 0 for n in packs)


@attrs.frozen
class _Side:
    """One engine of a recipe: 0 is the producer, and 1 is the consumer."""

    narrow: Supports
    kinds: Sequence[str]
    recipe: Recipe
    at: int

    def engine(self) -> EngineSpec:
        """Return the engine."""
        recipe, at = self.recipe, self.at
        groups = [self.group(kind) for kind in self.kinds]
        if recipe.draft:
            groups[0] = attrs.evolve(groups[0], excluded=groups[0].layers[-1:])
        stages = None
        if recipe.odd:
            # The stages have every other layer, beginning with another one on each side.
            names = [layer for group in groups for layer in group.layers]
            size = recipe.pp[at]
            stages = tuple(
                tuple(name for n, name in enumerate(names) if (n + at) % size == stage)
                for stage in range(size)
            )
        parallel = ParallelConfig(
            tp_size=recipe.tp[at], pp_size=recipe.pp[at], dcp_size=recipe.dcp[at],
            pcp_size=recipe.pcp[at], interleave_size=recipe.interleave[at], stages=stages,
        )  # fmt: skip
        layouts = self.layouts(groups[0].spec)
        number = recipe.layouts[0 if self.narrow.equal_layouts else at]
        bare = EngineSpec(groups=groups, parallel=parallel, layout=layouts[number % len(layouts)])
        groups = self.padded(bare)
        if recipe.reverse and at:
            groups.reverse()
        null = NULL if recipe.null[at] else None
        return attrs.evolve(bare, groups=tuple(groups), null_block=null)

    def layouts(self, spec: LayerSpec) -> list[str]:
        """Return the layouts that the system supports and that fit the spec and the recipe."""
        recipe = self.recipe
        names = layouts_of(spec, self.narrow.layouts or NAMED_LAYOUTS)
        if max(recipe.padding) >= 0 or recipe.shared:
            names = [name for name in names if set(name[:2]) == set("LB")]
        if any(recipe.page_format):
            names = [name for name in names if "K" in name and name.endswith("NC")]
        # A recipe that needs another layout has no case.
        return names or [""]

    def group(self, kind: str) -> KVCacheGroup:
        """Return the group of one kind, without padding."""
        recipe, at = self.recipe, self.at
        spec: Any = model(kind, recipe.heads, recipe.blocks[at], recipe.rows)
        if recipe.keeps[at] and type(spec) in FULL_KIND_OF:
            whole = FULL_KIND_OF[type(spec)]
            fields = [field.name for field in attrs.fields(whole) if field.init]
            spec = whole(**{name: getattr(spec, name) for name in fields})
        if recipe.rotary[at] and may_rotate(spec) and reorders(spec):
            size = spec.head_size // 2 * 2
            content = KeyContent(rotary=recipe.rotary[at], rotary_size=size)
            spec = attrs.evolve(spec, key_content=content)
        if recipe.page_format[at]:
            spec = attrs.evolve(spec, page_format=recipe.page_format[at])
        layers = spec.layers or [f"{kind}.{number}" for number in range(recipe.layers)]
        if recipe.named and not spec.layers:
            layers[-1] = f"{kind}.draft.{recipe.layers}"
        kernel = None if has_one_block(spec) else recipe.kernel[at] or None
        return KVCacheGroup(name=kind, layers=layers, spec=spec, kernel_block_size=kernel)

    def padded(self, bare: EngineSpec) -> list[KVCacheGroup]:
        """Return the groups with padded pages. Pages of one memory have equal bytes."""
        pad = self.recipe.padding[self.at]
        # The layers of a uniform-type group have pages of different sizes.
        if (pad < 0 and not self.recipe.shared) or any(g.spec.layers for g in bare.groups):
            return list(bare.groups)
        pages = [page_bytes(bare, group, group.layers[0]) for group in bare.groups]
        if self.recipe.shared:
            pages = [max(pages)] * len(pages)
        return [
            attrs.evolve(group, spec=attrs.evolve(group.spec, page_size_padded=page + max(pad, 0)))
            for group, page in zip(bare.groups, pages, strict=True)
        ]


def model(kind: str, heads: int, block: int, rows: int = 1) -> LayerSpec:
    """Return a small spec of a kind, with *heads* heads or units.

    >>> model("MLA", 4, 2).parts[0].content_bytes
    6
    """
    base: Any = {"block_size": block, "head_size": 6, "dtype": "uint8", "tokens_per_state": rows}
    gqa: Any = base | {"total_num_kv_heads": heads, "head_size": 2}
    state: Any = {"conv_kernel": 3, "dtype": "uint8"}
    uniform = [(0, gqa), (1, gqa | {"head_size": 3})]
    makers: dict[str, Any] = {
        "full": lambda: FullAttentionSpec(**gqa),
        "full, V of another size": lambda: FullAttentionSpec(**gqa, head_size_v=3),
        "full, opaque": lambda: FullAttentionSpec(**gqa, state_content_bytes=5),
        "full, keys of 16 bytes": lambda: FullAttentionSpec(
            **gqa | {"head_size": 16, "dtype": "bfloat16"}
        ),
        "full, with scales": lambda: FullAttentionSpec(**gqa, scale_dtype="float32"),
        "sliding window": lambda: SlidingWindowSpec(
            **gqa, sliding_window=3, extra_retained_tokens=1
        ),
        "chunked local": lambda: ChunkedLocalAttentionSpec(**gqa, attention_chunk_size=3),
        "cross": lambda: CrossAttentionSpec(**gqa),
        "MLA": lambda: MLAAttentionSpec(**base),
        "sliding window MLA": lambda: SlidingWindowMLASpec(**base, sliding_window=3),
        "uniform": lambda: UniformTypeKVCacheSpecs(
            specs={f"uniform.{name}": FullAttentionSpec(**fields) for name, fields in uniform}
        ),
        "uniform MLA": lambda: UniformTypeKVCacheSpecs(
            specs={f"latent.{n}": MLAAttentionSpec(**base | {"head_size": n}) for n in (2, 3)}
        ),
        "uniform sliding window": lambda: UniformTypeKVCacheSpecs(
            specs={
                f"window.{name}": SlidingWindowSpec(**fields, sliding_window=3)
                for name, fields in uniform
            }
        ),
        "mamba1": lambda: MambaSpec.mamba1(intermediate_size=heads, state_size=2, **state),
        "mamba2": lambda: MambaSpec.mamba2(
            num_heads=heads, head_dim=2, n_groups=2, state_size=2, **state
        ),
        "gated delta net": lambda: MambaSpec.gated_delta_net(
            num_k_heads=heads, num_v_heads=2 * heads, head_k_dim=1, head_v_dim=2, **state
        ),
        "short conv": lambda: MambaSpec.short_conv(conv_dim=heads, **state),
        "ring": lambda: CircularBufferSpec(
            block_size=block + 2, head_size=3, dtype="uint8", compress_ratio=2, overlap=True
        ),
        "replicated state": lambda: MambaSpec.replicated_state(state_bytes=5),
    }
    spec: LayerSpec = makers[kind]()
    return attrs.evolve(spec, block_size=block) if isinstance(spec, MambaSpec) else spec


def _with_request(
    narrow: Supports, recipe: Recipe, producer: EngineSpec, consumer: EngineSpec
) -> Case | None:
    """Return the case with its tables, or None if no token moves or the prefix is not allowed."""
    sides = producer, consumer
    row = max(1, *(part.tokens_per_state for part in parts_of(consumer.groups)))
    rings = (getattr(group.spec, "compress_ratio", 1) for group in consumer.groups)
    row = lcm(row, *rings)
    cached = recipe.cached // row * row
    whole = lcm(*(_virtual(engine, group) for engine in sides for group in engine.groups))
    if narrow.prefixes == "blocks" and cached % whole:
        return None
    # One number counts the tokens of the prompt, and a cross layer has those of an encoder.
    cross = any(group.name == "cross" for group in consumer.groups)
    bare = TransferRequest(
        request_id="must", num_tokens=recipe.tokens,
        encoder_tokens=recipe.tokens + 2 if cross else None,
        cached_tokens={group.name: cached for group in consumer.groups} if cross else cached,
        producer_blocks={}, consumer_blocks={},
    )  # fmt: skip
    if not all(needed(group, bare, consumer) for group in consumer.groups):
        return None
    (there, pool), (here, own_pool) = (
        _tables(recipe, at, engine, bare, consumer) for at, engine in enumerate(sides)
    )
    nodes = [{rank: rank.tp % 2 for rank in engine.parallel.ranks} for engine in sides]
    near = ReplicaPolicy("nearest", 0, Topology(producer=nodes[0], consumer=nodes[1]))
    policies: Sequence[Any] = narrow.policies or ("spread", near, "first", "stripe")
    policy = policies[sum(recipe.tp) % len(policies)]
    return Case(
        producer=producer, consumer=consumer, producer_pool=pool, consumer_pool=own_pool,
        request=attrs.evolve(bare, producer_blocks=there, consumer_blocks=here),
        replica_policy=policy, shared=recipe.shared,
    )  # fmt: skip


def _virtual(engine: EngineSpec, group: KVCacheGroup) -> int:
    """Return the tokens of one block of a table."""
    return group.spec.block_size * context_of(engine, RankId(), group)[1]


def _tables(
    recipe: Recipe, at: int, engine: EngineSpec, bare: TransferRequest, consumer: EngineSpec
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Return the tables and the pools of one side."""
    tables: dict[str, BlockTable] = {}
    free = count(NULL + 1)
    for group in engine.groups:
        moves, size = needed(group, bare, consumer), _virtual(engine, group)
        length = bare.encoder_tokens if "cross" in group.name else bare.num_tokens
        first = moves.start // size if recipe.late[at] else 0
        blocks = range(first, -(-(length or 0) // size) + recipe.spare[at])
        if has_one_block(group.spec):
            blocks = range(1)
        taken = list(islice(free, len(blocks)))
        # Every second block first on the producer, and the last ones first on the consumer.
        ids = [*taken[1::2], *taken[::2]] if at == 0 else [*taken[1:][::-1], *taken[:1]]
        if recipe.null[at] and not has_one_block(group.spec):
            ids = [
                block if (number + 1) * size > moves.start else NULL
                for number, block in zip(blocks, ids, strict=True)
            ]
        tables[group.name] = BlockTable(ids, blocks.start * size)
        free = free if recipe.shared else count(NULL + 1)
    most = max(max(table.block_ids.tolist()) for table in tables.values())
    sizes = {
        # Either pool may be the larger one.
        name: most + 1
        if recipe.shared
        else max(table.block_ids.tolist()) + 1 + (recipe.heads // 2 + at) % 2
        for name, table in tables.items()
    }
    return tables, sizes
