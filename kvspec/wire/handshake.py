"""The introduction of one rank, and the checks that two engines can exchange data.

Invariant: everything that both sides must agree on is compared, and each difference is named:
caches, model, revision and replica policy. An engine never connects to itself. All ranks of an
engine have the same epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy
from kvspec.plan.mismatches import differing, mismatches
from kvspec.version import __version__
from kvspec.wire.versions import NO_START, OWN, START, Versions

MAX_NAME = 255
"""Bytes of an engine's name, a model's, a revision's."""
MAX_TRANSPORT = 1 << 20
"""Bytes of the transport's own metadata."""


def is_name(field: str, value: object, most: int = MAX_NAME) -> str:
    """Return *value* if it is a text of 1 to *most* bytes; else raise `SpecError`."""
    try:
        size = len(value.encode()) if isinstance(value, str) else 0
    except UnicodeEncodeError:
        size = 0
    if not isinstance(value, str) or not 0 < size <= most:
        raise SpecError(field, value, f"a text of 1 to {most} bytes")
    return value


@attrs.frozen(kw_only=True)
class Handshake:
    """The introduction of one rank.

    Attributes:
        engine_id: Name of the engine, the same at each start.
        epoch: Number of this start, larger at each start, such as the time in nanoseconds.
        cache: The engine, the rank and the addresses of its cache.
        replica_policy: How replicas share the work.
        transport: Bytes of the transport, such as `NixlRank.metadata()`.
        model: The caller's name of the weights. Both engines must have the same.
        revision: The caller's revision of the weights. Both engines must have the same.
        library: Version of kvspec that wrote the handshake. By default, this version.
        start: Random bytes of this start of the session. Two live sessions of one engine, epoch and
            rank differ in them.
        versions: The versions of the wire format that the session reads.
    """

    engine_id: str
    epoch: int
    cache: RankCache
    replica_policy: ReplicaPolicy = attrs.field(factory=ReplicaPolicy)
    transport: bytes = attrs.field(default=b"", repr=False)
    model: str | None = None
    revision: str | None = None
    library: str = __version__
    start: bytes = NO_START
    versions: Versions = OWN

    def __attrs_post_init__(self) -> None:
        is_name("engine_id", self.engine_id)
        is_name("library", self.library)
        for name in ("model", "revision"):
            if getattr(self, name) is not None:
                is_name(name, getattr(self, name))
        positive_int("epoch", self.epoch, least=0)
        instance("versions", self.versions, Versions)
        if len(instance("start", self.start, bytes)) != START:
            raise SpecError("start", f"{len(self.start)} bytes", f"{START} bytes")
        instance("cache", self.cache, RankCache)
        instance("replica_policy", self.replica_policy, ReplicaPolicy)
        if len(instance("transport", self.transport, bytes)) > MAX_TRANSPORT:
            size = f"{len(self.transport)} bytes"
            raise SpecError("transport", size, f"at most {MAX_TRANSPORT}")

    @property
    def engine(self) -> EngineSpec:
        """The engine of the rank."""
        return self.cache.engine

    @property
    def rank(self) -> RankId:
        """The id of the rank."""
        return self.cache.rank


_WHY = {
    "engine_id": "all ranks of one engine have the same name",
    "epoch": "all ranks of one engine have the same epoch; some are from before a restart",
    "engine": "all ranks of one engine describe the same engine",
    "replica_policy": "both sides compute the plan and must get the same one",
    "model": "other weights make other caches; None differs from any name",
    "revision": "other weights make other caches; None differs from any revision",
}


def disagreements(producer: Handshake, consumer: Handshake) -> tuple[Mismatch, ...]:
    """Return all differences that prevent two engines from exchanging data.

    Args:
        producer: Handshake of any rank of the producer.
        consumer: Handshake of any rank of the consumer.

    Returns:
        The differences. Empty if the engines can exchange data.
    """
    instance("producer", producer, Handshake)
    instance("consumer", consumer, Handshake)
    differences = _differing(producer, consumer, ("model", "revision", "replica_policy"))
    if producer.engine_id == consumer.engine_id:
        why = "an engine cannot connect to itself"
        differences.insert(0, Mismatch("engine_id", producer.engine_id, consumer.engine_id, why))
    return (*differences, *mismatches(producer.engine, consumer.engine))


def _differing(one: Handshake, other: Handshake, fields: Iterable[str]) -> list[Mismatch]:
    return [
        mismatch
        for field in fields
        for mismatch in differing(
            getattr(one, field), getattr(other, field), field, _WHY[field], ("producer", "consumer")
        )
    ]


def one_engine(handshakes: Iterable[Handshake]) -> dict[RankId, Handshake]:
    """Return the handshakes of one engine by rank, in ascending order.

    Raises:
        MismatchError: If engines, epochs, models or replica policies differ.
        SpecError: If a rank is missing or occurs twice.
    """
    expected = "one handshake for each rank of an engine"
    shakes = sequence("handshakes", handshakes, expected)
    if not shakes:
        raise SpecError("handshakes", shakes, expected)
    first = instance("handshakes", shakes[0], Handshake)
    by_rank: dict[RankId, Handshake] = {}
    for shake in shakes:
        if wrong := _differing(first, instance("handshakes", shake, Handshake), _WHY):
            sides = (str(first.rank), str(shake.rank))
            raise MismatchError(attrs.evolve(each, sides=sides) for each in wrong)
        if shake.rank in by_rank:
            raise SpecError("handshakes", str(shake.rank), "each rank once")
        by_rank[shake.rank] = shake
    missing = [str(rank) for rank in first.engine.parallel.ranks if rank not in by_rank]
    if missing:
        raise SpecError("handshakes", sorted(map(str, by_rank)), f"{', '.join(missing[:3])} too")
    return dict(sorted(by_rank.items()))
