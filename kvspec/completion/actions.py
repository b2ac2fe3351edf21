"""The actions that ledgers return.

Invariant: a ledger does nothing itself. It returns actions, and the session carries them out.
"""

from __future__ import annotations

import attrs

from kvspec.errors import TransferState
from kvspec.ownership.parallel import RankId
from kvspec.wire.messages import Key, Message


@attrs.frozen
class Tell:
    """Action: send *message* to its receiver."""

    message: Message


@attrs.frozen
class Refused:
    """Action: a message changed nothing. *why* is the reason."""

    message: Message
    why: str

    def __str__(self) -> str:
        message = self.message
        return f"{message.kind} of {message.by} about {message.key.request_id!r:.80}: {self.why}"


@attrs.frozen
class Free:
    """Action: the producer may reuse the blocks of a request.

    *why* is the word `sent`, `expired` or `aborted`.
    """

    key: Key
    why: str


@attrs.frozen
class Ended:
    """Action: a load is done, or it has failed. Nothing can write its blocks any more.

    *state* is its public state. The data of a load that is done has arrived and was valid.
    """

    request_id: str
    state: str


@attrs.frozen
class Failed:
    """Action: a request has failed. Its blocks are still reserved.

    *state* becomes the state of the `TransferError`. *rank* is the producer rank that caused the
    failure, if one rank did.
    """

    request_id: str
    why: str
    state: TransferState
    rank: RankId | None = None


@attrs.frozen
class Closed:
    """Action: a request has ended. It sends and expects no message any more."""

    request_id: str


HoldAction = Tell | Refused | Free
"""An action that the producer's ledger returns. The session carries them out in order."""
Action = Tell | Refused | Failed | Ended | Closed
"""An action that the consumer's ledger returns. The session carries them out in order."""
