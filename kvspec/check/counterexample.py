"""A byte that is not right, told so that one can find it.

Law: names whose byte it is and who should have sent it, in the model's own numbers.
"""

from __future__ import annotations

from typing import Literal

import attrs

from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints

Kind = Literal["missing", "double", "wrong source", "unwanted"]
State = Literal["wanted", "dead", "cached"]


@attrs.frozen(kw_only=True)
class CounterExample:
    """One byte that is not right: whose, which, how, and who should have sent it.

    *unit* is the model's own number; *token* is None in a recurrent state, where *row* counts the
    rows of the state. Of an unwanted byte the *block* is told, *unit* then being the rank's own;
    outside every region *layer* is empty and *byte* the address.
    """

    kind: Kind
    consumer: RankId
    layer: str
    part: str
    unit: int = 0
    token: int | None = None
    row: int = 0
    byte: int = 0
    block: int | None = None
    wanted_from: tuple[RankId, ...] = ()

    def __str__(self) -> str:
        at = f"row {self.row}" if self.token is None else f"token {self.token}"
        if self.block is not None:
            at = f"block {self.block}, {at}"
        if not self.layer:
            where = f"consumer {self.consumer}, address {self.byte:#x}"
            return f"{where}: written, although no content lies there"
        senders = " or ".join(map(str, self.wanted_from))
        told = {
            "missing": f"missing; producer {senders} should have sent it",
            "double": f"written twice; producer {senders} should have sent it once",
            "wrong source": f"read from other bytes; producer {senders} holds the right ones",
            "unwanted": "written, although the request does not want it",
        }[self.kind]
        return (
            f"consumer {self.consumer}, layer {self.layer}, part {self.part}, unit {self.unit}, "
            f"{at}, byte {self.byte}: {told}"
        )


@attrs.frozen(eq=False, kw_only=True)
class Grid:
    """Contents of one part of one layer, rows x units: where they lie and what they stand for.

    *wanted* ones have to be written once, *dead* ones may be, *cached* ones must not be.
    """

    layer: str
    part: Part
    units: range
    producer_group: KVCacheGroup
    rows: Ints
    tokens: Ints | None
    state: State
    address: Ints
