"""The connector of vLLM stores pages, and an engine of another size loads them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_serving import Engine, Request, configs, installed, made, until
from vllm_stored import PASSED, TABLES, computed, ended, engine, moved, stored

from kvspec.adapters.vllm import adapters
from kvspec.adapters.vllm.store_settings import StoreSettings, model_identity
from kvspec.errors import SpecError

pytestmark = [pytest.mark.adapters, pytest.mark.usefixtures("simulated")]


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """Provide the base class of vLLM for the connector."""
    with installed():
        yield


EAGLE = SimpleNamespace(method="eagle", draft_model_config=SimpleNamespace(model="d", revision="1"))


@pytest.mark.parametrize(("tp", "block"), [((1, 1), 4), ((2, 3), 4), ((3, 2), 8)])
def test_stored_pages_are_loaded_by_an_engine_of_another_size(
    tmp_path: Path, tp: tuple[int, int], block: int
) -> None:
    """All bytes are right. The first engine has ended before the second one starts."""
    with engine("one", tmp_path, tp[0]) as one:
        ended(one, computed(one))
    assert [("full", 18), ("window-8", 18)] == stored(tmp_path)
    with engine("two", tmp_path, tp[1], block) as two:
        tables = ([3, 5, 7, 9], [0, 8, 6, 4]) if block == 4 else ([3, 5], [8, 6])
        wanted = moved(12, *tables)
        two.spoil(wanted)
        request = Request("b", 14)
        assert (12, True) == two.decode(request, *tables)
        source = two.scheduler.get_external_cache_hit_sources(request, 12)
        assert {"disk": 12} == {kind.value: count for kind, count in source.items()}
        until(lambda: two.received.get("b") == tp[1], two)
        assert {} == two.failed
        assert [] == two.wrong(wanted)
        # A prompt that is shorter by a token ends with a whole page. Its last token is computed.
        assert (8, True) == two.decode(Request("c", 12), *tables)


def test_pages_behind_local_tokens_are_loaded(tmp_path: Path) -> None:
    """The first 4 tokens are in the prefix cache. They are not written."""
    with engine("one", tmp_path) as one:
        ended(one, computed(one))
        wanted = moved(12, [9, 10, 11, 4], [0, 3, 2, 1], cached=4)
        one.spoil(wanted)
        tables = tuple(table.block_ids.tolist() for table in wanted.consumer_blocks.values())
        assert (8, True) == one.decode(Request("b", 14), *tables, cached=4)
        until(lambda: one.received, one)
        assert [] == one.wrong(wanted)
        # All that is stored is here already.
        assert (0, False) == one.decode(Request("c", 14), *tables, cached=12)


def test_stored_pages_are_not_written_again(tmp_path: Path) -> None:
    """The second request of a prompt writes nothing, and holds no block for long."""
    with engine("one", tmp_path, 2) as one:
        ended(one, computed(one))
        times = [path.stat().st_mtime_ns for path in tmp_path.rglob("*,*")]
        ended(one, computed(one, "b"))
        assert times == [path.stat().st_mtime_ns for path in tmp_path.rglob("*,*")]


def test_blocks_are_held_until_all_ranks_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two ranks has not written yet when the request is aborted and its blocks are freed."""
    with engine("one", tmp_path, 2) as one:
        last, submit = one.workers[1]._threads, one.workers[1]._threads._saver.submit
        waiting: list[Any] = []
        monkeypatch.setattr(last._saver, "submit", lambda run: waiting.append(run) or Never())
        request = computed(one)
        request.status = SimpleNamespace(name="FINISHED_ABORTED")
        one.scheduler.request_finished_all_groups(request, PASSED)
        until(lambda: not one.workers[0]._threads._saves, one)
        assert [1, 2, 3, 5, 6, 8] == one.pool.used()
        numbers = [number for number, _ in last._saves]
        last._saves = [(number, submit(run)) for number, run in zip(numbers, waiting, strict=True)]
        until(lambda: not one.scheduler.has_pending_push_work(), one)
        assert [] == one.pool.used()
    assert [("full", 18), ("window-8", 18)] == stored(tmp_path)


