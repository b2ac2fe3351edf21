"""The backend fits the SGLang that is installed. A nightly workflow installs it."""

from __future__ import annotations

import asyncio
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from forward_code import calls, module_of

from kvspec import RankId
from kvspec.adapters import sglang as adapter
from kvspec.adapters.rotating_modules import ALWAYS, CONDITIONS, applies_rotary
from kvspec.adapters.sglang import backend, plugin
from kvspec.adapters.sglang.describing import ONLY
from kvspec.adapters.sglang.hicache import _hashes
from kvspec.adapters.sglang.page_hashes import PageHashes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.adapters

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each kernel that a CPU does not have.
    sglang = pytest.importorskip("sglang", reason="SGLang is not installed")
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation import utils
    from sglang.srt.disaggregation.base import conn
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    plugin.register()
    HookRegistry.apply_hooks()

MODELS = "sglang.srt.models"


def test_backend_is_a_choice_of_sglang() -> None:
    assert plugin.NAME in DISAGG_TRANSFER_BACKEND_CHOICES
    assert plugin.NAME == utils.TransferBackend(plugin.NAME).value
    with pytest.raises(ValueError, match="other"):
        utils.TransferBackend("other")


@pytest.mark.parametrize("kind", [kind for kind in utils.KVClassType if kind.value != "kvargs"])
def test_classes_have_all_methods_of_sglang(kind: Any) -> None:
    found = utils.get_kv_class(utils.TransferBackend(plugin.NAME), kind)
    assert found.__module__ == plugin.__name__
    assert not found.__abstractmethods__


def test_other_backends_are_unchanged() -> None:
    found = utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
    assert "FakeKVSender" == found.__name__


def test_hooks_of_both_queues_are_applied() -> None:
    from sglang.srt.disaggregation import decode, prefill  # noqa: PLC0415

    for method in (
        prefill.PrefillBootstrapQueue._init_kv_manager,
        prefill.PrefillBootstrapQueue.create_sender,
        decode.DecodePreallocQueue._init_kv_manager,
        decode.DecodePreallocQueue._create_receiver_and_enqueue,
        decode._bootstrap_addr,
    ):
        assert hasattr(method, "__wrapped__")
    assert hasattr(prefill.get_kv_class, "__wrapped__")
    assert hasattr(decode.get_kv_class, "__wrapped__")


@pytest.mark.parametrize("host", [None, 7, "127.0.0.1"])
def test_address_that_sglang_cannot_read_raises_nothing(host: Any) -> None:
    """An error would end the scheduler. The look-up at this address fails one request."""
    from sglang.srt.disaggregation import decode  # noqa: PLC0415

    asked = SimpleNamespace(bootstrap_host=host, bootstrap_port=1)
    assert f"{host}:1" == decode._bootstrap_addr(asked)


def test_states_are_those_of_sglang() -> None:
    names = ("Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success")
    own = (
        backend.FAILED,
        backend.BOOTSTRAPPING,
        backend.WAITING,
        backend.TRANSFERRING,
        backend.SUCCESS,
    )
    assert own == tuple(getattr(conn.KVPoll, name) for name in names)


def test_checked_settings_exist_with_supported_defaults() -> None:
    args = ServerArgs(model_path="m")
    found = {name: getattr(args, name) for name in ONLY}
    assert {} == {name: value for name, value in found.items() if value not in ONLY[name]}


def test_queue_is_known_only_while_its_manager_is_constructed() -> None:
    queue = SimpleNamespace()
    assert queue is plugin._with_queue(lambda _: plugin._QUEUE.get(), queue)
    with pytest.raises(LookupError):
        plugin._QUEUE.get()


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", ["MHA", "MLA"])
def test_real_pool_is_described_with_the_addresses_of_its_slots(kind: str, page: int) -> None:
    """The bytes that SGLang writes to a slot are those of the page in the description."""
    import torch  # noqa: PLC0415
    from sglang.srt.mem_cache import memory_pool  # noqa: PLC0415

    common: dict[str, Any] = {"dtype": torch.float32, "layer_num": 2, "device": "cpu"}
    common |= {"enable_memory_saver": False}
    if kind == "MHA":
        pool = memory_pool.MHATokenToKVPool(64, page, head_num=2, head_dim=8, **common)
        part, buffers = "k", pool.k_buffer
    else:
        sizes = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
        pool = memory_pool.MLATokenToKVPool(64, page, **sizes, **common)
        part, buffers = "latent", pool.kv_buffer
    engine = adapter.engine_spec(pool)
    cache = adapter.rank_cache(engine, RankId(), pool)
    slots = torch.arange(3 * page, 4 * page)
    tables = adapter.block_tables(engine, slots)
    assert [3] == tables["full"].block_ids.tolist()
    address = cache.region("layers.1", part).address(3, 0, 0)
    assert buffers[1][3 * page].data_ptr() == address


@pytest.mark.parametrize("name", sorted(ALWAYS[MODELS]))
def test_code_of_class_always_applies_the_rotary_embedding(name: str) -> None:
    """The table of the adapters is what the code of the installed engine does."""
    module = module_of(f"{MODELS}.{name}")
    assert applies_rotary(module) is True
    assert calls(module, "rotary_emb") is True


