"""Register kvspec as a transfer backend of SGLang. SGLang calls `register` as a plug-in.

With kvspec installed, start both engines with ``--disaggregation-transfer-backend kvspec`` and the
same `KVSPEC_SECRET`. See `docs/sglang.md`.

Invariant: another version of SGLang than the tested one is refused, and nothing is hooked.

How it works:
    SGLang finds `register` by the entry point group ``sglang.srt.plugins``, in each of its
    processes. It adds a value to two lists of backends, and hooks:

        get_kv_class                    returns the classes of kvspec for the new backend
        decode's _bootstrap_addr        an address that SGLang cannot read fails one request
        both _init_kv_manager           the manager sees the queue, which has the token pool
        create_sender and               the sender and the receiver see their request, with its
        _create_receiver_and_enqueue    tokens
        handle_generate_request and     the decode half learns that the prompt was rejected
        _add_request_to_queue
        build_kv_cache, and calls of    the storage of HiCache gets the tokens of pages
        the radix cache                 (see `hicache`)
        update_weights_from_* and       requests that are served fail, and the weights have no name
        begin_ and end_weight_update    until SGLang knows a new one
        TokenizerManager                what cannot be served is refused in the server's process
"""

# ruff: noqa: ANN401, PLC0415 - SGLang is imported only inside an SGLang process
from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

from kvspec.adapters.sglang import backend, frontend_hooks, hicache, tickets
from kvspec.adapters.sglang.describing import GROUP_COUNTS, Surroundings, check_version
from kvspec.adapters.sglang.receiving import Receiver
from kvspec.adapters.sglang.sending import Sender

NAME = "kvspec"
_UTILS = "sglang.srt.disaggregation.utils"

# The queue whose manager is being constructed.
_QUEUE: contextvars.ContextVar[Any] = contextvars.ContextVar("queue")


@functools.cache
def register() -> None:
    """Add the backend to SGLang. A second call does nothing.

    Raises:
        SpecError: If this version of SGLang was not tested.
    """
    import sglang

    # Another version may lack the modules that are imported next.
    check_version(sglang.__version__)
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([NAME])
    # An enum calls `_missing_` for a value that it does not have.
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = NAME.upper(), NAME

    def missing(_: type, value: object) -> Any:
        return member if value == NAME else None

    TransferBackend._missing_ = classmethod(missing)

    def get_kv_class(original: Callable[..., Any], chosen: Any, class_type: Any) -> Any:
        if chosen is not member or class_type == KVClassType.KVARGS:
            return original(chosen, class_type)
        return _classes()[class_type.name]

    HookRegistry.register(f"{_UTILS}.get_kv_class", get_kv_class, HookType.AROUND)
    for target, (kind, hook) in _hooks().items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType[kind])


