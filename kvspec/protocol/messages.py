"""What two ranks tell each other about one request.

Law: a message names its request by id, nonce and attempt, who sends it and to whom, each of one
start; so none is taken for another's, another attempt's or an earlier start's. What a reader asks
has a number of its own; so no answer is taken for that to an earlier load's question.
"""

from __future__ import annotations

import attrs

from kvspec.errors import SpecError, TransferState
from kvspec.inputs import instance, positive_int, seconds
from kvspec.ownership.parallel import RankId
from kvspec.protocol.extent import Extent
from kvspec.protocol.handshake import is_name
from kvspec.protocol.pushed import Pushed

MESSAGES = {
    "heartbeat": "a reader lives, and reads or is about to: it asks for more time",
    "done": "a reader reads no more, whether or not it has all; it asks if what it read was valid",
    "lease": "answers a heartbeat: nothing is freed for so many seconds",
    "valid": "answers a reader that is done: all that it read was still held",
    "gone": "answers either: the blocks are freed, or about to be; what was read is void",
    "stop": "a reader wants no more of what is pushed to it; answered once nothing of it can move",
    "pushed": "a producer has written all that it has for a reader, and sums up what that was",
    "stopped": "a producer writes no more into a reader's blocks, and has not written all",
    "progress": "a producer has written a layer of a group up to a token: so far it can be read",
    "checksum_request": "a reader has it all, and asks for the sum of what the producer holds",
    "checksum": "answers it: the sum",
    "checksum_unavailable": "answers it: it cannot be summed, by what the producer was told",
}
"""By kind. Readers send heartbeat, done, stop, checksum_request; producers send the others."""

READERS = ("heartbeat", "done")
MAX_REQUEST = 1024
"""Bytes of a request's id."""
NONCE = range(8, 65)
"""Bytes of a nonce."""
MAX_READERS = 2**20
SUM = 8
"""Bytes of a sum."""
OWN = {
    "lease": ("lease", 0.0),
    "group": ("progress", ""),
    "layer": ("progress", ""),
    "upto": ("progress", 0),
    "extent": ("checksum_request", None),
    "total": ("checksum", b""),
    "pushed": ("pushed", None),
}
"""Fields of one kind of message alone, and what they are of the others."""


def _request(_: object, at: attrs.Attribute[str], value: object) -> None:
    is_name(at.name, value, MAX_REQUEST)


def _nonce(_: object, at: attrs.Attribute[bytes], value: object) -> None:
    if not isinstance(value, bytes) or len(value) not in NONCE:
        raise SpecError(at.name, value, f"{NONCE.start} to {NONCE.stop - 1} bytes")


def _count(_: object, at: attrs.Attribute[int], value: object) -> None:
    positive_int(at.name, value, least=0)


@attrs.frozen
class RankAddress:
    """One rank of one start of an engine."""

    engine_id: str
    epoch: int
    rank: RankId

    def __attrs_post_init__(self) -> None:
        is_name("engine_id", self.engine_id)
        positive_int("epoch", self.epoch, least=0)
        instance("rank", self.rank, RankId)
        for name in ("pp", "pcp", "tp"):
            positive_int(f"rank.{name}", getattr(self.rank, name), least=0)

    def __str__(self) -> str:
        return f"{self.engine_id} {self.rank}"


@attrs.frozen
class Key:
    """One request of a producer: its id there, and a nonce that no other request had or will have.

    The producer makes the nonce when it admits the request; whoever may read is told both.
    """

    request_id: str = attrs.field(validator=_request)
    nonce: bytes = attrs.field(validator=_nonce, repr=False)


