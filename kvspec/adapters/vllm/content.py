"""State everything on which the cache of a request of vLLM depends.

Invariant: a field that this version of vLLM does not show, or that cannot be read, is not stated.
Then no ticket of this request fits, and the log names the field.
"""

# ruff: noqa: ANN401 - requests are of vLLM's class, which is not imported
from __future__ import annotations

import hashlib
import re
from operator import index
from typing import Any

from kvspec.adapters.vllm.adapters import Adapters
from kvspec.adapters.vllm.media import MediaContents
from kvspec.errors import SpecError
from kvspec.stored.names import PromptIdentity
from kvspec.tickets import ContentIdentity, MediaItem, sampling_of

_MISSING = object()
# vLLM's class `SamplingParams` has these names.
_SETTINGS = (
    "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "logit_bias",
)  # fmt: skip
# More settings of vLLM that may change the first token.
_OTHERS = ("structured_outputs", "allowed_token_ids", "bad_words", "thinking_token_budget")
# If vLLM has neither a prefix cache nor one of processed media, it hashes no item. It numbers the
# items of each process instead, so the names of other items at another engine are the same.
_NUMBERED = re.compile(r"(.*:)?renderer\d+-mm-\d+-.*", re.DOTALL)


def content_of_request(
    request: Any, num_tokens: int, adapters: Adapters | None = None, weights: str | None = ""
) -> ContentIdentity:
    """Return the content of the first *num_tokens* tokens of vLLM's *request*.

    Args:
        request: vLLM's `Request`.
        num_tokens: Number of leading tokens, at most those of the prompt.
        adapters: The adapters of its scheduler. Without them, no adapter is stated.
        weights: As in `ContentIdentity`.

    Raises:
        SpecError: If the prompt has fewer tokens.
    """
    token_ids = request.prompt_token_ids
    if token_ids is None:
        token_ids = [0] * request.num_prompt_tokens
    media = _media(getattr(request, "mm_features", _MISSING))
    besides = _besides_tokens(request, num_tokens, adapters)
    return ContentIdentity.of(token_ids, num_tokens, weights=weights, media=media, **besides)


def prompt_of_request(
    request: Any, adapters: Adapters | None = None, media: MediaContents | None = None
) -> PromptIdentity:
    """Return all inputs of the cache of vLLM's *request*, besides its tokens and the model.

    A ticket belongs to one request of a router, so there vLLM's identifiers of media are enough.
    Stored pages are for all clients, so here the content of each item is stated.

    Args:
        request: vLLM's `Request`.
        adapters: As in `content_of_request`.
        media: The media items of its scheduler. Without them, no item is stated.
    """
    features = getattr(request, "mm_features", _MISSING)
    items: list[MediaItem] | None = None if features else []
    if features is not _MISSING and media is not None:
        items = media.stated(features)
    besides = _besides_tokens(request, request.num_prompt_tokens, adapters)
    return PromptIdentity.of(media=items, **besides)


def _besides_tokens(request: Any, num_tokens: int, adapters: Adapters | None) -> dict[str, Any]:
    embeddings = getattr(request, "prompt_embeds", _MISSING)
    are_tokens = getattr(request, "prompt_is_token_ids", None)
    salt: Any = getattr(request, "cache_salt", _MISSING)
    return {
        "adapter": _adapter(getattr(request, "lora_request", _MISSING), adapters),
        "embeddings": _embeddings(embeddings, are_tokens, num_tokens),
        "salt": None if salt is _MISSING else salt or "",
    }


def sampling_of_request(request: Any) -> str | None:
    """Return the settings with which *request* samples, or None if they cannot be stated."""
    params = getattr(request, "sampling_params", None)
    try:
        settings = {name: getattr(params, name) for name in _SETTINGS}
        others = {name: repr(value) for name in _OTHERS if (value := getattr(params, name))}
        return sampling_of(params.temperature, settings, others)  # type: ignore[union-attr]
    except (AttributeError, SpecError):
        return None


def _adapter(lora: Any, adapters: Adapters | None) -> str | None:
    if adapters is None or lora is _MISSING:
        return "" if lora is None else None
    return adapters.stated(lora)


def _media(features: Any) -> list[MediaItem] | None:
    """Return the media items of a request, or None if one has no identifier of its content."""
    if features is _MISSING:
        return None
    try:
        if any(_NUMBERED.fullmatch(each.identifier) for each in features or ()):
            return None
        return [
            # Some processors count positions with numpy.
            MediaItem(
                each.identifier, index(each.mm_position.offset), index(each.mm_position.length)
            )
            for each in features or ()
        ]
    except (AttributeError, TypeError, SpecError):
        return None


def _embeddings(embeddings: Any, is_token: Any, num_tokens: int) -> str | None:
    """Return a digest of the first rows of the prompt embeddings, or "" without embeddings."""
    if embeddings is None:
        return ""
    try:
        rows = embeddings[:num_tokens].contiguous().cpu()
        facts = f"{rows.dtype} {tuple(rows.shape)} {[*(is_token or ())][:num_tokens]}".encode()
        import torch  # noqa: PLC0415 - kvspec imports torch only inside functions

        content = rows.view(torch.uint8).numpy().tobytes()
    except (AttributeError, TypeError, RuntimeError):
        return None
    return hashlib.sha256(facts + b"\0" + content).hexdigest()[:32]
