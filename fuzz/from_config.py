"""Any JSON object gives KV cache groups or a `SpecError`, and never another exception.

The groups are valid: an engine can be built of them, and every layer's page has a size.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvspec import EngineSpec, SpecError
from kvspec.models import architectures, catalogue, from_config

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(("bfloat16", "full_attention", "mamba", "M*-E", "auto", "torch.float16")),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
CONFIGS = tuple(catalogue.config(name) for name in catalogue.names())
KEYS = tuple(sorted({key for config in CONFIGS for key in config} | {"text_config"}))
# The groups list the name of every layer. A config with millions of layers would exhaust the memory
# of the fuzzer, which is not the property under test.
MOST_LAYERS = 1000


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a published config with some keys changed, removed or added, or any object."""
    if draw(st.integers(0, 7)) == 0:
        return draw(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), JSON, max_size=6))
    config = dict(draw(st.sampled_from(CONFIGS)))
    if draw(st.booleans()):
        config["architectures"] = [draw(st.sampled_from(architectures()))]
    for key in draw(st.lists(st.sampled_from([*config, *KEYS]), max_size=4, unique=True)):
        config[key] = draw(changed(config.get(key)))
        if draw(st.integers(0, 3)) == 0:
            del config[key]
    if draw(st.integers(0, 4)) == 0:
        config = {"text_config": config, **draw(st.sampled_from(CONFIGS))}
    return config


@st.composite
def changed(draw: st.DrawFn, value: object) -> object:
    """Draw any JSON value; for a list, mostly a list of equal length with one entry replaced."""
    if not isinstance(value, list) or not value or draw(st.integers(0, 2)) == 0:
        return draw(JSON)
    at = draw(st.integers(0, len(value) - 1))
    return [*value[:at], draw(JSON), *value[at + 1 :]]


def small(config: dict[str, Any]) -> bool:
    """Return whether the config has few enough layers to list them."""
    inner = config.get("text_config")
    both = [config, inner] if isinstance(inner, dict) else [config]
    counts = [
        part.get(key) for part in both for key in ("num_hidden_layers", "n_layer", "n_layers")
    ]
    return all(not isinstance(count, int) or count <= MOST_LAYERS for count in counts)


@given(configs().filter(small), st.integers(0, 2))
def test_config_becomes_groups_or_spec_error(
    config: dict[str, Any], num_speculative_tokens: int
) -> None:
    """Read *config* and build an engine of the groups that are returned."""
    try:
        groups = from_config(config, num_speculative_tokens=num_speculative_tokens)
    except SpecError:
        return
    if groups:
        EngineSpec(groups=groups)
    for group in groups:
        for layer in group.layers:
            assert group.spec.of_layer(layer).page_size_bytes() > 0
