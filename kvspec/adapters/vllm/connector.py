"""vLLM's KV connector that moves caches by plan, between any two engines whose caches fit.

    --kv-transfer-config '{"kv_connector": "KvspecConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "kvspec.adapters.vllm.connector"}'

Law: what fails, fails a request by name and never the engine. Nothing is decided here: `Scheduling`
has what vLLM calls in its scheduler, `Serving` what it calls in a worker. Only this module needs
vLLM, whose class it extends.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvspec.adapters.vllm.scheduler_side import Scheduling
from kvspec.adapters.vllm.worker_side import Serving


class KvspecConnector(Scheduling, Serving, base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """What vLLM makes once in the scheduler and once in each worker.

    A prompt is fetched whole, before it runs, and not layer by layer. vLLM's routers tell a
    consumer of it in the producer's answer, so after its last layer; and a request that runs while
    layers are on their way stops, in `wait_for_layer_load`, all that run with it.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        base.KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        Scheduling.__init__(self, kv_cache_config)
        Serving.__init__(self, vllm_config, kv_cache_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ANN401, ARG003
        """Return False: an engine that sleeps gives memory back that peers read."""
        return False

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
        """Begin what the scheduler wants."""
        self.begin(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401, ARG002
        """Return what was sent, what was received, and what of that failed."""
        return base.KVConnectorTransferResults(*self.settle())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs when all of it has arrived."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Do nothing: a consumer reads."""

    def wait_for_save(self) -> None:
        """Do nothing: what is held is not written."""
