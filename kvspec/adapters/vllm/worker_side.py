"""The connector in one of vLLM's workers: a session over the caches that vLLM has allocated.

Invariant: no method waits for a peer. An error fails one request, and the log names it. A request
is reported to vLLM as failed only after no byte of its blocks can be written any more, because vLLM
then gives the blocks to other requests.
"""

# ruff: noqa: ANN401 - configs and tensors are of vLLM's classes, which are not imported
from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from kvspec.adapters.attention_modules import configured_key_content
from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.adapters import StatedAdapter, note_loads
from kvspec.adapters.vllm.drafts import draft_of
from kvspec.adapters.vllm.gpu import gpu_of, submitted_work
from kvspec.adapters.vllm.metrics import Numbers, WorkerNumbers
from kvspec.adapters.vllm.scheduler_side import EngineStep, Served
from kvspec.adapters.vllm.settings import worker_rank
from kvspec.adapters.vllm.store_scheduler import SaveReports
from kvspec.adapters.vllm.store_settings import StoreSettings, read_store
from kvspec.adapters.vllm.store_worker import PageThreads
from kvspec.adapters.vllm.tensors import rank_cache, zero
from kvspec.adapters.vllm.worker_info import WorkerInfo, whole_engine
from kvspec.digests import compile_digest
from kvspec.errors import KVSpecError, RemoteTransferError, SpecError
from kvspec.inputs import flag, positive_int, seconds
from kvspec.nixl import NixlRank
from kvspec.session import Load, Session, TcpChannel
from kvspec.session.ports import port_range
from kvspec.specs import KeyContent
from kvspec.tickets import PrefillTicket
from kvspec.wire.handshake import is_name
from kvspec.wire.messages import key_of
from kvspec.wire.seal import secret_of

T = TypeVar("T")
log = logging.getLogger(__name__)

# Seconds for which a ticket may wait in the queue. The scheduler declines it earlier if the request
# ends, so this is only for a scheduler that has forgotten it.
KEEP_TIMEOUT = 3600.0


def _fits(_: object, setting: attrs.Attribute[Any], value: object) -> None:
    """Raise `SpecError` for a wrong setting. The type of its default determines the check."""
    # A float is a time in seconds and an int a size in MiB. A text may be None if its default is.
    # A bool is an int for Python, so it comes first.
    field = f"kv_connector_extra_config[{setting.name!r}]"
    if setting.name == "port":
        port_range(value)
    elif isinstance(setting.default, bool):
        flag(field, value)
    elif isinstance(setting.default, float):
        seconds(field, value)
    elif isinstance(setting.default, int):
        positive_int(field, value, least=0, most=1 << 20)
    elif value is not None or setting.default is not None:
        is_name(field, value)


def _key_content(value: object) -> KeyContent | None:
    return configured_key_content("kv_connector_extra_config['key_content']", value)


