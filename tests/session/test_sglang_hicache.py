"""Tests the storage of SGLang's host pools. Only SGLang's hashes and settings are imitated."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_like as like
import sglang_serving as serving

from kvspec.adapters.sglang import hicache
from kvspec.adapters.sglang.describing import ONLY, BackendSettings
from kvspec.adapters.sglang.page_hashes import PageHashes
from kvspec.errors import SpecError
from kvspec.stored import PromptIdentity, page_names

pytestmark = pytest.mark.adapters

PAGE, PAGES, WIDTH = 8, 6, 8
TOKENS = list(range(10, 10 + 3 * PAGE))
SPACE = "0" * 64


def hashes(tokens: Any, before: str | None, page_size: int) -> list[str]:
    """Return hashes as SGLang does: a chain over the tokens."""
    found = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        content = array("q", tokens[start : start + page_size]).tobytes()
        before = hashlib.sha256(bytes.fromhex(before or "") + content).hexdigest()
        found.append(before)
    return found


def seed(extra_key: str | None, salt: str | None) -> str | None:
    """Return the start of the hashes of a caller."""
    return None if extra_key is salt is None else hashlib.sha256(f"{extra_key} {salt}".encode()).hexdigest()  # fmt: skip  # noqa: E501


def named(**changed: Any) -> PageHashes:
    own: dict[str, Any] = {"vocabulary": 100, "hashes": lambda t, b: hashes(t, b, PAGE)}
    return PageHashes(SPACE, 4, PAGE, **own | changed)


def names_of(tokens: Sequence[int], **prompt: Any) -> tuple[str, ...]:
    return page_names(SPACE, tokens, 4, PromptIdentity.of_text(**prompt))


def test_hash_of_a_prompt_has_the_names_of_its_tokens() -> None:
    pages = named()
    pages.add_prompt([*TOKENS, 5], None, "")
    found = pages.run(hashes(TOKENS, None, PAGE))
    assert [name for page in found for name in page.names] == [*names_of(TOKENS)]
    assert [page.first for page in found] == [0, 2, 4]


def test_salted_prompt_has_other_hashes_and_names() -> None:
    pages = named()
    pages.add_prompt(TOKENS, seed(None, "tenant"), "tenant")
    assert not pages.run(hashes(TOKENS, None, PAGE))
    (first, *_) = pages.run(hashes(TOKENS, seed(None, "tenant"), PAGE))
    assert first.names == names_of(TOKENS, salt="tenant")[:2]


def test_node_continues_the_names_before_it() -> None:
    """A node has generated tokens, which no prompt had."""
    pages, grown = named(), [*TOKENS, *range(40, 40 + 2 * PAGE)]
    pages.add_prompt(TOKENS, None, "")
    wanted = hashes(grown, None, PAGE)
    pages.add_pages(grown[2 * PAGE :], wanted[2:], wanted[1])
    found = pages.run(wanted)
    assert [name for page in found for name in page.names] == [*names_of(grown)]


def test_node_without_known_pages_before_it_has_no_names() -> None:
    pages, wanted = named(), hashes(TOKENS, None, PAGE)
    pages.add_pages(TOKENS[PAGE:], wanted[1:], wanted[0])
    assert not pages.run(wanted[1:])
    pages.add_pages(TOKENS, wanted, None)
    assert len(pages.run(wanted)) == len(wanted)


def test_node_of_another_caller_never_gets_the_names_of_this_one() -> None:
    """The node begins a prompt, but its hashes begin with the seed of a caller."""
    pages, wanted = named(), hashes(TOKENS, seed(None, "tenant"), PAGE)
    pages.add_pages(TOKENS, wanted, None)
    assert not pages.run(wanted)


def test_page_of_an_image_and_all_behind_it_have_no_names() -> None:
    """SGLang puts a number larger than any token in the place of an image."""
    pages, tokens = named(), [*TOKENS[:PAGE], 1_000_007, *TOKENS[PAGE + 1 :]]
    pages.add_prompt(tokens, None, "")
    wanted = hashes(tokens, None, PAGE)
    pages.add_pages(tokens, wanted, None)
    assert len(pages.run(wanted)) == 1


def test_prompt_that_is_looked_up_again_is_forgotten_last() -> None:
    pages, other = named(most=4), [*range(50, 50 + 2 * PAGE)]
    for tokens in (TOKENS[: 2 * PAGE], other[:PAGE], TOKENS[: 2 * PAGE], other):
        pages.add_prompt(tokens, None, "")
    for tokens in (TOKENS[: 2 * PAGE], other):
        assert len(pages.run(hashes(tokens, None, PAGE))) == 2


def test_oldest_hashes_are_forgotten() -> None:
    pages = named(most=2)
    pages.add_prompt(TOKENS, None, "")
    first, *others = hashes(TOKENS, None, PAGE)
    assert pages.find(first) is None
    assert len(pages.run(others)) == 2


@pytest.mark.parametrize("size", [3, 16])
def test_stored_page_must_divide_the_page(size: int) -> None:
    with pytest.raises(SpecError) as raised:
        PageHashes(SPACE, size, PAGE, vocabulary=9, hashes=lambda *_: [])
    assert raised.value.field == "page_tokens"


class Host:
    """A host pool of SGLang over numpy: keys and values, or latents."""

    def __init__(self, layout: str, heads: int = 0, *, value: int = 0) -> None:
        self.layout, self.page_size, layers = layout, PAGE, serving.LAYERS
        slots, width = PAGES * PAGE, (heads or 1, WIDTH)
        shape: tuple[int, ...] = {
            "layer_first": (layers, slots, *width),
            "page_first": (slots, layers, *width),
            "page_first_direct": (PAGES, layers, PAGE, *width),
            "page_head": (PAGES, width[0], PAGE, layers, WIDTH),
        }[layout]
        self.kv_buffer = np.full((2, *shape) if heads else shape, value, np.uint16)
        # The axes: parts, layers, pages, tokens, heads, elements.
        whole = self.kv_buffer if heads else self.kv_buffer[None]
        cut = (len(whole), *self._cut(whole.shape[1:]))
        order = {"layer_first": (0, 1, 2, 3, 4, 5), "page_head": (0, 4, 1, 3, 2, 5)}
        page_first = (0, 3, 1, 2, 4, 5) if layout == "page_first" else (0, 2, 1, 3, 4, 5)
        self.rows = whole.reshape(cut).transpose(order.get(layout, page_first))

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return *shape* with slots divided into pages."""
        place = {"layer_first": 1, "page_first": 0}.get(self.layout)
        if place is None:
            return shape
        return (*shape[:place], PAGES, PAGE, *shape[place + 1 :])


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imitate SGLang's function for hashes and its settings."""
    utils = SimpleNamespace(get_hash_str=hashes, storage_namespace_seed=seed)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.utils", utils)
    monkeypatch.setenv("KVSPEC_SGLANG", '{"model": "m", "revision": "1"}')
    settings = {name: values[0] for name, values in (ONLY | hicache._HICACHE).items()}
    more = {"model_path": "m", "revision": None, "load_format": "auto", "kv_cache_dtype": "auto",
            "json_model_override_args": "{}", "weight_version": "default"}  # fmt: skip
    config = SimpleNamespace(get_total_num_kv_heads=lambda: serving.HEADS, vocab_size=100,
                             quantization=None, hf_config=None, is_multimodal=False)  # fmt: skip
    runner = SimpleNamespace(model_config=config, model=serving.model())
    process = hicache.Process(SimpleNamespace(**settings | more), runner)
    monkeypatch.setattr(hicache, "PROCESS", process)
    return process


