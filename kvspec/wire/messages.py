"""The messages that two ranks exchange about one request: each class is the value and its bytes.

Invariant: a message contains the request's id and nonce, and the incarnations of sender and
receiver. So it is never taken for a message of another request or incarnation. Each
question of a reader has a number that no other question of its kind has. So a late answer is never
taken for the answer to a later question.

How it works:
    The classes form a tagged union of `msgspec`: the tag is the first element of the array, and
    selects the class. A message that arrives is checked against the types and bounds of its class.
    A message that this process creates is not checked again, because its fields come from arguments
    that public methods have checked. Only `ChecksumContents` checks itself,
    because its fields depend on each other.

    A reader sends the questions, and a producer sends the answers:

        question          answers
        ----------------  --------------------------------
        Heartbeat         Lease, Gone
        Done              Valid, Gone
        ChecksumRequest   Checksum, ChecksumUnavailable
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, NewType, TypeVar, get_args

from msgspec import Meta

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.stripes import WHOLE, Stripe
from kvspec.ownership.tokens import BlockCyclic
from kvspec.wire.handshake import MAX_NAME as MAX_ENGINE_ID
from kvspec.wire.handshake import is_name
from kvspec.wire.packing import Count, Seconds, WireStruct

MAX_REQUEST = 1024
"""Bytes of a request's id. A receiver of a message counts characters."""
MAX_PART_NAME = 1024
"""Characters of the name of a group, a layer or a part, as in a handshake."""
MAX_READERS = 2**20
"""Readers of one request on one producer rank."""
MAX_POSITION = 2**62
"""Positions and sizes are at most this, so that sums of two of them fit into 64 bits."""
NONCE = range(8, 65)
"""Bytes of a nonce."""
NEW_NONCE = 16
"""Bytes of the nonces that `new_remote_id` creates."""
SUM = 8
"""Bytes of a checksum of contents."""

RemoteId = NewType("RemoteId", str)
"""Name of a request in both engines, as `new_remote_id` returns it."""
PartName = Annotated[str, Meta(min_length=1, max_length=MAX_PART_NAME)]

M = TypeVar("M", bound="Message")


class RankAddress(WireStruct, frozen=True):
    """One rank of one incarnation of an engine.

    It does not check its rank, because this process creates one for each message.
    `decode_message` checks the rank of a message that arrived.
    """

    engine_id: Annotated[str, Meta(min_length=1, max_length=MAX_ENGINE_ID)]
    epoch: Count
    rank: RankId

    def __str__(self) -> str:
        return f"{self.engine_id} {self.rank}"


