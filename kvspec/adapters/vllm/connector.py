"""vLLM's KV connector that moves caches by plan, between any two engines whose caches fit.

    --kv-transfer-config '{"kv_connector": "KvspecConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "kvspec.adapters.vllm.connector"}'

Law: nothing is decided here. Each of vLLM's calls goes to `Requests`, in the scheduler, or to
`Worker`, in a worker; what fails, fails a request by name and never the engine.

`KvspecConnector` is made when it is asked for: it extends vLLM's own class. What
``kv_connector_extra_config`` may have is in `Settings`.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Any

from kvspec.adapters.vllm.scheduling import EngineStep, Requests, Served
from kvspec.adapters.vllm.worker import Worker

if TYPE_CHECKING:
    KvspecConnector: type


class Connector:
    """What `KvspecConnector` overrides of vLLM's class."""

    _connector_metadata: Any
    _kv_cache_config: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._requests = Requests(kv_cache_config)
        self._worker = Worker(vllm_config, kv_cache_config)

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Be ready for peers; all workers are called at once, and share the time of the first."""
        from vllm.distributed.parallel_state import get_world_group  # noqa: PLC0415

        self._worker.register(kv_caches, get_world_group().broadcast_object(time.time_ns()))

    def get_handshake_metadata(self) -> Served:
        """Return what the scheduler has to know."""
        return self._worker.served

    def bind_connector_metadata(self, connector_metadata: EngineStep) -> None:
        """Hold what the scheduler says, before this step computes anything."""
        self._connector_metadata = connector_metadata
        self._worker.hold(connector_metadata)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
        """Begin what the scheduler wants."""
        self._worker.begin(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401, ARG002
        """Return what was sent, what was received, and what of that failed."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415

        return base.KVConnectorTransferResults(*self._worker.settle())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs when all of it has arrived."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Do nothing: a consumer reads."""

    def wait_for_save(self) -> None:
        """Do nothing: what is held is not written."""

    def shutdown(self) -> None:
        """Let go of everything."""
        self._worker.close()

    # In the scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Served]) -> None:
        """Know this engine's ranks."""
        self._requests.ranks = tuple(metadata.values())

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """Note who holds the request."""
        self._requests.arrive(request)

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ANN401
        num_computed_tokens: int,
    ) -> tuple[int, bool]:
        """Return how many tokens are fetched, and that the request waits meanwhile."""
        count = self._requests.matched(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ANN401, ARG002
        """Return all groups that move: vLLM shall not zero what is fetched."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(
        self,
        request: Any,  # noqa: ANN401
        blocks: Any,  # noqa: ANN401
        num_external_tokens: int,
    ) -> None:
        """Fetch the request, or release it."""
        self._requests.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> EngineStep:  # noqa: ANN401, ARG002
        """Return what the workers shall do."""
        return self._requests.step()

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: Any,  # noqa: ANN401
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the request is held, and what its reader has to know."""
        return self._requests.finished(request, block_ids)


@cache
def _extended() -> type:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415

    bases = (Connector, base.KVConnectorBase_V1, base.SupportsHMA)
    return type("KvspecConnector", bases, {"__doc__": Connector.__doc__, "__module__": __name__})


def __getattr__(name: str) -> type:
    """Make `KvspecConnector` when vLLM asks for it."""
    if name == "KvspecConnector":
        return _extended()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
