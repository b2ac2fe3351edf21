"""Recurrent states: one block holds the whole state of a layer after some number of tokens.

In this module, a *state* is the whole content of such a block. Its rows, which `Part.states`
counts, are the inputs that a convolution reads again. The temporal state has one row.

Invariant: each projection of a conv state is a part with its own sharding.

How it works:
    A Mamba layer has a conv state and a temporal (SSM) state. The conv state of Mamba2 concatenates
    the channels of three projections: x, B and C. TP divides each projection separately, in whole
    heads or groups. So a rank does not own a contiguous piece of the model's concatenation. With
    x of 4 channels (2 heads), B and C of 2 channels (1 group each), on 2 ranks:

        model      x0 x1 x2 x3   B0 B1   C0 C1
        rank 0     x0 x1         B0 B1   C0 C1
        rank 1           x2 x3   B0 B1   C0 C1

    The first half of the model's channels would be x0 to x3, which no rank holds. The ranks also
    replicate B and C, because there are fewer groups than ranks.

        >>> spec = MambaSpec.mamba2(num_heads=2, head_dim=2, n_groups=1, state_size=2,
        ...                         conv_kernel=4, dtype="bfloat16")
        >>> [(part.name, part.units, part.granularity, part.states) for part in spec.parts]
        [('conv_x', 4, 2, 3), ('conv_b', 2, 2, 3), ('conv_c', 2, 2, 3), ('ssm', 2, 1, 1)]

    Shapes of vLLM's `MambaStateShapeCalculator`, for the whole model. K is `conv_kernel - 1 +
    num_speculative_tokens`:

    kind               conv state                                    temporal state
    -----------------  --------------------------------------------  -------------------------------
    Mamba1             (intermediate, K)                             (intermediate, state)
    Mamba2             (heads x head_dim + 2 x groups x state, K)    (heads, head_dim, state)
    gated delta net    (2 x k_heads x k_dim + v_heads x v_dim, K)    (v_heads, v_dim, k_dim)
    short convolution  (channels, K)                                 none
    linear attention   none                                          (heads, dim, dim)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.dtypes import dtype_name, itemsize
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.part import Part
from kvspec.specs.layer import LayerSpec, is_size

_CONV = "conv"  # How the names of all parts of a conv state begin.


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
    """A recurrent state. A block contains one whole state, and its rows are not tokens.

    Create it with `mamba1`, `mamba2`, `gated_delta_net`, `short_conv`, `linear_attention` or
    `replicated_state`. Their arguments are the sizes of the whole model, before TP. vLLM's
    `MambaSpec` has the shapes of one rank instead.

    Attributes:
        state_parts: Parts of the state.
        dtype: Type of the conv state. None is possible if the parts have their own dtypes or are
            opaque.
        ssm_dtype: Type of the temporal state, with the same rule for None.
        block_size: Tokens of one block. A table may also contain only the id of the last state.
        page_size_padded: Bytes to which a page is padded, or None.

    >>> import kvspec
    >>> spec = kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=3, dtype="bfloat16")
    >>> [(part.name, part.units, part.states) for part in spec.parts]
    [('conv_x', 4, 2)]
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
            raise SpecError("state_parts", names, "parts with different names")
        for part in self.state_parts:
            if part.per_token:
                requirement = "0, because the rows of a state are not tokens"
                raise SpecError(f"{part.name}.tokens_per_state", part.tokens_per_state, requirement)
        # A part raises an error if its content is not a whole number of elements.
        self.parts  # noqa: B018

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the state. A part without a dtype gets the dtype of the spec."""
        return tuple(
            attrs.evolve(part, dtype=self.ssm_dtype if part.name == "ssm" else self.dtype)
            if part.dtype is None
            else part
            for part in self.state_parts
        )

    def live_tokens(self, num_tokens: int) -> range:
        """Return a range with only the last token. Only the state after that token is read.

        The source is vLLM's `MambaManager.get_num_skipped_tokens`.
        """
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
    ) -> MambaSpec:
        """Return the state of a Mamba1 layer.

        The conv state and the temporal state both have *intermediate_size* channels.

        Args:
            intermediate_size: Channels of the layer.
            state_size: Elements of the temporal state of one channel.
            conv_kernel: Width of the convolution.
            dtype: Type of the conv state.
            ssm_dtype: Type of the temporal state. By default, *dtype*.
            num_speculative_tokens: Speculative tokens, which add rows to the conv state.
            block_size: Tokens of one block. A table may also contain only the id of the last state.

        Raises:
            SpecError: If a size or a dtype is not valid.

        >>> spec = MambaSpec.mamba1(
        ...     intermediate_size=8192, state_size=16, conv_kernel=4, dtype="bfloat16")
        >>> [(part.name, part.units, part.states, part.content_bytes) for part in spec.parts]
        [('conv_x', 8192, 3, 2), ('ssm', 8192, 1, 32)]
        """
        rows = _conv_rows(conv_kernel, num_speculative_tokens)
        positive_int("state_size", state_size)
        ssm_dtype = dtype if ssm_dtype is None else ssm_dtype
        parts = (
            _conv("conv_x", "intermediate_size", intermediate_size, 1, rows, dtype),
            _ssm("intermediate_size", intermediate_size, state_size, ssm_dtype),
        )
        return cls(block_size=block_size, state_parts=parts, dtype=dtype, ssm_dtype=ssm_dtype)

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
    ) -> MambaSpec:
        """Return the state of a Mamba2 layer.

        TP divides x and the temporal state by heads, and B and C by groups. If there are fewer
        groups than ranks, the ranks replicate B and C, but not the others. The module docstring has
        an example.

        Args:
            num_heads: SSM heads.
            head_dim: Channels of one head.
            n_groups: Groups of B and C.
            state_size: Channels of one group, and elements of the state of one channel.
            conv_kernel: Width of the convolution.
            dtype: Type of the conv state.
            ssm_dtype: Type of the temporal state. By default, *dtype*.
            num_speculative_tokens: Speculative tokens, which add rows to the conv state.
            block_size: Tokens of one block. A table may also contain only the id of the last state.

        Raises:
            SpecError: If a size or a dtype is not valid.
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
        return cls(block_size=block_size, state_parts=parts, dtype=dtype, ssm_dtype=ssm_dtype)

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
    ) -> MambaSpec:
        """Return the state of a gated delta net, as in Qwen3-Next.

        TP divides q and k by key heads, and v and the temporal state by value heads.

        Args:
            num_k_heads: Key heads.
            num_v_heads: Value heads.
            head_k_dim: Elements of one key.
            head_v_dim: Elements of one value.
            conv_kernel: Width of the convolution.
            dtype: Type of the conv state.
            ssm_dtype: Type of the temporal state. By default, *dtype*.
            num_speculative_tokens: Speculative tokens, which add rows to the conv state.
            block_size: Tokens of one block. A table may also contain only the id of the last state.

        Raises:
            SpecError: If a size or a dtype is not valid.

        >>> spec = MambaSpec.gated_delta_net(
        ...     num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel=4,
        ...     dtype="bfloat16", ssm_dtype="float32")
        >>> [(part.name, part.units, part.content_bytes) for part in spec.parts]
        [('conv_q', 2048, 2), ('conv_k', 2048, 2), ('conv_v', 4096, 2), ('ssm', 32, 65536)]
        """
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
        return cls(block_size=block_size, state_parts=parts, dtype=dtype, ssm_dtype=ssm_dtype)

    @classmethod
    def short_conv(
        cls,
        *,
        conv_dim: int,
        conv_kernel: int,
        dtype: str,
        num_speculative_tokens: int = 0,
        block_size: int = 1,
    ) -> MambaSpec:
        """Return the state of a short convolution, as in LFM2. It has no temporal state.

        Args:
            conv_dim: Channels of the convolution.
            conv_kernel: Width of the convolution.
            dtype: Type of the conv state.
            num_speculative_tokens: Speculative tokens, which add rows to the conv state.
            block_size: Tokens of one block. A table may also contain only the id of the last state.

        Raises:
            SpecError: If a size or a dtype is not valid.

        >>> spec = MambaSpec.short_conv(conv_dim=2048, conv_kernel=3, dtype="bfloat16")
        >>> spec.page_size_bytes(tp_rank=0, tp_size=2) == 2 * 1024 * 2
        True
        """
        rows = _conv_rows(conv_kernel, num_speculative_tokens)
        parts = (_conv("conv_x", "conv_dim", conv_dim, 1, rows, dtype),)
        return cls(block_size=block_size, state_parts=parts, dtype=dtype)

    @classmethod
    def linear_attention(
        cls,
        *,
        num_heads: int,
        head_dim: int,
        dtype: str,
        ssm_dtype: str | None = None,
        block_size: int = 1,
    ) -> MambaSpec:
        """Return the state of linear attention, as in MiniMax-Text-01. It has no conv state.

        Args:
            num_heads: Heads, which TP divides.
            head_dim: Elements of a key and of a value of one head.
            dtype: Type of the state.
            ssm_dtype: Another name of the type, as in the other constructors. By default, *dtype*.
            block_size: Tokens of one block. A table may also contain only the id of the last state.

        Raises:
            SpecError: If a size or a dtype is not valid.

        >>> spec = MambaSpec.linear_attention(num_heads=64, head_dim=128, dtype="float32")
        >>> spec.page_size_bytes(tp_rank=0, tp_size=8) == 8 * 128 * 128 * 4
        True
        """
        positive_int("head_dim", head_dim)
        own = dtype if ssm_dtype is None else ssm_dtype
        part = _ssm("num_heads", num_heads, head_dim * head_dim, own)
        return cls(block_size=block_size, state_parts=(part,), dtype=own, ssm_dtype=own)

    @classmethod
    def replicated_state(cls, *, state_bytes: int) -> MambaSpec:
        """Return a state of *state_bytes* opaque bytes, of which every TP rank has a replica.

        >>> MambaSpec.replicated_state(state_bytes=100).page_size_bytes(tp_rank=1, tp_size=2)
        100
        """
        positive_int("state_bytes", state_bytes)
        part = Part(name="state", units=1, states=1, content_bytes=state_bytes, tokens_per_state=0)
        return cls(state_parts=(attrs.evolve(part, tensor="state"),))


