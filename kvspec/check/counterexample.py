"""A byte that is not right, told so that one can find it.

Law: names whose byte it is and who should have sent it, in the model's own numbers.
"""

from __future__ import annotations

from typing import Literal

import attrs

from kvspec.ownership.parallel import RankId

Kind = Literal["missing", "double", "wrong source", "unwanted", "foreign"]


@attrs.frozen(kw_only=True)
class CounterExample:
    """One byte that is not right: whose, which, how, and who should have sent it.

    *unit* is the model's own number; *token* is None in a recurrent state, where *row* counts the
    rows of the state. Of an unwanted byte the *block* is told, *unit* then being the rank's own;
    outside every region *layer* is empty and *byte* the address. A foreign byte is one that is
    read though it is not the request's: block and unit, or the address, are the *producer*'s.
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
    producer: RankId | None = None

    def __str__(self) -> str:
        at = f"row {self.row}" if self.token is None else f"token {self.token}"
        if self.block is not None:
            at = f"block {self.block}, {at}"
        who = f"consumer {self.consumer}"
        if self.producer is not None:
            who += f" reads producer {self.producer}"
        if not self.layer:
            told = "written" if self.producer is None else "read"
            return f"{who}, address {self.byte:#x}: {told}, although no content lies there"
        senders = " or ".join(map(str, self.wanted_from))
        told = {
            "missing": f"missing; producer {senders} should have sent it",
            "double": f"written twice; producer {senders} should have sent it once",
            "wrong source": f"read from other bytes; producer {senders} holds the right ones",
            "unwanted": "written, although the request does not want it",
            "foreign": "another request's block",
        }[self.kind]
        return (
            f"{who}, layer {self.layer}, part {self.part}, unit {self.unit}, "
            f"{at}, byte {self.byte}: {told}"
        )
