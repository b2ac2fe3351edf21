"""A KV connector for vLLM that moves caches between any two engines whose caches fit together.

    --kv-transfer-config '{"kv_connector": "KvspecConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "kvspec.adapters.vllm.connector"}'

Invariant: an error fails one request and never the engine. The log names the request.

How it works:
    vLLM constructs the connector once in its scheduler and once in each worker. The two call
    different methods. This class decides nothing. It only joins two classes with vLLM's base class,
    and so it is the only module of kvspec that needs vLLM. vLLM's front end calls class methods for
    the metrics:

        `Scheduling` in the scheduler             `Serving` in a worker
        on_new_request                            register_kv_caches
        get_num_new_matched_tokens                get_handshake_metadata
        update_state_after_alloc                  start_load_kv -> begin
        build_connector_meta -> EngineStep        wait_for_save -> save_pages
        update_connector_output                   get_transfer_results -> settle
        request_finished_all_groups               build_connector_worker_meta
                                                  shutdown

    In each step, vLLM sends the `EngineStep` of the scheduler to all workers. The producer's
    `request_finished_all_groups` returns the parameters that a router passes to the consumer.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as vllm_metrics

from kvspec.adapters.vllm.metrics import Numbers, PromMetrics, added, no_numbers, summary
from kvspec.adapters.vllm.scheduler_side import Scheduling
from kvspec.adapters.vllm.worker_side import Serving, check_secret, check_weights

# The sources of cached tokens. Older versions of vLLM have none.
_SOURCES = type(getattr(base.KVConnectorBase_V1, "_cache_hit_source", None))


def _log_as_vllm_does() -> None:
    """Let the lines of kvspec have the format, the level and the place of vLLM's own lines."""
    own, engine = logging.getLogger("kvspec"), logging.getLogger("vllm")
    if not own.handlers and engine.handlers:  # Otherwise the user has configured one of them.
        own.handlers, own.level, own.propagate = engine.handlers, engine.level, False


def _register() -> None:
    """Let vLLM find the class by its name alone.

    Inside a `MultiConnector`, vLLM's front end reads the numbers of each connector by the name of
    its class. A name that is not registered raises an error there, which ends the front end.
    """
    with contextlib.suppress(ValueError):  # It is registered already.
        KVConnectorFactory.register_connector("KvspecConnector", __name__, "KvspecConnector")


_log_as_vllm_does()
_register()
# vLLM imports this module while it reads its settings. It calls the connector only after it has
# loaded the weights, which may take minutes.
check_secret()


class KvspecStats(vllm_metrics.KVConnectorStats):  # type: ignore[misc]
    """The numbers of some workers and steps. vLLM adds them and sends them as plain values."""

    data: Numbers

    def reset(self) -> None:
        """Begin at zero."""
        self.data = no_numbers()

    def aggregate(self, other: Any) -> KvspecStats:  # noqa: ANN401 - a KvspecStats
        """Return the sum of these numbers and others."""
        return KvspecStats(added(self.data or no_numbers(), other.data or no_numbers()))

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for a line of the log."""
        return summary(self.data or no_numbers())

    def is_empty(self) -> bool:
        """Return whether nothing has happened."""
        return (self.data or no_numbers()) == no_numbers()


class KvspecPromMetrics(vllm_metrics.KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics in ``/metrics``: see `kvspec.adapters.vllm.metrics`."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: Any,  # noqa: ANN401
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = PromMetrics(self, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: Numbers, engine_idx: int = 0) -> None:
        """Record the numbers of one step."""
        self._metrics.observe(transfer_stats_data, engine_idx)


class KvspecConnector(Scheduling, Serving, base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """The connector. See the module for the calls of vLLM.

    A prompt is fetched whole, before its request runs, and not layer by layer. There are two
    reasons. The consumer learns of the prompt from the producer's answer, after the last layer was
    computed. And `wait_for_layer_load` runs inside the forward pass, where one request that waits
    for a layer delays all others of the batch.
    """

    # A prompt comes from the memory of another engine.
    _cache_hit_source = getattr(_SOURCES, "P2P", None)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        # The bases take different arguments, so `super().__init__` cannot serve all three.
        base.KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        Scheduling.__init__(self, vllm_config, kv_cache_config)
        Serving.__init__(self, vllm_config, kv_cache_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ANN401, ARG003
        """Return False: a sleeping engine frees memory that peers may be reading."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ANN401
        """Require no layout. Raise `SpecError` for settings that are not supported.

        vLLM calls it before it allocates the caches.
        """
        check_weights(vllm_config)
        return None

    def get_external_cache_hit_sources(
        self,
        request: Any,  # noqa: ANN401
        num_external_tokens: int,
    ) -> dict[Any, int]:
        """Return the tokens by their source: stored pages or another engine."""
        if not num_external_tokens:
            return {}
        stored = self.loads_pages(request.request_id)
        source = getattr(_SOURCES, "DISK", None) if stored else self._cache_hit_source
        return {source: num_external_tokens}

    def get_kv_connector_stats(self) -> KvspecStats | None:
        """Return the numbers of this worker since the last call, or None if nothing happened."""
        numbers = self.numbers()
        return None if numbers is None else KvspecStats(numbers)

    @classmethod
    def build_kv_connector_stats(cls, data: Numbers | None = None) -> KvspecStats:
        """Return the object for numbers that vLLM has sent as plain values."""
        return KvspecStats(no_numbers() if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,  # noqa: ANN401
        metric_types: Any,  # noqa: ANN401
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> KvspecPromMetrics:
        """Return the metrics of a front end."""
        return KvspecPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
        """Begin the transfers of this step."""
        self.begin(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401, ARG002
        """Return three sets of requests: sent, received or failed, and failed."""
        return base.KVConnectorTransferResults(*self.settle())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all layers have arrived."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Do nothing: the consumer reads after the prompt has finished. A page has all layers."""

    def wait_for_save(self) -> None:
        """Begin to store the pages of this step. Nothing waits for them."""
        self.save_pages(self._connector_metadata)