class Never:
    """A save that does not end."""

    def done(self) -> bool:
        """Return False."""
        return False


@pytest.mark.parametrize("harm", ["flip", "delete"])
def test_damaged_page_is_computed(tmp_path: Path, harm: str) -> None:
    """The load fails on all ranks, the request is not offered the page again, others load."""
    with engine("one", tmp_path) as one:
        ended(one, computed(one))
    with engine("two", tmp_path, 2) as two:
        request = Request("b", 14)
        assert (12, True) == two.decode(request, [3, 5, 7, 9], [0, 8, 6, 4])
        path = max(tmp_path.rglob("*full,tp3*"))
        if harm == "delete":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        until(lambda: two.received.get("b") == 2, two)
        assert two.failed
        assert (0, False) == two.load(request, [3, 5, 7, 9], [0, 8, 6, 4])
        assert not two.scheduler.loads_pages("b")
        two.scheduler.request_finished_all_groups(request, ([], []))
        ended(two, computed(two, "c"))  # It stores the page that is missing.
        assert (12, True) == two.decode(Request("d", 14), [3, 5, 7, 9], [0, 8, 6, 4])
        until(lambda: two.received.get("d") == 2, two)
        assert "d" not in two.failed


def test_request_that_ends_while_it_loads_is_reported(tmp_path: Path) -> None:
    """VLLM frees its blocks then. The pins have ended, and nothing of it is saved."""
    with engine("one", tmp_path) as one:
        ended(one, computed(one))
        request = Request("b", 14)
        one.tables["b"] = [9, 10, 11, 4], [0, 3, 2, 1]
        assert (12, True) == one.decode(request, *one.tables["b"])
        request.num_computed_tokens = 12  # As vLLM counts it.
        assert (False, None) == one.scheduler.request_finished_all_groups(request, ([], []))
        until(lambda: one.received, one)
        assert not one.scheduler.loads_pages("b")
        assert not one.scheduler.has_pending_push_work()


def test_preempted_request_finds_its_own_pages(tmp_path: Path) -> None:
    """A request that was preempted loads what it had computed, also its generated tokens."""
    with engine("one", tmp_path) as one:
        request = computed(one)
        until(lambda: not one.scheduler.has_pending_push_work(), one)
        request.num_computed_tokens = 0
        request._all_token_ids += [5, 6, 7]
        assert (12, True) == one.load(request, [9, 10, 11, 4], [0, 3, 2, 1])
        until(lambda: one.received, one)
        assert {} == one.failed


def test_session_whose_tokens_change_stores_nothing(tmp_path: Path) -> None:
    """VLLM replaces the last token of a session that goes on, and its name would be wrong."""
    with engine("one", tmp_path) as one:
        ended(one, computed(one, resumable=True))
    assert [] == stored(tmp_path)


@pytest.mark.parametrize(
    ("own", "fields"),
    [
        ({}, {"cache_salt": "tenant"}),
        ({}, {"lora_request": SimpleNamespace(lora_name="l", lora_path="")}),
        ({"revision": "2"}, {}),
        ({"store": {"weights": "step-2"}}, {}),
    ],
)
def test_pages_of_other_values_are_not_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: Any, fields: Any
) -> None:
    """The log names the field that is not stated, or the difference to the pages that are there."""
    with engine("one", tmp_path) as one:
        ended(one, computed(one))
    caplog.set_level(logging.INFO)
    with engine("two", tmp_path, **own) as two:
        request = Request("b", 14)
        vars(request).update(fields)
        assert (0, False) == two.decode(request, *TABLES)
    words = "adapter is not stated" if "lora_request" in fields else "pages of another space"
    assert "cache_salt" in fields or words in caplog.text