@attrs.frozen(kw_only=True)
class Message:
    """One message of *by* to *to* about the request *key*; *kind* is one of `MESSAGES`.

    *attempt* grows with each attempt to read the request, *number* with each question of a reader,
    about any; asked again, it has the same, and so has its answer. *sample*: which of several equal
    requests of a prompt reads. *expected*, of a reader: how many readers *to* will hear of in this
    attempt, the samples counted. *lease*, of a `lease`: seconds. *group*, *layer*, *upto*, of what
    was written: every token before position *upto*. *extent*: what is to be summed; *total*: its
    sum, 8 bytes. *pushed*: what was written for the reader.
    """

    kind: str
    key: Key
    by: RankAddress
    to: RankAddress
    attempt: int = attrs.field(default=0, validator=_count)
    number: int = attrs.field(default=0, validator=_count)
    sample: int = attrs.field(default=0, validator=_count)
    expected: int = attrs.field(default=0, validator=_count)
    lease: float = 0.0
    group: str = ""
    layer: str = ""
    upto: int = attrs.field(default=0, validator=_count)
    extent: Extent | None = None
    total: bytes = attrs.field(default=b"", repr=False)
    pushed: Pushed | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in MESSAGES:
            raise SpecError("kind", self.kind, f"one of {', '.join(MESSAGES)}")
        for name, kind in (("key", Key), ("by", RankAddress), ("to", RankAddress)):
            instance(name, getattr(self, name), kind)
        least = int(self.kind in READERS)
        positive_int("expected", self.expected, least=least, most=MAX_READERS * least)
        if self.sample and self.sample >= MAX_READERS:
            raise SpecError("sample", self.sample, f"less than {MAX_READERS}")
        seconds("lease", self.lease)
        for name, (owner, none) in OWN.items():
            if self.kind != owner and getattr(self, name) != none:
                raise SpecError(name, getattr(self, name), f"{none!r}, but of a {owner!r}")
        self._check_own()

    def _check_own(self) -> None:
        """Check what only this kind has."""
        if self.kind == "progress":
            for name in ("group", "layer"):
                is_name(name, getattr(self, name), MAX_REQUEST)
        elif self.kind == "checksum" and (
            not isinstance(self.total, bytes) or len(self.total) != SUM
        ):
            raise SpecError("total", self.total, f"{SUM} bytes")
        for name, kind in (("extent", Extent), ("pushed", Pushed)):
            if self.kind == OWN[name][0]:
                instance(name, getattr(self, name), kind)

    def answer(
        self,
        kind: str,
        *,
        lease: float = 0.0,
        group: str = "",
        layer: str = "",
        upto: int = 0,
        total: bytes = b"",
    ) -> Message:
        """Return the answer to this one."""
        return Message(
            kind=kind,
            key=self.key,
            by=self.to,
            to=self.by,
            attempt=self.attempt,
            number=self.number,
            sample=self.sample,
            lease=lease,
            group=group,
            layer=layer,
            upto=upto,
            total=total,
        )


@attrs.frozen
class Tell:
    """Send *message*, to its *to*."""

    message: Message


@attrs.frozen
class Refused:
    """A message that changed nothing, and *why*."""

    message: Message
    why: str


@attrs.frozen
class Free:
    """The producer may use the blocks of a request again; *why*: sent, expired or aborted."""

    request_id: str
    why: str


@attrs.frozen
class Ready:
    """All of a request has arrived, and was valid: it can be computed with."""

    request_id: str


@attrs.frozen
class Failed:
    """A request will not be ready, and *why*; its blocks are not free yet.

    *state*: which `TransferError` it becomes.
    """

    request_id: str
    why: str
    state: TransferState


@attrs.frozen
class Release:
    """Nothing can write a failed request's blocks any more: the consumer may use them again."""

    request_id: str


@attrs.frozen
class Closed:
    """Nothing more will be said or heard of a request."""

    request_id: str


Action = Tell | Refused | Free | Ready | Failed | Release | Closed
"""What a ledger wants done, in order."""


class Present:
    """The present start of each engine that was met; of an engine that was not, any may be."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}

    def connect(self, engine_id: str, epoch: int) -> None:
        """Know a start of an engine; raise `SpecError` where *epoch* goes back."""
        positive_int("epoch", epoch, least=self._epochs.get(is_name("engine_id", engine_id), 0))
        self._epochs[engine_id] = epoch

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine."""
        self._epochs.pop(engine_id, None)

    def past(self, engine_id: str, epoch: int) -> bool:
        """Return whether another start than this one is the present one."""
        return self._epochs.get(engine_id, epoch) != epoch