def opened(process: Any, directory: Path, layout: str, rank: int = 0, tp: int = 1, *,
           latent: bool = False, value: int = 0, **settings: Any) -> tuple[Any, Host]:  # fmt: skip
    """Return the storage of a rank, and its host pool."""
    heads = 0 if latent else serving.HEADS // tp
    pool: Any = like.MHATokenToKVPool(PAGES * PAGE, max(heads, 1), WIDTH, page_size=PAGE)
    if latent:
        pool = like.MLATokenToKVPool(PAGES * PAGE, WIDTH, page_size=PAGE)
    process.runner.token_to_kv_pool = pool
    extra = {"interface_v1": 1, "directory": str(directory), "page_tokens": 4, "head_groups": 2,
             **settings}  # fmt: skip
    config = SimpleNamespace(tp_rank=rank, tp_size=tp, is_mla_model=latent, extra_config=extra)
    storage, host = hicache.Pages(config), Host(layout, heads, value=value)
    storage.register_mem_pool_host(host)
    storage.register_mem_host_pool_v2(host, "kv")
    return storage, host


def indices(*pages: int) -> Any:
    """Return SGLang's indices of all tokens of *pages*."""
    return np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def stored(process: Any, directory: Path, layout: str, tp: int) -> tuple[list[str], list[Host]]:
    """Store a prompt from pages 4, 0 and 2 of each rank. Return its hashes and the host pools."""
    hosts, wanted = [], hashes(TOKENS, None, PAGE)
    for rank in range(tp):
        storage, host = opened(process, directory, layout, rank, tp)
        host.rows[...] = np.random.default_rng(rank).integers(1, 1 << 16, host.rows.shape)
        storage.name_prompt(TOKENS, None, None)
        assert storage.batch_set_v1(wanted, indices(4, 0, 2)) == [True] * 3
        hosts.append(host)
    return wanted, hosts