@attrs.frozen(kw_only=True)
class Settings:
    """The settings in `kv_connector_extra_config`.

    Attributes:
        host: The address at which the ranks of this machine listen.
        port: The port of a rank, or a range such as "9000-9015", of which each rank of the machine
            takes the first free one. 0 for any free port.
        public: The name by which peers reach this machine. *host* by default.
        model: The name of the model, which must be equal on both engines. vLLM's by default.
        revision: The revision of the model, which must be equal, too. vLLM's by default.
        draft: The method, the name and the revision of the draft model, which must be equal on both
            engines. vLLM's by default. None without a draft that has a cache.
        hold: Seconds for which a finished prompt waits for its first reader. A consumer renews it
            from its queue.
        lease: Seconds for which it is held after the last message of a reader.
        timeout: Seconds within which a prompt must be read.
        checksum: Whether to compare checksums of each prompt with the producer. Both engines must
            set it. It needs caches in host memory.
        staging: MiB of host memory through which short runs move if that is cheaper. 0 for none.
        key_content: The fields of the `KeyContent` of all layers. It is required only if the
            modules of the model do not show how keys are rotated.
        dead_tokens: Whether blocks may move whole, with tokens behind the last, if that takes less
            descriptors. Set it only if the producer's memory is finite everywhere: vLLM's attention
            may return NaN if a masked token is NaN.
        store: Where pages are stored, and which. No pages are stored by default.
    """

    host: str = attrs.field(default="127.0.0.1", validator=_fits)
    port: int | str = attrs.field(default=0, validator=_fits)
    public: str | None = attrs.field(default=None, validator=_fits)
    model: str = attrs.field(validator=_fits)
    revision: str | None = attrs.field(default=None, validator=_fits)
    draft: str | None = attrs.field(default=None, validator=_fits)
    # The consumer's scheduler renews the lease as soon as it has the ticket. So this is the time
    # between the two halves of a request, as in vLLM's own connector (`kv_lease_duration`).
    hold: float = attrs.field(default=30.0, validator=_fits)
    lease: float = attrs.field(default=30.0, validator=_fits)
    timeout: float = attrs.field(default=120.0, validator=_fits)
    checksum: bool = attrs.field(default=False, validator=_fits)
    staging: int = attrs.field(default=0, validator=_fits)
    key_content: KeyContent | None = attrs.field(default=None, converter=_key_content)
    dead_tokens: bool = attrs.field(default=False, validator=_fits)
    store: StoreSettings | None = attrs.field(default=None, converter=read_store)

    @property
    def weights(self) -> str:
        """The names of the model and of its draft, for peers to compare.

        Two drafts may have layers of equal names and sizes.
        """
        return self.model if self.draft is None else f"{self.model} with draft {self.draft}"

    @staticmethod
    def of(vllm_config: Any) -> Settings:
        """Return the settings of *vllm_config*."""
        model = FieldReader("model_config", vllm_config.model_config)
        values = {name: model.get(name).value for name in ("model", "revision")}
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        draft = draft_of(vllm_config)
        if draft is None and extra.get("draft") is not None:
            wanted = "None: this engine has no draft model with a cache"
            raise SpecError("kv_connector_extra_config['draft']", extra["draft"], wanted)
        values |= {"draft": None if draft is None else str(draft), **extra}
        known = [field.name for field in attrs.fields(Settings)]
        for name in values:
            if name not in known:
                raise SpecError("kv_connector_extra_config", name, f"one of {', '.join(known)}")
        return Settings(**values)


def check_secret() -> None:
    """Raise `SpecError` if the environment has no secret."""
    try:
        secret_of(None)
    except SpecError as error:
        if error.value is not None:
            raise
        rule = (
            "set this environment variable to the same random text, at least 16 bytes, for both"
            " engines and all their workers"
        )
        raise SpecError("KVSPEC_SECRET", None, rule=rule) from error


def check_weights(vllm_config: Any) -> None:
    """Raise `SpecError` if vLLM may receive other weights, or sleep, while it runs."""
    # vLLM updates weights in its workers. No connector learns of it, so a prompt that was computed
    # with old weights would be read by an engine with new ones.
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is not None:
        rule = "is not supported: tickets would not show with which weights a prompt was computed"
        raise SpecError("weight_transfer_config", transfer, rule=rule)
    # vLLM 0.32 asks no connector whether it may sleep.
    if getattr(getattr(vllm_config, "model_config", None), "enable_sleep_mode", False):
        rule = "is not supported: a sleeping engine frees memory that its peers may be reading"
        raise SpecError("enable_sleep_mode", True, rule=rule)  # noqa: FBT003


def refuse_reloads() -> None:
    """Let vLLM's workers in this process refuse to load other weights while they run."""
    # Imported here: the tests of this module run without vLLM.
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415

    def refused(*_: object, **__: object) -> None:
        rule = "is not supported while KvspecConnector serves: restart this engine and its peers"
        raise SpecError("reload_weights", None, rule=rule)

    # vLLM informs no connector. Each worker of each device inherits or calls this method.
    Worker.reload_weights = refused


