"""Extents: parts of a request's contents whose checksums two ranks compare.

Invariant: both ranks use the same extent for the same contents, whatever their blocks, layouts and
contexts are. The two halves of an extent cover it.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.stripes import WHOLE, Stripe
from kvspec.ownership.tokens import BlockCyclic
from kvspec.wire.handshake import is_name

MAX_NAMES = 4096
"""Bytes of the names in one extent; two of the longest fit."""
MAX_NAME = 1024
MOST = 2**62
ALONE = BlockCyclic()


def _layers(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("layers", value, "names")


def _parts(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("parts", value, "names")


def _check_names(field: str, names: tuple[str, ...]) -> None:
    for name in names:
        is_name(field, name, MAX_NAME)
    if not names or len(set(names)) < len(names):
        raise SpecError(field, names, "at least one name, each once")


def _span(field: str, value: object, *, least: int) -> None:
    span = instance(field, value, range)
    if not 0 <= span.start <= span.stop - least <= MOST or span.step != 1:
        raise SpecError(field, span, f"a range of at least {least} below {MOST}")


@attrs.frozen(kw_only=True)
class Extent:
    """Contents of a request: some units of some parts, at some tokens, or some rows of a state.

    Only the tokens count that both context ranks own, and that the stripe contains.

    Attributes:
        layers: Names of the layers.
        parts: Names of the parts.
        units: Units of the model.
        tokens: Positions of tokens, in the count of the group. For a state, the last of them is the
            token that it has seen.
        rows: Rows of a state. Empty for tokens.
        producer: Tokens that the producer's context rank owns.
        consumer: Tokens that the consumer's context rank owns.
        stripe: Blocks of this producer rank, if replicas share the work.
        block: Tokens of one block of the stripe.
    """

    layers: tuple[str, ...] = attrs.field(converter=_layers)
    parts: tuple[str, ...] = attrs.field(converter=_parts)
    units: range
    tokens: range
    rows: range = EMPTY
    producer: BlockCyclic = ALONE
    consumer: BlockCyclic = ALONE
    stripe: Stripe = WHOLE
    block: int = 1

    def __attrs_post_init__(self) -> None:
        _check_names("layers", self.layers)
        _check_names("parts", self.parts)
        if (total := sum(len(name.encode()) for name in self.layers + self.parts)) > MAX_NAMES:
            raise SpecError("layers", f"{total} bytes", f"names of at most {MAX_NAMES} bytes")
        for field, least in (("units", 1), ("tokens", 1), ("rows", 0)):
            _span(field, getattr(self, field), least=least)
        for side in ("producer", "consumer"):
            one = instance(side, getattr(self, side), BlockCyclic)
            for name, least in (("interleave", 1), ("size", 1), ("rank", 0)):
                positive_int(f"{side}.{name}", getattr(one, name), least=least, most=MOST)
        instance("stripe", self.stripe, Stripe)
        positive_int("block", self.block, most=MOST)

    def __str__(self) -> str:
        last = f" to {self.layers[-1]}" if len(self.layers) > 1 else ""
        units = f"units {self.units.start}..{self.units.stop - 1}"
        what = f"layers {self.layers[0]}{last}, {'+'.join(self.parts)} {units}"
        if self.rows:
            return f"{what}, rows {self.rows.start}..{self.rows.stop - 1}"
        return f"{what}, tokens {self.tokens.start}..{self.tokens.stop - 1}"

    @property
    def halves(self) -> tuple[Extent, Extent] | None:
        """Two extents that cover this one, or None for one token or row of one unit."""
        for field in ("layers", "parts", "units", "rows" if self.rows else "tokens"):
            whole = getattr(self, field)
            if len(whole) > 1:
                first, second = whole[: len(whole) // 2], whole[len(whole) // 2 :]
                return attrs.evolve(self, **{field: first}), attrs.evolve(self, **{field: second})
        return None