class Key(WireStruct, frozen=True):
    """The name of one request of a producer: its id there, and a unique nonce.

    The producer makes the nonce when it holds the request, and sends both to the consumer.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST)]
    nonce: Annotated[bytes, Meta(min_length=NONCE.start, max_length=NONCE.stop - 1)]

    @property
    def remote_id(self) -> RemoteId:
        """The same name as text, which `key_of` reads."""
        return RemoteId(f"{self.request_id}#{self.nonce.hex()}")


class ChecksumContents(WireStruct, frozen=True, kw_only=True):
    """Contents of a request whose checksums two ranks compare.

    These are some units of some parts of a layer, at some tokens, or some rows of a state. Both
    ranks use the same value for the same contents, whatever their blocks, layouts and contexts
    are. Only the tokens count that both context ranks own, and that the stripe contains.

    Attributes:
        layer: Name of the layer.
        parts: Names of the parts.
        units: Units of the model.
        tokens: Positions of tokens, in the count of the group. For a state, the last token that it
            has seen.
        rows: Rows of a state. Empty for tokens.
        producer: Tokens that the producer's context rank owns.
        consumer: Tokens that the consumer's context rank owns.
        stripe: Blocks of this producer rank, if replicas share the work.
        block: Tokens of one block of the stripe.
    """

    layer: PartName
    parts: tuple[PartName, ...]
    units: range
    tokens: range
    rows: range = EMPTY
    producer: BlockCyclic = BlockCyclic()
    consumer: BlockCyclic = BlockCyclic()
    stripe: Stripe = WHOLE
    block: Annotated[int, Meta(ge=1, le=MAX_POSITION)] = 1

    def __post_init__(self) -> None:
        names = [("parts", name) for name in instance("parts", self.parts, tuple)]
        for field, name in [("layer", self.layer), *names]:
            if not isinstance(name, str) or not 0 < len(name) <= MAX_PART_NAME:
                raise SpecError(field, name, f"a text of 1 to {MAX_PART_NAME} characters")
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise SpecError("parts", self.parts, "at least one name, each once")
        for field, least in (("units", 1), ("tokens", 1), ("rows", 0)):
            numbers = getattr(self, field)
            whole = 0 <= numbers.start <= numbers.stop - least and numbers.stop <= MAX_POSITION
            if not whole or numbers.step != 1:
                raise SpecError(
                    field, numbers, f"a range of at least {least}, up to {MAX_POSITION}"
                )
        for side in ("producer", "consumer"):
            for name, least in (("interleave", 1), ("size", 1), ("rank", 0)):
                number = getattr(getattr(self, side), name)
                positive_int(f"{side}.{name}", number, least=least, most=MAX_POSITION)

    def __str__(self) -> str:
        units = f"units {self.units.start}..{self.units.stop - 1}"
        what = f"layer {self.layer}, {'+'.join(self.parts)} {units}"
        if self.rows:
            return f"{what}, rows {self.rows.start}..{self.rows.stop - 1}"
        return f"{what}, tokens {self.tokens.start}..{self.tokens.stop - 1}"


class Message(WireStruct, frozen=True):
    """One message about one request. Each subclass is one kind.

    Attributes:
        key: Name of the request.
        by: Sender.
        to: Receiver.
        number: Number of the question. A reader has one counter for heartbeats and `done`, and one
            for checksum requests. Each heartbeat has a new number. A repeated `done` or checksum
            request keeps its number. Each answer has the number of its question.
    """

    key: Key
    by: RankAddress
    to: RankAddress
    number: Count = 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.by} about {self.key.request_id!r:.80}"

    @property
    def kind(self) -> str:
        """The tag of the class, a key of `MESSAGES`."""
        return str(self.__struct_config__.tag)

    def answer(self, kind: type[M], **own: Any) -> M:  # noqa: ANN401 - the fields of *kind* alone
        """Return the answer of *kind* to this message."""
        return kind(self.key, self.to, self.by, self.number, **own)


class ReaderStatus(Message, frozen=True, kw_only=True):
    """A question about the data that a reader reads.

    Attributes:
        expected: How many readers the receiver must expect.
    """

    expected: Annotated[int, Meta(ge=1, le=MAX_READERS)]


class Heartbeat(ReaderStatus, tag="heartbeat", frozen=True):
    """The reader is alive and reads, or will read. It requests more time."""


class Done(ReaderStatus, tag="done", frozen=True):
    """The reader has stopped, with all data or not. It asks whether the data was valid."""


class Lease(Message, tag="lease", frozen=True, kw_only=True):
    """Answer to `heartbeat`: nothing is freed for so many seconds.

    Attributes:
        lease: Seconds, from when the heartbeat was sent.
    """

    lease: Seconds


class Valid(Message, tag="valid", frozen=True):
    """Answer to `done`: the request was held until now, so all data was valid."""


class Gone(Message, tag="gone", frozen=True):
    """Answer to `heartbeat` or `done`: the blocks are freed or will be, so the data is void."""


class ChecksumRequest(Message, tag="checksum_request", frozen=True, kw_only=True):
    """The reader has all data, and requests the producer's checksum.

    Attributes:
        contents: The contents.
    """

    contents: ChecksumContents


class Checksum(Message, tag="checksum", frozen=True, kw_only=True):
    """Answer to `checksum_request`: the checksum.

    Attributes:
        total: The checksum, little-endian.
    """

    total: Annotated[bytes, Meta(min_length=SUM, max_length=SUM)]


class ChecksumUnavailable(Message, tag="checksum_unavailable", frozen=True):
    """Answer to `checksum_request`: the producer does not know the blocks."""


AnyMessage = (
    Heartbeat | Done | Lease | Valid | Gone | ChecksumRequest | Checksum | ChecksumUnavailable
)
MESSAGES: dict[str, type[Message]] = {
    kind.__struct_config__.tag: kind for kind in get_args(AnyMessage)
}
"""Each kind of message by its tag."""


def new_remote_id(request_id: str) -> RemoteId:
    """Return a new name of the producer's request *request_id*, for all ranks of both engines.

    The producer's engine calls this once for each request, and sends the name to its own ranks and
    to the consumer. The name contains a random part, so that two requests of one id differ.

    Args:
        request_id: Id of the request in the producer's engine.

    Returns:
        The name, of the form `id#digits`.

    Raises:
        SpecError: If *request_id* is not a text of 1 to 1024 bytes.

    >>> new_remote_id("request-1").split("#")[0]
    'request-1'
    """
    is_name("request_id", request_id, MAX_REQUEST)
    return Key(request_id, secrets.token_bytes(NEW_NONCE)).remote_id


def key_of(remote_id: object) -> Key:
    """Return the request that *remote_id* stands for.

    Raises:
        SpecError: If *remote_id* is not a name that `new_remote_id` returned.
    """
    request_id, _, digits = instance("remote_id", remote_id, str).rpartition("#")
    try:
        is_name("request_id", request_id, MAX_REQUEST)
        nonce = bytes.fromhex(digits)
    except ValueError:  # `SpecError` is a ValueError too.
        nonce = b""
    # `bytes.fromhex` also reads capitals and spaces. Each request has only one name.
    if len(nonce) not in NONCE or nonce.hex() != digits:
        raise SpecError("remote_id", remote_id, "a str that new_remote_id returned")
    return Key(request_id, nonce)
