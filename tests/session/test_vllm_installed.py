"""The adapter reads the meaning of keys from the models of the vLLM that is installed.

Each attention module computes the keys of the same tokens at several positions. What the adapter
states about its keys must be what the keys show.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
from forward_code import calls, module_of
from vllm_fields import FIELDS, NEWER

import kvspec
from kvspec.adapters import vllm as adapter
from kvspec.adapters.attention_modules import key_content_of
from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.rotating_modules import ALWAYS, CONDITIONS, applies_rotary
from kvspec.adapters.rotation import rotation_of
from kvspec.adapters.vllm.backends import BACKENDS_REFUSED, FORMATS, full_name

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# vLLM imports what torch has deprecated.
pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]

SIZE, WIDTH, TOKENS = 16, 96, 8
COMMON = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 64}
HEADS = COMMON | {"num_key_value_heads": 3, "intermediate_size": 128, "pad_token_id": 0}
KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
HYBRID = HEADS | KINDS | {"head_dim": SIZE}
PLACE = "model.layers.{}.self_attn"


class ModelConfig(SimpleNamespace):
    """The part of vLLM's `ModelConfig` that attention modules read. Other fields are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.fixture(name="config", scope="module")
def with_vllm() -> Iterator[Any]:
    """Yield the config of a vLLM worker, which is alone."""
    from vllm.config import VllmConfig, set_current_vllm_config  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415

    config = VllmConfig()
    model = ModelConfig(dtype=torch.float32, is_moe=False, max_model_len=256)
    object.__setattr__(config, "model_config", model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield config
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def exaone4(layer: int) -> Any:
    """Return the attention of EXAONE 4. Its full layers have no positions."""
    from vllm.model_executor.models.exaone4 import Exaone4Attention  # noqa: PLC0415

    config = transformers.Exaone4Config(**HYBRID, sliding_window_pattern=4)
    return Exaone4Attention(config, WIDTH, 6, 3, prefix=PLACE.format(layer))


def cohere2(layer: int) -> Any:
    """Return the attention of Cohere 2. Its full layers have no positions."""
    from vllm.model_executor.models.commandr import CohereAttention  # noqa: PLC0415

    return CohereAttention(transformers.Cohere2Config(**HYBRID), prefix=PLACE.format(layer))


def qwen3(layer: int) -> Any:
    """Return the attention of Qwen 3."""
    from vllm.model_executor.models.qwen3 import Qwen3Attention  # noqa: PLC0415

    rope = transformers.Qwen3Config(**HEADS).rope_parameters
    return Qwen3Attention(WIDTH, 6, 3, rope, head_dim=SIZE, prefix=PLACE.format(layer))


def falcon(layer: int, *, alibi: bool = False) -> Any:
    """Return the attention of Falcon."""
    from vllm.model_executor.models.falcon import FalconAttention  # noqa: PLC0415

    config = transformers.FalconConfig(**COMMON, alibi=alibi)
    return FalconAttention(config, prefix=f"transformer.h.{layer}.self_attention")


class Attending(Exception):  # noqa: N818 - not an error
    """The module has reached its attention layer."""


def keys_at(module: Any, position: int, hidden: Any) -> Any:
    """Return the keys that a module passes to its attention layer."""
    keys: list[Any] = []

    def attend(_: Any, key: Any, *__: Any) -> None:
        keys.append(key.detach().clone())
        raise Attending

    module.attn.forward = attend
    with suppress(Attending), torch.no_grad():
        module.forward(torch.full((TOKENS,), position), hidden.clone())
    return keys[0].reshape(-1, SIZE).double().numpy()


@pytest.mark.parametrize(
    ("build", "layer", "rotary"),
    [
        (exaone4, 0, "halves"),
        (exaone4, 3, "none"),
        (cohere2, 0, "pairs"),
        (cohere2, 3, "none"),
        (qwen3, 0, "halves"),
        (falcon, 0, "halves"),
        pytest.param(lambda layer: falcon(layer, alibi=True), 0, "none", id="falcon-alibi"),
    ],
)
def test_stated_key_content_is_that_of_computed_keys(
    config: Any, build: Any, layer: int, rotary: str
) -> None:
    config.compilation_config.static_forward_context.clear()
    torch.manual_seed(0)
    module = build(layer)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for linear in module.modules():
        if hasattr(linear, "quant_method"):
            linear.quant_method.process_weights_after_loading(linear)
    hidden = torch.randn(TOKENS, WIDTH)
    stated = key_content_of(FieldReader("module", module), SIZE, latent=False)
    # Products of a whole hidden state have many roundings.
    shown = rotation_of("keys", [keys_at(module, at, hidden) for at in (9, 1, 0)], 1e-5)
    size = 0 if rotary == "none" else SIZE
    assert kvspec.KeyContent(rotary=rotary, rotary_size=size) == shown
    assert stated is not None
    assert (stated.rotary, stated.rotary_start, stated.rotary_size) == (rotary, 0, size)


@pytest.mark.parametrize(
    "name",
    sorted(
        f"{package}.{name}"
        for package, names in ALWAYS.items()
        if package.startswith("vllm.")
        for name in names
    ),
)
def test_code_of_class_always_applies_the_rotary_embedding(name: str) -> None:
    """The table of the adapters is what the code of the installed engine does."""
    module = module_of(name)
    assert applies_rotary(module) is True
    assert calls(module, "rotary_emb") is True


ATTRIBUTES = {
    "afmoe.AfmoeAttention": ("is_local_attention",),
    "cohere2_moe.Cohere2MoeAttention": ("sliding_window", "force_rope"),
    "commandr.CohereAttention": ("v1", "sliding_window"),
    "exaone4.Exaone4Attention": ("sliding_window", "apply_rope_all_layers"),
    "exaone_moe.ExaoneMoeAttention": ("use_rope",),
    "falcon.FalconAttention": ("use_rotary",),
    "granite.GraniteAttention": ("use_rope",),
    "granitemoe.GraniteMoeAttention": ("use_rope",),
    "step3p5.Step3p5Attention": ("use_rope",),
}
"""Attributes that decide whether a class applies its rotary embedding: it does if any is true."""


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_conditions_of_classes_are_those_of_their_code(name: str) -> None:
    for values in itertools.product((None, 64), repeat=len(ATTRIBUTES[name])):
        attributes = dict(zip(ATTRIBUTES[name], values, strict=True))
        module = module_of(f"vllm.model_executor.models.{name}", **attributes)
        assert any(values) is applies_rotary(module)
        assert any(values) is calls(module, "rotary_emb")


def test_each_condition_of_a_class_is_compared_with_its_code() -> None:
    names = {f"vllm.model_executor.models.{name}" for name in ATTRIBUTES}
    assert names == {name for name in CONDITIONS if name.startswith("vllm.")}


def test_backend_that_vllm_makes_for_chunks_has_the_pages_of_its_base() -> None:
    """The classes of other layers are made in the same way, and they keep their names."""
    from vllm.model_executor.layers.attention import (  # noqa: PLC0415
        chunked_local_attention,
        encoder_only_attention,
    )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415

    chunks = chunked_local_attention.create_chunked_local_attention_backend(CPUAttentionBackend, 64)
    assert ".".join(CPUAttentionBackend.full_cls_name()) == full_name("backend", chunks)
    other = encoder_only_attention.create_encoder_only_attention_backend(CPUAttentionBackend)
    assert full_name("backend", other) not in FORMATS


def backend_classes(root: Path) -> set[str]:
    """Return the names of all classes below vLLM's `AttentionBackend`, from the files of vLLM.

    Most of them cannot be imported on a CPU.
    """
    bases_of: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        if "AttentionBackend" not in (text := file.read_text()) and "Backend)" not in text:
            continue
        module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                bases_of.setdefault(f"{module}.{node.name}", set()).update(names)
    known, found = {"AttentionBackend"}, set[str]()
    while more := {name for name in bases_of.keys() - found if bases_of[name] & known}:
        found |= more
        known |= {name.rpartition(".")[2] for name in more}
    return found


def test_each_backend_class_of_vllm_has_pages_or_a_reason() -> None:
    """A class that a newer vLLM adds is missing here, and its layers are refused."""
    names = backend_classes(Path(inspect.getfile(vllm)).parent)
    assert len(names) > 80
    assert set() == names - FORMATS.keys() - BACKENDS_REFUSED.keys()


def test_each_cache_type_of_vllm_is_recorded() -> None:
    """docs/border.py has a line for each of them (see tests/tools/test_border.py)."""
    from vllm.config.cache import CacheDType  # noqa: PLC0415

    recorded = Path(__file__).parents[1] / "goldens" / "vllm_backends.json"
    assert set() == set(get_args(CacheDType)) - set(json.loads(recorded.read_text())["types"])


def test_engine_that_may_receive_weights_is_refused() -> None:
    """The field is that of vLLM's own config, without which no worker updates its weights."""
    from vllm.config import VllmConfig, WeightTransferConfig  # noqa: PLC0415

    from kvspec.adapters.vllm.worker_side import check_weights  # noqa: PLC0415

    check_weights(VllmConfig())
    with pytest.raises(kvspec.SpecError, match="weight_transfer_config"):
        check_weights(VllmConfig(weight_transfer_config=WeightTransferConfig(backend="nccl")))


def test_workers_of_vllm_refuse_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker for CPUs inherits the method of the one for GPUs."""
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415

    from kvspec.adapters.vllm.worker_side import refuse_reloads  # noqa: PLC0415

    monkeypatch.setattr(Worker, "reload_weights", Worker.reload_weights)
    refuse_reloads()
    with pytest.raises(kvspec.SpecError, match="reload_weights"):
        CPUWorker.reload_weights(SimpleNamespace(), weights_path="new")


def test_adapters_of_vllm_are_stated_by_their_files(tmp_path: Path) -> None:
    """VLLM's own classes have a name, a number and a path, and nothing of the content."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.config import LoRAConfig  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    from kvspec.adapters.vllm.adapters import Adapters  # noqa: PLC0415
    from kvspec.adapters.vllm.content import prompt_of_request  # noqa: PLC0415

    def stated(config: Any, content: bytes | None, **more: Any) -> str | None:
        lora = None
        if content is not None:
            (tmp_path / "sql").mkdir(exist_ok=True)
            (tmp_path / "sql" / "adapter_model.safetensors").write_bytes(content)
            lora = LoRARequest("sql", 1, str(tmp_path / "sql"), **more)
        request = Request("r", [1, 2], SamplingParams(), None, lora_request=lora)
        model = SimpleNamespace(dtype=torch.float32)
        vllm_config = SimpleNamespace(lora_config=config, model_config=model)
        return prompt_of_request(request, Adapters(vllm_config)).adapter

    usual = LoRAConfig(lora_dtype=torch.float32)
    found = [stated(usual, content) for content in (b"1", b"1", b"2", None)]
    assert found[0] == found[1]
    assert 3 == len(set(found))
    assert "" == found[3]
    fewer = LoRAConfig(lora_dtype=torch.float32, target_modules=["o_proj"])
    assert stated(fewer, b"1") not in (None, found[0])
    assert stated(LoRAConfig(lora_dtype=torch.float16), b"1") not in (None, found[0])
    assert stated(usual, b"1", load_inplace=True) is None
    assert stated(usual, b"1", is_3d_lora_weight=True) not in (None, found[0])


def test_fields_of_adapters_in_vllm_are_those_that_are_known() -> None:
    """A field that a newer vLLM adds may change the effect of an adapter. Then state it."""
    from vllm.config import LoRAConfig  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    from kvspec.adapters.vllm.adapters import SETTINGS  # noqa: PLC0415

    assert set(LoRARequest.__struct_fields__) == {
        "lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace",
        "is_3d_lora_weight",
    }  # fmt: skip
    # The other settings decide sizes, how ranks share the work, or which adapter a request has.
    assert set(LoRAConfig.__dataclass_fields__) == {
        *SETTINGS, "lora_dtype", "max_lora_rank", "max_loras", "max_cpu_loras",
        "fully_sharded_loras", "specialize_active_lora", "default_mm_loras", "max_lora_cls_labels",
    }  # fmt: skip


def test_workers_of_vllm_load_adapters_by_the_method_that_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager of the workers inherits the method, and calls it for each load."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415
    from vllm.lora.worker_manager import (  # noqa: PLC0415
        LRUCacheWorkerLoRAManager,
        WorkerLoRAManager,
    )

    from kvspec.adapters.vllm import adapters  # noqa: PLC0415

    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    loaded = dict[int, str | None]()
    monkeypatch.setattr(adapters, "_loaded", loaded)
    for name, empty in (("_kept", {}), ("_managers", [])):
        monkeypatch.setattr(adapters, name, empty)
    assert callable(WorkerLoRAManager._load_adapter)
    monkeypatch.setattr(
        WorkerLoRAManager, "set_active_adapters", WorkerLoRAManager.set_active_adapters
    )
    assert "set_active_adapters" not in vars(LRUCacheWorkerLoRAManager)
    read = lambda *_: SimpleNamespace(id=3)  # noqa: E731 - what vLLM reads from a whole adapter
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", read)
    adapters.note_loads()
    manager = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
    manager._adapter_manager = MagicMock(list_adapters=dict, capacity=2, lora_slots=2)
    manager.add_adapter(LoRARequest("sql", 3, str(tmp_path)))
    assert {3: adapters.digest_at(str(tmp_path))} == loaded
    # In its first step, vLLM activates the adapters of the batch, of which there may be none.
    manager.set_active_adapters(set(), None)
    assert [manager] == adapters._managers


def test_multi_connector_of_vllm_finds_the_numbers_by_name() -> None:
    """Its front end gets them as plain values, with the names of the classes."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector  # noqa: PLC0415

    from kvspec.adapters.vllm import connector  # noqa: PLC0415
    from kvspec.adapters.vllm.metrics import no_numbers  # noqa: PLC0415

    name = connector.KvspecConnector.__name__
    numbers = {name: no_numbers() | {"bytes_read": 1 << 20}}
    stats = multi_connector.MultiConnector.build_kv_connector_stats(numbers)
    assert 1.0 == stats.reduce()[name]["MB read"]


def test_vllm_numbers_items_that_it_does_not_hash_by_this_name() -> None:
    """The adapter recognises the name: equal numbers of two engines are no equal images."""
    from vllm.renderers.base import BaseRenderer  # noqa: PLC0415

    source = inspect.getsource(BaseRenderer._process_multimodal)
    assert 'f"renderer{self.api_process_rank}-mm-{' in source


def processed(pixels: Any, identifier: str = "u", **more: Any) -> Any:
    """Return vLLM's own feature of an image."""
    from vllm.multimodal import inputs  # noqa: PLC0415

    field = inputs.MultiModalBatchedField()
    values = {"pixel_values": pixels, **more}
    item = inputs.MultiModalKwargsItem(
        {name: inputs.MultiModalFieldElem(value, field) for name, value in values.items()}
    )
    place = inputs.PlaceholderRange(offset=2, length=3)
    return inputs.MultiModalFeatureSpec(item, "image", identifier, place, identifier)


def test_vllm_takes_the_uuid_of_a_client_as_the_identifier_of_a_picture() -> None:
    """So names of pages contain the content instead."""
    from PIL import Image  # noqa: PLC0415
    from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems  # noqa: PLC0415
    from vllm.multimodal.processing.inputs import ProcessorInputs  # noqa: PLC0415

    def identifiers(uuid: str | None, **settings: Any) -> list[str]:
        found = []
        for color in ("red", "blue"):
            items = ImageProcessorItems([Image.new("RGB", (4, 4), color)])
            data = MultiModalDataItems({"image": items})
            inputs = ProcessorInputs([1], data, {"image": [uuid]}, settings)
            found += inputs.get_mm_hashes("m", "sha256")["image"]
        return found

    assert ["u", "u"] == identifiers("u")
    one, two = identifiers("u", do_rescale=False)
    assert one == two != "u"
    one, two = identifiers(None)
    assert one != two


def test_items_of_vllm_are_stated_by_their_arrays() -> None:
    from vllm.v1.request import Request  # noqa: PLC0415

    from kvspec.adapters.vllm.content import prompt_of_request  # noqa: PLC0415
    from kvspec.adapters.vllm.media import MediaContents, digest_of  # noqa: PLC0415

    def stated(media: Any, *features: Any) -> Any:
        request = Request("r", [1] * 8, vllm.SamplingParams(), None, mm_features=list(features))
        return prompt_of_request(request, None, media).media

    pixels = torch.arange(12.0).reshape(3, 2, 2)
    contents = MediaContents(SimpleNamespace(), 4)
    (one,) = stated(contents, processed(pixels))
    assert (2, 3, digest_of(processed(pixels))) == (one.start, one.length, one.identifier)
    assert (one,) == stated(contents, processed(pixels.clone(), "v"))
    assert (one,) != stated(contents, processed(pixels + 1, "w"))
    assert None is stated(contents, processed(pixels + 1))
    assert None is stated(contents, processed(pixels))
    assert () == stated(contents)
    assert one.identifier != digest_of(processed(pixels, grid=torch.tensor([1, 2])))


def test_item_has_one_digest_in_both_processes_of_an_engine() -> None:
    """VLLM's front end packs the arrays, and its core unpacks them."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec  # noqa: PLC0415
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: PLC0415

    from kvspec.adapters.vllm.media import digest_of  # noqa: PLC0415

    grid = {"grid": torch.tensor([1, 2]), "sizes": [torch.ones(3), torch.ones(2)], "fps": 2.0}
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        sent = processed(torch.arange(4096).to(dtype).reshape(64, 64), **grid)
        packed = MsgpackEncoder().encode([sent])
        (got,) = MsgpackDecoder(list[MultiModalFeatureSpec]).decode(packed)
        assert None is not digest_of(sent)
        assert digest_of(sent) == digest_of(got)


def test_item_in_the_shared_memory_of_vllm_is_not_stated() -> None:
    """Its feature has an address, under which another picture may be later."""
    from vllm.multimodal.cache.shm import (  # noqa: PLC0415
        ShmObjectStoreSenderCache,
        _get_shm_handle,
    )
    from vllm.multimodal.inputs import PlaceholderRange  # noqa: PLC0415

    from kvspec.adapters.vllm.media import digest_of  # noqa: PLC0415

    item = ShmObjectStoreSenderCache.address_as_item(MagicMock(), 64, 3, [1, 2])
    assert (64, 3, [1, 2]) == _get_shm_handle(item)
    place = PlaceholderRange(offset=2, length=3)
    assert None is digest_of(SimpleNamespace(modality="image", data=item, mm_position=place))


def test_drafts_of_vllm_that_read_ahead_are_those_of_the_table() -> None:
    """A method that a newer vLLM adds is refused until the table has it."""
    from vllm.config import speculative  # noqa: PLC0415

    from kvspec.adapters.vllm.drafts import LOOKAHEAD, WITHOUT_CACHE  # noqa: PLC0415

    modules = set(get_args(speculative.MTPModelTypes))
    methods = set(get_args(speculative.SpeculativeMethod)) - modules | {"mtp"}
    assert {"custom_class", "extract_hidden_states"} == methods - {*LOOKAHEAD, *WITHOUT_CACHE}
    for method in methods & {*LOOKAHEAD, *WITHOUT_CACHE}:
        config = object.__new__(speculative.SpeculativeConfig)
        config.method = method
        # vLLM 0.32 has no name for it, and drops a block for all drafts that read hidden states.
        own_tokens = config.use_dflash() or config.use_dspark()
        needs = config.use_eagle() and not own_tokens
        if hasattr(config, "needs_eagle_block_drop"):
            needs = config.needs_eagle_block_drop()
        assert bool(LOOKAHEAD.get(method)) is needs


def state_tables(prompt: int, chunk: int, **spec: int) -> Iterator[tuple[Any, int, Any]]:
    """Let vLLM's manager allocate the blocks of a prompt in chunks. The mode is ``align``.

    Yield its config, the number of computed tokens and its lists of ids.
    """
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415
    from vllm.utils.hashing import sha256  # noqa: PLC0415
    from vllm.v1 import kv_cache_interface as cache  # noqa: PLC0415
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
    from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    kind = cache.MambaSpec.__dataclass_fields__["mamba_type"].default
    state = cache.MambaSpec(
        block_size=16,
        shapes=((3, 96), (4, 8, 8)),
        dtypes=(torch.float16, torch.float32),
        mamba_type=next(each for each in type(kind) if each.name == "GDN_ATTN"),
        mamba_cache_mode="align",
        **spec,
    )
    full = cache.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16)
    groups = [cache.KVCacheGroupSpec(["l.0"], full), cache.KVCacheGroupSpec(["l.1"], state)]
    config = cache.KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        config, 4096, max_in_flight_tokens=4096, scheduler_block_size=16, hash_block_size=16,
        enable_caching=True,
    )  # fmt: skip
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(16, sha256)
    request = Request("r", [*range(prompt)], SamplingParams(), None, block_hasher=hasher)
    manager.get_computed_blocks(request)
    while (done := request.num_computed_tokens) < prompt:
        step = min(chunk, prompt - done)
        ahead = spec.get("num_speculative_blocks", 0)
        assert manager.allocate_slots(request, step, num_lookahead_tokens=ahead)
        request.num_computed_tokens = done + step
        yield config, done + step, manager.get_block_ids("r")


@pytest.mark.parametrize(
    ("prompt", "chunk", "spec"),
    [
        (100, 16, {}),
        (96, 48, {}),
        (100, 32, {"num_speculative_blocks": 2}),
        (100, 64, {"num_prefill_checkpoint_blocks": 1}),
    ],
)
def test_state_is_in_the_block_that_vllm_writes_after_a_step(
    prompt: int, chunk: int, spec: dict[str, int]
) -> None:
    """Blocks of speculative tokens follow it, and a checkpoint precedes it."""
    flash = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    for config, tokens, ids in state_tables(prompt, chunk, **spec):
        engine = adapter.engine_spec(config, backends=flash, conv_layout="SD")
        tables = adapter.block_tables(engine, config, ids, tokens)
        # The kernels write the state after `tokens` into this place of the table.
        written = ids[1][: -(-tokens // 16)]
        assert [written[-1]] == tables["group1"].block_ids.tolist()
        assert written[-1] != 0


@pytest.mark.parametrize("kind", FIELDS)
def test_each_field_of_vllm_has_a_place_in_the_names_of_pages_or_none(kind: str) -> None:
    """A field that a newer vLLM adds may change values. Then decide where it is stated."""
    module = "vllm.config.quantization" if kind.startswith("Quant") else "vllm.config"
    own = {field.name for field in dataclasses.fields(getattr(import_module(module), kind))}
    listed = [name for names in FIELDS[kind].values() for name in names.split()]
    assert len(listed) == len(set(listed))
    assert not own - set(listed)
    assert set(listed) - own <= set(NEWER.get(kind, "").split())


def tiny_engine(folder: Path, **model: Any) -> Any:
    """Return vLLM's configuration of a model of one layer, with its connector."""
    from vllm.config import (  # noqa: PLC0415
        AttentionConfig,
        CacheConfig,
        LoadConfig,
        ModelConfig,
        MultiModalConfig,
    )

    config = {
        **HEADS, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1, "max_position_embeddings": 64, "torch_dtype": "float32",
        "head_dim": SIZE,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    own = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True, **model}
    made = ModelConfig(model=str(folder), **own)
    object.__setattr__(made, "multimodal_config", MultiModalConfig())
    extra = {"revision": "1", "model": "tiny"}
    return SimpleNamespace(
        model_config=made,
        cache_config=CacheConfig(),
        load_config=LoadConfig(),
        attention_config=AttentionConfig(),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
    )


# Other values of fields that change an identity. All further fields get the value "other".
_OTHERS: dict[str, Any] = {
    "quantization_config": {"ignore": ["lm_head"]},
    "hf_overrides": {"rope_theta": 5.0},
    "mm_processor_kwargs": {"num_crops": 4},
    "use_non_causal": True,
    "use_prefill_query_quantization": True,
    "disable_flashinfer_q_quantization": True,
    "video_pruning_rate": 0.5,
    "cache_dtype": "fp8",
}
# These are read only together with another field, or are objects with fields of their own.
_TOGETHER = {
    "model", "revision", "hf_config", "dtype", "mamba_cache_dtype", "is_attention_free",
    "video_pruning_method", "multimodal_config",
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("model_config", "ModelConfig"), ("cache_config", "CacheConfig"),
        ("load_config", "LoadConfig"), ("attention_config", "AttentionConfig"),
        ("model_config.multimodal_config", "MultiModalConfig"),
    ],
)  # fmt: skip
def test_identity_of_vllm_changes_exactly_with_the_fields_that_change_values(
    part: str, kind: str, tmp_path: Path
) -> None:
    from kvspec.adapters.vllm.model_identity import model_identity  # noqa: PLC0415

    plain = model_identity(tiny_engine(tmp_path), "")
    assert not plain.unstated
    for place, names in FIELDS[kind].items():
        for name in set(names.split()) - set(NEWER.get(kind, "").split()) - _TOGETHER:
            engine = tiny_engine(tmp_path)
            owner = attrgetter(part)(engine)
            object.__setattr__(owner, name, _OTHERS.get(name, "other"))
            changed = model_identity(engine, "")
            assert (changed != plain) is (place == "identity"), (place, name)