def _hooks() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return the methods of SGLang that are hooked, each with the kind of its hook."""
    prefill = "disaggregation.prefill.PrefillBootstrapQueue"
    decode = "disaggregation.decode.DecodePreallocQueue"
    weights = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    frontend = "managers.tokenizer_manager.TokenizerManager"
    scheduler = "managers.scheduler.Scheduler"
    tree = "mem_cache.unified_radix_cache.UnifiedRadixCache"
    controller = "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
    found: dict[str, tuple[str, Callable[..., Any]]] = {
        "disaggregation.decode._bootstrap_addr": ("AROUND", _bootstrap_addr),
        f"{prefill}._init_kv_manager": ("AROUND", _with_queue),
        f"{decode}._init_kv_manager": ("AROUND", _with_queue),
        f"{prefill}.create_sender": ("AFTER", _sender_created),
        f"{decode}._create_receiver_and_enqueue": ("AFTER", _receiver_created),
        f"{scheduler}.handle_generate_request": ("AFTER", _request_handled),
        f"{scheduler}._add_request_to_queue": ("AFTER", _request_added),
        f"{scheduler}.record_weight_version_change": ("AFTER", _weights_named),
        f"{scheduler}.flush_cache": ("AFTER", _cache_flushed),
        f"{weights}.begin_weight_update": ("BEFORE", _update_begins),
        f"{weights}.end_weight_update": ("AFTER", _update_ended),
        f"{weights}.check_weights": ("AROUND", _weights_checked),
        "mem_cache.kv_cache_builder.build_kv_cache": ("AROUND", hicache.cache_is_built),
        f"{tree}.prefetch_from_storage": ("AROUND", hicache.prompt_is_looked_up),
        f"{tree}.write_backup_storage": ("BEFORE", hicache.node_is_stored),
        f"{controller}.write_storage": ("AROUND", hicache.pages_are_stored),
        f"{frontend}.generate_request": ("AROUND", frontend_hooks.generate),
        f"{frontend}._handle_batch_request": ("AROUND", frontend_hooks.handle_batch),
        f"{frontend}.release_memory_occupation": ("AROUND", frontend_hooks.release_memory),
    }
    for source in ("disk", "distributed", "tensor", "ipc"):
        found[f"{weights}.update_weights_from_{source}"] = ("AROUND", _weights_updated)
    return found


def _with_queue(original: Callable[..., Any], queue: Any) -> Any:
    token = _QUEUE.set(queue)
    try:
        return original(queue)
    finally:
        _QUEUE.reset(token)


def _sender_created(_: bool, queue: Any, req: Any, num_kv_heads: int) -> None:  # noqa: ARG001, FBT001
    if isinstance(req.disagg_kv_sender, Sender):
        req.disagg_kv_sender.request = req


def _receiver_created(result: Any, queue: Any, req: Any, is_rebootstrap: bool = False) -> None:  # noqa: FBT001, FBT002
    if isinstance(result.kv_receiver, Receiver):
        result.kv_receiver.request = req
        if is_rebootstrap:
            queue.kv_manager.submit_prefill_recompute(result.kv_receiver, None)


def manager_of(scheduler: Any) -> backend.Manager | None:
    """Return the manager of *scheduler*, or None if it has another backend."""
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, name, None), "kv_manager", None)
        if isinstance(manager, backend.Manager):
            return manager
    return None


def _refuse(scheduler: Any, request: Any, why: str) -> None:
    """Let the other half learn that an engine has rejected *request*."""
    manager, room = manager_of(scheduler), request.bootstrap_room
    fake = request.bootstrap_host == frontend_hooks.FAKE  # SGLang's own test requests.
    if manager is None or fake or not tickets.is_room(room) or manager.has_room(room):
        return
    if scheduler.disagg_prefill_bootstrap_queue is not None:
        manager.refused(room, why)
    else:
        # The prefill engine may have computed the prompt already.
        manager.reject(request.rid, room, f"{request.bootstrap_host}:{request.bootstrap_port}")


def _request_added(_: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:  # noqa: FBT001, FBT002
    """Refuse the room of a request that came to no queue, such as one that is too long."""
    reason = req.finished_reason or req.to_finish
    if req.disagg_kv_sender is None and hasattr(reason, "message") and not is_retracted:
        _refuse(scheduler, req, str(reason.message))


def _request_handled(_: Any, scheduler: Any, recv_req: Any, **_more: Any) -> None:
    """Refuse the room of a request that was rejected before it came to a queue."""
    waiting = {req.rid for req in scheduler.grammar_manager.grammar_queue}
    if recv_req.rid not in waiting:
        _refuse(scheduler, recv_req, "the prefill engine has rejected the request")


def _bootstrap_addr(original: Callable[..., str], req: Any) -> str:
    """Return the address of the ticket server. An error here would end SGLang's scheduler."""
    try:
        return original(req)
    except Exception:  # noqa: BLE001 - the host may be anything, and the look-up will fail
        return f"{req.bootstrap_host}:{req.bootstrap_port}"


def _update_begins(manager: Any, *_: Any, **__: Any) -> None:
    hicache.weights_changed()
    if (own := manager_of(manager.scheduler)) is not None:
        own.weights_changing()
        own.weights.partial = True


