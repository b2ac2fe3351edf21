"""A KV connector for vLLM that moves caches between any two engines whose caches fit together.

    --kv-transfer-config '{"kv_connector": "KvspecConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "kvspec.adapters.vllm.connector"}'

Invariant: an error fails one request and never the engine. The log names the request.

How it works:
    vLLM constructs the connector once in its scheduler and once in each worker. The two call
    different methods. This class decides nothing. It only joins two classes with vLLM's base class,
    and so it is the only module of kvspec that needs vLLM:

        `Scheduling` in the scheduler             `Serving` in a worker
        on_new_request                            register_kv_caches
        get_num_new_matched_tokens                get_handshake_metadata
        update_state_after_alloc                  start_load_kv -> begin
        build_connector_meta -> EngineStep        get_transfer_results -> settle
        request_finished_all_groups               shutdown

    In each step, vLLM sends the `EngineStep` of the scheduler to all workers. The producer's
    `request_finished_all_groups` returns the parameters that a router passes to the consumer.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvspec.adapters.vllm.scheduler_side import Scheduling
from kvspec.adapters.vllm.worker_side import Serving


class KvspecConnector(Scheduling, Serving, base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """The connector. See the module for the calls of vLLM.

    A prompt is fetched whole, before its request runs, and not layer by layer. There are two
    reasons. The consumer learns of the prompt from the producer's answer, after the last layer was
    computed. And `wait_for_layer_load` runs inside the forward pass, where one request that waits
    for a layer delays all others of the batch.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        # The bases take different arguments, so `super().__init__` cannot serve all three.
        base.KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        Scheduling.__init__(self, kv_cache_config)
        Serving.__init__(self, vllm_config, kv_cache_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ANN401, ARG003
        """Return False: a sleeping engine frees memory that peers may be reading."""
        return False

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
        """Begin the transfers of this step."""
        self.begin(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401, ARG002
        """Return three sets of requests: sent, received or failed, and failed."""
        return base.KVConnectorTransferResults(*self.settle())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all layers have arrived."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Do nothing: the consumer reads the layers after the prompt has finished."""

    def wait_for_save(self) -> None:
        """Do nothing: no write is in progress, because the consumer reads."""
