"""What a connector does in one of vLLM's workers: a session over the caches that vLLM has made.

Law: nothing here waits, and nothing that fails goes further than its request: that is logged by
name, and told to vLLM once none of its blocks can be written any more.
"""

# ruff: noqa: ANN401 - configs and tensors are of vLLM's classes, which are not imported
from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, TypeVar

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.scheduler_side import EngineStep, Served
from kvspec.adapters.vllm.settings import worker_rank
from kvspec.adapters.vllm.tensors import rank_cache, zero
from kvspec.adapters.vllm.worker_info import WorkerInfo, whole_engine
from kvspec.errors import SpecError
from kvspec.inputs import positive_int, seconds
from kvspec.nixl import NixlRank
from kvspec.protocol.handshake import is_name
from kvspec.session import Prompts, Session, TcpChannel
from kvspec.session.prompts import PromptLoad

T = TypeVar("T")
log = logging.getLogger(__name__)


def _fits(_: object, at: attrs.Attribute[Any], value: object) -> None:
    """Check a number of seconds or MiB, or a text that may be left out if its default is None."""
    field = f"kv_connector_extra_config[{at.name!r}]"
    if isinstance(at.default, float):
        seconds(field, value)
    elif isinstance(at.default, int):
        positive_int(field, value, least=0, most=1 << 20)
    elif value is not None or at.default is not None:
        is_name(field, value)


@attrs.frozen(kw_only=True)
class Settings:
    """What `kv_connector_extra_config` may have.

    *host*: where this machine's ranks listen, and *public*: by which name peers reach it, *host*
    unless given. *model*, *revision*: what both engines must have alike, vLLM's names for them
    unless given. *hold*: seconds for which a request is held for its readers, who may have others
    to serve before; *lease*: for which it is held beyond that, after one was last heard.
    *timeout*: seconds within which a request is read. *staging*: MiB of host memory through which
    short runs move where that is cheaper; 0: none do.
    """

    host: str = attrs.field(default="127.0.0.1", validator=_fits)
    public: str | None = attrs.field(default=None, validator=_fits)
    model: str = attrs.field(validator=_fits)
    revision: str | None = attrs.field(default=None, validator=_fits)
    hold: float = attrs.field(default=480.0, validator=_fits)
    lease: float = attrs.field(default=30.0, validator=_fits)
    timeout: float = attrs.field(default=120.0, validator=_fits)
    staging: int = attrs.field(default=0, validator=_fits)

    @staticmethod
    def of(vllm_config: Any) -> Settings:
        """Return what *vllm_config* says."""
        model = FieldReader("model_config", vllm_config.model_config)
        given = {name: model.get(name).value for name in ("model", "revision")}
        given |= vllm_config.kv_transfer_config.kv_connector_extra_config
        known = [field.name for field in attrs.fields(Settings)]
        for name in given:
            if name not in known:
                raise SpecError("kv_connector_extra_config", name, f"one of {', '.join(known)}")
        return Settings(**given)


class Serving:
    """One rank's session, and what it reads."""

    _session: Session
    _reads: Prompts

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = Settings.of(vllm_config)
        self._served: Served | None = None
        self._open = contextlib.ExitStack()
        self._loads: dict[str, PromptLoad] = {}
        self._sent: set[str] = set()
        self._failed: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Be ready for peers; all workers are called at once, and share the time of the first."""
        config, settings = self._kv_cache_config, self._settings
        own = time.time_ns(), WorkerInfo.of(self._vllm_config, config)
        (epoch, _), *_ = told = self._everybody(own)
        engine = whole_engine(self._vllm_config, [each for _, each in told], kv_caches)
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        staging = settings.staging << 20 or None
        nixl = NixlRank(prefix=f"{engine_id[:64]}-", staging=staging)
        self._open.callback(nixl.close)
        self._tensors = tuple(kv_caches.values())
        self._session = Session(
            nixl,
            rank_cache(engine, worker_rank(self._vllm_config), kv_caches, config=config),
            engine_id=engine_id,
            epoch=epoch,
            model=settings.model,
            revision=settings.revision,
            channel=TcpChannel(settings.host, public=settings.public or ""),
            owner=kv_caches,
            lease=settings.lease,
            background=True,
        )
        self._open.callback(self._session.close)
        self._reads = self._open.enter_context(Prompts(self._session, timeout=settings.timeout))
        address = self._session.channel.address
        self._served = Served(engine=engine, engine_id=engine_id, address=address)

    def _everybody(self, own: T) -> list[T]:
        """Return what all workers of this engine give, in order of rank."""
        from vllm.distributed.parallel_state import get_world_group  # noqa: PLC0415

        world, parallel = get_world_group(), self._vllm_config.parallel_config
        found = [world.broadcast_object(own, src) for src in range(world.world_size)]
        first = world.rank_in_group - parallel.rank  # where engines of one model share a world
        return found[first : first + parallel.world_size]

    def get_handshake_metadata(self) -> Served | None:
        """Return what the scheduler has to know."""
        return self._served

    def shutdown(self) -> None:
        """Let go of everything."""
        self._open.close()

    def begin(self, step: EngineStep) -> None:
        """Hold, fetch and release what the scheduler says."""
        for request_id, remote_id in step.held:
            try:
                self._session.ledger.hold(remote_id, lease=self._settings.hold)
            except SpecError as error:  # who reads it is told that it is void
                log.error("%s is not held: %s", request_id, error)  # noqa: TRY400
                self._sent.add(request_id)
        for prompt in step.declined:
            self._reads.decline(prompt)
        for prompt, request in step.fetched:
            self._loads[request.request_id] = self._reads.load(prompt, request)
        self._failed.update(step.failed)

    def settle(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests that were sent, that were received or failed, and those that failed.

        Each once, and only when none of its blocks is read or written any more.
        """
        ended = {name for name, load in self._loads.items() if load.poll() != "moving"}
        failed = {name for name in ended if not self._complete(name, self._loads.pop(name))}
        settled = self._session.ledger.poll()
        for request_id in settled.expired:
            log.warning("%s was not read within its lease", request_id)
        sent, failed = {*settled.done, *settled.expired, *self._sent}, failed | self._failed
        self._sent, self._failed = set(), set()
        return sent, ended | failed, failed

    def _complete(self, name: str, load: PromptLoad) -> bool:
        """Return whether a load that ended has it all; zero what it left of its blocks."""
        if load.error is not None:
            log.error("%s: %s: %s", name, type(load.error).__name__, load.error)
            return False
        if self._kv_cache_config.needs_kv_cache_zeroing:
            zero(self._tensors, load.unwritten_ranges)
        return True
