"""The statement of a request about its LoRA adapter: the content of its files, or nothing.

vLLM's workers know an adapter by its number, its prefix cache by name and path. Neither shows with
which weights a prompt is computed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_serving import Request

import kvspec
from kvspec.adapters.vllm import adapters as adapters_module
from kvspec.adapters.vllm.adapters import Adapters, StatedAdapter, digest_at
from kvspec.adapters.vllm.content import content_of_request, prompt_of_request

pytestmark = pytest.mark.adapters

LORA = {
    "target_modules": None,
    "lora_dtype": "torch.bfloat16",
    "enable_tower_connector_lora": False,
    "enable_mixed_moe_lora_format": False,
    "enable_moe_shared_loras": False,
}


def engine(**changed: Any) -> Adapters:
    """Return the adapters of an engine with other settings."""
    model = SimpleNamespace(dtype="torch.bfloat16")
    lora = SimpleNamespace(**{**LORA, **changed})
    return Adapters(SimpleNamespace(lora_config=lora, model_config=model))


def written(folder: Path, content: bytes, config: bytes = b"{}") -> Path:
    """Write the files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_bytes(config)
    return folder


def asked(path: Path, number: int = 1, name: str = "sql", **more: Any) -> Any:
    """Return vLLM's `LoRARequest`."""
    fields = {"load_inplace": False, "is_3d_lora_weight": False, **more}
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **fields)


def stated(adapters: Adapters, lora: Any) -> str | None:
    """Return the adapter that a page states. A ticket states the same."""
    request = Request("r", 4, lora_request=lora)
    found = prompt_of_request(request, adapters).adapter
    assert found == content_of_request(request, 4, adapters).adapter
    return found


def test_adapter_is_stated_by_its_name_and_the_content_of_its_files(tmp_path: Path) -> None:
    one = stated(engine(), asked(written(tmp_path / "a", b"weights")))
    assert one is not None
    assert one.startswith("sql@")
    # Another engine has a copy of the folder under another number.
    assert one == stated(engine(), asked(written(tmp_path / "b", b"weights"), 7))
    others = [
        asked(written(tmp_path / "c", b"Weights")),
        asked(written(tmp_path / "d", b"weights", b'{"lora_alpha": 8}')),
        asked(tmp_path / "a", name="chat"),
        asked(tmp_path / "a", is_3d_lora_weight=True),
        None,
    ]
    assert len(others) + 1 == len({one, *(stated(engine(), lora) for lora in others)})
    assert stated(engine(), None) == ""


def test_adapter_without_the_state_of_its_engine_is_not_stated(tmp_path: Path) -> None:
    request = Request("r", 4, lora_request=asked(written(tmp_path / "a", b"weights")))
    assert content_of_request(request, 4).adapter is None
    assert content_of_request(Request("r", 4), 4).adapter == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"target_modules": ["o_proj"]},
        {"lora_dtype": "torch.float16"},
        {"enable_tower_connector_lora": True},
        {"enable_mixed_moe_lora_format": True},
        {"enable_moe_shared_loras": True},
    ],
)
def test_adapter_states_how_the_engine_applies_it(tmp_path: Path, changed: dict[str, Any]) -> None:
    """With `target_modules`, vLLM leaves out the other modules of the same files."""
    lora = asked(written(tmp_path / "a", b"weights"))
    usual, other = stated(engine(), lora), stated(engine(**changed), lora)
    assert None not in (usual, other)
    assert usual != other


def test_order_of_target_modules_is_not_stated(tmp_path: Path) -> None:
    lora = asked(written(tmp_path / "a", b"weights"))
    found = {
        stated(engine(target_modules=modules), lora)
        for modules in (["o_proj", "qkv_proj"], ["qkv_proj", "o_proj"])
    }
    assert 1 == len(found)


def test_number_of_another_adapter_is_not_stated(tmp_path: Path) -> None:
    """VLLM's workers compute both with the weights that they have loaded under the number."""
    adapters = engine()
    first = asked(written(tmp_path / "a", b"weights"), 5)
    second = asked(written(tmp_path / "b", b"others"), 5, "chat")
    assert stated(adapters, first) is not None
    assert stated(adapters, second) is None
    # The workers may have dropped the first one meanwhile, and have loaded the second.
    assert stated(adapters, first) is None
    assert stated(adapters, asked(tmp_path / "b", 6, "chat")) is not None


def test_adapter_that_is_loaded_in_place_is_not_stated(tmp_path: Path) -> None:
    """VLLM reads its files again at each step."""
    path = written(tmp_path / "a", b"weights")
    assert stated(engine(), asked(path, load_inplace=True)) is None


def test_adapter_whose_files_change_is_not_stated(tmp_path: Path) -> None:
    """VLLM has the old weights in memory, and prompts that were computed with them in its cache."""
    adapters, path = engine(), written(tmp_path / "a", b"weights")
    before = stated(adapters, asked(path))
    assert before is not None
    os.utime(path / "adapter_model.safetensors", (1, 1))
    assert before == stated(adapters, asked(path))  # The files are copied again, and are equal.
    written(path, b"other weights")
    assert stated(adapters, asked(path)) is None
    assert stated(adapters, asked(path, 78)) is None
    written(path, b"weights")
    assert stated(adapters, asked(path)) is None
    assert before == stated(adapters, asked(written(tmp_path / "b", b"weights"), 79))


