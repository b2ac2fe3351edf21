"""Recurrent states: one block holds the state after some number of tokens.

The conv state's channels are sharded in whole heads or groups, each named sub-projection by itself:
cutting the concatenation [x | B | C] by rank would give one rank another's channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs

from kvspec.dtypes import dtype_name, itemsize
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.part import Part
from kvspec.specs.layer import LayerSpec, is_size


def _parts(value: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(
        instance("state_parts", part, Part) for part in sequence("state_parts", value, "Parts")
    )


def _dtype(value: object) -> str | None:
    return None if value is None else dtype_name(value)


def _ssm_dtype(value: object) -> str | None:
    return None if value is None else dtype_name(value, "ssm_dtype")


@attrs.frozen(kw_only=True, slots=False)
class MambaSpec(LayerSpec):
    """A recurrent state with its own *state_parts*, not indexed by tokens.

    Build one with `mamba1`, `mamba2`, `gated_delta_net`, `short_conv` or `replicated_state`. Their
    arguments are the model's own sizes, before TP; *dtype* is that of the conv state, *ssm_dtype*
    (the same unless given) that of the temporal state. The conv state has
    ``conv_kernel - 1 + num_speculative_tokens`` rows. Both dtypes are None where *state_parts* are
    made by hand and do not say.
    """

    block_size: int = attrs.field(default=1, validator=is_size)
    state_parts: tuple[Part, ...] = attrs.field(converter=_parts)
    dtype: str | None = attrs.field(default=None, converter=_dtype)
    ssm_dtype: str | None = attrs.field(default=None, converter=_ssm_dtype)

    def __attrs_post_init__(self) -> None:
        if not self.state_parts:
            raise SpecError("state_parts", self.state_parts, "at least one part")
        names = tuple(part.name for part in self.state_parts)
        if len(set(names)) < len(names):
            raise SpecError("state_parts", names, "parts with names that differ")
        for part in self.state_parts:
            if part.per_token:
                wanted = "0: a state is not indexed by tokens"
                raise SpecError(f"{part.name}.tokens_per_state", part.tokens_per_state, wanted)
        self.parts  # noqa: B018 - their contents are whole elements, or this raises

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The state's own parts; those that do not name a dtype have the spec's."""
        return tuple(
            attrs.evolve(part, dtype=self.ssm_dtype if part.name == "ssm" else self.dtype)
            if part.dtype is None
            else part
            for part in self.state_parts
        )

    def live_tokens(self, num_tokens: int) -> range:
        """Return the position after which the state stands: the last of *num_tokens*."""
        n = positive_int("num_tokens", num_tokens, least=0)
        return range(n - 1, n) if n else EMPTY

    @classmethod
    def mamba1(
        cls,
        *,
        intermediate_size: int,
        state_size: int,
        conv_kernel: int,
        dtype: str,
        ssm_dtype: str | None = None,
        num_speculative_tokens: int = 0,
        block_size: int = 1,
        page_size_padded: int | None = None,
    ) -> MambaSpec:
        """Return the state of a Mamba1 layer: conv channels, and as many SSM channels."""
        rows = _conv_rows(conv_kernel, num_speculative_tokens)
        positive_int("state_size", state_size)
        ssm_dtype = dtype if ssm_dtype is None else ssm_dtype
        parts = (
            _conv("conv_x", "intermediate_size", intermediate_size, 1, rows, dtype),
            _ssm("intermediate_size", intermediate_size, state_size, ssm_dtype),
        )
        return cls(
            block_size=block_size,
            page_size_padded=page_size_padded,
            state_parts=parts,
            dtype=dtype,
            ssm_dtype=ssm_dtype,
        )

    @classmethod
    def mamba2(
        cls,
        *,
        num_heads: int,
        head_dim: int,
        n_groups: int,
        state_size: int,
        conv_kernel: int,
        dtype: str,
        ssm_dtype: str | None = None,
        num_speculative_tokens: int = 0,
        block_size: int = 1,
        page_size_padded: int | None = None,
    ) -> MambaSpec:
        """Return the state of a Mamba2 layer: x in heads, B and C in groups, SSM heads.

        With fewer groups than ranks, B and C are replicated while x and the SSM state are not.
        """
        rows = _conv_rows(conv_kernel, num_speculative_tokens)
        positive_int("state_size", state_size)
        positive_int("head_dim", head_dim)
        ssm_dtype = dtype if ssm_dtype is None else ssm_dtype
        parts = (
            _conv("conv_x", "num_heads", num_heads, head_dim, rows, dtype),
            _conv("conv_b", "n_groups", n_groups, state_size, rows, dtype),
            _conv("conv_c", "n_groups", n_groups, state_size, rows, dtype),
            _ssm("num_heads", num_heads, head_dim * state_size, ssm_dtype),
        )
        return cls(
            block_size=block_size,
            page_size_padded=page_size_padded,
            state_parts=parts,
            dtype=dtype,
            ssm_dtype=ssm_dtype,
        )

    @classmethod
    def gated_delta_net(
        cls,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel: int,
        dtype: str,
        ssm_dtype: str | None = None,
        num_speculative_tokens: int = 0,
        block_size: int = 1,
        page_size_padded: int | None = None,
    ) -> MambaSpec:
        """Return the state of a gated delta net: q and k in key heads, v in value heads."""
        rows = _conv_rows(conv_kernel, num_speculative_tokens)
        positive_int("head_k_dim", head_k_dim)
        positive_int("head_v_dim", head_v_dim)
        ssm_dtype = dtype if ssm_dtype is None else ssm_dtype
        parts = (
            _conv("conv_q", "num_k_heads", num_k_heads, head_k_dim, rows, dtype),
            _conv("conv_k", "num_k_heads", num_k_heads, head_k_dim, rows, dtype),
            _conv("conv_v", "num_v_heads", num_v_heads, head_v_dim, rows, dtype),
            _ssm("num_v_heads", num_v_heads, head_k_dim * head_v_dim, ssm_dtype),
        )
        return cls(
            block_size=block_size,
            page_size_padded=page_size_padded,
            state_parts=parts,
            dtype=dtype,
            ssm_dtype=ssm_dtype,
        )

    @classmethod
    def short_conv(
        cls,
        *,
        conv_dim: int,
        conv_kernel: int,
        dtype: str,
        num_speculative_tokens: int = 0,
        block_size: int = 1,
        page_size_padded: int | None = None,
    ) -> MambaSpec:
        """Return the state of a short convolution over *conv_dim* channels."""
        rows = _conv_rows(conv_kernel, num_speculative_tokens)
        parts = (_conv("conv_x", "conv_dim", conv_dim, 1, rows, dtype),)
        return cls(
            block_size=block_size,
            page_size_padded=page_size_padded,
            state_parts=parts,
            dtype=dtype,
        )

    @classmethod
    def replicated_state(cls, *, state_bytes: int) -> MambaSpec:
        """Return a state of *state_bytes* opaque bytes that every TP rank holds whole."""
        positive_int("state_bytes", state_bytes)
        parts = (
            Part(
                name="state",
                units=1,
                states=1,
                content_bytes=state_bytes,
                tokens_per_state=0,
                tensor="state",
            ),
        )
        return cls(state_parts=parts)


