"""Describe one rank of a running SGLang engine: refuse what is unknown, and read the rest.

Invariant: a configuration that was not run with kvspec raises `SpecError` with the name of the
setting, before any memory is registered.
"""

# ruff: noqa: ANN401 - pools, models and settings are of SGLang's classes, which are not imported
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from kvspec.adapters.attention_modules import (
    agreed_key_content,
    configured_key_content,
    key_content_of,
)
from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.sglang.engine import engine_spec, parallel_config
from kvspec.adapters.sglang.pools import FULL_GROUP, STATE, WINDOW, TokenPool, read_pools
from kvspec.adapters.sglang.request_identity import STARTED
from kvspec.adapters.sglang.tables import state_table
from kvspec.adapters.sglang.tensors import rank_cache
from kvspec.descriptors.request import BlockTable
from kvspec.errors import SpecError
from kvspec.inputs import flag, instance, mapping, positive_int, seconds
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.session.ports import port_range, public_host
from kvspec.specs import KeyContent
from kvspec.wire.handshake import is_name

VARIABLE = "KVSPEC_SGLANG"

# The version of SGLang whose classes are hooked.
TESTED_VERSION = "0.5.23"

# Settings of SGLang that must have one of these values. Others were not run with kvspec.
ONLY: dict[str, tuple[Any, ...]] = {
    "speculative_algorithm": (None,),
    "pp_size": (1,),
    "dp_size": (1,),
    "enable_dp_attention": (False,),
    "dcp_size": (1, None),
    "attn_cp_size": (1,),
    "nnodes": (1,),
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_lora": (None, False),
    "enable_pd_role_switch": (False,),
    "enable_return_hidden_states": (False,),
    "enable_memory_saver": (False,),
    # SGLang would move pages while an aborted load still writes them.
    "enable_unified_memory": (False,),
    "disaggregation_decode_enable_offload_kvcache": (False,),
    "disaggregation_decode_allocation_policy": ("early",),
    "disaggregation_enable_kv_checksum": (False,),
    "disaggregation_decode_host_receive_threshold": (1, 1.0),
}
RECURRENT = "mamba"
# The pools that are moved, by exact class, and the kinds of SGLang's states that lie in them.
# SGLang also has states beside a pool, with its requests.
POOLS = {
    "MHATokenToKVPool": (),
    "HybridLinearKVPool": (RECURRENT, "dsa"),
    "DSATokenToKVPool": ("dsa",),
    "MiniMaxSparseKVPool": ("minimax_index_k", "minimax_dense_kv"),
}
# Pools that `engine_spec` describes, and why the backend does not move them.
NOT_IN_BACKEND = {
    "SWAKVPool": "start the engine with disable_hybrid_swa_memory",
    "DeepSeekV4TokenToKVPool": "not yet: slots of windows and of requests, which SGLang passes"
    " as pages of its states",
}
# The attributes of SGLang's `Indexer`, of which one is true if its keys are stored as they are.
INDEXER_FLAGS = ("use_dsa_indexer_fusion", "use_aiter_fused_fp8_writer")
# The attribute of a model's config with the groups of its Mamba 2 layers, by the config's class.
GROUP_COUNTS = {
    "FalconH1Config": "mamba_n_groups",
    "GraniteMoeHybridConfig": "mamba_n_groups",
    "NemotronHConfig": "n_groups",
    "NemotronHPuzzleConfig": "n_groups",
}
# The same for variables of the environment.
UNSET = ("SGLANG_DISAGG_STAGING_BUFFER", "SGLANG_ENABLE_DISAGG_SAMPLING_MASK", "SGLANG_RUST_SERVER")


def _name(_: object, setting: attrs.Attribute[Any], value: object) -> None:
    if value is not None or setting.default is not None:
        is_name(f"{VARIABLE}[{setting.name!r}]", value)


def _seconds(_: object, setting: attrs.Attribute[Any], value: object) -> None:
    seconds(f"{VARIABLE}[{setting.name!r}]", value)


def _ports(value: object) -> range:
    return port_range(value, f"{VARIABLE}['port']")


def _public(value: object) -> str:
    return public_host(value, f"{VARIABLE}['public']")


def _bool(_: object, setting: attrs.Attribute[Any], value: object) -> None:
    instance(f"{VARIABLE}[{setting.name!r}]", value, bool)


