"""State on what the cache and the first token of one request of SGLang depend.

Invariant: what this module cannot state stays unstated, so that the other engine refuses it by
name. Nothing is assumed to be equal.

How it works:
    `identity_of` returns the `ContentIdentity` of the first tokens of a request, and
    `sampling_text` the settings with which its first token is sampled. The prefill engine puts both
    into the ticket, and the decode engine compares them with those of its own request.

    `Weights` knows whether the weights have a name. SGLang can load other weights while it runs:

        event                                        named        clean
        the engine has started                       yes          yes
        weights are about to change                  no           no
        a version is recorded, not "default"         yes          as before
        the update flushed the cache, or a flush     as before    yes
        `/flush_cache` succeeded later               as before    yes

    SGLang may load new weights in several parts, between `begin_weight_update` and
    `end_weight_update`. Each part may record the new version. Until the end, nothing is stated.

    Tokens in the radix cache were computed with older weights until it is flushed. The version is
    stated only while the weights are named and the cache is clean.
"""

# ruff: noqa: ANN401 - requests are of SGLang's classes, which are not imported
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.tickets import ContentIdentity, MediaItem, sampling_of

# SGLang's number for a `top_k` without a limit.
ALL_TOKENS = 1 << 30
# SGLang's name of the weights with which an engine has started.
STARTED = "default"
# Settings of a request that add what no field of an identity can state.
STRANGE = (
    "session",
    "positional_embed_overrides",
    "token_type_ids",
    "token_indices_to_pool",
    "multi_item_delimiter_indices",
    "decision_layout",
    "beam_group",
)
# Settings of SGLang's sampling that other makers do not have, or name otherwise.
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


@attrs.define
class Weights:
    """Whether the weights of this engine have a name.

    Attributes:
        version: A function that returns SGLang's `weight_version`.
        named: Whether the version names the weights that are loaded.
        clean: Whether all cached tokens were computed with these weights.
        partial: Whether only some parts of new weights are loaded.
    """

    version: Callable[[], str]
    named: bool = True
    clean: bool = True
    partial: bool = False

    @property
    def stated(self) -> str | None:
        """The version for a `ContentIdentity`, or None. "" for the weights of the start."""
        if self.partial or not (self.named and self.clean):
            return None
        version = self.version()
        return "" if version == STARTED else version

    def name(self, version: str | None) -> None:
        """Take *version* as the name of the weights, unless it names those of the start."""
        self.named = self.named or version not in (None, STARTED)

    def check(self) -> None:
        """Raise `SpecError` if no prompt can be exchanged."""
        if self.partial:
            rule = "weights are being updated: call end_weight_update"
            raise SpecError("weight_version", self.version(), rule=rule)
        if not self.named:
            rule = (
                "the weights were updated: pass weight_version, equal on both engines, and not"
                f" {STARTED!r}, which names those of the start"
            )
            raise SpecError("weight_version", self.version(), rule=rule)
        if not self.clean:
            rule = "the weights were updated, and the cache was not flushed: call /flush_cache"
            raise SpecError("flush_cache", False, rule=rule)  # noqa: FBT003


def check_known(request: Any) -> None:
    """Raise `SpecError` if *request* has a setting that cannot be compared with the other half."""
    for name in STRANGE:
        if getattr(request, name, None) is not None:
            rule = "not yet run with kvspec: the other engine cannot compare it"
            raise SpecError(name, type(getattr(request, name)).__name__, rule=rule)
    if request.sampling_params.watermark is not None:
        raise SpecError("watermark", "a watermark", rule="not yet run with kvspec")
    if getattr(request, "lora_id", None) is not None:
        rule = "LoRA adapters were not yet run with kvspec"
        raise SpecError("lora_id", request.lora_id, rule=rule)