def common_rows(spec: LayerSpec, other: LayerSpec) -> LayerSpec:
    """Return *spec* with the rows that *other* has too, of each of its state's parts.

    Rows of tokens are all of them: two engines' blocks differ in size, not in what is common.
    """
    if not isinstance(spec, MambaSpec):
        return spec
    rows = {part.name: part.states for part in other.parts}
    least = [min(part.states, rows.get(part.name, part.states)) for part in spec.parts]
    if least == [part.states for part in spec.parts]:
        return spec
    parts = zip(spec.parts, least, strict=True)
    return attrs.evolve(spec, state_parts=[attrs.evolve(p, states=n) for p, n in parts])


def _conv_rows(conv_kernel: int, num_speculative_tokens: int) -> int:
    positive_int("conv_kernel", conv_kernel, least=2)
    return conv_kernel - 1 + positive_int("num_speculative_tokens", num_speculative_tokens, least=0)


def _conv(name: str, field: str, heads: int, channels: int, rows: int, dtype: str) -> Part:
    positive_int(field, heads)
    return Part(
        name=name,
        units=heads * channels,
        states=rows,
        content_bytes=itemsize(dtype_name(dtype)),
        granularity=channels,
        tokens_per_state=0,
        dtype=dtype,
        tensor="conv",
    )


def _ssm(field: str, heads: int, elements: int, dtype: str) -> Part:
    positive_int(field, heads)
    return Part(
        name="ssm",
        units=heads,
        states=1,
        content_bytes=elements * itemsize(dtype_name(dtype, "ssm_dtype")),
        tokens_per_state=0,
        dtype=dtype,
        tensor="ssm",
    )