def test_pages_of_an_adapter_move_only_with_the_files_that_workers_have_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler reads the files when a request comes, and a worker may have read others."""
    loaded: dict[int, str | None] = {1: "of other files"}
    monkeypatch.setattr(adapters, "_loaded", loaded)
    monkeypatch.setattr(adapters, "_kept", {})
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_model.safetensors").write_bytes(b"weights")
    path = str(tmp_path / "sql")
    lora = SimpleNamespace(lora_name="sql", lora_path=path, lora_int_id=1)
    with engine("one", tmp_path / "pages") as one:
        ended(one, computed(one, lora_request=lora))
        assert [] == stored(tmp_path / "pages")
        assert "0 of 12 objects: SpecError: adapters[1]=" in caplog.text
        loaded[1] = adapters.digest_at(path)
        ended(one, computed(one, "again", lora_request=lora))
    assert [("full", 18), ("window-8", 18)] == stored(tmp_path / "pages")
    # With a manager, a worker that has not read the files does so before it loads pages.
    right = loaded[1]
    manager = SimpleNamespace(list_adapters=set)
    manager._load_adapter = lambda lora: loaded.setdefault(lora.lora_int_id, right)
    for number, (found, managers, fails) in enumerate((
        ({1: None}, [], True), ({1: right}, [], False), ({}, [], True), ({}, [manager], False),
    )):  # fmt: skip
        loaded.clear()
        loaded.update(found)
        monkeypatch.setattr(adapters, "_managers", managers)
        with engine(f"two-{number}", tmp_path / "pages") as two:
            request = Request("b", 14, lora_request=lora)
            assert (12, True) == two.decode(request, *TABLES)
            until(lambda two=two: two.received.get("b"), two)  # type: ignore[misc]
            assert fails == bool(two.failed)


@pytest.mark.parametrize("before", [False, True])
def test_ticket_wins_over_stored_pages(tmp_path: Path, *, before: bool) -> None:
    """A decode engine reads the prompt from its prefill engine. It stores only complete pages."""
    with (
        engine("p", tmp_path / "p") as producer,
        engine("d", tmp_path / "d") as consumer,
    ):
        if before:
            ended(consumer, computed(consumer, "before"))
        request = computed(producer)
        request.kv_transfer_params = {"do_remote_decode": True}
        held, params = producer.scheduler.request_finished_all_groups(request, PASSED)
        assert held
        other = Request("b", 14, params)
        consumer.tables["b"] = PASSED
        assert (13, True) == consumer.decode(other, *PASSED)
        until(lambda: consumer.received and producer.sent, producer, consumer)
        consumer.step(b=1)
        other.num_computed_tokens = 14
        ended(consumer, other)
    # The query of token 13 reads the window from token 6 on, so only page 2 is complete.
    assert [("full", 18), ("window-8", 18 if before else 6)] == stored(tmp_path / "d")


def test_page_that_cannot_be_written_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on, and the blocks are free."""
    with engine("one", tmp_path, store={"limit": 1000}) as one:
        ended(one, computed(one))
    assert "not stored" in caplog.text
    assert [] == stored(tmp_path)


def test_store_settings_are_checked(tmp_path: Path) -> None:
    """An engine does not start if the names of its pages would be incomplete."""
    for extra, field in (
        ({"store": 5}, "kv_connector_extra_config['store']"),
        ({"store": {"directory": "x", "other": 1}}, "kv_connector_extra_config['store']"),
        ({"store": {"directory": "x", "page_tokens": 0}}, "page_tokens"),
        ({"store": "x", "policy": "fail"}, "kv_load_failure_policy"),
        ({"store": "x", "speculative": EAGLE}, "speculative_config.method"),
        ({"store": "x", "diffusion": True}, "diffusion_config"),
    ):
        fields = dict(extra)
        diffusion = fields.pop("diffusion", None)
        vllm_config, _ = configs("e", 0, 1, 4, fields)
        vllm_config.diffusion_config = diffusion and SimpleNamespace(canvas_length=32)
        with pytest.raises(SpecError) as error:
            made(vllm_config, "SCHEDULER", None)
        assert field in error.value.field
    with pytest.raises(SpecError) as error:
        Engine("e", store=str(tmp_path))
    assert "revision" in error.value.field
    vllm_config, _ = configs("e", 0, 1, 4, {"store": str(tmp_path)})
    vllm_config.model_config.hf_overrides = lambda config: config
    vllm_config.model_config.revision = "1"
    with pytest.raises(SpecError) as error:
        StoreSettings(directory=str(tmp_path)).open(vllm_config, None)  # type: ignore[arg-type]
    assert "overrides" in error.value.field
    vllm_config.load_config = SimpleNamespace(load_format="dummy")
    with pytest.raises(SpecError) as error:
        StoreSettings(directory=str(tmp_path)).open(vllm_config, None)  # type: ignore[arg-type]
    assert "weights" in error.value.field