def test_identity_of_vllm_has_the_whole_recipe_of_a_quantization(tmp_path: Path) -> None:
    """Two recipes of "online" give other weights."""
    from vllm.config.quantization import resolve_quantization_config  # noqa: PLC0415

    from kvspec.adapters.vllm.model_identity import model_identity  # noqa: PLC0415

    recipes: list[tuple[str | None, Any]] = [
        (None, None),
        ("fp8_per_tensor", None),
        *(("online", each) for each in (
            {"linear": "fp8_per_block"}, {"linear": "fp8_per_tensor"},
            {"linear": "fp8_per_block", "ignore": ["lm_head"]}, {"moe": "mxfp8"},
            {"targets": {"re:.*mlp.*": "fp8_per_tensor"}},
        )),
    ]  # fmt: skip
    digests = set()
    for name, recipe in recipes:
        engine = tiny_engine(tmp_path)
        object.__setattr__(engine.model_config, "quantization", name)
        resolved = resolve_quantization_config(name, recipe)
        object.__setattr__(engine.model_config, "quantization_config", resolved)
        digests.add(model_identity(engine, "").digest)
    assert len(recipes) == len(digests)


def test_positions_of_media_that_numpy_counts_are_stated() -> None:
    from vllm.multimodal.inputs import PlaceholderRange  # noqa: PLC0415

    from kvspec.adapters.vllm.content import prompt_of_request  # noqa: PLC0415
    from kvspec.adapters.vllm.media import MediaContents  # noqa: PLC0415

    found = []
    for number in (int, np.int64):
        feature = processed(np.ones((2, 3), np.float32))
        feature.mm_position = PlaceholderRange(offset=number(1), length=number(2))
        request = SimpleNamespace(
            num_prompt_tokens=4, prompt_embeds=None, cache_salt=None, lora_request=None,
            mm_features=[feature],
        )  # fmt: skip
        prompt = prompt_of_request(request, media=MediaContents(SimpleNamespace(), 4))
        (item,) = prompt.media or ()
        assert (1, 2) == (item.start, item.length)
        found.append(prompt.digest)
    assert found[0] == found[1]