def _update_ended(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    if (own := manager_of(manager.scheduler)) is not None:
        own.weights.partial = False


def _weights_updated(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    hicache.weights_changed()
    own = manager_of(manager.scheduler)
    if own is None:
        return original(manager, recv_req)
    before = own.weights.named, own.weights.clean
    own.weights_changing()
    result = original(manager, recv_req)
    if result.success and recv_req.flush_cache:
        own.weights.clean = True
    # SGLang loads the old weights again if those of a folder do not fit.
    unflushed = "cache was not flushed" in result.message
    if not result.success and original.__name__ == "update_weights_from_disk" and not unflushed:
        own.weights.named, own.weights.clean = before
    return result


def _weights_checked(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    own = manager_of(manager.scheduler)
    if recv_req.action not in ("checksum", "snapshot", "compare"):
        hicache.weights_changed()
        if own is not None:
            own.weights_changing()
    return original(manager, recv_req)


def _weights_named(_: Any, scheduler: Any, new_version: str | None) -> None:
    if (own := manager_of(scheduler)) is not None:
        own.weights.name(new_version)


def _cache_flushed(success: bool, scheduler: Any, *_: Any, **__: Any) -> None:  # noqa: FBT001
    if success and (own := manager_of(scheduler)) is not None:
        own.weights.clean = True


def _surroundings(args: Any, mode: Any) -> Surroundings:
    """Return the objects of the rank whose manager is being constructed."""
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

    queue, parallel = _QUEUE.get(), get_parallel()
    runner = queue.scheduler.tp_worker.model_runner
    decodes = mode.value == "decode"
    return Surroundings(
        pool=queue.token_to_kv_pool,
        draft_pool=queue.draft_token_to_kv_pool,
        model=runner.model,
        kv_heads=runner.model_config.get_total_num_kv_heads(),
        state_types=tuple(args.state_types),
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        decode_radix_cache=decodes and get_disagg().disaggregation_decode_enable_radix_cache,
        gather=parallel.attn_tp_group.all_gather_object,
        buffers=queue.metadata_buffers,
        releases=queue.transfer_queue if decodes else None,
        weight_version=lambda: str(get_serving().weight_version),
        labels=_labels(queue.scheduler),
        n_groups=_groups(runner.model_config.hf_text_config),
        index_order="shuffled" if _shuffles() else "rows",
        forwards=functools.partial(_forwards, queue.scheduler),
    )


def _groups(config: Any) -> int | None:
    """Return the groups of the model's Mamba 2 layers, or None if it has none."""
    name = GROUP_COUNTS.get(type(config).__name__)
    return None if name is None else int(getattr(config, name))


def _shuffles() -> bool:
    """Return whether SGLang shuffles the keys of an indexer's pages."""
    from sglang.srt.layers.attention.dsa.utils import aiter_can_use_preshuffle_paged_mqa

    return bool(aiter_can_use_preshuffle_paged_mqa())


def _forwards(scheduler: Any) -> Callable[[], bool]:
    """Return a function: whether the forward passes that are launched until now have ended."""
    if scheduler.device == "cpu" or not scheduler.enable_overlap:
        return lambda: True  # A pass has ended when its result is processed.
    ended = scheduler.device_module.Event()
    ended.record(scheduler.forward_stream)
    return ended.query  # type: ignore[no-any-return]


def _labels(scheduler: Any) -> dict[str, str] | None:
    """Return the labels of SGLang's metrics, or None if it exports none."""
    if not scheduler.metrics_reporter.enable_metrics:
        return None
    return {name: str(value) for name, value in scheduler.metrics_collector.labels.items()}


@functools.cache
def _classes() -> dict[str, type]:
    """Return the classes of the backend by the name of their kind, with SGLang's base classes."""
    from sglang.srt.disaggregation.base import conn

    def metric(_: Any) -> Any:
        return conn.KVTransferMetric()

    class Manager(backend.Manager, conn.BaseKVManager):  # type: ignore[misc]
        surroundings = staticmethod(_surroundings)

    class OwnSender(Sender, conn.BaseKVSender):  # type: ignore[misc]
        get_transfer_metric = metric

    class OwnReceiver(Receiver, conn.BaseKVReceiver):  # type: ignore[misc]
        pass

    class BootstrapServer(tickets.TicketServer, conn.BaseKVBootstrapServer):  # type: ignore[misc]
        pass

    return {
        "MANAGER": Manager,
        "SENDER": OwnSender,
        "RECEIVER": OwnReceiver,
        "BOOTSTRAP_SERVER": BootstrapServer,
    }
