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
from kvspec.wire.compatibility import compatibility_hash

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


def _name(_: object, at: attrs.Attribute[str], value: object) -> None:
    is_name(at.name, value)


def _name_or_none(_: object, at: attrs.Attribute[str | None], value: object) -> None:
    if value is not None:
        is_name(at.name, value)


def _epoch(_: object, at: attrs.Attribute[int], value: object) -> None:
    positive_int(at.name, value, least=0)


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
    """

    engine_id: str = attrs.field(validator=_name)
    epoch: int = attrs.field(validator=_epoch)
    cache: RankCache
    replica_policy: ReplicaPolicy = attrs.field(factory=ReplicaPolicy)
    transport: bytes = attrs.field(default=b"", repr=False)
    model: str | None = attrs.field(default=None, validator=_name_or_none)
    revision: str | None = attrs.field(default=None, validator=_name_or_none)
    library: str = attrs.field(validator=_name)

    @library.default
    def _running(self) -> str:
        return __version__

    def __attrs_post_init__(self) -> None:
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

    @property
    def compatibility_hash(self) -> str:
        """Hash of the meaning of its bytes. See `kvspec.wire.compatibility`."""
        return compatibility_hash(self.engine)


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
    found: list[Mismatch] = []
    if producer.engine_id == consumer.engine_id:
        why = "an engine cannot connect to itself"
        found.append(Mismatch("engine_id", producer.engine_id, consumer.engine_id, why))
    found += _differing(producer, consumer, ("model", "revision", "replica_policy"))
    return (*found, *mismatches(producer.engine, consumer.engine))


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
    given = sequence("handshakes", handshakes, "Handshakes, one for each rank of an engine")
    if not given:
        raise SpecError("handshakes", given, "one handshake for each rank of an engine")
    first = instance("handshakes", given[0], Handshake)
    found: dict[RankId, Handshake] = {}
    for one in given:
        wrong = _differing(first, instance("handshakes", one, Handshake), _WHY)
        if wrong:
            sides = (str(first.rank), str(one.rank))
            raise MismatchError(attrs.evolve(each, sides=sides) for each in wrong)
        if one.rank in found:
            raise SpecError("handshakes", str(one.rank), "each rank once")
        found[one.rank] = one
    missing = [str(rank) for rank in first.engine.parallel.ranks if rank not in found]
    if missing:
        raise SpecError("handshakes", sorted(map(str, found)), f"{', '.join(missing[:3])} too")
    return dict(sorted(found.items()))
