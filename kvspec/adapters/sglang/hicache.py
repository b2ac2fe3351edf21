"""Store the pages of SGLang's host cache (HiCache) in a store that other engines read, too.

With kvspec installed, start SGLang with ``--enable-hierarchical-cache --hicache-storage-backend
dynamic`` and ``--hicache-storage-backend-extra-config`` as here:

    {"backend_name": "kvspec", "module_path": "kvspec.adapters.sglang.hicache",
     "class_name": "HiCachePages", "interface_v1": 1, "directory": "/mnt/kv"}

Invariant: a page is stored and loaded only under a name that was computed from its tokens. An
engine whose pages cannot be named does not start.

How it works:
    SGLang copies pages from the device to its host pool, and calls the storage with their hashes:

        batch_exists    how many of these pages, from the first on, are stored?
        batch_get_v1    read them into these places of the host pool
        batch_set_v1    store them from these places

    SGLang passes no tokens. The plug-in of kvspec sees them before, and `PageHashes` keeps the name
    of each hash. Each TP rank has a storage of its own, with the memory of its host pool. The
    placement decides which of them writes an object.
"""

# ruff: noqa: ANN401, PLC0415 - SGLang is imported only inside an SGLang process
from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.sglang.describing import ONLY, BackendSettings, Surroundings, describe
from kvspec.adapters.sglang.page_hashes import NamedPage, PageHashes
from kvspec.adapters.sglang.request_identity import STARTED, salt_with_key
from kvspec.descriptors.request import BlockTable
from kvspec.errors import KVSpecError, SpecError
from kvspec.inputs import positive_int
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.dtypes import dtype_name
from kvspec.ownership.parallel import RankId
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.names import ModelIdentity
from kvspec.stored.placement import StoredSpec
from kvspec.stored.store import LoadError, PageStore

log = logging.getLogger(__name__)

CLASS = "HiCachePages"
_SHOWN = 5  # Other spaces of the directory that the log describes.
_CONFIG = "hicache_storage_backend_extra_config"
# Fields of the configuration that are SGLang's.
_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
# Settings that must have one of these values, besides most of those for a transfer.
_HICACHE: dict[str, tuple[Any, ...]] = {
    "enable_hierarchical_cache": (True,),
    "hicache_host_memory_mode": ("cache",),
    "disaggregation_mode": ("null",),
}
# Settings by which SGLang changes values when it loads the weights, besides `quantization`.
_CHANGES_VALUES = (
    "quantization_param_path",
    "modelopt_quant",
    "rl_quant_profile",
    "torchao_config",
)
# The order of a host pool's axes, by SGLang's name of its layout, and that of one layer of it.
_LAYOUTS = {
    "layer_first": ("L(BN)HC", "(BN)HC"),
    "page_first": ("(BN)LHC", "(BN)HC"),
    "page_first_direct": ("BLNHC", "BNHC"),
    "page_head": ("BHNLC", "BHNC"),
}


@attrs.frozen(kw_only=True)
class HiCacheSettings:
    """The fields of SGLang's `hicache_storage_backend_extra_config` that are kvspec's.

    Attributes:
        directory: The directory of the pages. All ranks share it.
        page_tokens: Tokens of a page: a divisor of SGLang's page size. All engines that share pages
            need the same value.
        head_groups: Head groups of a page. `StoredSpec.of` chooses a number by default.
        limit: Bytes that the directory may have. No limit by default.
        weights: Version of the weights. "" if they are those of the revision.
    """

    directory: str
    page_tokens: int = 64
    head_groups: int | None = None
    limit: int | None = None
    weights: str = ""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.directory, str) or not self.directory:
            raise SpecError(f"{_CONFIG}['directory']", self.directory, "a path")
        if not isinstance(self.weights, str):
            raise SpecError(f"{_CONFIG}['weights']", self.weights, "a text")
        for name in ("page_tokens", "head_groups", "limit"):
            if (value := getattr(self, name)) is not None:
                positive_int(f"{_CONFIG}[{name!r}]", value)

    @staticmethod
    def of(config: Mapping[str, Any]) -> HiCacheSettings:
        """Return the settings in SGLang's configuration.

        Raises:
            SpecError: If a field is missing, unknown or wrong.
        """
        if not config.get("interface_v1"):
            wanted = "1: SGLang then passes the places of pages instead of copies"
            raise SpecError(f"{_CONFIG}['interface_v1']", config.get("interface_v1"), wanted)
        own = {name: value for name, value in config.items() if name not in _SGLANG}
        known = [field.name for field in attrs.fields(HiCacheSettings)]
        for name in own:
            if name not in known:
                raise SpecError(_CONFIG, name, f"one of {', '.join(known)}")
        if "directory" not in own:
            raise SpecError(_CONFIG, "no directory", "the directory of the pages")
        return HiCacheSettings(**own)