def _size(_: object, setting: attrs.Attribute[Any], value: object) -> None:
    positive_int(f"{VARIABLE}[{setting.name!r}]", value, least=0)


def _key_content(value: object) -> KeyContent | None:
    return configured_key_content(f"{VARIABLE}['key_content']", value)


@attrs.frozen(kw_only=True)
class BackendSettings:
    """The settings in the environment variable `KVSPEC_SGLANG`, an object in JSON.

    Attributes:
        host: The address at which the ranks of this machine listen.
        port: A port, or the first and the last port of a range, such as "9000-9015". Each rank of
            this machine listens on the first free one. 0 selects any free one.
        public: The host name or IP address by which peers reach this machine. *host* by default.
        engine_id: The name of this engine. By default, a new one at each start.
        model: The name of the model, which must be equal on both engines. SGLang's model path by
            default.
        revision: The revision of the model, which must be equal, too.
        layer_name: The peers' name of a layer, with ``{}`` in place of its number.
        index_name: The same for the keys of an indexer.
        state_name: The same for recurrent states.
        hold: Seconds for which a finished prompt waits for its first reader. A decode engine that
            has found the ticket sends messages from then on, also while its queue is long.
        lease: Seconds for which it is held after the last message of a reader.
        waiting: Seconds for which a decode engine waits for a ticket.
        timeout: Seconds within which a prompt must be read.
        overlap: Whether a decode engine reads each chunk of a prompt while the next is computed.
        staging: MiB of host memory through which short runs move if that is cheaper. 0 for none.
        key_content: The fields of the `KeyContent` of all layers. It is required only if the
            modules of the model do not show how keys are rotated.
    """

    host: str = attrs.field(default="127.0.0.1", validator=_name)
    port: range = attrs.field(default=range(1), converter=_ports)
    public: str = attrs.field(default="", converter=_public)
    engine_id: str | None = attrs.field(default=None, validator=_name)
    model: str = attrs.field(validator=_name)
    revision: str | None = attrs.field(default=None, validator=_name)
    layer_name: str = attrs.field(default="model.layers.{}.self_attn.attn", validator=_name)
    index_name: str = attrs.field(
        default="model.layers.{}.self_attn.indexer.k_cache", validator=_name
    )
    state_name: str = attrs.field(default="model.layers.{}.linear_attn", validator=_name)
    hold: float = attrs.field(default=30.0, validator=_seconds)
    lease: float = attrs.field(default=30.0, validator=_seconds)
    waiting: float = attrs.field(default=300.0, validator=_seconds)
    timeout: float = attrs.field(default=120.0, validator=_seconds)
    overlap: bool = attrs.field(default=True, validator=_bool)
    staging: int = attrs.field(default=0, validator=_size)
    key_content: KeyContent | None = attrs.field(default=None, converter=_key_content)

    @staticmethod
    def of(server_args: Any) -> BackendSettings:
        """Return the settings of the environment, with SGLang's model as the default."""
        text = os.environ.get(VARIABLE, "{}")
        try:
            given = mapping(VARIABLE, json.loads(text), "settings by name")
        except json.JSONDecodeError as error:
            raise SpecError(VARIABLE, text, "an object in JSON") from error
        known = [field.name for field in attrs.fields(BackendSettings)]
        for name in given:
            if name not in known:
                raise SpecError(VARIABLE, name, f"one of {', '.join(known)}")
        reader = FieldReader("server_args", server_args)
        own = {"model": reader.get("model_path").value, "revision": reader.get("revision").value}
        return BackendSettings(**own | dict(given))