def identity_of(request: Any, weights: str | None, count: int) -> ContentIdentity:
    """Return the identity of the first *count* tokens of *request*.

    Raises:
        SpecError: If the prompt has fewer tokens, or a setting that cannot be stated.
    """
    check_known(request)
    return ContentIdentity.of(
        request.origin_input_ids,
        count,
        weights=weights,
        adapter="",
        media=_media(request),
        embeddings=_embeddings(request),
        salt=_salt(request),
    )


def _media(request: Any) -> list[MediaItem] | None:
    """Return the images, videos and audio of the prompt. None if one has no hash or no place."""
    inputs = getattr(request, "multimodal_inputs", None)
    items = []
    for item in () if inputs is None else inputs.mm_items:
        full = getattr(item, "identity", None)
        digest = item.hash.to_bytes(8) if item.hash is not None else None
        digest = full if full is not None else digest
        if digest is None or not item.offsets:
            return None
        kind = getattr(item.modality, "name", item.modality)
        # SGLang's offsets are the first and the last token of each place of the item.
        items += [
            MediaItem(f"{kind}-{digest.hex()}", int(first), int(last) - int(first) + 1)
            for first, last in item.offsets
        ]
    return items


def _embeddings(request: Any) -> str:
    """Return a digest of the embeddings that replace the tokens of the prompt, or ""."""
    values = getattr(request, "input_embeds", None)
    if values is None:
        return ""
    array = np.ascontiguousarray(np.asarray(values, dtype="<f4"))
    return hashlib.sha256(f"{array.shape}".encode() + array.tobytes()).hexdigest()[:32]


def _salt(request: Any) -> str | bytes:
    """Return the keys that separate the caches of two callers."""
    extra, salt = getattr(request, "extra_key", None), getattr(request, "cache_salt", None)
    return salt_with_key(json.dumps([extra, salt or ""])) if extra else salt or ""


def salt_with_key(text: str) -> bytes:
    """Return a salt that contains SGLang's own key of a caller, as *text*.

    No text of UTF-8 begins with this byte. So no caller can choose a salt that equals it.
    """
    return b"\xff" + text.encode("utf-8", "surrogatepass")


def sampling_text(request: Any) -> str:
    """Return `sampling_of` all settings on which the first token of *request* depends.

    Raises:
        SpecError: If a setting has no representation.
    """
    own = request.sampling_params
    settings: dict[str, object] = {
        "top_k": -1 if own.top_k >= ALL_TOKENS else own.top_k,
        "top_p": own.top_p,
        "min_p": own.min_p,
        "seed": own.sampling_seed,
        "repetition_penalty": own.repetition_penalty,
        "presence_penalty": own.presence_penalty,
        "frequency_penalty": own.frequency_penalty,
        "min_tokens": own.min_new_tokens,
        "logit_bias": {str(token): float(bias) for token, bias in (own.logit_bias or {}).items()}
        or None,
    }
    return sampling_of(own.temperature, settings, _others(request, own))


def _others(request: Any, own: Any) -> Mapping[str, object]:
    """Return the settings of SGLang that other makers do not have."""
    grammars = {name: getattr(own, name) for name in GRAMMARS if getattr(own, name) is not None}
    # SGLang adds "__req__", which is the request itself.
    custom = {name: value for name, value in (own.custom_params or {}).items() if name != "__req__"}
    others: dict[str, object] = dict(grammars)
    if custom:
        others["custom_params"] = custom
    processor = getattr(request, "custom_logit_processor", None)
    if processor is not None:
        others["custom_logit_processor"] = hashlib.sha256(processor.encode()).hexdigest()
    if grammars:
        # A model that reasons first is free until the end of its thoughts.
        others["require_reasoning"] = bool(getattr(request, "require_reasoning", False))
        others["ebnf_full_assistant"] = bool(own.ebnf_full_assistant)
    if own.min_new_tokens:
        # These tokens are excluded until `min_new_tokens` are there.
        others["stop_token_ids"] = sorted(own.stop_token_ids or ())
    return others
