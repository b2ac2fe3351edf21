"""Know which layers belong to a draft model, and on which tokens their keys depend.

A draft model proposes tokens, and the target verifies them. So a wrong key of a draft changes no
answer: fewer proposals are accepted, and nothing fails. That is why the connector must be exact.

Invariant: an unknown method is refused.

How it works:
    A draft of EAGLE, or a module of MTP, computes its key at a position from the hidden state there
    and from the next token. After a prompt of four tokens, vLLM has sampled token x:

        token       a     b     c     d
        key of      a,b   b,c   c,d   d,x

    Another engine that goes on with the prompt a b c d y takes the first three keys and computes
    the rest. Drafts of other methods compute a key from the tokens up to its own position.

    The layers of a draft have the numbers after the target's, or a name with `draft_model` or
    `mtp`. The name `mtp.layers.0` counts from 0 again, so its number is not that of a target layer.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.errors import SpecError

# By vLLM's method: the tokens after a position on which the draft's key there depends (vLLM:
# `SpeculativeConfig.needs_eagle_block_drop`). These drafts have caches.
LOOKAHEAD = {"draft_model": 0, "dflash": 0, "dspark": 0, "eagle": 1, "eagle3": 1, "mtp": 1}

# Methods whose drafts have no cache. vLLM names the target as their draft model.
WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")

_METHOD = "speculative_config.method"


@attrs.frozen
class Draft:
    """A draft model with a cache.

    Attributes:
        method: vLLM's name of the method.
        model: The name of the model. Modules of MTP have that of the target.
        revision: Its revision, or None.
        lookahead: Tokens after a position on which the draft's key there depends.
    """

    method: str
    model: str
    revision: str | None
    lookahead: int

    def __str__(self) -> str:
        version = "" if self.revision is None else f"@{self.revision}"
        return f"{self.method} {self.model}{version}"


def draft_of(vllm_config: Any) -> Draft | None:  # noqa: ANN401 - vLLM's class, not imported
    """Return the draft of an engine, or None if it has none, or one without a cache.

    Raises:
        SpecError: If the method is not known, or has several modules that read ahead.
    """
    config = FieldReader("vllm_config", vllm_config).get("speculative_config")
    if config.value is None:
        return None
    method = config.get("method").value
    if method in WITHOUT_CACHE:
        return None
    if method not in LOOKAHEAD:
        wanted = f"one of {', '.join((*LOOKAHEAD, *WITHOUT_CACHE))}; not yet: other methods"
        raise SpecError(_METHOD, method, wanted)
    several = config.get("use_multi_module_mtp")
    if callable(several.value) and several.value():
        rule = "not yet: several MTP modules, each of which reads a token further ahead"
        raise SpecError(_METHOD, method, rule=rule)
    model = config.get("draft_model_config")
    name, revision = model.get("model").value, model.get("revision").value
    if not isinstance(name, str):
        raise SpecError("speculative_config.draft_model_config.model", name, "a text")
    return Draft(method, name, revision, LOOKAHEAD[method])


def number_of(layer: str) -> int | None:
    """Return the number in the name of *layer*, or None.

    >>> number_of("model.layers.12.self_attn.attn")
    12
    """
    match = re.search(r"\.(\d+)\.", f".{layer}.")
    return int(match.group(1)) if match else None


def is_of_draft(layer: str, count: int) -> bool:
    """Whether *layer* has a name of a draft, beside a target of *count* layers.

    >>> names = "mtp.layers.0.attn", "draft_model.model.layers.0.attn", "model.layers.2.attn"
    >>> [is_of_draft(name, 2) for name in (*names, "model.layers.1.attn")]
    [True, True, True, False]
    """
    number = number_of(layer)
    beyond = number is not None and number >= count
    return beyond or layer.startswith("draft") or ".mtp." in f".{layer}."