@dataclasses.dataclass
class Quantization:
    """Settings of quantization, as vLLM keeps them: in data classes, inside of which others are."""

    dtype: str = "fp8"
    ignore: tuple[str, ...] = ()


def test_settings_that_change_values_change_the_name_of_the_model(tmp_path: Path) -> None:
    """VLLM's identifiers of images contain the settings of a request, not those of an engine."""
    draft = {"model": "draft", "revision": "1", "quantization": None}
    plain = {"mm_processor_kwargs": None, "video_pruning_rate": None, "video_pruning_method": "evs"}
    scales = tmp_path / "one", tmp_path / "other"
    for number, path in enumerate(scales):
        path.write_text(str(number))
    pruned, loose = {"video_pruning_rate": 0.5}, {"size": {"longest_edge": 9}}

    def identity(media: Any = None, drafted: Any = None, **model: Any) -> Any:
        vllm_config, _ = configs("e", 0, 1, 4, {"revision": "1"})
        vars(vllm_config.model_config).update(model)
        media = None if media is None else SimpleNamespace(**{**plain, **media})
        vllm_config.model_config.multimodal_config = media
        drafted = drafted and SimpleNamespace(**{**draft, **drafted})
        vllm_config.cache_config = SimpleNamespace(cache_dtype="auto")
        speculative = SimpleNamespace(
            method="draft_model", draft_model_config=drafted, use_multi_module_mtp=None
        )
        vllm_config.speculative_config = drafted and speculative
        return model_identity(vllm_config, "")

    config = SimpleNamespace(_commit_hash="beef")
    identities = [
        identity(),
        identity({"mm_processor_kwargs": loose}),
        identity({"mm_processor_kwargs": {"do_rescale": False}}),
        identity(pruned),
        identity({**pruned, "video_pruning_method": "vidcom2"}),
        identity({"mm_encoder_attn_dtype": "fp8"}),
        *(
            identity({"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(path)})
            for path in scales
        ),
        identity(hf_config_path="org/other", hf_config=config),
        identity(code_revision="2"),
        identity(model_class_overrides={"A": "B"}),
        identity(drafted={"model": "draft"}),
        identity(drafted={"quantization": "fp8"}),
        identity(drafted={"code_revision": "fp8"}),
        identity(quantization="fp8"),
        *(
            identity(quantization="online", quantization_config=each)
            for each in (
                {"ignore": []},
                {"ignore": ["lm_head"]},
                Quantization(),
                Quantization(dtype="fp4"),
            )
        ),
    ]
    assert "" == identities[0].overrides
    assert len(identities) == len({each.digest for each in identities})
    assert identities[0] == identity({}) == identity({"mm_processor_kwargs": {"device": "cuda"}})
    assert identities[0] == identity(hf_config_path="tiny", code_revision=None)
    # A checkpoint that is quantised already is used as it is, by another kernel of each device.
    stored = SimpleNamespace(quantization_config={"quant_method": "gptq"})
    assert identities[0] == identity(quantization="gptq_marlin", hf_config=stored)
    assert ("overrides",) == identity(hf_config_path="/a/folder").unstated
    lost = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(tmp_path / "none")}
    assert ("overrides",) == identity(lost).unstated
    assert ("overrides",) == identity({"mm_processor_kwargs": {"size": object()}}).unstated


@pytest.mark.parametrize(
    ("cache", "stated"),
    [
        ({"cache_dtype": "auto"}, ""), ({"cache_dtype": "bfloat16"}, ""),
        ({"cache_dtype": "fp8"}, '{"dtype": "bfloat16"}'),
        ({"cache_dtype": "float16"}, '{"dtype": "bfloat16"}'),
        # The states of a model without attention may have another type than the computation.
        ({"cache_dtype": "auto", "mamba_cache_dtype": "float32", "is_attention_free": True},
         '{"dtype": "bfloat16"}'),
        ({"mamba_cache_dtype": "auto", "is_attention_free": True}, ""),
        ({"mamba_cache_dtype": "bfloat16", "is_attention_free": True}, ""),
        ({"cache_dtype": "auto", "mamba_cache_dtype": "float32", "is_attention_free": False}, ""),
    ],
)  # fmt: skip
def test_type_of_computation_is_stated_if_no_cache_has_it(
    cache: dict[str, Any], stated: str
) -> None:
    vllm_config, _ = configs("e", 0, 1, 4, {"revision": "1"})
    vllm_config.model_config.dtype = "bfloat16"
    vllm_config.cache_config = SimpleNamespace(**cache)
    assert stated == model_identity(vllm_config, "").overrides


@pytest.mark.parametrize(
    ("load_format", "stated"),
    [("auto", ""), ("safetensors", ""), ("dummy", None), ("tensorizer", None), ("Dummy", None),
     ("ipc_cache", None), ("modelexpress", None), ("a_plugin", None)],
)  # fmt: skip
def test_weights_of_other_files_are_stated_only_by_the_user(
    load_format: str, stated: str | None
) -> None:
    vllm_config, _ = configs("e", 0, 1, 4, {"revision": "1"})
    vllm_config.load_config = SimpleNamespace(load_format=load_format)
    assert stated == model_identity(vllm_config, "").weights
    assert "2" == model_identity(vllm_config, "2").weights


def test_attention_that_is_not_causal_changes_the_name_of_the_model() -> None:
    names = "use_non_causal", "use_prefill_query_quantization", "disable_flashinfer_q_quantization"
    digests = set()
    for name in (None, *names):
        vllm_config, _ = configs("e", 0, 1, 4, {"revision": "1"})
        own = {each: each == name for each in names}
        vllm_config.attention_config = SimpleNamespace(**own)
        digests.add(model_identity(vllm_config, "").digest)
    assert len(names) + 1 == len(digests)


def test_config_of_another_repository_does_not_state_the_revision_of_the_weights() -> None:
    vllm_config, _ = configs("e", 0, 1, 4, {})
    vllm_config.model_config.hf_config = SimpleNamespace(_commit_hash="beef")
    vllm_config.cache_config = SimpleNamespace(cache_dtype="auto")
    vllm_config.speculative_config = None
    assert "beef" == model_identity(vllm_config, "").revision
    vllm_config.model_config.hf_config_path = "org/other"
    assert None is model_identity(vllm_config, "").revision


def test_request_stores_the_page_that_it_could_not_load(tmp_path: Path) -> None:
    """It computes all pages after the failure, and the page is found again."""
    with engine("one", tmp_path) as one:
        ended(one, computed(one))
        request = Request("b", 14)
        one.tables["b"] = TABLES
        assert (12, True) == one.decode(request, *TABLES)
        max(tmp_path.rglob("*full,tp3*")).unlink()
        until(lambda: one.received, one)
        assert one.failed
        assert (0, False) == one.load(request, *TABLES)
        one.step(b=14)
        request.num_computed_tokens = 14
        ended(one, request)
    assert [("full", 18), ("window-8", 18)] == stored(tmp_path)
