"""The actions that ledgers return, and which incarnations of engines are connected.

Invariant: a ledger does nothing itself. It returns actions, and the session carries them out.
"""

from __future__ import annotations

import attrs

from kvspec.errors import TransferState
from kvspec.inputs import positive_int
from kvspec.wire.handshake import is_name
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

    *state* becomes the state of the `TransferError`.
    """

    request_id: str
    why: str
    state: TransferState


@attrs.frozen
class Closed:
    """Action: a request has ended. It sends and expects no message any more."""

    request_id: str


HoldAction = Tell | Refused | Free
"""An action that the producer's ledger returns. The session carries them out in order."""
Action = Tell | Refused | Failed | Ended | Closed
"""An action that the consumer's ledger returns. The session carries them out in order."""


class Present:
    """The current incarnation of each connected engine.

    If an engine is not connected, every incarnation of it counts as current.
    """

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}

    def connect(self, engine_id: str, epoch: int) -> None:
        """Record the current incarnation; raise `SpecError` if *epoch* is less than before."""
        positive_int("epoch", epoch, least=self._epochs.get(is_name("engine_id", engine_id), 0))
        self._epochs[engine_id] = epoch

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine."""
        self._epochs.pop(engine_id, None)

    def is_other(self, engine_id: str, epoch: int) -> bool:
        """Return whether another incarnation than this one is current."""
        return self._epochs.get(engine_id, epoch) != epoch
