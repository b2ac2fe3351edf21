"""The LoRA adapters of vLLM's requests, each with its name and a digest of its content.

Invariant: an adapter is stated only if a prompt under it is computed with the content that the
digest describes. Otherwise its prompts have no names, and no ticket of them fits.

How it works:
    vLLM's `LoRARequest` has a name, a number and a path, but not the content. Its workers
    know an adapter by the number: they read the files once, and keep them in memory, perhaps until
    other adapters displace them. Its prefix cache knows an adapter by name and path. So if two
    adapters have one number, or the files of a path change, nobody knows with which ones a prompt
    is computed. Then the number, or the path, is not stated any more while the engine runs.

    A scheduler reads the files when a request arrives. A worker may have read them earlier or will
    later, perhaps on another node. So each worker notes what it loads, and compares that with what
    the scheduler has stated, before it stores a page or loads one.

    vLLM lets a worker read the files in the first step of a request, after its pages are loaded. If
    the files change in between, pages of the old files and values of the new ones would be mixed.
    So a worker reads the files before it loads pages under them. It keeps the result, and
    vLLM gets it instead of reading the files again:

        the request comes      the scheduler states digest A
        pages are to be loaded the worker reads the files: digest A, so the load begins
        the files change       to digest B
        the first step         vLLM gets what was read: all values are of A

    The stamp of a file is its size, its times and its place. A file that changes twice within one
    tick of the clock of its system keeps its stamp. So a digest is kept only by stamps that are
    older than that.
"""

# ruff: noqa: ANN401 - requests and configs are of vLLM's classes, which are not imported
from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from kvspec.errors import SpecError

log = logging.getLogger(__name__)

# Settings of vLLM's `LoRAConfig` that change the effect of an adapter. The others are sizes of
# memory, or divide the work among ranks.
SETTINGS = (
    "target_modules", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
# Seconds after which a change of a file changes its stamp. The times of FAT have two seconds, and
# a client of NFS learns of a change some seconds late.
_SETTLED = 10.0
# Adapters that a worker keeps until vLLM needs them. Their requests may have been aborted.
_MOST_KEPT = 32


class _Content(NamedTuple):
    """The files of an adapter: their names and stamps, and a digest of them."""

    stamps: tuple[object, ...]
    digest: str


class _Kept(NamedTuple):
    """An adapter that a worker has read before vLLM needs it."""

    manager: Any
    place: tuple[str, str]
    model: Any


# The digests of adapters, by the stamps of their files. An adapter is read once.
_digests: dict[tuple[object, ...], str] = {}
# By number, the digest of the files that the workers of this process have loaded. None if they have
# loaded several, or the files changed meanwhile.
_loaded: dict[int, str | None] = {}
_kept: dict[int, _Kept] = {}
# vLLM's manager of the adapters of this process, after its first step.
_managers: list[Any] = []


@attrs.frozen
class StatedAdapter:
    """An adapter as a scheduler states it to its workers.

    Attributes:
        number: vLLM's number of it.
        digest: Digest of its files.
        request: vLLM's `LoRARequest`.
    """

    number: int
    digest: str
    request: Any = attrs.field(default=None, eq=False, repr=False)

    def load(self) -> SpecError | None:
        """Let this worker read the files, unless it has, and return how this differs from them.

        vLLM's own thread must call it.
        """
        if not _holds(self.number):
            try:
                _read_ahead(self.request)
            except Exception as error:  # noqa: BLE001 - vLLM raises it again when it needs the files
                rule = f"its files cannot be loaded: {error}"
                return SpecError(f"adapters[{self.number}]", None, rule=rule)
        return self.mismatch()

    def mismatch(self) -> SpecError | None:
        """Return how this differs from what the workers of this process have loaded, or None."""
        found = _loaded.get(self.number)
        if found == self.digest:
            return None
        wanted = f"{self.digest!r}, the digest of its files when the request came"
        return SpecError(f"adapters[{self.number}]", found, wanted)


class Adapters:
    """The adapters that the requests of one scheduler have named."""

    def __init__(self, vllm_config: Any) -> None:
        """Take the settings with which vLLM applies adapters."""
        self._settings = _settings(vllm_config)
        self._served = getattr(vllm_config, "lora_config", None) is not None
        # The first content of each number, and of each name with its path. None if it has changed.
        self._first: dict[object, str | None] = {}
        self._files: dict[str | None, str] = {}  # Digests of files, by content.

    def stated(self, lora: Any) -> str | None:
        """Return the name and a digest of an adapter, joined by "@", or "" for no adapter.

        Args:
            lora: vLLM's `LoRARequest`, or None.

        Returns:
            None if the content with which vLLM computes is not known.
        """
        if lora is None:
            return ""
        name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
        number = getattr(lora, "lora_int_id", None)
        if not isinstance(name, str) or not isinstance(path, str) or not path or number is None:
            return None
        # vLLM reads the files of such an adapter again at each step, or those of another place.
        if getattr(lora, "load_inplace", False) or getattr(lora, "tensorizer_config_dict", None):
            return None
        if (digest := digest_at(path)) is None:
            return None
        facts = self._settings + ("3d" if getattr(lora, "is_3d_lora_weight", False) else "")
        content = digest if not facts else _digest(f"{digest} {facts}".encode())
        self._files[content] = digest
        for key in (number, (name, path)):
            if self._first.setdefault(key, content) != content:
                self._first[key] = None
        known = {self._first[number], self._first[name, path]}
        return f"{name}@{content}" if known == {content} else None

    def to_workers(self, lora: Any) -> StatedAdapter | None:
        """Return what workers compare with the files that they load. None for no adapter.

        The files are not read again: they may have changed since the adapter was stated.
        """
        if lora is None:
            return None
        content = self._first.get(lora.lora_int_id)
        return StatedAdapter(lora.lora_int_id, self._files.get(content, ""), lora)

    def words(self, stated: str | None) -> str:
        """Return what is stated in words. "" for a prompt of an engine that serves no adapter."""
        if stated:
            return f"adapter {stated}"
        return "no adapter" if self._served else ""


def note_loads() -> None:
    """Let the workers of this process note which files of adapters they load."""
    # Imported here: the tests of this module run without vLLM.
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415

    load, activate = WorkerLoRAManager._load_adapter, WorkerLoRAManager.set_active_adapters  # noqa: SLF001
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def noted(manager: Any, lora: Any) -> Any:
        number, in_place = lora.lora_int_id, getattr(lora, "load_inplace", False)
        kept = _kept.pop(number, None)
        if kept is not None and not in_place and kept[:2] == (manager, _place(lora)):
            return kept.model
        before = _content_at(lora.lora_path)
        found = load(manager, lora)
        loaded = before.digest if before and before == _content_at(lora.lora_path) else None
        if _loaded.setdefault(number, loaded) != loaded:
            _loaded[number] = None
            if not in_place:
                words = (
                    "adapter %d has other files at %s: its prompts may mix both, and are not stored"
                )
                log.error(words, number, lora.lora_path)
        return found

    @functools.wraps(activate)
    def activated(manager: Any, requests: Any, mapping: Any) -> Any:
        _managers[:] = [manager]
        return activate(manager, requests, mapping)

    # vLLM informs no connector, and gives it no manager. All its managers inherit these methods.
    WorkerLoRAManager._load_adapter = noted  # noqa: SLF001
    WorkerLoRAManager.set_active_adapters = activated


def _holds(number: int) -> bool:
    """Return whether this worker has the adapter *number* in memory."""
    return number in _kept or any(number in manager.list_adapters() for manager in _managers)


def _read_ahead(lora: Any) -> None:
    """Read an adapter as vLLM does, and keep it until vLLM needs it.

    Without a manager, nothing is read. Then nothing is loaded under the adapter either.
    """
    for manager in _managers:
        model = manager._load_adapter(lora)  # noqa: SLF001 - vLLM has no other way
        _kept[lora.lora_int_id] = _Kept(manager, _place(lora), model)
    while len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]