@pytest.mark.parametrize(
    ("name", "attributes", "applied"),
    [
        ("commandr.CohereAttention", {"v1": False, "sliding_window_size": 64}, True),
        ("commandr.CohereAttention", {"v1": False, "sliding_window_size": -1}, False),
        ("commandr.CohereAttention", {"v1": True, "sliding_window_size": -1}, True),
        ("commandr.CohereAttention", {}, None),
        ("cohere2_moe.Cohere2MoeAttention", {"is_sliding": False, "force_rope": False}, False),
        ("cohere2_moe.Cohere2MoeAttention", {"is_sliding": True, "force_rope": False}, True),
        ("cohere2_moe.Cohere2MoeAttention", {"is_sliding": False, "force_rope": True}, True),
        ("exaone4.Exaone4Attention", {"sliding_window_pattern": "LG", "is_sliding": 1}, True),
        ("exaone4.Exaone4Attention", {"sliding_window_pattern": "LG", "is_sliding": 0}, False),
        ("exaone4.Exaone4Attention", {"sliding_window_pattern": None, "is_sliding": 0}, True),
        (
            "exaone_moe.ExaoneMoEAttention",
            {"sliding_window": None, "apply_rope_all_layers": False},
            False,
        ),
        (
            "exaone_moe.ExaoneMoEAttention",
            {"sliding_window": None, "apply_rope_all_layers": True},
            True,
        ),
        (
            "exaone_moe.ExaoneMoEAttention",
            {"sliding_window": 64, "apply_rope_all_layers": False},
            True,
        ),
        # It gets rotary embeddings from its caller.
        ("gemma3_causal.Gemma3Attention", {}, None),
    ],
)
def test_conditions_of_classes_are_those_of_their_code(
    name: str, attributes: dict[str, Any], applied: bool | None
) -> None:
    module = module_of(f"{MODELS}.{name}", **attributes)
    assert applied is applies_rotary(module)
    assert applied is calls(module, "rotary_emb")


def test_each_condition_of_a_class_is_compared_with_its_code() -> None:
    rows = test_conditions_of_classes_are_those_of_their_code.pytestmark[0].args[1]  # type: ignore[attr-defined]
    names = {name for name in CONDITIONS if name.startswith(MODELS)}
    assert names == {f"{MODELS}.{row[0]}" for row in rows if row[2] is not None}


def image_of(content: int, *, full: bool) -> Any:
    """Return SGLang's own item of an image, with the tokens that stand for it."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem  # noqa: PLC0415

    feature = torch.full((4, 8), float(content))
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=feature)
    if full:
        item.set_identity(bytes([content]) * 32)
    item.set_pad_value()
    return item


@pytest.mark.parametrize("full", [False, True])
def test_images_of_sglang_have_no_page_names(*, full: bool) -> None:
    """SGLang puts numbers from the hash of an image in the place of its tokens.

    Another maker has one token there and states the image. A page of SGLang with an image has no
    name at all, so it is never equal to one of another maker.
    """
    from sglang.srt.managers.schedule_batch import (  # noqa: PLC0415
        MM_PAD_SHIFT_VALUE,
        sanity_check_mm_pad_shift_value,
    )

    size, before = 8, 16
    pages = PageHashes(
        "0" * 64, 4, size, vocabulary=MM_PAD_SHIFT_VALUE, hashes=lambda t, b: _hashes(size, t, b)
    )
    found = []
    for content in (1, 2):
        item = image_of(content, full=full)
        tokens = [*range(before + 3), *item.padding_sequence(20), *range(30)]
        pages.add_prompt(tokens, None, "")
        hashes = _hashes(size, tokens, None)
        pages.add_pages(tokens, hashes, None)
        pages.add_pages(tokens[before:], hashes[2:], hashes[1])
        assert before // size == len(pages.run(hashes))
        assert all(pages.find(each) is None for each in hashes[2:])
        found.append(hashes)
    assert found[0][:2] == found[1][:2]
    assert not set(found[0][2:]) & set(found[1][2:])
    # No token of a model is such a number: SGLang does not start a larger vocabulary.
    sanity_check_mm_pad_shift_value(MM_PAD_SHIFT_VALUE)
    with pytest.raises(ValueError, match="vocab_size"):
        sanity_check_mm_pad_shift_value(MM_PAD_SHIFT_VALUE + 1)


def test_model_for_images_is_one_for_sglang(tmp_path: Path) -> None:
    """`HiCachePages` refuses an engine by this field."""
    from sglang.srt.configs.model_config import ModelConfig  # noqa: PLC0415

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    images = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {"model_type": "clip_vision_model", **sizes, "num_attention_heads": 2},
        "text_config": text,
        "image_token_index": 3,
    }
    found = []
    for name, config in (("text", text), ("images", images)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        for enabled in (None, False):
            model = ModelConfig(str(tmp_path / name), enable_multimodal=enabled)
            found.append(model.is_multimodal)
    assert [False, False, True, False] == found


def test_embeddings_need_an_sglang_without_a_prefix_cache() -> None:
    """So `HiCachePages` never gets the token ids that stand for them."""
    from sglang.srt.managers import io_struct, tokenizer_manager  # noqa: PLC0415

    request = io_struct.GenerateReqInput(input_embeds=[[0.0] * 4] * 3)
    request.normalize_batch_and_arguments()
    method = tokenizer_manager.TokenizerManager._tokenize_one_request
    memory = SimpleNamespace(disable_radix_cache=False)
    with (
        patch.object(tokenizer_manager, "get_memory", lambda: memory),
        pytest.raises(ValueError, match="disable_radix_cache"),
    ):
        asyncio.run(method(SimpleNamespace(), request))
