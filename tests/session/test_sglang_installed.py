"""The backend fits the SGLang that is installed. A nightly workflow installs it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from forward_code import calls, module_of

from kvspec import RankId
from kvspec.adapters import sglang as adapter
from kvspec.adapters.rotating_modules import ALWAYS, CONDITIONS, applies_rotary
from kvspec.adapters.sglang import backend, plugin
from kvspec.adapters.sglang.describing import ONLY

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