@attrs.frozen(kw_only=True)
class Surroundings:
    """The objects of one SGLang rank that a transfer backend needs.

    SGLang gives a backend only addresses of memory. These objects come from the scheduler.

    Attributes:
        pool: The token pool.
        draft_pool: The token pool of a draft model, or None.
        model: The model, a torch module.
        kv_heads: The KV heads of the model.
        state_types: The kinds of states that move with the tokens, in SGLang's order.
        tp_rank: The rank among those that share the attention heads.
        tp_size: The number of these ranks.
        decode_radix_cache: Whether a decode engine keeps prefixes of other prompts.
        gather: A function that returns the values of all ranks, in order of rank.
        buffers: SGLang's metadata buffers.
        releases: The queue that frees the memory of failed transfers. None for prefill.
        weight_version: A function that returns the name of the weights.
        labels: The labels of SGLang's metrics. None if it exports none.
        n_groups: The groups of the model's Mamba 2 layers, or None.
        index_order: How the keys of an indexer's page lie: see `engine_spec`.
        forwards: A function that returns whether all forward passes have ended that were launched
            before it was made.
    """

    pool: Any
    draft_pool: Any
    model: Any
    kv_heads: int
    state_types: tuple[Any, ...]
    tp_rank: int
    tp_size: int
    decode_radix_cache: bool
    gather: Callable[[Any], list[Any]]
    buffers: Any
    releases: Any
    weight_version: Callable[[], str] = lambda: STARTED
    labels: dict[str, str] | None = None
    n_groups: int | None = None
    index_order: str | None = None
    forwards: Callable[[], Callable[[], bool]] = lambda: _nothing_runs

    @property
    def states(self) -> list[str]:
        """The names of `state_types`."""
        return [str(getattr(kind, "value", kind)) for kind in self.state_types]

    def tables(
        self, groups: list[str], pages: list[int], first: int, slot: Any
    ) -> dict[str, BlockTable]:
        """Return the block tables of a request.

        Args:
            groups: The names of the groups of the engine.
            pages: The pages of the request.
            first: The first token in them.
            slot: The slot of its recurrent state, or None.

        Raises:
            SpecError: If the engine has states, and SGLang names no slot.
        """
        table = BlockTable(pages, first_token=first)
        own: dict[str, BlockTable] = dict.fromkeys(groups, table)
        if STATE in own:
            own[STATE] = state_table("state_indices", slot)
        return own

    def slot(self, state_indices: Any) -> Any:
        """Return the slot of a request among SGLang's *state_indices*, or None."""
        # SGLang has one entry for each of its kinds of states. Pages are those of the tokens.
        if RECURRENT not in self.states or state_indices is None:
            return None
        return state_indices[self.states.index(RECURRENT)]


def _nothing_runs() -> bool:
    """Return True: the forward passes of this engine end before their results are processed."""
    return True


def check_version(version: str) -> None:
    """Raise `SpecError` unless *version* is the one whose classes are hooked."""
    if version != TESTED_VERSION:
        raise SpecError(
            "sglang.__version__", version, f"{TESTED_VERSION}, the version that was tested"
        )


def check_supported(server_args: Any, around: Surroundings) -> None:
    """Raise `SpecError` if the engine is configured in a way that was not run with kvspec."""
    reader = FieldReader("server_args", server_args)
    for name, values in ONLY.items():
        field = reader.get(name)
        # A missing setting would mean that the name has changed, and the check is void.
        if not hasattr(server_args, name) or field.value not in values:
            wanted = f"{' or '.join(map(repr, values))}: not yet run with kvspec"
            raise SpecError(field.path, field.value, wanted)
    for name in UNSET:
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            raise SpecError(name, os.environ[name], "unset: not yet run with kvspec")
    if around.draft_pool is not None:
        raise SpecError("draft_token_to_kv_pool", type(around.draft_pool).__name__, "None")
    kind = type(around.pool).__name__
    if kind not in POOLS:
        hint = f": {NOT_IN_BACKEND[kind]}" if kind in NOT_IN_BACKEND else ""
        raise SpecError("token_to_kv_pool", kind, f"one of {', '.join(POOLS)}{hint}")
    if not {*around.states} <= {*POOLS[kind]}:
        own = ", ".join(POOLS[kind]) or "none"
        wanted = f"{own}, which a {kind} has: others are not yet moved"
        raise SpecError("state_types", around.states, wanted)