def _place(lora: Any) -> tuple[str, str]:
    return lora.lora_name, lora.lora_path


def digest_at(path: str) -> str | None:
    """Return a digest of the files of the adapter in folder *path*, or None without such files.

    None if they change while they are read.
    """
    found = _content_at(path)
    return None if found is None else found.digest


def _content_at(path: str) -> _Content | None:
    """Return the files in folder *path*, or None without such files, or if they change."""
    folder = Path(path).expanduser()
    try:
        files = sorted(_files(folder))
        if not files:
            return None
        now, stamps = time.time_ns(), _stamps(folder, files)
        if stamps not in _digests:
            digest = _digest_of(files)
            if _stamps(folder, files) != stamps:
                return None
            if now - max(each.stat().st_ctime_ns for each in files) < _SETTLED * 1e9:
                return _Content(stamps, digest)
            _digests[stamps] = digest
    except OSError:
        return None
    return _Content(stamps, _digests[stamps])


def _stamps(folder: Path, files: list[Path]) -> tuple[object, ...]:
    """Return facts that differ if a file, the folder or a link to it was replaced meanwhile."""
    places = _stamp(folder.lstat()), _stamp(folder.stat())
    return (*places, *((str(each), *_stamp(each.stat())) for each in files))


def _settings(vllm_config: Any) -> str:
    """Return the settings that differ from vLLM's defaults, as text. "" for none."""
    lora = getattr(vllm_config, "lora_config", None)
    facts = {name: value for name in SETTINGS if (value := getattr(lora, name, None))}
    if "target_modules" in facts:
        facts["target_modules"] = sorted(facts["target_modules"])
    # vLLM has replaced "auto" by the type of the model.
    dtype = getattr(lora, "lora_dtype", None)
    if dtype is not None and str(dtype) != str(vllm_config.model_config.dtype):
        facts["lora_dtype"] = str(dtype)
    return json.dumps(facts, sort_keys=True) if facts else ""


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of an adapter in *folder*. A name on a hub has none here."""
    if folder.is_dir():
        yield from folder.glob("adapter_model*")
        yield from folder.glob("adapter_config.json")


def _stamp(facts: os.stat_result) -> tuple[int, ...]:
    """Return facts that differ if a file was changed or replaced. Its owner can set one time."""
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_dev


def _digest_of(files: list[Path]) -> str:
    whole = b""
    for path in files:
        with path.open("rb") as file:
            whole += path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest()
    return _digest(whole)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