@attrs.define
class Process:
    """The facts that the plug-in keeps in a process of SGLang.

    Attributes:
        server_args: SGLang's settings.
        runner: The runner of the model, or None before it was made.
        stopped: Why nothing is stored or loaded any more, or "".
    """

    server_args: Any = None
    runner: Any = None
    stopped: str = ""


PROCESS = Process()


def cache_is_built(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Keep the model while SGLang makes its caches, of which the storage is one."""
    PROCESS.server_args, PROCESS.runner = more["server_args"], more["tp_worker"].model_runner
    return original(*args, **more)


def weights_changed() -> None:
    """Store and load nothing any more: the weights have no name."""
    if not PROCESS.stopped:
        PROCESS.stopped = "the weights were updated: start the engine again with their name"
        log.warning("no page is stored or loaded any more: %s", PROCESS.stopped)


def _pages_of(controller: Any) -> Pages | None:
    storage = getattr(controller, "storage_backend", None)
    return storage if isinstance(storage, Pages) else None


def prompt_is_looked_up(original: Callable[..., Any], cache: Any, *args: Any, **more: Any) -> Any:
    """Name the pages of a prompt before SGLang asks the storage for them."""
    pages = _pages_of(cache.cache_controller)
    if pages is not None:
        tokens = [*(more.get("matched_prefix_tokens") or ()), *args[2]]
        pages.name_prompt(tokens, more.get("extra_key"), more.get("cache_salt"))
    return original(cache, *args, **more)


def node_is_stored(cache: Any, *_: Any) -> None:
    """Let SGLang pass the hashes of the pages before a node."""
    if _pages_of(cache.cache_controller) is not None:
        cache.hicache_storage_pass_prefix_keys = True


def pages_are_stored(
    original: Callable[..., Any],
    controller: Any,
    host_indices: Any,
    token_ids: Any,
    hash_value: Any = None,
    prefix_keys: Any = None,
    *args: Any,
    **more: Any,
) -> Any:
    """Name the pages of a node before SGLang stores them."""
    pages = _pages_of(controller)
    if pages is not None and hash_value:
        pages.name_node(token_ids, hash_value, prefix_keys)
    return original(controller, host_indices, token_ids, hash_value, prefix_keys, *args, **more)


class Pages:
    """The storage of one rank. `HiCachePages` is this class with SGLang's base class.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`.
    """

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        self._config = storage_config
        self._settings = HiCacheSettings.of(storage_config.extra_config or {})

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for the pages of a host pool.

        Raises:
            SpecError: If the pages of this engine cannot be named or described.
            MismatchError: If the engine does not fit the placement.
            StoreError: If the directory cannot be used.
        """
        self.mem_pool_host = mem_pool_host
        if PROCESS.runner is None:
            rule = "kvspec must be installed, so that SGLang loads its plug-in"
            raise SpecError("sglang.srt.plugins", "no kvspec", rule=rule)
        cache, model = self._describe(mem_pool_host)
        settings = self._settings
        placement = StoredSpec.of(
            cache.engine, page_tokens=settings.page_tokens, head_groups=settings.head_groups
        )
        objects = FileObjects(settings.directory, limit=settings.limit)
        self.store = PageStore(placement, model, objects)
        # Stores and loads run at the same time, in two threads of SGLang.
        self._saving, self._loading = self.store.rank_pages(cache), self.store.rank_pages(cache)
        self._group = cache.engine.groups[0].name
        self._objects = self._loading.load_plan.objects_of(cache.rank)
        log.info("stored pages of rank %s: %s", cache.rank, self._saving.store_plan)
        for line in self.store.other_spaces()[:_SHOWN]:
            log.info("%s: %s", settings.directory, line)
        self.hashes = PageHashes(
            self.store.space,
            settings.page_tokens,
            mem_pool_host.page_size,
            vocabulary=PROCESS.runner.model_config.vocab_size,
            hashes=functools.partial(_hashes, mem_pool_host.page_size),
        )

    def _describe(self, host: Any) -> tuple[RankCache, ModelIdentity]:
        """Return the memory of the host pool, and the identity of the model."""
        args, runner, config = PROCESS.server_args, PROCESS.runner, self._config
        _check_supported(args, runner)
        # All TP ranks have the same latents, and SGLang calls only the first one to store them.
        sizes = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
        around = Surroundings(
            pool=runner.token_to_kv_pool,
            draft_pool=None,
            model=runner.model,
            kv_heads=runner.model_config.get_total_num_kv_heads(),
            state_types=(),
            tp_rank=sizes[0],
            tp_size=sizes[1],
            decode_radix_cache=False,
            gather=lambda value: [value],
            buffers=None,
            releases=None,
        )
        backend = BackendSettings.of(args)
        engine = attrs.evolve(describe(around, backend).engine, null_block=None)
        if len(engine.groups) > 1:
            groups = [group.name for group in engine.groups]
            wanted = "one group of layers: not yet: windows, states and indexers of HiCache"
            raise SpecError("engine.groups", groups, wanted)
        model = _identity(args, runner, backend, self._settings.weights)
        return host_cache(engine, RankId(tp=sizes[0]), host), model

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse other pools than that of the tokens."""
        if host_pool is not self.mem_pool_host:
            wanted = "only the pool of the tokens: not yet: states, windows and indexers"
            raise SpecError("host_pool_name", str(host_pool_name), wanted)

    def name_prompt(self, tokens: Sequence[int], extra_key: str | None, salt: str | None) -> None:
        """Name the pages of a prompt. SGLang's scheduler calls it, so it raises nothing."""
        from sglang.srt.mem_cache.utils import storage_namespace_seed

        try:
            seed = storage_namespace_seed(extra_key, salt)
            # The key is SGLang's own. Other makers have only the salt.
            own = salt_with_key(seed) if extra_key and seed else salt or ""
            self.hashes.add_prompt(tokens, seed, own)
        except Exception:  # an error would end the scheduler
            log.exception("the pages of a prompt have no names")

    def name_node(
        self, tokens: Sequence[int], hashes: Sequence[str], before: Sequence[str] | None
    ) -> None:
        """Name the pages of a node of the radix tree. It raises nothing, as `name_prompt`."""
        try:
            self.hashes.add_pages(tokens, hashes, before[-1] if before else None)
        except Exception:  # an error would end the scheduler
            log.exception("the pages of a node have no names")

    def batch_exists(self, keys: Sequence[str], _: Any = None) -> int:
        """Return how many of the pages, from the first on, are stored."""
        if PROCESS.stopped:
            return 0
        found = self.hashes.run(keys)
        wanted = [name for page in found for name in page.names]
        there = self.store.has(wanted, self._objects)
        pages = there.index(False) // self.hashes.per_page if False in there else len(found)
        if pages < len(keys):
            unnamed = f", {len(keys) - len(found)} have no name" if len(found) < len(keys) else ""
            log.info("%d of %d pages are stored under their names%s", pages, len(keys), unnamed)
        return pages

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into the host pool. Return for each one whether it is there."""
        found = list[NamedPage]() if PROCESS.stopped else self.hashes.run(keys)
        count = self._load(found, host_indices, extra_info) if found else 0
        return [number < count for number in range(len(keys))]

    def _load(self, found: list[NamedPage], host_indices: Any, extra_info: Any) -> int:
        """Return how many of the pages *found* were loaded."""
        first, names, tables = self._places(found, host_indices, extra_info)
        known = first * self._settings.page_tokens
        try:
            self._loading.load(names, len(names), tables, cached_tokens=known)
            # SGLang does not call `lookup`, whose `Hit.close` notes the use of the pages.
            self.store.objects.use(self.store.space, [*filter(None, names)])
        except LoadError as error:
            log.warning("%s", error)
            return (error.missing.start - first) // self.hashes.per_page
        except (KVSpecError, OSError):
            log.exception("pages were not loaded")
            return 0
        return len(found)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool. Return for each one whether it is stored."""
        found = list[NamedPage]() if PROCESS.stopped else self.hashes.run(keys)
        self.hashes.unnamed += len(keys) - len(found)
        count = len(found) if found and self._save(found, host_indices, extra_info) else 0
        return [number < count for number in range(len(keys))]

    def _save(self, found: list[NamedPage], host_indices: Any, extra_info: Any) -> bool:
        first, names, tables = self._places(found, host_indices, extra_info)
        try:
            self._saving.save(names, first, len(names) - first, tables)
        except (KVSpecError, OSError) as error:
            log.warning("pages were not stored: %s", error)
            return False
        return True

    def _places(
        self, found: list[NamedPage], host_indices: Any, extra_info: Any
    ) -> tuple[int, list[str], dict[str, BlockTable]]:
        """Return the first stored page, the names of the prompt from its start, and the table.

        The pages before the first one are named "" if SGLang does not pass all their keys, or if
        their names are forgotten. Only their use is then not noted.
        """
        first, size = found[0].first, self.mem_pool_host.page_size
        before = self.hashes.run(getattr(extra_info, "prefix_keys", None) or ())
        names = [name for page in before for name in page.names]
        if len(names) != first:
            names = [""] * first
        names += [name for page in found for name in page.names]
        blocks = [index // size for index in host_indices[::size].tolist()][: len(found)]
        table = BlockTable(blocks, first_token=first * self._settings.page_tokens)
        return first, names, {self._group: table}

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, *_: Any, **__: Any) -> Any:
        """Refuse a copy of a page: SGLang uses `batch_get_v1`."""
        raise SpecError("interface_v1", 0, "1")

    batch_get = set = batch_set = get

    def clear(self) -> None:
        """Keep the pages: other engines use them."""
        log.warning("the stored pages stay: remove them with `kvspec store prune`")


def _check_supported(server_args: Any, runner: Any) -> None:
    """Raise `SpecError` if the engine is configured in a way whose pages have no names."""
    reader = FieldReader("server_args", server_args)
    for name, values in (ONLY | _HICACHE).items():
        field = reader.get(name)
        if not hasattr(server_args, name) or field.value not in values:
            wanted = f"{' or '.join(map(repr, values))}: not yet with stored pages"
            raise SpecError(field.path, field.value, wanted)
    if server_args.load_format == "dummy":
        raise SpecError("server_args.load_format", "dummy", "weights that have a name")
    images = FieldReader("model_config", runner.model_config).get("is_multimodal")
    if images.value is not False:
        raise SpecError(images.path, images.value, "False: not yet: the names of images")


def _identity(args: Any, runner: Any, backend: BackendSettings, weights: str) -> ModelIdentity:
    """Return what the values of the cache depend on. All of it must be known."""
    commit = getattr(runner.model_config.hf_config, "_commit_hash", None)
    facts: dict[str, Any] = {}
    if changed := json.loads(args.json_model_override_args or "{}"):
        facts["hf_overrides"] = changed
    if (stored := args.kv_cache_dtype) != "auto":
        computed = dtype_name(runner.model_config.dtype, "model_config.dtype")
        # Otherwise the placement contains the type of the computation, as with "auto".
        if stored not in (computed, {"bfloat16": "bf16"}.get(computed)):
            facts["dtype"] = computed
    for name in _CHANGES_VALUES:
        if value := getattr(args, name, None):
            facts[name] = str(value)
    version = args.weight_version
    revision = backend.revision or commit
    if not revision:
        rule = "the names of stored pages need the revision: set it in KVSPEC_SGLANG"
        raise SpecError("revision", revision, rule=rule)
    return ModelIdentity(
        model=backend.model,
        revision=revision,
        weights=weights or ("" if version == STARTED else version),
        quantization=_quantization(runner.model_config),
        overrides=json.dumps(facts, sort_keys=True) if facts else "",
    )


def _quantization(config: Any) -> str:
    """Return the method by which SGLang quantises weights that it loads.

    A checkpoint that is quantised already is used as it is, by another kernel of each device.
    """
    stored = getattr(config.hf_config, "quantization_config", None)
    return "" if stored else config.quantization or ""


def host_cache(engine: Any, rank: RankId, host: Any) -> RankCache:
    """Return the memory of a host pool of SGLang as that of one rank.

    Args:
        engine: The engine, with one group of layers.
        rank: The rank.
        host: SGLang's `MHATokenToKVPoolHost` or `MLATokenToKVPoolHost`.

    Raises:
        SpecError: If the layout is unknown, or the pool does not fit the engine.
    """
    if host.layout not in _LAYOUTS:
        wanted = f"one of {', '.join(_LAYOUTS)}: not yet: others"
        raise SpecError("hicache_mem_layout", host.layout, wanted)
    axes, own = _LAYOUTS[host.layout]
    (group,) = engine.groups
    parts = [part.name for part in group.spec.parts]
    buffers = [host.kv_buffer] if len(parts) == 1 else [host.kv_buffer[0], host.kv_buffer[1]]
    place = axes.replace("(BN)", "T").index("L")
    if (count := buffers[0].shape[place]) != len(group.layers):
        raise SpecError("mem_pool_host.layers", count, f"{len(group.layers)}, as the device has")
    before = (slice(None),) * place
    tensors = {
        layer: {
            part: buffer[(*before, number)] for part, buffer in zip(parts, buffers, strict=True)
        }
        for number, layer in enumerate(group.layers)
    }
    return RankCache.from_tensors(engine, rank, tensors, dict.fromkeys(parts, own))


def _hashes(page_size: int, token_ids: Any, before: str | None) -> list[str]:
    """Return SGLang's hashes of the pages of *token_ids* behind the hash *before*."""
    from sglang.srt.mem_cache.utils import get_hash_str

    return list(get_hash_str(token_ids, before, page_size)) if len(token_ids) else []


@functools.cache
def _class() -> type:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return type(CLASS, (Pages, HiCacheStorage), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == CLASS:
        return _class()
    raise AttributeError(name)