def describe(around: Surroundings, settings: BackendSettings) -> RankCache:
    """Return the memory of one rank, with the description of its engine.

    Raises:
        SpecError: If the pool or the meaning of the keys is unknown.
    """
    pools = read_pools("token_to_kv_pool", around.pool, FULL_GROUP)
    for pool in pools:
        if pool.scales is not None or "float8" in pool.dtype:
            wanted = "a type without scales: not yet run with kvspec"
            raise SpecError(f"{pool.path}.dtype", pool.dtype, wanted)
    whole = _attending(around.pool, pools)
    layers = dict(_layers(around.model))
    row = whole.latent_size or whole.shape("k" if whole.has_heads else "latent")[2]
    contents: dict[str, KeyContent] = {}
    windows: dict[int, int] = {}
    for number in whole.layers:
        if number not in layers:
            raise SpecError("model", f"layer {number}", "an attention layer inside a module")
        module, attention = layers[number]
        # A pool has one number of heads for all layers. If a rank holds one head, the pool looks
        # the same for 4 heads as for 8, but the ranks hold other heads.
        heads = module.get("total_num_kv_heads")
        if isinstance(heads.value, int) and heads.value != around.kv_heads:
            wanted = f"{around.kv_heads}, as the model has; not yet: layers with other KV heads"
            raise SpecError(heads.path, heads.value, wanted)
        # SGLang counts the tokens before the query's own, and -1 stands for all.
        before = attention.get("sliding_window_size").value
        if isinstance(before, int) and before >= 0:
            windows[number] = before + 1
        group = WINDOW if number in windows else FULL_GROUP
        found = key_content_of(module, row, latent=not whole.has_heads)
        content = agreed_key_content(f"{VARIABLE}['key_content']", settings.key_content, found)
        if content is None or contents.setdefault(group, content) != content:
            shown = contents.get(group, "a module that shows how its keys are rotated")
            setting = "key_content, such as {'rotary': 'halves', 'rotary_size': 128}"
            raise SpecError(module.path, content, f"{shown}, or {setting}, in {VARIABLE}")
    if windows and around.decode_radix_cache:
        # Only tokens inside the window are loaded. A shorter prompt would read the others.
        rule = "not with layers that have a window: their earlier tokens are not loaded"
        raise SpecError("disaggregation_decode_enable_radix_cache", True, rule=rule)  # noqa: FBT003
    if RECURRENT in around.states and around.decode_radix_cache:
        rule = "not yet run with recurrent states"
        raise SpecError("disaggregation_decode_enable_radix_cache", True, rule=rule)  # noqa: FBT003
    engine = engine_spec(
        around.pool,
        parallel=parallel_config(around.tp_size),
        total_num_kv_heads=around.kv_heads,
        windows=windows,
        key_content=contents,
        tp_rank=around.tp_rank,
        n_groups=around.n_groups,
        index_order=around.index_order,
        index_hadamard=_hadamard(around.model),
        fp8_dtype=_fp8_dtype(),
        layer_name=settings.layer_name,
        index_name=settings.index_name,
        state_name=settings.state_name,
    )
    return rank_cache(engine, RankId(tp=around.tp_rank), around.pool, windows=windows)


def _attending(fields: Any, pools: tuple[TokenPool, ...]) -> TokenPool:
    """Return the layers that attend, of those of *fields*, one of SGLang's pools."""
    for pool in pools:
        if pool.group == FULL_GROUP:
            return pool
    wanted = "a pool with layers that attend; not yet: models with states alone"
    raise SpecError("token_to_kv_pool", type(fields).__name__, wanted)


def _fp8_dtype() -> str:
    """Return the type of SGLang's elements of fp8, which older AMD GPUs have otherwise."""
    name = "sglang.srt.layers.quantization.fp8_kernel"
    dtype = FieldReader(name, sys.modules.get(name)).get("fp8_dtype")
    return "float8_e4m3fn" if dtype.value is None else dtype.dtype()


def _hadamard(model: Any) -> bool | None:
    """Return whether the model's indexers multiply their keys by a Hadamard matrix.

    None if it has no indexer.
    """
    found: set[bool] = set()
    for name, module in model.named_modules():
        if type(module).__name__ == "Indexer":
            own = FieldReader(f"model.{name}", module)
            # `Indexer._maybe_rotate` reads both. Kernels that leave the product out set one.
            flags = [own.get(name) for name in INDEXER_FLAGS]
            found.add(not any(flag(each.path, each.value) for each in flags))
    if len(found) > 1:
        raise SpecError("model", "indexers of both kinds", "one kind of keys in all indexers")
    return found.pop() if found else None


def _layers(model: Any) -> Iterator[tuple[int, tuple[FieldReader, FieldReader]]]:
    """Yield the number of each attention layer, the module that contains it, and the layer."""
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            if type(child).__name__ == "RadixAttention":
                path = f"model.{name}"
                layer = FieldReader(f"{path}.{child_name}", child)
                yield layer.get("layer_id").size(least=0), (FieldReader(path, module), layer)