def common_rows(spec: LayerSpec, other: LayerSpec) -> LayerSpec:
    """Return *spec* with only the rows of recurrent states that *other* has as well.

    An engine with more speculative tokens has more rows in its conv state. Only parts whose names
    begin with "conv" lose rows: in another part, such as a ring of rows by position, row i need not
    mean the same on both sides. Specs of attention are
    returned unchanged: their numbers of rows differ only because the block sizes differ, and block
    sizes may differ.

    Args:
        spec: Spec of one engine.
        other: Spec of the same layers on the other engine.

    >>> sizes = {"conv_dim": 8, "conv_kernel": 4, "dtype": "bfloat16"}
    >>> spec = MambaSpec.short_conv(num_speculative_tokens=2, **sizes)
    >>> [s.parts[0].states for s in (spec, common_rows(spec, MambaSpec.short_conv(**sizes)))]
    [5, 3]
    """
    if not isinstance(spec, MambaSpec):
        return spec
    rows = {part.name: part.states for part in other.parts if part.name.startswith(_CONV)}
    least = [min(part.states, rows.get(part.name, part.states)) for part in spec.parts]
    if least == [part.states for part in spec.parts]:
        return spec
    parts = zip(spec.parts, least, strict=True)
    return attrs.evolve(spec, state_parts=[attrs.evolve(p, states=n) for p, n in parts])


def is_of_common_rows(field: str) -> bool:
    """Return whether the mismatch *field* is a number of rows that `common_rows` makes equal.

    >>> is_of_common_rows("layers.0.conv_x.states"), is_of_common_rows("layers.0.ring.states")
    (True, False)
    """
    *_, part, name = ("", *field.split("."))
    return name == "states" and part.startswith(_CONV)


def _conv_rows(conv_kernel: int, num_speculative_tokens: int) -> int:
    """Return the rows of a conv state: the inputs that the next convolution reads again."""
    # A kernel of width 1 reads no earlier input, so it has no state.
    positive_int("conv_kernel", conv_kernel, least=2)
    return conv_kernel - 1 + positive_int("num_speculative_tokens", num_speculative_tokens, least=0)


def _conv(name: str, field: str, heads: int, channels: int, rows: int, dtype: str) -> Part:
    """Return one projection of a conv state. *field* is the name of *heads* for the error."""
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
    """Return a temporal state. *field* is the name of *heads* for the error."""
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
