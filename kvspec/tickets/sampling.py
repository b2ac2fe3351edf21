"""Name the settings with which a token is sampled, equally for engines of all makers.

A consumer that begins with the producer's first token must have been asked for the same kind of
token. Two requests with one prompt and other settings would otherwise exchange their first tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping

NEUTRAL: Mapping[str, object] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
}
"""The settings that all engines have, and the values with which they change nothing."""
_RANDOM = ("temperature", "top_k", "top_p", "min_p", "seed")
"""The settings that do not matter if the most probable token is taken."""


def sampling_of(
    temperature: float,
    settings: Mapping[str, object] | None = None,
    others: Mapping[str, object] | None = None,
) -> str:
    """Return a text that is equal for two requests if their first tokens are sampled equally.

    Args:
        temperature: The temperature. 0 for the most probable token.
        settings: Settings by the names of `NEUTRAL`. Neutral values are left out. -1 for *top_k*
            means no limit, too.
        others: More settings that may change the token, such as a grammar, by names of the engine's
            maker. Values must be plain values that JSON can represent.

    Returns:
        "greedy" for the most probable token without other settings. Otherwise hexadecimal digits.

    Raises:
        SpecError: If a setting is unknown or has no JSON representation.

    >>> sampling_of(0.0, {"top_p": 0.9}) == sampling_of(1.0, {"top_k": 1}) == "greedy"
    True
    >>> sampling_of(0.5) == sampling_of(0.5, {"top_k": -1}) != sampling_of(0.7)
    True
    """
    given: dict[str, object] = {"temperature": _number("temperature", temperature)}
    named = mapping("settings", {} if settings is None else settings, "names to values")
    for name, value in named.items():
        if not isinstance(name, str) or name not in NEUTRAL:
            raise SpecError("settings", name, f"one of {', '.join(NEUTRAL)}")
        neutral = NEUTRAL[name]
        if value is None or name == "logit_bias":
            plain = value or None
        else:
            plain = _number(f"settings[{name!r}]", value)
        if name == "top_k" and plain == -1:
            plain = 0.0
        if plain is not None and plain != neutral:
            given[name] = plain
    if given["temperature"] == 0 or given.get("top_k") == 1:
        given = {name: value for name, value in given.items() if name not in _RANDOM}
    extra = mapping("others", {} if others is None else others, "names to values")
    for name in extra:
        instance("others", name, str)  # 1 and "1" would have one name.
    given |= {f"other {name}": value for name, value in extra.items()}
    if not given:
        return "greedy"
    try:
        text = json.dumps(given, sort_keys=True, allow_nan=False)
        # Two halves of a surrogate pair and the character that they make have the same escapes.
        json.dumps(given, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError("settings", given, "values that JSON can represent") from error
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _number(field: str, value: object) -> float:
    """Return *value* as a float. An int and an equal float are one setting.

    An int that no float equals stays an int. Otherwise two large seeds would be one.
    """
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise SpecError(field, value, "a finite number")
    return value if isinstance(value, int) and value != number else number