def test_files_of_equal_sizes_and_times_are_told_apart(tmp_path: Path) -> None:
    """Some file systems and archives give all files the same time."""

    def placed(content: bytes) -> Any:
        path = written(tmp_path / "at", content)
        for file in path.iterdir():
            os.utime(file, (1, 1))
        return asked(path)

    first = stated(engine(), placed(b"weights"))
    shutil.rmtree(tmp_path / "at")
    assert first != stated(engine(), placed(b"Weights"))


def test_request_of_vllm_whose_fields_are_unknown_is_not_stated(tmp_path: Path) -> None:
    """A field that this version of vLLM does not have decides nothing, but its absence is known."""
    lora = asked(written(tmp_path / "a", b"weights"))
    for name in ("lora_name", "lora_path", "lora_int_id"):
        fields = dict(vars(lora))
        del fields[name]
        assert stated(engine(), SimpleNamespace(**fields)) is None


def sent(lora: Any) -> StatedAdapter:
    """Return the message of an engine to its workers for a new request."""
    adapters = engine()
    stated(adapters, lora)
    found = adapters.to_workers(lora)
    assert found is not None
    return found


def test_workers_compare_with_the_files_that_were_stated(tmp_path: Path) -> None:
    """Workers get the digest of the files with which the request was named."""
    adapters, lora = engine(target_modules=["o_proj"]), asked(written(tmp_path / "a", b"weights"))
    before = digest_at(lora.lora_path)
    stated(adapters, lora)
    written(tmp_path / "a", b"other weights")
    found = adapters.to_workers(lora)
    assert found is not None
    assert before == found.digest
    assert stated(adapters, lora) is None
    assert adapters.to_workers(lora) == StatedAdapter(1, "")
    assert adapters.to_workers(None) is None


class Manager:
    """VLLM's `WorkerLoRAManager`: tests/session/test_vllm_installed.py compares the names."""

    def __init__(self) -> None:
        self.held, self.reads = dict[int, bytes](), 0

    def _load_adapter(self, lora: Any) -> bytes:
        self.reads += 1
        folder = Path(lora.lora_path)
        found = (folder / "adapter_model.safetensors").read_bytes()
        if found == b"replaced":  # While it is read.
            written(folder, b"new")
        if found == b"exchange":  # For a moment, another folder is at this place.
            other, away = folder.with_name("other"), folder.with_name("away")
            folder.rename(away)
            other.rename(folder)
            found = (folder / "adapter_model.safetensors").read_bytes()
            folder.rename(other)
            away.rename(folder)
        return found

    def set_active_adapters(self, loras: list[Any], _: Any) -> None:
        """Load the adapters of a step that are not in memory."""
        for lora in loras:
            if lora.lora_int_id not in self.held:
                self.held[lora.lora_int_id] = self._load_adapter(lora)

    def list_adapters(self) -> set[int]:
        """Return the numbers of the adapters in memory."""
        return set(self.held)