@pytest.mark.parametrize("layout", [*hicache._LAYOUTS])
def test_pages_of_two_ranks_are_loaded_by_one_in_another_layout(
    layout: str, sglang: Any, tmp_path: Path
) -> None:
    wanted, hosts = stored(sglang, tmp_path, layout, tp=2)
    storage, host = opened(sglang, tmp_path, "page_first", value=7)
    assert storage.batch_exists(wanted) == 0  # No tokens are known yet.
    storage.name_prompt(TOKENS, None, None)
    assert storage.batch_exists(wanted) == 3
    assert storage.batch_get_v1(wanted[1:], indices(5, 1)) == [True, True]
    expected = np.concatenate([each.rows for each in hosts], axis=4)[:, :, [0, 2]]
    assert (host.rows[:, :, [5, 1]] == expected).all()
    assert (host.rows[:, :, [0, 2, 3, 4]] == 7).all()


def test_latents_are_stored_by_the_first_rank_and_loaded_by_all(
    sglang: Any, tmp_path: Path
) -> None:
    wanted = hashes(TOKENS, None, PAGE)
    for rank in range(2):
        storage, host = opened(sglang, tmp_path, "layer_first", rank, 2, latent=True)
        storage.name_prompt(TOKENS, None, None)
        if rank == 0:
            host.rows[...] = np.random.default_rng().integers(1, 1 << 16, host.rows.shape)
            first = host.rows[:, :, :3].copy()
            assert storage.batch_set_v1(wanted, indices(0, 1, 2)) == [True] * 3
    assert storage.batch_get_v1(wanted, indices(3, 4, 5)) == [True] * 3
    assert (host.rows[:, :, 3:] == first).all()


def prefix(keys: list[str]) -> Any:
    """Return SGLang's `HiCacheStorageExtraInfo`."""
    return SimpleNamespace(prefix_keys=keys)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_nodes_behind_a_prefix_are_stored(
    known: bool, limit: int | None, sglang: Any, tmp_path: Path
) -> None:
    """SGLang may have forgotten the hashes before a node, and so may kvspec their names."""
    storage, host = opened(sglang, tmp_path, "layer_first", limit=limit)
    host.rows[...] = np.random.default_rng(1).integers(1, 1 << 16, host.rows.shape)
    wanted = hashes(TOKENS, None, PAGE)
    storage.name_prompt(TOKENS, None, None)
    for number in range(3):
        extra = prefix(wanted[:number]) if known else None
        assert storage.batch_set_v1(wanted[number : number + 1], indices(number), extra) == [True]
    other, other_host = opened(sglang, tmp_path, "layer_first", value=7)
    other.name_prompt(TOKENS, None, None)
    assert other.batch_exists(wanted) == 3
    assert other.batch_get_v1(wanted, indices(5, 4, 3)) == [True] * 3
    assert (other_host.rows[:, :, [5, 4, 3]] == host.rows[:, :, :3]).all()


