"""The messages that two ranks exchange about one request.

Invariant: a message contains the request's id, nonce and attempt, and the incarnations of sender
and receiver. So it is never taken for a message of another request, attempt or incarnation. Each
question of a reader has its own number, so a late answer is never taken for the answer to a later
question.
"""

from __future__ import annotations

import secrets

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, seconds
from kvspec.ownership.parallel import RankId
from kvspec.wire.extent import Extent
from kvspec.wire.handshake import is_name
from kvspec.wire.pushed import Pushed

MESSAGES = {
    "heartbeat": "the reader is alive and reads, or will read: it requests more time",
    "done": "the reader has stopped, with all data or not: it asks whether the data was valid",
    "lease": "answer to heartbeat: nothing is freed for so many seconds",
    "valid": "answer to done: the request was held until now, so all data was valid",
    "gone": "answer to both: the blocks are freed or will be, so the data is void",
    "stop": "the reader gives a push up: the answer comes when nothing of it can move",
    "pushed": "the producer has written all its data for the reader, and describes the data",
    "stopped": "the producer writes nothing more for the reader, and has not written all",
    "progress": "the producer has written a layer up to a token: so far it can be read",
    "checksum_request": "the reader has all data, and requests the producer's checksum",
    "checksum": "answer to checksum_request: the checksum",
    "checksum_unavailable": "answer to checksum_request: the producer does not know the blocks",
}
"""By kind. Readers send heartbeat, done, stop, checksum_request; producers send the others."""

READERS = ("heartbeat", "done")
MAX_REQUEST = 1024
"""Bytes of a request's id."""
NONCE = range(8, 65)
"""Bytes of a nonce."""
NEW_NONCE = 16
"""Bytes of the nonces that `new_remote_id` makes."""
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
    """One rank of one incarnation of an engine."""

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
    """The name of one request of a producer: its id there, and a unique nonce.

    The producer makes the nonce when it admits the request, and sends both to the consumer.
    """

    request_id: str = attrs.field(validator=_request)
    nonce: bytes = attrs.field(validator=_nonce, repr=False)


@attrs.frozen(kw_only=True)
class Message:
    """One message about one request.

    Attributes:
        kind: A key of `MESSAGES`.
        key: Name of the request.
        by: Sender.
        to: Receiver.
        attempt: Number of the attempt to read the request. It grows with each attempt.
        number: Number of the question, unique among all questions of a reader. A repeated question
            and its answer have the same number.
        sample: Which of several equal requests of a prompt reads.
        expected: In messages of readers, how many readers *to* must expect in this attempt, all
            samples counted.
        lease: In a `lease`, its seconds.
        group: In a `progress`, the group.
        layer: In a `progress`, the layer.
        upto: In a `progress`, the position behind the last written token.
        extent: In a `checksum_request`, the contents.
        total: In a `checksum`, its 8 bytes.
        pushed: In messages about pushes, the written data.
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
                raise SpecError(
                    name, getattr(self, name), rule=f"only a {owner!r} message may carry {name}"
                )
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
        """Return the answer of *kind* to this message."""
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


def new_remote_id(request_id: str) -> str:
    """Return a new name of the producer's request *request_id*, for all ranks of both engines.

    The producer's engine calls this once for each request, and sends the name to its own ranks and
    to the consumer. The name contains a random part, so that two requests of one id differ.

    Args:
        request_id: Id of the request in the producer's engine.

    Returns:
        The name, of the form `id#digits`.

    >>> new_remote_id("request-1").split("#")[0]
    'request-1'
    """
    key = Key(request_id, secrets.token_bytes(NEW_NONCE))
    return f"{key.request_id}#{key.nonce.hex()}"


def key_of(remote_id: object) -> Key:
    """Return the request that *remote_id* stands for."""
    request_id, _, nonce = instance("remote_id", remote_id, str).rpartition("#")
    try:
        return Key(request_id, bytes.fromhex(nonce))
    except ValueError:  # no hexadecimal digits; or a SpecError
        raise SpecError("remote_id", remote_id, "a str that new_remote_id returned") from None
