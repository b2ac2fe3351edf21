"""What a connector does in one of vLLM's workers: a session over the caches that vLLM has made.

Law: nothing here waits, and nothing that fails goes further than its request: that is logged by
name, and told to vLLM once none of its blocks can be written any more.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from kvspec.adapters.given import Given
from kvspec.adapters.vllm.arrays import zero
from kvspec.adapters.vllm.scheduling import EngineStep, Fetch, RemotePrompt, Served
from kvspec.adapters.vllm.settings import from_vllm
from kvspec.adapters.vllm.tables import block_tables
from kvspec.adapters.vllm.tensors import rank_cache
from kvspec.descriptors.request import TransferRequest
from kvspec.errors import KVSpecError, SpecError
from kvspec.inputs import seconds
from kvspec.nixl import NixlRank
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.session import Session, SessionLoad, TcpChannel

T = TypeVar("T")
log = logging.getLogger(__name__)

MEETING = 30.0
"""Seconds for which a producer is waited for; meanwhile no other is met."""


def _text(_: object, at: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not value:
        raise SpecError(f"kv_connector_extra_config[{at.name!r}]", value, "a non-empty str")


def _seconds(_: object, at: attrs.Attribute[float], value: object) -> None:
    seconds(f"kv_connector_extra_config[{at.name!r}]", value)


@attrs.frozen(kw_only=True)
class Settings:
    """What `kv_connector_extra_config` may have.

    *host*: where this machine's ranks listen, and *public*: by which name peers reach it, *host*
    unless given. *model*, *revision*: what both engines must have alike, vLLM's names for them
    unless given. *lease*: seconds for which a request is held after its last reader was heard.
    *timeout*: seconds within which a request is read.
    """

    host: str = attrs.field(default="127.0.0.1", validator=_text)
    public: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text))
    model: str = attrs.field(validator=_text)
    revision: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text))
    lease: float = attrs.field(default=30.0, validator=_seconds)
    timeout: float = attrs.field(default=120.0, validator=_seconds)

    @staticmethod
    def of(vllm_config: Any) -> Settings:  # noqa: ANN401 - vLLM's class, not imported
        """Return what *vllm_config* says."""
        model = Given("model_config", vllm_config.model_config)
        given = {name: model.get(name).value for name in ("model", "revision")}
        given |= vllm_config.kv_transfer_config.kv_connector_extra_config
        known = [field.name for field in attrs.fields(Settings)]
        for name in given:
            if name not in known:
                raise SpecError("kv_connector_extra_config", name, f"one of {', '.join(known)}")
        return Settings(**given)


class Worker:
    """One rank's session, and what it fetches."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        self._vllm_config = vllm_config
        self._config = kv_cache_config
        self._settings = Settings.of(vllm_config)
        self._session: Session | None = None
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvspec-meet")
        self._met: dict[tuple[str, ...], Future[None]] = {}  # by addresses
        self._waiting: list[tuple[Fetch, Future[None]]] = []
        self._releases: list[tuple[RemotePrompt, Future[None]]] = []
        self._loads: dict[str, tuple[Fetch, SessionLoad]] = {}
        self._unheld: set[str] = set()

    @property
    def session(self) -> Session:
        """The session; there is one once the caches are registered."""
        if self._session is None:
            raise SpecError("kv_caches", None, "registered before anything is fetched or held")
        return self._session

    def register(self, tensors: dict[str, Any], epoch: int) -> None:
        """Begin to exchange *tensors*, by layer; *epoch* is the same in all workers."""
        self._engine = engine = from_vllm(self._vllm_config, self._config, tensors)
        self._tensors = tensors
        rank = _rank(self._vllm_config.parallel_config.rank, engine.parallel)
        cache = rank_cache(engine, rank, tensors, config=self._config)
        transfer, settings = self._vllm_config.kv_transfer_config, self._settings
        self._session = Session(
            NixlRank(prefix=f"{transfer.engine_id[:64]}-"),
            cache,
            engine_id=transfer.engine_id,
            epoch=epoch,
            model=settings.model,
            revision=settings.revision,
            channel=TcpChannel(settings.host, public=settings.public or ""),
            owner=tensors,
            lease=settings.lease,
            background=True,
        )

    @property
    def served(self) -> Served:
        """What this engine's scheduler has to know of the rank."""
        session, engine_id = self.session, self.session.me.engine_id
        return Served(engine=self._engine, engine_id=engine_id, address=session.channel.address)

    def hold(self, step: EngineStep) -> None:
        """Hold what the scheduler promised to peers, before anything else: they may be reading."""
        for request_id, remote_id in step.held:
            try:
                self.session.ledger.expect(remote_id)
            except SpecError as error:  # who reads it is told that it is void
                log.error("%s is not held: %s", request_id, error)  # noqa: TRY400
                self._unheld.add(request_id)

    def begin(self, step: EngineStep) -> None:
        """Fetch and release what the scheduler says."""
        self._waiting += ((fetch, self._meeting(fetch.remote)) for fetch in step.fetched)
        self._releases += ((remote, self._meeting(remote)) for remote in step.released)

    def settle(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests that were sent, that were received or failed, and those that failed.

        Each once, and only when none of its blocks is read or written any more.
        """
        self._releases, releases = _split(self._releases)
        for remote, meeting in releases:
            self._release(remote, meeting)
        self._waiting, fetches = _split(self._waiting)
        failed = {fetch.request_id for fetch, meeting in fetches if not self._load(fetch, meeting)}
        ended = {name for name, (_, load) in self._loads.items() if load.poll() != "moving"}
        failed |= {name for name in ended if not self._complete(*self._loads.pop(name))}
        settled = self.session.ledger.poll()
        for request_id in settled.expired:
            log.warning("%s was not read within its lease", request_id)
        sent = {*settled.done, *settled.expired, *self._unheld}
        self._unheld.clear()
        return sent, ended | failed, failed

    def close(self) -> None:
        """Let go of everything."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            self._session.close()
            self._session.nixl.close()

    def _meeting(self, remote: RemotePrompt) -> Future[None]:
        """Return when a producer is met, or was; one that could not be met is tried again."""
        known = self._met.get(remote.addresses)
        if known is None or (known.done() and known.exception() is not None):
            known = self._threads.submit(self._meet, remote.addresses)
            self._met[remote.addresses] = known
        return known

    def _meet(self, addresses: tuple[str, ...]) -> None:
        timeout = min(MEETING, self._settings.timeout)
        self.session.meet(self.session.fetch(addresses, timeout), timeout=timeout)

    def _load(self, fetch: Fetch, meeting: Future[None]) -> bool:
        """Start to read, from a producer that was met; return whether that could be."""
        try:
            meeting.result()
            self._loads[fetch.request_id] = fetch, self._start(fetch)
        except Exception as error:  # noqa: BLE001 - whatever it was, it fails this request alone
            log.error("%s: %s: %s", fetch.request_id, type(error).__name__, error)  # noqa: TRY400
            self._release(fetch.remote, meeting)
            return False
        return True

    def _start(self, fetch: Fetch) -> SessionLoad:
        remote, end = fetch.remote, fetch.num_tokens
        request = TransferRequest(
            request_id=fetch.request_id,
            num_tokens=end,
            cached_tokens=fetch.cached_tokens,
            state_tokens=remote.num_tokens,
            producer_blocks=remote.tables,
            consumer_blocks=block_tables(self._engine, self._config, fetch.block_ids, end),
        )
        return self.session.load(
            request,
            remote_id=remote.remote_id,
            engine_id=remote.engine_id,
            timeout=self._settings.timeout,
        )

    def _release(self, remote: RemotePrompt, meeting: Future[None]) -> None:
        """Tell a producer that nothing is read; one that cannot be told waits for its lease."""
        if meeting.exception() is None:
            try:
                self.session.release(remote.remote_id, engine_id=remote.engine_id)
            except KVSpecError as error:
                log.warning("%s is not released: %s", remote.remote_id, error)

    def _complete(self, fetch: Fetch, load: SessionLoad) -> bool:
        """Return whether a load that ended has it all; zero what it left of its blocks."""
        if load.error is not None:
            log.error("%s: %s", type(load.error).__name__, load.error)
            self._met.pop(fetch.remote.addresses, None)  # it may have to be connected anew
            return False
        if self._config.needs_kv_cache_zeroing:
            zero(self._tensors.values(), load.untouched)
        return True


def _split(
    waiting: list[tuple[T, Future[None]]],
) -> tuple[list[tuple[T, Future[None]]], list[tuple[T, Future[None]]]]:
    """Return what still waits for its meeting, and what does not."""
    sides: tuple[list[tuple[T, Future[None]]], list[tuple[T, Future[None]]]] = ([], [])
    for one in waiting:
        sides[one[1].done()].append(one)
    return sides


def _rank(number: int, parallel: ParallelConfig) -> RankId:
    """Return which rank vLLM's worker *number* is: TP ranks of a context rank first, then these."""
    rest, tp = divmod(number, parallel.tp_size)
    pp, pcp = divmod(rest, parallel.pcp_size)
    return RankId(pp=pp, pcp=pcp, tp=tp)
