"""Where an engine of vLLM stores its pages, and what their names contain.

    "kv_connector_extra_config": {"store": "/mnt/kv"}
    "kv_connector_extra_config": {"store": {"directory": "/mnt/kv", "page_tokens": 256}}

Invariant: if a fact about the weights or about the settings of the model is not known, the engine
does not start. Stored pages outlive the engine, so their names could not be corrected later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvspec.adapters.vllm.drafts import draft_of, number_of
from kvspec.adapters.vllm.model_identity import model_identity
from kvspec.adapters.vllm.settings import stages
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.stored.bucket_objects import BucketObjects
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.placement import StoredSpec
from kvspec.stored.store import PageStore

_FIELD = "kv_connector_extra_config['store']"


_HINTS = {
    "model": "set kv_connector_extra_config['model']",
    "revision": "set kv_connector_extra_config['revision']",
    "weights": f"random weights, and those of other files, need {_FIELD}['weights']",
    "quantization": "this version of vLLM does not state it",
    "overrides": "a function in hf_overrides has none, nor a draft or a config without a revision",
}


def _size(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None or field.default is not None:
        positive_int(f"{_FIELD}[{field.name!r}]", value)


def _text(_: object, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or (field.default is attrs.NOTHING and not value):
        raise SpecError(f"{_FIELD}[{field.name!r}]", value, "a text")


@attrs.frozen(kw_only=True)
class StoreSettings:
    """The setting `store`. All engines that share pages need the same values but *limit*.

    Attributes:
        directory: The directory of the pages, or the address of a bucket, such as
            "s3://bucket/folder". Workers on several nodes share it.
        page_tokens: Tokens of a page, such as a multiple of the block sizes of all engines.
        head_groups: Head groups of a page. `StoredSpec.of` chooses a number by default.
        layer_ranges: Layer ranges of a page: a multiple of the pipeline stages of all engines.
        context_size: Chunks of tokens of a page: the number of context ranks of all engines.
        interleave_size: The interleave size of these chunks.
        limit: Bytes that the directory may have. Pages that were not used for the longest time are
            removed first. No limit by default. A bucket has rules of its own instead.
        weights: Version of the weights. "" if they are those of the revision.
    """

    directory: str = attrs.field(validator=_text)
    page_tokens: int = attrs.field(default=64, validator=_size)
    head_groups: int | None = attrs.field(default=None, validator=_size)
    layer_ranges: int = attrs.field(default=1, validator=_size)
    context_size: int = attrs.field(default=1, validator=_size)
    interleave_size: int = attrs.field(default=1, validator=_size)
    limit: int | None = attrs.field(default=None, validator=_size)
    weights: str = attrs.field(default="", validator=_text)

    @staticmethod
    def in_config(vllm_config: Any) -> StoreSettings | None:  # noqa: ANN401 - vLLM's class
        """Return the settings of vLLM's configuration, or None if it stores no pages.

        Raises:
            SpecError: If a setting is wrong, or a request whose load fails would fail.
        """
        transfer = vllm_config.kv_transfer_config
        settings = read_store(transfer.kv_connector_extra_config.get("store"))
        policy = getattr(transfer, "kv_load_failure_policy", None)
        if settings is not None and policy != "recompute":
            # A page may be damaged, or removed while it is read. Then its tokens are computed.
            wanted = "'recompute' with a store: a page that cannot be loaded has to be computed"
            raise SpecError("kv_load_failure_policy", policy, wanted)
        diffusion = getattr(vllm_config, "diffusion_config", None)
        if settings is not None and diffusion is not None:
            rule = "not yet with a store: values depend on the steps that removed the noise"
            raise SpecError("diffusion_config", type(diffusion).__name__, rule=rule)
        draft = draft_of(vllm_config)
        if settings is not None and draft is not None and draft.lookahead:
            rule = "not yet with a store: a page's last key of the draft depends on the next page"
            raise SpecError("speculative_config.method", draft.method, rule=rule)
        return settings

    def open(self, vllm_config: Any, engine: EngineSpec) -> PageStore:  # noqa: ANN401
        """Return the store of an engine.

        Raises:
            SpecError: If a fact about the model is not known, or the engine cannot store its pages.
            StoreError: If the directory cannot be used.
        """
        model = model_identity(vllm_config, self.weights)
        for field in model.unstated:
            raise SpecError(field, None, f"a value for the names of pages: {_HINTS[field]}")
        placement = StoredSpec.of(
            engine,
            page_tokens=self.page_tokens,
            head_groups=self.head_groups,
            layer_ranges=_ranges(vllm_config, engine, self.layer_ranges),
            context_size=self.context_size,
            interleave_size=self.interleave_size,
        )
        return PageStore(placement, model, opened(self.directory, self.limit))


def opened(place: str, limit: int | None) -> FileObjects | BucketObjects:
    """Return the objects of a directory or of a bucket.

    Raises:
        SpecError: If a bucket cannot be used, or has a limit.
        StoreError: If a directory cannot be used.
    """
    if "://" not in place:
        return FileObjects(place, limit=limit)
    if limit is not None:
        raise SpecError(f"{_FIELD}['limit']", limit, "none for a bucket, which has its own rules")
    if place.startswith("memory:"):
        wanted = "a directory or a bucket: each process would have a memory of its own"
        raise SpecError(f"{_FIELD}['directory']", place, wanted)
    return BucketObjects.of_url(place)


def read_store(value: object) -> StoreSettings | None:
    """Return the settings in *value*: a directory, or a mapping with the fields.

    Raises:
        SpecError: If *value* is neither, or a field is unknown or wrong.
    """
    if value is None or isinstance(value, StoreSettings):
        return value
    fields: Any = {"directory": value} if isinstance(value, str) else value
    known = [field.name for field in attrs.fields(StoreSettings)]
    if not isinstance(fields, Mapping) or "directory" not in fields:
        raise SpecError(_FIELD, value, "a directory, or a mapping that contains 'directory'")
    for name in fields:
        if name not in known:
            raise SpecError(_FIELD, name, f"one of {', '.join(known)}")
    return StoreSettings(**fields)


def _ranges(vllm_config: Any, engine: EngineSpec, count: int) -> list[list[str]] | None:  # noqa: ANN401
    """Return the layers of *count* ranges, by vLLM's rule for pipeline stages."""
    if count == 1:
        return None
    total = vllm_config.model_config.get_total_num_hidden_layers()
    layers = [layer for layer in engine.homes if layer not in engine.excluded]
    return [
        [layer for layer in layers if (number_of(layer) or 0) in numbers]
        for numbers in stages(total, count)
    ]