class Serving:
    """The session of one rank, and its loads."""

    _session: Session

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        check_secret()
        check_weights(vllm_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._numbers = WorkerNumbers()
        self._settings = Settings.of(vllm_config)
        self._threads: PageThreads | None = None
        self._served: Served | None = None
        self._open = contextlib.ExitStack()
        self._loads: dict[str, Load] = {}
        self._held: set[str] = set()  # Request ids.
        self._cancelled: set[str] = set()  # Ids of requests that ended while they were loaded.
        self._sent: set[str] = set()
        self._failed: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the session of this rank over *kv_caches*."""
        refuse_reloads()
        if getattr(self._vllm_config, "lora_config", None) is not None:
            note_loads()
        config, settings = self._kv_cache_config, self._settings
        own = time.time_ns(), WorkerInfo.of(self._vllm_config, config)
        # vLLM calls all workers at once. The epoch must be the same on all ranks of an engine, so
        # all use the time of the first worker.
        (epoch, _), *_ = all_workers = self._all_workers(own)
        infos = [info for _, info in all_workers]
        engine = whole_engine(self._vllm_config, infos, kv_caches, settings.key_content)
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        cache = rank_cache(engine, worker_rank(self._vllm_config), kv_caches, config=config)
        if settings.checksum and any(region.memory_type != "DRAM" for region in cache.regions):
            field = "kv_connector_extra_config['checksum']"
            raise SpecError(field, True, rule="checksums need caches in host memory")  # noqa: FBT003
        if settings.checksum:
            compile_digest()  # It takes seconds, which no request should wait for.
        staging = settings.staging << 20 or None
        nixl = NixlRank(prefix=f"{engine_id[:64]}-", staging=staging)
        # The stack closes in reverse order: first the session, then NIXL.
        self._open.callback(nixl.close)
        self._tensors = tuple(kv_caches.values())
        # The target's kernels end before a sampled token reaches the host, but not the draft's.
        self._draft_gpu = None if draft_of(self._vllm_config) is None else gpu_of(cache)
        self._session = Session(
            nixl,
            cache,
            engine_id=engine_id,
            epoch=epoch,
            model=settings.weights,
            revision=settings.revision,
            channel=TcpChannel(settings.host, settings.port, public=settings.public or ""),
            owner=kv_caches,
            lease=settings.lease,
            dead_tokens=settings.dead_tokens,
            # Peers whose heartbeat is not shorter than half of the lease are refused. So two
            # engines with the same short lease need a shorter heartbeat than the default.
            heartbeat=min(5.0, settings.lease / 4),
            background=True,
        )
        self._open.callback(self._session.close)
        if settings.store is not None:
            self._threads = PageThreads(settings.store.open(self._vllm_config, engine), cache)
            self._open.callback(self._threads.close)
        address = self._session.channel.address
        # With a range of ports, only this line shows which one the rank has.
        log.info("rank %s of %s listens at %s", cache.rank, engine_id, address)
        self._served = Served(engine=engine, engine_id=engine_id, address=address)

    def _all_workers(self, own: T) -> list[T]:
        """Return the values *own* of all workers of this engine, in order of rank."""
        # Imported here: the tests of this module run without vLLM.
        from vllm.distributed.parallel_state import get_world_group  # noqa: PLC0415

        world, parallel = get_world_group(), self._vllm_config.parallel_config
        values = [world.broadcast_object(own, src) for src in range(world.world_size)]
        # Several engines of one model may share vLLM's world group. This engine's workers are
        # consecutive, and `parallel.rank` counts inside the engine.
        first = world.rank_in_group - parallel.rank
        return values[first : first + parallel.world_size]

    def get_handshake_metadata(self) -> Served | None:
        """Return the facts about this rank for the scheduler. None before the caches exist."""
        return self._served

    def shutdown(self) -> None:
        """Close the session and release NIXL."""
        self._open.close()

    def begin(self, step: EngineStep) -> None:
        """Begin the work of *step*: hold, decline and fetch requests."""
        self._hold_requests(step)
        for ticket in step.kept:
            self._session.keep(ticket, timeout=KEEP_TIMEOUT)
        for ticket in step.declined:
            self._session.decline(ticket=ticket)
        for ticket, request in step.fetched:
            name, timeout = request.request_id, self._settings.timeout
            try:
                # After this, vLLM computes with these files, whatever becomes of them.
                self._check_adapter(step, name, StatedAdapter.load)
                self._loads[name] = self._session.load(
                    request, ticket=ticket, timeout=timeout, checksum=self._settings.checksum
                )
            except KVSpecError as error:
                # For example, an earlier load of this request has not ended on all ranks.
                log.error("%s is not read: %s", name, error)  # noqa: TRY400
                self._failed.add(name)
                self._session.decline(ticket=ticket)
        if self._threads is not None:
            self._threads.begin(step.page_loads, step.cancelled)
        for name in step.cancelled:
            if name in self._loads:
                self._cancelled.add(name)
                self._loads[name].cancel()
        self._failed.update(step.failed)

    def _hold_requests(self, step: EngineStep) -> None:
        """Hold the requests of *step* that have ended, when all their bytes are written."""
        if step.held:
            submitted_work(self._draft_gpu)()
        for request_id, ticket in step.held:
            try:
                self._check_adapter(step, request_id, StatedAdapter.mismatch)
                self._hold_blocks(request_id, ticket)
            except SpecError as error:
                # The request ends here. A reader of this remote id receives an error.
                log.error("%s is not held: %s", request_id, error)  # noqa: TRY400
                self._sent.add(request_id)

    def save_pages(self, step: EngineStep) -> None:
        """Begin to store the pages that the model completes in *step*."""
        if self._threads is not None:
            for save in step.page_saves:
                self._threads.save(save)

    def build_connector_worker_meta(self) -> SaveReports | None:
        """Return the pages that were stored since the last step, for the scheduler."""
        return None if self._threads is None else self._threads.reports()

    @staticmethod
    def _check_adapter(
        step: EngineStep, request_id: str, check: Callable[[StatedAdapter], SpecError | None]
    ) -> None:
        adapter = step.adapters.get(request_id)
        error = None if adapter is None else check(adapter)
        if error is not None:
            raise error

    def _hold_blocks(self, request_id: str, ticket: PrefillTicket) -> None:
        # A session holds several requests of one id, but vLLM frees blocks by the id alone.
        if request_id in self._held:
            raise SpecError("request_id", request_id, "the id of no held request")
        tables = ticket.tables if self._settings.checksum else None
        self._session.hold(ticket.remote_id, lease=self._settings.hold, blocks=tables)
        self._held.add(request_id)

    def settle(self) -> tuple[set[str], set[str], set[str]]:
        """Return three sets of requests: sent, received or failed, and failed.

        Each request is returned once, when none of its blocks is read or written any more.
        """
        ended = {name for name, load in self._loads.items() if load.poll() != "moving"}
        failed = {name for name in ended if not self._complete(name, self._loads.pop(name))}
        if self._threads is not None:
            loaded, invalid = self._threads.settle()
            ended, failed = ended | loaded, failed | invalid
        settled = self._session.settled()
        for remote_id in settled.expired:
            log.warning("%s was not read within its lease", key_of(remote_id).request_id)
        freed = {key_of(remote_id).request_id for remote_id in settled.freed}
        self._held -= freed
        sent, failed = freed | self._sent, failed | self._failed
        self._sent, self._failed = set(), set()
        # Failed requests count as received, too: their loads have ended.
        return sent, ended | failed, failed

    def numbers(self) -> Numbers | None:
        """Return the numbers of this worker since the last call, or None if nothing happened."""
        if self._served is None:
            return None
        return self._numbers.take(self._session.stats())

    def _complete(self, name: str, load: Load) -> bool:
        """Return whether a load that ended succeeded."""
        if load.error is not None:
            error = load.error.__cause__ or load.error
            # The producer has ended, or is slow. This engine has no fault.
            remote = isinstance(load.error, RemoteTransferError)
            level = logging.WARNING if remote else logging.ERROR
            level = logging.INFO if name in self._cancelled else level
            self._cancelled.discard(name)
            log.log(level, "%s: %s: %s", name, type(error).__name__, error)
            return False
        self._cancelled.discard(name)
        self._numbers.load_is_done(load.seconds)
        # If this is set, vLLM zeroes new blocks, but not those that are loaded. So the bytes that
        # the load has not written are zeroed here.
        if self._kv_cache_config.needs_kv_cache_zeroing:
            zero(self._tensors, load.unwritten_ranges)
        return True
