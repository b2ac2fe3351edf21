"""Numbers of the things that a session holds."""

from __future__ import annotations

import attrs

from kvspec.completion.producer import ProducerLedger
from kvspec.session.checksums import ChecksumAnswers
from kvspec.session.loading import Loading
from kvspec.session.remotes import Remotes


@attrs.frozen
class SessionStats:
    """Numbers of the things that a session holds.

    All are zero after everything has ended and the session is closed.

    Attributes:
        loads: Loads that still send or expect messages.
        steps: Steps that may still write.
        pushes: Readers whose outcome of a push is remembered, because they may send again.
        held: Requests that are held for readers.
        remembered: Requests that the ledger still remembers.
        engines: Connected engines.
        leaving: Old engines whose connections still exist.
        sums: Checksums that readers wait for.
    """

    loads: int = 0
    steps: int = 0
    pushes: int = 0
    held: int = 0
    remembered: int = 0
    engines: int = 0
    leaving: int = 0
    sums: int = 0


def stats_of(
    loading: Loading, ledger: ProducerLedger, remotes: Remotes, answers: ChecksumAnswers
) -> SessionStats:
    """Count what the parts of a session hold."""
    return SessionStats(
        loads=len({*loading.book.open, *loading.loads}),
        steps=loading.book.steps,
        pushes=ledger.pushes,
        held=ledger.holding,
        remembered=ledger.remembered,
        engines=len(remotes),
        leaving=remotes.leaving,
        sums=answers.waiting,
    )