def test_pages_that_are_loaded_leave_late_and_the_first_ones_last(
    sglang: Any, tmp_path: Path
) -> None:
    storage, _ = opened(sglang, tmp_path, "layer_first", limit=1 << 20)
    prompts = [[start + token for token in TOKENS] for start in (0, 30)]
    found = []
    for tokens in prompts:
        storage.name_prompt(tokens, None, None)
        wanted = hashes(tokens, None, PAGE)
        for number in range(3):
            before = prefix(wanted[:number])
            assert all(storage.batch_set_v1([wanted[number]], indices(number), before))
        found.append(wanted)
    first = found[0]
    for number in range(3):
        before = prefix(first[:number])
        assert all(storage.batch_get_v1([first[number]], indices(number), before))
    left = []
    while there := [storage.batch_exists(wanted) for wanted in found]:
        left.append(there)
        if not any(there):
            break
        storage.store.objects.free_bytes(1)
    assert [3, 3] == left[0]
    assert [3, 0] in left, "the prompt that was loaded left first"
    assert [1, 0] in left


def test_damaged_page_ends_the_load(sglang: Any, tmp_path: Path) -> None:
    wanted, _ = stored(sglang, tmp_path, "layer_first", tp=1)
    storage, host = opened(sglang, tmp_path, "layer_first", value=7)
    storage.name_prompt(TOKENS, None, None)
    page = storage.hashes.find(wanted[1]).names[1]
    file, _ = tmp_path.rglob(f"{page}*")
    with file.open("r+b") as opened_file:
        opened_file.seek(-1, 2)
        last = opened_file.read(1)[0]
        opened_file.seek(-1, 2)
        opened_file.write(bytes([last ^ 1]))
    # A buffer for all pages: whole pages before the damaged one may stay away, too.
    got = storage.batch_get_v1(wanted, indices(0, 1, 2))
    assert got[1:] == [False, False]
    assert (host.rows[:, :, 1:] == 7).all()


@pytest.mark.parametrize("change", ["salt", "revision", "weights", "weight_version", "torchao"])
def test_other_salt_revision_or_weights_miss(change: str, sglang: Any, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    wanted, _ = stored(sglang, tmp_path, "layer_first", tp=1)
    salt = "tenant" if change == "salt" else None
    if change == "revision":
        monkeypatch.setenv("KVSPEC_SGLANG", '{"model": "m", "revision": "2"}')
    if change == "weight_version":
        sglang.server_args.weight_version = "2"
    if change == "torchao":
        sglang.server_args.torchao_config = "int4wo-32"
    more = {"weights": "2"} if change == "weights" else {}
    storage, _ = opened(sglang, tmp_path, "layer_first", **more)
    storage.name_prompt(TOKENS, None, salt)
    wanted = hashes(TOKENS, seed(None, salt), PAGE)
    assert len(storage.hashes.run(wanted)) == 3
    assert storage.batch_exists(wanted) == 0


def test_key_of_sglang_and_a_salt_of_equal_words_have_other_names(
    sglang: Any, tmp_path: Path
) -> None:
    storage, _ = opened(sglang, tmp_path, "layer_first")
    found = []
    # A caller may choose the last salt, which names what SGLang makes of the key of another one.
    guessed = f"sglang:{seed('a', 'b')}"
    for key, salt in ((None, "a\nb"), ("a", "b"), ("a\nb", None), (None, guessed)):
        storage.name_prompt(TOKENS, key, salt)
        (page, *_) = storage.hashes.run(hashes(TOKENS, seed(key, salt), PAGE))
        found.append(page.names)
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    ("cache", "quantization", "stated"),
    [
        ("auto", None, ("", "")), ("bf16", None, ("", "")), ("bfloat16", None, ("", "")),
        ("fp8_e4m3", None, ('{"dtype": "bfloat16"}', "")), ("auto", "fp8", ("", "fp8")),
    ],
)  # fmt: skip
def test_identity_states_only_what_the_engine_changes(
    sglang: Any, cache: str, quantization: str | None, stated: tuple[str, str]
) -> None:
    """An engine of another maker with the same weights and the same types has an equal identity."""
    config, args = sglang.runner.model_config, sglang.server_args
    config.dtype, config.quantization, args.kv_cache_dtype = "bfloat16", quantization, cache
    found = hicache._identity(args, sglang.runner, BackendSettings.of(args), "")
    assert stated == (found.overrides, found.quantization)
    config.hf_config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    assert "" == hicache._identity(args, sglang.runner, BackendSettings.of(args), "").quantization


