"""The backend fits the SGLang that is installed. A nightly workflow installs it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvspec.adapters.sglang import backend, plugin
from kvspec.adapters.sglang.describing import ONLY

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
    ):
        assert hasattr(method, "__wrapped__")
    assert hasattr(prefill.get_kv_class, "__wrapped__")
    assert hasattr(decode.get_kv_class, "__wrapped__")


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
