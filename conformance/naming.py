"""Which facts of a request are in the names of stored pages of vLLM, SGLang and LMCache.

`python conformance/naming.py NAME` names a page of one request, and then of requests that differ in
one fact. It calls the installed code of the project, and keeps the results in `naming.json`.
Without a name, it writes `naming.md` from the results. `conformance/run naming` does both.

How it works:
    `kvspec.testing.differing` has the requests, from which the kit makes its pairs of prompts, too.
    Each fact is put where the project keeps it: revision and quantization in its configuration,
    salt and adapter in its request. Then the project's own code makes the name. A fact is in the
    name if the name of the changed request differs. vLLM gets a stand-in for its configuration with
    an attribute for every fact, so a fact that is missing in the name was there, but was not read.
"""

# ruff: noqa: PLC0415 - each project is imported in its own environment
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from array import array
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvspec.testing import differing

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "naming.json", HERE / "naming.md"
IMAGE_TOKEN = 9


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything on which the values and the bytes of a page depend, of a request of 12 tokens."""

    tokens: tuple[int, ...]
    image: str | None  # The hash of an image of two tokens.
    image_start: int
    adapter: str | None
    adapter_weights: str
    embeddings: int | None
    salt: str | None
    model: str
    revision: str
    weights: str
    quantization: str | None
    overrides: str
    dtype: str
    scale: float
    layout: str
    block: int
    adapter_path: str = "/adapters/sql"
    rope_theta: float = 10000.0
    heads: int = 8
    tp_size: int = 1


def facts_of(fields: Mapping[str, Any]) -> Facts:
    """Return the facts of a request with the *fields* of `kvspec.testing.differing`."""
    image, start, _ = next(iter(fields["media"]), (None, 0, 0))
    name, _, weights = fields["adapter"].partition("@")
    return Facts(
        tokens=fields["token_ids"],
        image=image,
        image_start=start,
        adapter=name or None,
        adapter_weights=weights,
        embeddings=int(fields["embeddings"]) if fields["embeddings"] else None,
        salt=fields["salt"] or None,
        model=fields["model"],
        revision=fields["revision"],
        weights=fields["weights"],
        quantization=fields["quantization"] or None,
        overrides=fields["overrides"],
        dtype=_DTYPES[fields["dtype"]],
        scale=1.0 if fields["scales_digest"] is None else 2.0,
        layout=_LAYOUTS[fields["layout"]],
        block=fields["page_tokens"],
    )


# The names by which the projects know a type of a cache, and a layout.
_DTYPES = {"bfloat16": "bfloat16", "float8_e4m3fn": "fp8_e4m3"}
_LAYOUTS = {"BLHNC": "HND", "BLNHC": "NHD"}
BASE = facts_of(differing.FULL_REQUEST)
# Facts that kvspec has in one of the others: in the content of an adapter, and in the overrides or
# the placement of a model.
_OWN: dict[str, dict[str, Any]] = {
    "name of the adapter": {"adapter": "law"},
    "path of the adapter": {"adapter_path": "/adapters/law"},
    "rotation of the keys": {"rope_theta": 500000.0},
    "heads of the model": {"heads": 4},
    "TP size": {"tp_size": 2},
}
CHANGES: dict[str, Facts] = {
    **{
        fact: facts_of(differing.FULL_REQUEST | fields)
        for fact, fields in differing.CHANGES.items()
    },
    **{fact: dataclasses.replace(BASE, **fields) for fact, fields in _OWN.items()},
}
"""A request that differs from the first one in one fact, by the name of the fact in the table."""


def vllm_block_hashes(facts: Facts) -> list[bytes]:
    """Return the block hashes of vLLM's own `Request`."""
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256)
    images, embeds = None, None
    if facts.image is not None:
        place = PlaceholderRange(offset=facts.image_start, length=2)
        images = [MultiModalFeatureSpec(None, "image", facts.image, place)]
    if facts.embeddings is not None:
        embeds = torch.full((len(facts.tokens), 2), float(facts.embeddings))
    lora = facts.adapter and LoRARequest(facts.adapter, 1, facts.adapter_path)
    request = Request(
        request_id="r",
        prompt_token_ids=list(facts.tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=images,
        prompt_embeds=embeds,
        lora_request=lora or None,
        cache_salt=facts.salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(facts.block, sha256),
    )
    return request.block_hashes


def vllm_files(facts: Facts) -> str:
    """Return the file of vLLM's `fs` tier with canonical pages."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.file_mapper import FileMapper

    stored = torch.bfloat16 if facts.dtype == "bfloat16" else torch.uint8
    spec = FullAttentionSpec(
        block_size=facts.block,
        num_kv_heads=facts.heads // facts.tp_size,
        head_size=8,
        dtype=stored,
    )
    groups = [KVCacheGroupSpec(layer_names=["l.0"], kv_cache_spec=spec)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    model = SimpleNamespace(
        model=facts.model, served_model_name=facts.model, tokenizer=facts.model,
        revision=facts.revision, code_revision=facts.revision, tokenizer_revision=facts.revision,
        quantization=facts.quantization, hf_overrides=facts.overrides, dtype="bfloat16",
        hf_config=SimpleNamespace(rope_theta=facts.rope_theta, rope_parameters=facts.rope_theta),
        use_mla=False, max_model_len=64, weight_version=facts.weights,
        get_total_num_kv_heads=lambda: facts.heads,
    )  # fmt: skip
    parallel = SimpleNamespace(
        rank=0, world_size=facts.tp_size, tensor_parallel_size=facts.tp_size,
        pipeline_parallel_size=1, prefill_context_parallel_size=1,
        decode_context_parallel_size=1, cp_kv_cache_interleave_size=1,
        data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=0,
        distributed_executor_backend="mp", nnodes_within_dp=1,
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(
            block_size=facts.block, prefix_match_unit=None, enable_prefix_caching=True,
            cache_dtype="auto" if facts.dtype == "bfloat16" else facts.dtype,
            calculate_kv_scales=facts.scale,
            kv_cache_layout={"HND": "LBHNC", "NHD": "LBNHC"}[facts.layout],
            mamba_cache_mode="none",
        ),
        lora_config=SimpleNamespace(weights=facts.adapter_weights),
        quant_config=facts.quantization,
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"canonical_layout": True}, engine_id="e"
        ),
        kv_events_config=None,
        use_v2_model_runner=False,
    )  # fmt: skip
    offloading = build_offloading_config(config, cache)
    mapper = FileMapper.from_offloading_spec(
        "/store", SimpleNamespace(config=offloading), parallel_agnostic=True
    )
    return mapper.get_file_name(make_offload_key(vllm_block_hashes(facts)[-1], 0))


def sglang_page_hash(facts: Facts) -> str:
    """Return the hash of the last page of SGLang's own `Req`."""
    from sglang.srt.managers.mm_utils import pad_mm_tokens
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalInputs,
        Req,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokens = array("q", facts.tokens)
    if facts.image is not None:
        item = MultimodalDataItem(
            modality=Modality.IMAGE, offsets=[(facts.image_start, facts.image_start + 1)]
        )
        item.set_identity(bytes.fromhex(facts.image))
        inputs = MultimodalInputs(mm_items=[item], im_token_id=IMAGE_TOKEN)
        tokens = array("q", pad_mm_tokens(tokens, inputs))
    # SGLang makes the id of an adapter at random when it loads it.
    loaded = facts.adapter and f"{facts.adapter}{facts.adapter_path}{facts.adapter_weights}"
    request = Req(
        rid="r",
        origin_input_text="",
        origin_input_ids=tokens,
        sampling_params=SamplingParams(),
        lora_id=loaded or None,
        cache_salt=facts.salt,
    )
    key = RadixKey(tokens, extra_key=request.extra_key, cache_salt=request.cache_salt)
    return get_storage_hash_str(key, page_size=facts.block)[-1]


def sglang_config(facts: Facts) -> Any:
    """Return SGLang's description of an engine for its stores. It has no place for other facts."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0, tp_size=facts.tp_size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False,
        is_page_first_layout=facts.layout == "HND", model_name=facts.model,
    )  # fmt: skip


def sglang_files(facts: Facts) -> str:
    """Return the key of SGLang's `file` backend, with its scheme by ranks."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    with tempfile.TemporaryDirectory() as folder:
        files = HiCacheFile(sglang_config(facts), file_path=folder)
        return files._get_suffixed_key(sglang_page_hash(facts))


def sglang_unified(facts: Facts) -> str:
    """Return the keys of SGLang's scheme `unified`, with one head in a chunk."""
    from sglang.srt.mem_cache import hicache_key_scheme

    plan = hicache_key_scheme.plan_unified_kv(
        model_id=facts.model, dtype=facts.dtype, page_size=facts.block, rank_replicated=False,
        local_kv_heads=facts.heads // facts.tp_size, attn_tp_rank=0, attn_tp_size=facts.tp_size,
        attn_cp_size=1, start_layer=0, end_layer=1, is_final_stage=True, head_group=1,
    )  # fmt: skip
    return f"{sglang_page_hash(facts)}_{plan.suffixes[0]}"


def lmcache_tokens(facts: Facts) -> list[int]:
    """Return the tokens in which LMCache replaces those of an image."""
    import torch
    from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids

    tokens = torch.tensor(facts.tokens)
    if facts.image is not None:
        place = SimpleNamespace(offset=facts.image_start, length=2)
        apply_mm_hashes_to_token_ids(tokens, [facts.image], [place])
    return tokens.tolist()


def lmcache_process(facts: Facts) -> str:
    """Return the key of LMCache inside an engine."""
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=facts.block, pre_caching_hash_algorithm="sha256_cbor"
    )
    stored = torch.bfloat16 if facts.dtype == "bfloat16" else torch.float8_e4m3fn
    engine = LMCacheMetadata(
        model_name=facts.model, world_size=facts.tp_size, local_world_size=facts.tp_size,
        worker_id=0, local_worker_id=0, kv_dtype=stored,
        kv_shape=(1, 2, facts.block, facts.heads // facts.tp_size, 8),
    )  # fmt: skip
    database = ChunkedTokenDatabase(config, engine)
    *_, (_, _, key) = database.process_tokens(lmcache_tokens(facts), request_configs=None)
    return key.to_string()


def lmcache_server(facts: Facts) -> str:
    """Return the key of LMCache's server of several processes."""
    from lmcache.v1.distributed.api import ipc_key_to_object_keys
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    tokens = lmcache_tokens(facts)
    key = IPCCacheServerKey(
        model_name=facts.model, world_size=facts.tp_size, worker_id=0, token_ids=tuple(tokens),
        start=0, end=len(tokens), request_id="r", cache_salt=facts.salt or "",
    )  # fmt: skip
    hashes = TokenHasher(facts.block, "sha256_cbor").compute_chunk_hashes(tokens)
    return str(ipc_key_to_object_keys(key, hashes, [0])[0][-1])


@dataclasses.dataclass(frozen=True)
class Naming:
    """One way of naming pages.

    Attributes:
        title: Its name in the table.
        package: The package whose version is named.
        name: Function that returns the name of the last page.
        excluded: Facts on which a page does not depend here, or that no request in a store has.
        judged: The code that runs.
    """

    title: str
    package: str
    name: Callable[[Facts], str]
    judged: str
    excluded: tuple[str, ...] = ()


NAMINGS = {
    "vllm": Naming(
        "vLLM, canonical files", "vllm", vllm_files,
        "`Request` with `get_request_block_hasher` (sha256), `build_offloading_config` and"
        " `FileMapper`", ("TP size",),
    ),
    "sglang_files": Naming(
        "SGLang, keys by rank", "sglang", sglang_files,
        "`Req`, `RadixKey`, `get_storage_hash_str` and `HiCacheFile`", ("prompt embeddings",),
    ),
    "sglang_unified": Naming(
        "SGLang, unified keys", "sglang", sglang_unified,
        "`Req`, `RadixKey`, `get_storage_hash_str` and `plan_unified_kv`",
        ("prompt embeddings", "layout of the page", "TP size"),
    ),
    "lmcache": Naming(
        "LMCache in the engine", "lmcache", lmcache_process,
        "`apply_mm_hashes_to_token_ids` and `ChunkedTokenDatabase` (sha256_cbor)",
        ("prompt embeddings",),
    ),
    "lmcache_server": Naming(
        "LMCache server", "lmcache", lmcache_server,
        "`apply_mm_hashes_to_token_ids`, `TokenHasher` (sha256_cbor) and `ipc_key_to_object_keys`",
        ("prompt embeddings",),
    ),
}  # fmt: skip


def version_of(package: str) -> str:
    """Return the version of *package*, also if its wheel has another name."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(import_module(package).__version__)


def judged(name: str) -> dict[str, Any]:
    """Return which facts are in the names of *name*."""
    naming = NAMINGS[name]
    base = naming.name(BASE)
    if base != naming.name(BASE):
        raise RuntimeError(f"{name}: one request has two names")
    outcomes = {}
    for fact, other in CHANGES.items():
        if fact in naming.excluded:
            outcomes[fact] = "excluded"
            continue
        own = base
        if fact == "prompt embeddings":
            own = naming.name(dataclasses.replace(BASE, image=None, embeddings=0))
        changed = naming.name(other)
        outcomes[fact] = "missing" if own == changed else "in the name"
    return {
        "title": naming.title,
        "version": version_of(naming.package),
        "judged": naming.judged,
        "example": base,
        "facts": outcomes,
    }


HEAD = """# Names of stored pages in other projects

A store finds a page by its name. If a fact on which the values of the page depend is missing in the
name, two engines share the name of two different pages. A request then continues from wrong values,
and no error is raised.

Each column runs the project's own code. It names the last page of a request of 12 tokens, and of
requests that differ in one fact. *yes*: the name differs. **missing**: both have one name. A dash
means that a page does not depend on the fact, or that no such request reaches the store. kvspec has
all of these facts in its names or in the placement that is part of them, and a test compares each
with all others ([rule 10](../docs/spec.md#10-names-of-stored-pages)).

`conformance/run naming` installs the projects, judges them and writes this page.
"""
TAIL = """
In the column of vLLM, a stand-in for its configuration has all facts. The classes with which SGLang
and LMCache describe an engine to a store have no field for a fact that is missing.

Not each *missing* is a fault of its project. A deployment may keep one store for each model and
configuration. Users of LMCache can add facts to a key by hand: `lmcache.tag.NAME` in the settings
of each request. SGLang makes the id of an adapter when it loads it. So the id names the weights
inside one process, and another process misses. The TP size belongs into a name only where a page
has the heads of one rank.

The lengths of the names matter for a store with many pages: the name of vLLM's directory has 48
bits of a SHA-256, SGLang's unified digest has 64, and LMCache in the engine keeps 64 for each
chunk.
"""


def page(made: dict[str, Any]) -> str:
    """Return the page of the results."""
    columns = [made[name] for name in NAMINGS if name in made]
    titles = [f"{column['title']} ({column['version']})" for column in columns]
    rows = [["differs in", *titles], ["---"] * (1 + len(columns))]
    words = {"in the name": "yes", "missing": "**missing**", "excluded": "-"}
    rows += [[fact, *(words[column["facts"][fact]] for column in columns)] for fact in CHANGES]
    lines = [HEAD, *(f"| {' | '.join(row)} |" for row in rows), "", "What runs:", ""]
    lines += [f"- {c['title']}: {c['judged']}. Example: `{c['example']}`" for c in columns]
    return "\n".join([*lines, TAIL])


def main() -> None:
    """Judge one project, or write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *NAMINGS], help="without one, the page")
    names = parser.parse_args().names
    made = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for name in names:
        made[name] = judged(name)
        missing = [fact for fact, found in made[name]["facts"].items() if found == "missing"]
        sys.stdout.write(f"{name} {made[name]['version']}: missing {', '.join(missing)}\n")
    if names:
        RESULTS.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", "utf-8")
    else:
        PAGE.write_text(page(made), "utf-8")


if __name__ == "__main__":
    main()
