"""Numbers of the things that a session holds."""

from __future__ import annotations

import attrs

from kvspec.completion.producer import ProducerLedger
from kvspec.session.loading import Loading
from kvspec.session.pushing import Pushing
from kvspec.session.remotes import Remotes
from kvspec.session.summing import Summing


@attrs.frozen
class SessionStats:
    """Numbers of the things that a session holds.

    All are zero after everything has ended and the session is closed.

    Attributes:
        loads: Loads that still send or expect messages.
        steps: Steps that may still write.
        pushes: Pushes whose readers may send again.
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
    loading: Loading, book: ProducerLedger, pushing: Pushing, remotes: Remotes, summing: Summing
) -> SessionStats:
    """Count what the parts of a session hold."""
    return SessionStats(
        loads=len({*loading.book.open, *loading.loads}),
        steps=loading.book.steps,
        pushes=len(pushing.writing),
        held=len(book.held),
        remembered=book.remembered,
        engines=len(remotes),
        leaving=remotes.leaving,
        sums=summing.waiting,
    )