def test_updated_weights_end_all_stores_and_loads(sglang: Any, tmp_path: Path) -> None:
    wanted, _ = stored(sglang, tmp_path, "layer_first", tp=1)
    storage, _ = opened(sglang, tmp_path, "layer_first")
    storage.name_prompt(TOKENS, None, None)
    hicache.weights_changed()
    assert storage.batch_exists(wanted) == 0
    assert storage.batch_get_v1(wanted, indices(0, 1, 2)) == [False] * 3
    assert storage.batch_set_v1(wanted, indices(0, 1, 2)) == [False] * 3


REFUSED: dict[str, tuple[str, Any]] = {
    "enable_lora": ("enable_lora", True),
    "load_format": ("load_format", "dummy"),
    "disaggregation_mode": ("disaggregation_mode", "prefill"),
    "pp_size": ("pp_size", 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_engine_whose_pages_have_no_names_is_refused(
    name: str, sglang: Any, tmp_path: Path
) -> None:
    setting, value = REFUSED[name]
    setattr(sglang.server_args, setting, value)
    with pytest.raises(SpecError, match=setting):
        opened(sglang, tmp_path, "layer_first")


@pytest.mark.parametrize("value", [True, None])
def test_engine_for_images_is_refused(value: object, sglang: Any, tmp_path: Path) -> None:
    sglang.runner.model_config.is_multimodal = value
    with pytest.raises(SpecError) as raised:
        opened(sglang, tmp_path, "layer_first")
    assert raised.value.field == "model_config.is_multimodal"


def test_unknown_revision_is_refused(
    sglang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSPEC_SGLANG", '{"model": "m"}')
    with pytest.raises(SpecError) as raised:
        opened(sglang, tmp_path, "layer_first")
    assert raised.value.field == "revision"


def test_engine_without_the_plugin_is_refused(sglang: Any, tmp_path: Path) -> None:
    storage, host = opened(sglang, tmp_path, "layer_first")
    sglang.runner = None
    with pytest.raises(SpecError, match="installed"):
        storage.register_mem_pool_host(host)


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ({"directory": "d"}, "interface_v1"),
        ({"interface_v1": 1}, "directory"),
        ({"interface_v1": 1, "directory": "d", "page_token": 4}, "page_token"),
        ({"interface_v1": 1, "directory": "d", "page_tokens": 0}, "page_tokens"),
        ({"interface_v1": 1, "directory": ""}, "directory"),
    ],
)
def test_wrong_configuration_is_refused(config: dict[str, Any], wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        hicache.HiCacheSettings.of(config)


def test_other_pools_are_refused(sglang: Any, tmp_path: Path) -> None:
    storage, _ = opened(sglang, tmp_path, "layer_first")
    with pytest.raises(SpecError, match="mamba"):
        storage.register_mem_host_pool_v2(Host("layer_first"), "mamba")


def test_plugin_passes_the_tokens_of_sglang_on(sglang: Any, tmp_path: Path) -> None:
    """The calls are those of SGLang's radix cache and of its controller."""
    storage, _ = opened(sglang, tmp_path, "layer_first")
    controller = SimpleNamespace(storage_backend=storage)
    cache = SimpleNamespace(cache_controller=controller, hicache_storage_pass_prefix_keys=False)
    looked_up, written = [], []
    hicache.prompt_is_looked_up(
        lambda *args, **more: looked_up.append((args, more)), cache, "request", 3, TOKENS[PAGE:],
        None, None, matched_prefix_tokens=TOKENS[:PAGE], extra_key=None, cache_salt="tenant",
    )  # fmt: skip
    before = hashes(TOKENS, seed(None, "tenant"), PAGE)
    assert len(storage.hashes.run(before)) == 3
    hicache.node_is_stored(cache, 3)
    assert cache.hicache_storage_pass_prefix_keys
    later = [*range(40, 40 + PAGE)]
    node = hashes(later, before[-1], PAGE)
    hicache.pages_are_stored(
        lambda *args, **more: written.append((args, more)), controller, indices(3), later, node,
        before, extra_pools=None,
    )  # fmt: skip
    (found,) = storage.hashes.run(node)
    names = storage.store.names([*TOKENS, *later], PromptIdentity.of_text(salt="tenant"))
    assert found.names == names[-2:]
    assert len(looked_up) == len(written) == 1
