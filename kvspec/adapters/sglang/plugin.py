"""Register kvspec as a transfer backend of SGLang. SGLang calls `register` as a plug-in.

With kvspec installed, start both engines with ``--disaggregation-transfer-backend kvspec`` and the
same `KVSPEC_SECRET`. See `docs/sglang.md`.

Invariant: another version of SGLang than the tested one is refused, and nothing is hooked.

How it works:
    SGLang finds `register` by the entry point group ``sglang.srt.plugins``, in each of its
    processes. It adds a value to two lists of backends, and four hooks:

        get_kv_class                    returns the classes of kvspec for the new backend
        both _init_kv_manager           the manager sees the queue, which has the token pool
        create_sender and               the sender and the receiver see their request, with its
        _create_receiver_and_enqueue    tokens
"""

# ruff: noqa: ANN401, PLC0415 - SGLang is imported only inside an SGLang process
from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

from kvspec.adapters.sglang import backend, tickets
from kvspec.adapters.sglang.describing import Surroundings, check_version

NAME = "kvspec"
_UTILS, _PREFILL, _DECODE = (
    f"sglang.srt.disaggregation.{module}"
    for module in ("utils", "prefill.PrefillBootstrapQueue", "decode.DecodePreallocQueue")
)

# The queue whose manager is being constructed.
_QUEUE: contextvars.ContextVar[Any] = contextvars.ContextVar("queue")


def register() -> None:
    """Add the backend to SGLang.

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
    for queue in (_PREFILL, _DECODE):
        HookRegistry.register(f"{queue}._init_kv_manager", _with_queue, HookType.AROUND)
    HookRegistry.register(f"{_PREFILL}.create_sender", _sender_created, HookType.AFTER)
    created = f"{_DECODE}._create_receiver_and_enqueue"
    HookRegistry.register(created, _receiver_created, HookType.AFTER)


def _with_queue(original: Callable[..., Any], queue: Any) -> Any:
    token = _QUEUE.set(queue)
    try:
        return original(queue)
    finally:
        _QUEUE.reset(token)


def _sender_created(_: bool, queue: Any, req: Any, num_kv_heads: int) -> None:  # noqa: ARG001, FBT001
    if isinstance(req.disagg_kv_sender, backend.Sender):
        req.disagg_kv_sender.request = req


def _receiver_created(result: Any, queue: Any, req: Any, is_rebootstrap: bool = False) -> None:  # noqa: ARG001, FBT001, FBT002
    if isinstance(result.kv_receiver, backend.Receiver):
        result.kv_receiver.request = req


def _surroundings(args: Any, mode: Any) -> Surroundings:
    """Return the objects of the rank whose manager is being constructed."""
    from sglang.srt.runtime_context import get_disagg, get_parallel

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
    )


@functools.cache
def _classes() -> dict[str, type]:
    """Return the classes of the backend by the name of their kind, with SGLang's base classes."""
    from sglang.srt.disaggregation.base import conn

    def metric(_: Any) -> Any:
        return conn.KVTransferMetric()

    class Manager(backend.Manager, conn.BaseKVManager):  # type: ignore[misc]
        surroundings = staticmethod(_surroundings)

    class Sender(backend.Sender, conn.BaseKVSender):  # type: ignore[misc]
        get_transfer_metric = metric

    class Receiver(backend.Receiver, conn.BaseKVReceiver):  # type: ignore[misc]
        pass

    class BootstrapServer(tickets.TicketServer, conn.BaseKVBootstrapServer):  # type: ignore[misc]
        pass

    return {
        "MANAGER": Manager,
        "SENDER": Sender,
        "RECEIVER": Receiver,
        "BOOTSTRAP_SERVER": BootstrapServer,
    }