@pytest.fixture(name="manager")
def fixture_manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a manager of a worker whose loads are noted, after the first step of its engine."""
    own = type("Own", (Manager,), {})  # `note_loads` replaces methods of the class.
    module = ModuleType("vllm.lora.worker_manager")
    module.WorkerLoRAManager = own  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, empty in (("_loaded", {}), ("_kept", {}), ("_managers", [])):
        monkeypatch.setattr(adapters_module, name, empty)
    adapters_module.note_loads()
    adapters_module.note_loads()  # Another engine in the process.
    manager = own()
    manager.set_active_adapters([], None)
    return manager


def test_worker_compares_the_adapter_that_it_has_loaded(tmp_path: Path, manager: Any) -> None:
    """The files were replaced after the worker read them, and before a request came."""
    lora = asked(written(tmp_path / "a", b"old"), 3)
    before = sent(lora)
    assert isinstance(before.mismatch(), kvspec.SpecError)
    manager.set_active_adapters([lora], None)
    assert manager.held == {3: b"old"}
    assert before.mismatch() is None
    assert before.load() is None
    written(tmp_path / "a", b"new")
    after = sent(lora)
    for found in (after.mismatch(), after.load()):
        assert found is not None
        assert ("adapters[3]", before.digest) == (found.field, found.value)
    assert 1 == manager.reads


def test_worker_computes_with_the_files_under_which_it_has_loaded_pages(
    tmp_path: Path, manager: Any
) -> None:
    """They are replaced after the pages were loaded, and before the first step of the request."""
    lora = asked(written(tmp_path / "a", b"old"), 3)
    stated_before = sent(lora)
    assert stated_before.load() is None
    written(tmp_path / "a", b"new")
    # Another request comes before the first one runs.
    assert stated_before.load() is None
    manager.set_active_adapters([lora], None)
    assert manager.held == {3: b"old"}
    assert stated_before.mismatch() is None
    assert 1 == manager.reads


def test_worker_loads_no_pages_under_files_that_were_replaced_before(
    tmp_path: Path, manager: Any
) -> None:
    """They are replaced after the scheduler has read them, and before a worker does."""
    lora = asked(written(tmp_path / "a", b"old"), 3)
    before = sent(lora)
    written(tmp_path / "a", b"new")
    found = before.load()
    assert found is not None
    assert "adapters[3]" == found.field
    manager.set_active_adapters([lora], None)
    assert manager.held == {3: b"new"}
    assert before.mismatch() is not None


def test_worker_that_has_dropped_an_adapter_reads_it_before_it_loads_pages(
    tmp_path: Path, manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lora = asked(written(tmp_path / "a", b"old"), 3)
    before = sent(lora)
    manager.set_active_adapters([lora], None)
    manager.held.clear()  # Others have displaced it.
    assert before.load() is None
    assert 2 == manager.reads
    manager.set_active_adapters([lora], None)
    assert 2 == manager.reads
    manager.held.clear()
    written(tmp_path / "a", b"new")
    assert before.load() is not None
    assert ["ERROR"] == [record.levelname for record in caplog.records]


def test_worker_without_a_manager_loads_no_pages(tmp_path: Path, manager: Any) -> None:
    adapters_module._managers.clear()
    found = sent(asked(written(tmp_path / "a", b"old"), 3)).load()
    assert found is not None
    assert 0 == manager.reads


def test_adapter_that_cannot_be_read_fails_only_the_load(tmp_path: Path, manager: Any) -> None:
    lora = asked(written(tmp_path / "a", b"old"), 3)
    before = sent(lora)
    shutil.rmtree(tmp_path / "a")
    found = before.load()
    assert found is not None
    assert "cannot be loaded" in str(found)
    assert not manager.held


def test_adapter_that_was_read_before_belongs_to_its_name_and_place(
    tmp_path: Path, manager: Any
) -> None:
    """Another adapter of the same number comes before the first one is needed."""
    first, second = (asked(written(tmp_path / name, name.encode()), 3, name) for name in ("a", "b"))
    before = sent(first)
    assert before.load() is None
    manager.set_active_adapters([second], None)
    assert manager.held == {3: b"b"}
    assert before.mismatch() is not None


def test_adapters_that_nobody_needs_are_dropped(tmp_path: Path, manager: Any) -> None:
    del manager
    for number in range(1, 40):
        name = f"a{number}"
        assert sent(asked(written(tmp_path / name, name.encode()), number, name)).load() is None
    assert 32 == len(adapters_module._kept)


def test_number_under_which_a_worker_has_loaded_two_adapters_fits_none(
    tmp_path: Path, manager: Any
) -> None:
    """It may be loaded in place, while requests under the first one run."""
    loras = [asked(written(tmp_path / name, name.encode()), 3) for name in ("a", "b")]
    manager._load_adapter(loras[0])
    manager._load_adapter(loras[0])  # It was displaced meanwhile.
    assert sent(loras[0]).mismatch() is None
    for lora in (loras[1], loras[0]):
        manager._load_adapter(lora)
    for lora in loras:
        assert sent(lora).mismatch() is not None


def test_files_that_change_while_a_worker_reads_them_fit_none(tmp_path: Path, manager: Any) -> None:
    lora = asked(written(tmp_path / "a", b"replaced"), 3)
    before = sent(lora)
    manager._load_adapter(lora)
    assert before.digest != digest_at(lora.lora_path)
    for each in (before, sent(lora)):
        assert each.mismatch() is not None


def test_files_that_change_and_change_back_while_a_worker_reads_them_fit_none(
    tmp_path: Path, manager: Any
) -> None:
    written(tmp_path / "other", b"others")
    lora = asked(written(tmp_path / "at", b"exchange"), 3)
    before = sent(lora)
    assert b"others" == manager._load_adapter(lora)
    assert before.digest == digest_at(lora.lora_path)
    assert before.mismatch() is not None


def test_files_that_change_within_one_tick_of_the_clock_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their stamps are equal, as on a file system whose times have two seconds."""
    monkeypatch.setattr(adapters_module, "_stamp", lambda facts: (facts.st_size,))
    first = digest_at(str(written(tmp_path / "a", b"weights")))
    assert first != digest_at(str(written(tmp_path / "a", b"Weights")))
    # The files count as old, so the digest is kept.
    monkeypatch.setattr(adapters_module, "_SETTLED", -1.0)
    kept = digest_at(str(written(tmp_path / "a", b"weights")))
    assert first == kept == digest_at(str(written(tmp_path / "a", b"Weights")))


def test_adapter_that_vllm_reads_from_another_place_is_not_stated(tmp_path: Path) -> None:
    lora = asked(
        written(tmp_path / "a", b"weights"), tensorizer_config_dict={"tensorizer_dir": "x"}
    )
    assert stated(engine(), lora) is None
