"""What a session holds, counted."""

from __future__ import annotations

import attrs

from kvspec.protocol.producer import ProducerLedger
from kvspec.session.loading import Loading
from kvspec.session.pushing import Pushing
from kvspec.session.remotes import Remotes
from kvspec.session.summing import Summing


@attrs.frozen
class SessionStats:
    """What a session holds: all zero once everything came to its end and it is closed.

    *loads* of which anything is still said, *steps* that may still write, *pushes* to readers that
    may come again, requests *held* for readers, and *remembered*; *engines* that were met, and
    starts whose lanes are still *leaving*; *sums* that readers wait for.
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
