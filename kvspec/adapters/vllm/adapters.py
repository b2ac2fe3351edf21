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
    the scheduler has stated, before it stores a page or after it was asked to load one.
"""

# ruff: noqa: ANN401 - requests and configs are of vLLM's classes, which are not imported
from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from kvspec.errors import SpecError

# Settings of vLLM's `LoRAConfig` that change the effect of an adapter. The others are sizes of
# memory, or divide the work among ranks.
SETTINGS = (
    "target_modules", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
# The digests of adapters, by the facts about their files. An adapter is read once.
_digests: dict[tuple[object, ...], str] = {}
# By number, the digest of the files that the workers of this process have loaded. None if they have
# loaded several, or the files changed meanwhile.
_loaded: dict[int, str | None] = {}


@attrs.frozen
class StatedAdapter:
    """An adapter as a scheduler states it to its workers.

    Attributes:
        number: vLLM's number of it.
        digest: Digest of its files.
    """

    number: int
    digest: str

    def mismatch(self, *, unless_loaded: bool = False) -> SpecError | None:
        """Return how this differs from what the workers of this process have loaded, or None.

        Args:
            unless_loaded: Whether it may be loaded later.
        """
        if unless_loaded and self.number not in _loaded:
            return None
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
        # vLLM reads the files of such an adapter again at each step.
        if getattr(lora, "load_inplace", False) or (digest := digest_at(path)) is None:
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
        return StatedAdapter(lora.lora_int_id, self._files.get(content, ""))

    def words(self, stated: str | None) -> str:
        """Return what is stated in words. "" for a prompt of an engine that serves no adapter."""
        if stated:
            return f"adapter {stated}"
        return "no adapter" if self._served else ""


def note_loads() -> None:
    """Let the workers of this process note which files of adapters they load."""
    # Imported here: the tests of this module run without vLLM.
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415

    load = WorkerLoRAManager._load_adapter  # noqa: SLF001
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def noted(manager: Any, lora: Any) -> Any:
        before = digest_at(lora.lora_path)
        found = load(manager, lora)
        loaded = before if before == digest_at(lora.lora_path) else None
        if _loaded.setdefault(lora.lora_int_id, loaded) != loaded:
            _loaded[lora.lora_int_id] = None
        return found

    # vLLM informs no connector. All its managers inherit this method.
    WorkerLoRAManager._load_adapter = noted  # noqa: SLF001


def digest_at(path: str) -> str | None:
    """Return a digest of the files of the adapter in folder *path*, or None without such files."""
    try:
        files = sorted(_files(Path(path).expanduser()))
        if not files:
            return None
        known = tuple((str(each), *_stamp(each)) for each in files)
        if known not in _digests:
            _digests[known] = _digest_of(files)
    except OSError:
        return None
    return _digests[known]


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


def _stamp(path: Path) -> tuple[int, ...]:
    """Return facts that differ if the content of a file differs. Its owner can set the time."""
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_dev


def _digest_of(files: list[Path]) -> str:
    whole = b""
    for path in files:
        with path.open("rb") as file:
            whole += path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest()
    return _digest(whole)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
