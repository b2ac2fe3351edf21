"""State everything on which the cache of a request of vLLM depends.

Invariant: a field that this version of vLLM does not show, or that cannot be read, is not stated.
Then no ticket of this request fits, and the log names the field.
"""

# ruff: noqa: ANN401 - requests are of vLLM's class, which is not imported
from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
# The digests of adapters, by the sizes and times of their files. An adapter is read once.
_digests: dict[tuple[object, ...], str] = {}
# By name and path, the digest of an adapter when this process first had a request for it. It is ""
# if the files were changed since.
_first_seen: dict[tuple[str, str], str] = {}


def content_of_request(request: Any, num_tokens: int, weights: str | None = "") -> ContentIdentity:
    """Return the content of the first *num_tokens* tokens of vLLM's *request*.

    Args:
        request: vLLM's `Request`.
        num_tokens: Number of leading tokens, at most those of the prompt.
        weights: As in `ContentIdentity`.

    Raises:
        SpecError: If the prompt has fewer tokens.
    """
    token_ids = request.prompt_token_ids
    if token_ids is None:
        token_ids = [0] * request.num_prompt_tokens
    return ContentIdentity.of(
        token_ids, num_tokens, weights=weights, **_besides_tokens(request, num_tokens)
    )


def prompt_of_request(request: Any) -> PromptIdentity:
    """Return what the cache of vLLM's *request* depends on, besides its tokens and the model."""
    return PromptIdentity.of(**_besides_tokens(request, request.num_prompt_tokens))


def _besides_tokens(request: Any, num_tokens: int) -> dict[str, Any]:
    embeddings = getattr(request, "prompt_embeds", _MISSING)
    are_tokens = getattr(request, "prompt_is_token_ids", None)
    salt: Any = getattr(request, "cache_salt", _MISSING)
    return {
        "adapter": _adapter(getattr(request, "lora_request", _MISSING)),
        "media": _media(getattr(request, "mm_features", _MISSING)),
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


def _adapter(lora: Any) -> str | None:
    """Return the name and a digest of an adapter, "" for none, or None if its files are unknown.

    vLLM reads an adapter once and keeps it in memory, perhaps until other adapters displace it. Its
    prefix cache knows an adapter by name and path. So if the files of a path change, nobody knows
    with which ones a prompt is computed. The adapter is unknown until it has another path.
    """
    if lora is None:
        return ""
    name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
    if not isinstance(name, str) or not isinstance(path, str) or not path:
        return None
    try:
        files = sorted(each for each in _files(Path(path)))
        known = tuple((str(each), *_stamp(each)) for each in files)
        if not files:
            return None
        if known not in _digests:
            _digests[known] = _digest_of(files)
    except OSError:
        return None
    digest = _digests[known]
    if _first_seen.setdefault((name, path), digest) != digest:
        _first_seen[name, path] = ""
        return None
    return f"{name}@{digest}"


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of an adapter in *folder*. A name on a hub is no folder."""
    if folder.is_dir():
        yield from folder.glob("adapter_model*")
        yield from folder.glob("adapter_config.json")


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _digest_of(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        whole.update(path.name.encode() + b"\0" + digest)
    return whole.hexdigest()[:32]


def _media(features: Any) -> list[MediaItem] | None:
    """Return the media items of a request, or None if one has no identifier of its content."""
    if features is _MISSING:
        return None
    try:
        if any(_NUMBERED.fullmatch(each.identifier) for each in features or ()):
            return None
        return [
            MediaItem(each.identifier, each.mm_position.offset, each.mm_position.length)
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
