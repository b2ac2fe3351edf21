"""The base class of all kinds of layer.

Invariant: only the modules of this package know a kind of layer by name. A kind defines the parts
of a block and the tokens that a query still reads. It knows no layout, block table or transport.

How it works:
    A new kind of layer is a subclass with two members: `parts`, and `live_tokens` if old tokens
    become unnecessary. Everything else follows from the parts: page sizes, slices, plans, tables.

    `kvspec.plan.mismatches` compares the fields of two engines, because equal bytes must have equal
    meaning. The engines may differ in `MEMORY_FIELDS`. All other fields that both kinds have must
    have equal values. `WHY` contains the reasons.

    One engine may keep a layer with a window as full attention. These two kinds match, because the
    fields that only one kind has are all in `LIVENESS_FIELDS`. Two windows of different sizes do
    not match.
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
from kvspec.specs.key_content import KeyContent, Segment, without_rotation

# Fields that determine where bytes lie and how long they are kept, but not their meaning. The two
# engines may differ in them.
MEMORY_FIELDS = frozenset(
    {"block_size", "page_size_padded", "page_block_size", "extra_retained_tokens"}
)

# Fields that determine which tokens a layer keeps. A kind without these fields keeps all tokens,
# with the same content.
LIVENESS_FIELDS = frozenset({"sliding_window", "extra_retained_tokens", "attention_chunk_size"})

# The reason why a field must be equal on both engines. It is the `why` of a `Mismatch`. A field
# without an entry gets a general reason.
WHY = {
    "total_num_kv_heads": "heads are matched by their number in the model",
    "head_size": "one head of one token has another length",
    "head_size_v": "one value of one token has another length",
    "scale_dtype": "the same bytes mean other numbers",
    "elements_per_scale": "one scale belongs to another number of elements",
    "tokens_per_scale": "one row of scales belongs to another number of tokens",
    "dtype": "the same bytes mean other numbers",
    "ssm_dtype": "the same bytes mean other numbers",
    "tokens_per_state": "one row describes another number of tokens",
    "state_content_bytes": "one head's row has another length or packing",
    "sliding_window": "the sides keep different tokens",
    "attention_chunk_size": "the sides keep different tokens",
    "compress_ratio": "the sides keep different tokens",
    "overlap": "the sides keep different tokens",
    "num_kv_heads": "each position has another number of rows",
    "key_content": "the same elements of a key mean other numbers",
    "rotation": "the same keys are rotated by other angles",
    "scales_digest": "the same quantised elements stand for other numbers",
    "page_format": "an opaque page can only be read in its own format",
}

# Fields that may be None, and the field whose value they have then.
UNLESS_GIVEN = {
    "head_size_v": "head_size",
    "ssm_dtype": "dtype",
    "elements_per_scale": "head_size",
}


def meaning(spec: LayerSpec, field: str) -> object:
    """Return the value of a field in a canonical form, so that two specs can be compared.

    None becomes the value of the field that `UNLESS_GIVEN` lists. All known page formats become
    "plain", and the orders of keys that kvspec can change become one, because kvspec converts
    between them.

    Args:
        spec: The spec of one layer.
        field: Name of the field.

    >>> from kvspec import FullAttentionSpec
    >>> spec = FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> spec.head_size_v, meaning(spec, "head_size_v")
    (None, 128)
    """
    value = getattr(spec, field)
    if field == "page_format":
        return value if is_opaque(value) else PLAIN
    if field == "key_content":
        # The angles of the rotation may be unknown, so `mismatches` compares them on its own.
        content = getattr(spec, "common_key_content", value)
        return without_rotation(content) if isinstance(content, KeyContent) else content
    return getattr(spec, UNLESS_GIVEN[field]) if value is None and field in UNLESS_GIVEN else value


def is_size(_: object, at: attrs.Attribute[int], value: object) -> None:
    """Check that the field is an int >= 1. This is an attrs validator."""
    positive_int(at.name, value)


def is_count(_: object, at: attrs.Attribute[int], value: object) -> None:
    """Check that the field is an int >= 0. This is an attrs validator."""
    positive_int(at.name, value, least=0)


def is_size_or_none(_: object, at: attrs.Attribute[int | None], value: object) -> None:
    """Check that the field is None or an int >= 1. This is an attrs validator."""
    if value is not None:
        positive_int(at.name, value)


def is_flag(_: object, at: attrs.Attribute[bool], value: object) -> None:
    """Check that the field is a bool. This is an attrs validator."""
    flag(at.name, value)


@attrs.frozen(kw_only=True, slots=False)
class LayerSpec:
    """The base class of all kinds of layer. Use a subclass.

    Attributes:
        block_size: Tokens of one block (vLLM: `block_size`).
        page_size_padded: Bytes to which the engine pads a page, or None. A page is one block of one
            layer on one rank (vLLM: `page_size_padded`).
    """

    block_size: int = attrs.field(validator=is_size)
    page_size_padded: int | None = attrs.field(default=None, validator=is_size_or_none)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The named arrays of one block, with the units of the whole model."""
        raise NotImplementedError

    def segments(self, part: str) -> tuple[Segment, ...]:  # noqa: ARG002
        """Return where a row of *part* stores its bytes, see `kvspec.specs.key_content`.

        Empty if the row is stored in the common order, or in an order that kvspec does not know.
        """
        return ()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that the spec contains. Only a uniform-type group contains any."""
        return ()

    def of_layer(self, layer: str) -> LayerSpec:  # noqa: ARG002
        """Return the spec of *layer* in a group that has this spec."""
        return self

    @property
    def counts_prompt(self) -> bool:
        """Whether the layer stores tokens of the prompt, not those of an encoder."""
        return True

    @property
    def is_ring(self) -> bool:
        """Whether a block is a ring: a request has one block, and rows are positions modulo it."""
        return False

    def without_transfer(self, cached: int, num_tokens: int) -> int:  # noqa: ARG002
        """Return the leading positions that need not move if the consumer has cached *cached*.

        Raises:
            SpecError: If the layer cannot continue to *num_tokens* after so many tokens.
        """
        return cached

    def total(self, num_tokens: int, encoder_tokens: int | None) -> int:  # noqa: ARG002
        """Return the number of tokens that the layer stores for a request.

        Args:
            num_tokens: Tokens of the prompt.
            encoder_tokens: Tokens of the encoder, or None.
        """
        return num_tokens

    def page_size_bytes(self, tp_rank: int = 0, tp_size: int = 1) -> int:
        """Return the bytes of one block of one layer on one rank, with padding.

        The units are sharded evenly. `EngineSpec.page_size_bytes` uses the shardings of an engine.
        vLLM has the same property, for the rank that the spec describes.

        Args:
            tp_rank: TP rank.
            tp_size: Number of TP ranks.

        Returns:
            The sum of units x states x content bytes over all parts, or `page_size_padded`.

        Raises:
            SpecError: If the rank does not exist, or the padded size is too small.

        >>> from kvspec import FullAttentionSpec
        >>> FullAttentionSpec(block_size=16, total_num_kv_heads=8, head_size=128,
        ...                   dtype="bfloat16").page_size_bytes()
        65536
        """
        _check_rank("tp_rank", tp_rank, "tp_size", tp_size)
        real = 0
        for part in self.parts:
            units = even_sharding(part.units, tp_size, part.granularity).ranges[tp_rank]
            real += len(units) * part.states * part.content_bytes
        return padded_page(real, self.page_size_padded)

    def live_tokens(self, num_tokens: int) -> range:
        """Return the positions that the query after *num_tokens* tokens still reads.

        Blocks that contain none of these positions do not move. By default, a query reads all
        earlier tokens.

        The start of the range is the *first live position*. No query from *num_tokens* on reads an
        earlier position, so the engine may have given earlier blocks to another request. If the
        query reads no position at all, the range is empty and begins at *num_tokens*.
        """
        return range(positive_int("num_tokens", num_tokens, least=0))

    def get_tp_transfer_slices(
        self,
        local_tp_rank: int,
        local_tp_size: int,
        remote_tp_size: int,
        role: Role = "consumer",
        replica_policy: ReplicaPolicyName | ReplicaPolicy = "spread",
    ) -> tuple[TPTransferSlice, ...]:
        """Return the units that the local rank exchanges with each remote rank.

        The slices of a consumer rank cover its units exactly once. `plan_transfer` makes the same
        slices for all ranks at once: the edges of a plan contain those of every consumer rank. Use
        it for engines that have their own shardings, pipeline stages or context ranks, because
        here both sides are sharded evenly. vLLM's `TransferTopology` computes the same ranges, but
        only for TP sizes that divide each other.

        Args:
            local_tp_rank: TP rank on the local side.
            local_tp_size: Number of TP ranks on the local side.
            remote_tp_size: Number of TP ranks on the remote side.
            role: Role of the local side.
            replica_policy: How one of several equal producer ranks is chosen: a `ReplicaPolicy`, or
                the name of a policy.

        Returns:
            One slice for each remote rank and range of units.

        Raises:
            SpecError: If an argument is not valid.

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
        for layers, parts in self._layers_by_parts():
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

    def _layers_by_parts(self) -> Iterator[tuple[tuple[str, ...], tuple[Part, ...]]]:
        """Yield each distinct set of parts with the names of its layers.

        A spec of a single kind does not know its layers. It yields no names, which stands for all.
        """
        yield (), self.parts


def padded_page(real: int, padded: int | None) -> int:
    """Return the bytes of a page that has *real* bytes of content and is padded to *padded*.

    >>> padded_page(100, None), padded_page(100, 128)
    (100, 128)
    """
    if padded is not None and padded < real:
        raise SpecError("page_size_padded", padded, f"at least the {real} bytes of the page")
    return real if padded is None else padded


def _check_rank(field: str, rank: object, size_field: str, size: object) -> None:
    if positive_int(field, rank, least=0) >= positive_int(size_field, size, most=MAX_RANKS):
        raise SpecError(field, rank, f"less than {size_field}={size}")
