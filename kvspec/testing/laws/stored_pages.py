"""The law of stored pages: an engine that loads them has the same bytes as after a transfer.

Law 16.

How it works:
    The producer computes a prompt in steps. Each step is a memory of its own, with the tokens up to
    its end and with block tables of its own, so a page that is saved too early has wrong bytes:

        page tokens 4, steps end at 6, 8, 13
        step    tokens       finished pages    state at
        1       0 to 5       page 0            6: no page ends here, so no page can have it
        2       6 to 7       page 1            8: page 1 can have it
        3       8 to 12      page 2            13

    The consumer then finds 3 pages, or 2 pages if the model has a state. Its memory has guard
    bytes, and the byte oracle compares it as after a direct transfer. In some cases, one rank of
    the producer saves nothing in the last step. Then a system may find less, but all that it finds
    must be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kvspec.errors import KVSpecError
from kvspec.stored.names import ModelIdentity, PromptIdentity
from kvspec.testing import oracle
from kvspec.testing.case import Case
from kvspec.testing.laws.system import GUARD, MovedBeforeRefusalError, copied_memory
from kvspec.testing.laws.whole import changed_producers, writes_outside
from kvspec.testing.world import SEED, World, WrongFormError, held, snapshot

if TYPE_CHECKING:
    from kvspec.descriptors.request import TransferRequest
    from kvspec.engines.engine import EngineSpec
    from kvspec.ownership.parallel import RankId
    from kvspec.stored.placement import StoredSpec
    from kvspec.testing.laws.system import System, Trial

STORED_MODEL = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
"""The model of all stored cases."""


class Storing(Protocol):
    """An empty store for the pages of one prompt, which a system makes for each case."""

    def save(self, here: World, tokens: range) -> object:
        """Save the pages that are whole now.

        Args:
            here: A world whose producers have computed ``case.request.num_tokens`` tokens. The
                block tables may leave out the pages that earlier steps have finished.
            tokens: The tokens that this step has computed.
        """

    def lookup(self, consumer: EngineSpec) -> int:
        """Return how many tokens of the prompt the engine *consumer* can load."""

    def load(self, here: World) -> object:
        """Load these tokens into the memory of the consumers of *here*."""


@attrs.frozen(kw_only=True)
class StoredStep:
    """Block tables and pools of one engine at one length of the prompt.

    Attributes:
        request: The request with the length. Its tables are those of the engine on both sides.
        pool: Number of blocks of each group, by its name.
    """

    request: TransferRequest
    pool: Mapping[str, int]


def _steps(steps: Sequence[StoredStep]) -> tuple[StoredStep, ...]:
    return tuple(steps)


@attrs.frozen(kw_only=True)
class StoredCase:
    """A prompt that one engine stores, and another one loads.

    Attributes:
        producer: The engine that stores.
        consumer: The engine that loads.
        placement: The placement of the pages.
        steps: The lengths of the prompt after each step of the producer, with its tables.
        loaded: The tables of the consumer. The length is that of the longest stored prefix.
        absent: A rank of the producer that saves nothing in the last step, or None.
    """

    producer: EngineSpec
    consumer: EngineSpec
    placement: StoredSpec
    steps: tuple[StoredStep, ...] = attrs.field(converter=_steps)
    loaded: StoredStep
    absent: RankId | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return tuple(range(self.steps[-1].request.num_tokens))

    def transfer(self, step: StoredStep) -> Case:
        """Return *step*, or the load, as a transfer with the tables of one side on both."""
        return Case(
            producer=self.producer,
            consumer=self.consumer,
            producer_pool=step.pool,
            consumer_pool=self.loaded.pool,
            request=step.request,
        )


def pages(trial: Trial) -> Iterator[str]:
    """Yield each byte that is wrong after the load, and each promise that does not hold."""
    case: Any = trial.case
    make: Any = trial.system.pages
    store = make(STORED_MODEL, PromptIdentity.of_text(), case.placement, case.token_ids)
    yield from _saved(store, case)
    length, found = case.loaded.request.num_tokens, store.lookup(case.consumer)
    if type(found) is not int:
        raise WrongFormError(f"lookup: expected a number of tokens, got {found!r}")
    if found > length or (found < length and case.absent is None):
        yield f"lookup: {length} tokens are stored in whole pages, but it returned {found}"
    elif found == length:
        yield from _loaded(store, case, trial.system)


def _saved(store: Storing, case: StoredCase) -> Iterator[str]:
    """Save each step, and yield the bytes of the producer that this has changed."""
    done = 0
    for step in case.steps:
        request = step.request
        ranks = held(case.producer, step.pool, guard=GUARD)
        for rank, (_, storage) in ranks.items():
            own = case.producer, rank, storage, step.pool, request.producer_blocks, request
            oracle.fill(*own, seed=SEED)
        before = snapshot(ranks)
        present = dict(ranks)
        if step is case.steps[-1] and case.absent is not None:
            del present[case.absent]
        here = World(case.transfer(step), present, {}, {})
        store.save(here, range(done, request.num_tokens))
        after = attrs.evolve(here, producers=ranks)
        yield from (f"save: {fault}" for fault in changed_producers(after, before))
        yield from (f"save: {fault}" for fault in writes_outside(after))
        done = request.num_tokens


def _loaded(store: Storing, case: StoredCase, system: System) -> Iterator[str]:
    """Load the stored prefix, and yield the bytes of the consumer that are wrong then."""
    request, pool = case.loaded.request, case.loaded.pool
    ranks = held(case.consumer, pool, guard=GUARD)
    for rank, (_, storage) in ranks.items():
        own = case.consumer, rank, storage, pool, request.consumer_blocks, request
        oracle.spoil(*own, seed=SEED)
    here = World(case.transfer(case.loaded), {}, ranks, snapshot(ranks))
    refusals: tuple[type[Exception], ...] = (KVSpecError, *system.refuses)
    try:
        store.load(here)
    except refusals as error:
        moved = "bytes have moved before this refusal" if here.changed() else "it was promised"
        raise MovedBeforeRefusalError(f"load: {moved}: {error}") from error
    # A thread of the system may still copy. Bytes that arrive later are missing.
    after = attrs.evolve(here, consumers=copied_memory(here.consumers))
    yield from (f"load: {fault}" for fault in after.differences())
    yield from (f"load: {fault}" for fault in writes_outside(after))
