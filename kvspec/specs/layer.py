"""What every kind of layer offers.

Law: the modules of this package are the only ones that know a kind of layer by name. A kind says
which parts a block has and which tokens a query still needs; it knows nothing of layouts, block
tables or transports.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int
from kvspec.ownership.parallel import MAX_RANKS
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName, Role, tp_chooser
from kvspec.ownership.sharding import even_sharding
from kvspec.ownership.slices import TPTransferSlice, transfer_slices
from kvspec.specs.formats import PLAIN, is_opaque

MEMORY_FIELDS = frozenset(
    {"block_size", "page_size_padded", "page_block_size", "extra_retained_tokens"}
)
"""Fields that say where bytes lie and how long, not what they mean: two engines may differ."""

LIVENESS_FIELDS = frozenset({"sliding_window", "extra_retained_tokens", "attention_chunk_size"})
"""Fields that say which tokens a kind keeps: a kind without them keeps more of the same."""

WHY = {
    "total_num_kv_heads": "heads pair by their global number",
    "head_size": "one head of one token has another length",
    "head_size_v": "one value of one token has another length",
    "scale_dtype": "the same bytes mean other numbers",
    "elements_per_scale": "a scale holds for other elements",
    "tokens_per_scale": "a row of scales stands for other tokens",
    "dtype": "the same bytes mean other numbers",
    "ssm_dtype": "the same bytes mean other numbers",
    "tokens_per_state": "a row stands for other tokens",
    "state_content_bytes": "one head's row has another length or packing",
    "sliding_window": "the sides keep different tokens",
    "attention_chunk_size": "the sides keep different tokens",
    "page_format": "an opaque page can be read in its own format alone",
}
"""Why a field of a spec must be the same on both engines."""

UNLESS_GIVEN = {
    "head_size_v": "head_size",
    "ssm_dtype": "dtype",
    "elements_per_scale": "head_size",
}
"""Fields that, where they are None, mean what another field says."""


def meaning(spec: LayerSpec, field: str) -> object:
    """Return what a *field* of a spec says, in one of the ways in which it can be said.

    Of a field left out, what it then means; all formats of pages that are known are one.
    """
    value = getattr(spec, field)
    if field == "page_format":
        return value if is_opaque(value) else PLAIN
    return getattr(spec, UNLESS_GIVEN[field]) if value is None and field in UNLESS_GIVEN else value


def is_size(_: object, at: attrs.Attribute[int], value: object) -> None:
    """Accept an int >= 1 (an attrs validator)."""
    positive_int(at.name, value)


def is_count(_: object, at: attrs.Attribute[int], value: object) -> None:
    """Accept an int >= 0 (an attrs validator)."""
    positive_int(at.name, value, least=0)


def is_size_or_none(_: object, at: attrs.Attribute[int | None], value: object) -> None:
    """Accept None or an int >= 1 (an attrs validator)."""
    if value is not None:
        positive_int(at.name, value)


def is_flag(_: object, at: attrs.Attribute[bool], value: object) -> None:
    """Accept a bool (an attrs validator)."""
    flag(at.name, value)


@attrs.frozen(kw_only=True, slots=False)
class LayerSpec:
    """What every kind of layer offers; a kind overrides `parts` and, where it differs, the rest.

    *block_size*: tokens of one block. *page_size_padded*: bytes to which an engine pads the page
    (one layer, one block, one rank), or None.
    """

    block_size: int = attrs.field(validator=is_size)
    page_size_padded: int | None = attrs.field(default=None, validator=is_size_or_none)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The named arrays of one block, unsharded."""
        raise NotImplementedError

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that the spec itself names: none, unless it is a uniform-type group."""
        return ()

    def of_layer(self, layer: str) -> LayerSpec:  # noqa: ARG002
        """Return the spec of one layer of a group that has this spec."""
        return self

    @property
    def counts_prompt(self) -> bool:
        """Whether its positions are the prompt's; else they are of another sequence."""
        return True

    def total(self, num_tokens: int, encoder_tokens: int | None) -> int:  # noqa: ARG002
        """Return how many tokens such a layer counts: the prompt's, unless it has others."""
        return num_tokens

    def page_size_bytes(self, tp_rank: int = 0, tp_size: int = 1) -> int:
        """Return the bytes of one block of one layer on one rank, padding included.

        Units are sharded by default; `EngineSpec.page_size_bytes` knows an engine's own shardings.
        """
        _check_rank("tp_rank", tp_rank, "tp_size", tp_size)
        shardings = [(p, even_sharding(p.units, tp_size, p.granularity)) for p in self.parts]
        real = sum(len(d.ranges[tp_rank]) * p.states * p.content_bytes for p, d in shardings)
        return padded_page(real, self.page_size_padded)

    def live_tokens(self, num_tokens: int) -> range:
        """Return the positions that the query at position *num_tokens* still reads."""
        return range(positive_int("num_tokens", num_tokens, least=0))

    def get_tp_transfer_slices(
        self,
        local_tp_rank: int,
        local_tp_size: int,
        remote_tp_size: int,
        role: Role = "consumer",
        replica_policy: ReplicaPolicyName | ReplicaPolicy = "spread",
    ) -> tuple[TPTransferSlice, ...]:
        """Return which units the local rank exchanges with which remote ranks.

        Both sides shard by default: contiguous and balanced. Where an engine has shardings of its
        own, only its plan knows. *role* says whether the local side is the consumer or the
        producer; *replica_policy* which one of several equal producer ranks is read: a policy's
        name or a `ReplicaPolicy`. The slices of a consumer tile what it
        owns, exactly once.

        >>> from kvspec import FullAttentionSpec
        >>> spec = FullAttentionSpec(
        ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
        >>> [(s.remote_rank, s.global_range) for s in spec.get_tp_transfer_slices(1, 3, 2)]
        [(0, range(2, 4)), (1, range(4, 5))]
        """
        _check_rank("local_tp_rank", local_tp_rank, "local_tp_size", local_tp_size)
        positive_int("remote_tp_size", remote_tp_size, most=MAX_RANKS)
        replica_policy = ReplicaPolicy.of(replica_policy)
        if not isinstance(role, str) or role not in ("consumer", "producer"):
            raise SpecError("role", role, "'consumer' or 'producer'")
        pull = role == "consumer"
        sizes = (remote_tp_size, local_tp_size) if pull else (local_tp_size, remote_tp_size)
        chooser = tp_chooser(replica_policy, *sizes)
        slices: tuple[TPTransferSlice, ...] = ()
        for layers, parts in self._same_sharding():
            slices += transfer_slices(
                parts,
                role,
                local_tp_rank,
                lambda part: even_sharding(part.units, local_tp_size, part.granularity),
                lambda part: even_sharding(part.units, remote_tp_size, part.granularity),
                chooser,
                layers,
            )
        return slices

    def _same_sharding(self) -> Iterator[tuple[tuple[str, ...], tuple[Part, ...]]]:
        """Yield layers by name with the parts that each has; no names for any layer of the spec."""
        yield (), self.parts


def padded_page(real: int, padded: int | None) -> int:
    """Return the bytes of a page whose contents take *real* bytes, padded to *padded*."""
    if padded is not None and padded < real:
        raise SpecError("page_size_padded", padded, f"at least the {real} bytes of the page")
    return real if padded is None else padded


def _check_rank(field: str, rank: object, size_field: str, size: object) -> None:
    if positive_int(field, rank, least=0) >= positive_int(size_field, size, most=MAX_RANKS):
        raise SpecError(field, rank, f"less than {size_field}={size}")
