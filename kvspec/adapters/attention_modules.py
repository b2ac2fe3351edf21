"""Read the meaning of stored keys from the module of a model that contains an attention layer.

vLLM's and SGLang's models are written alike: the module around an attention layer owns the rotary
embedding and the norm of the keys. Both engines apply them before they store a key. Some models
apply the rotary embedding in some layers only: `rotating_modules` has the condition of each class.
"""

from __future__ import annotations

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.rotary_modules import LONGROPE, rotation
from kvspec.adapters.rotating_modules import applies_rotary
from kvspec.errors import SpecError
from kvspec.inputs import mapping
from kvspec.specs import KeyContent
from kvspec.specs.key_content import rotation_difference, without_rotation

# The names that models give to a module that normalises keys, or the latent of MLA.
KEY_NORMS = ("k_norm", "qk_norm", "k_layernorm", "key_layernorm", "kv_a_layernorm")


def key_content_of(module: FieldReader, row: int, *, latent: bool) -> KeyContent | None:
    """Return the meaning of the keys of the attention layer inside *module*, or None if unknown.

    Args:
        module: The module that contains the attention layer.
        row: Elements of a stored key, or of a latent of MLA.
        latent: Whether the layer stores a latent of MLA.
    """
    # vLLM's Qwen2 has the bool False in place of a module.
    norms = [module.get(name).value for name in KEY_NORMS]
    normalized = any(norm is not None and not isinstance(norm, bool) for norm in norms)
    rotary = module.get("rotary_emb")
    # Llama 4 has None in place of a rotary embedding in layers without positions.
    absent = rotary.value is None and hasattr(module.value, "rotary_emb")
    applied = False if absent else applies_rotary(module.value)
    if applied is False:
        return KeyContent(rotary="none", normalized=normalized)
    if applied is None:
        return None
    neox, size = rotary.get("is_neox_style").value, rotary.get("rotary_dim").size_or_none()
    if type(rotary.value).__name__ == LONGROPE:
        neox = True
    # The rotary embedding of a whole key has the size of the key. In a latent of MLA, the rotated
    # part comes last. In other layers, a smaller embedding may belong to any part of the key.
    whole = rotary.get("head_size").size_or_none() == row
    if not isinstance(neox, bool) or size is None or not (whole or latent):
        return None
    return KeyContent(
        rotary="halves" if neox else "pairs",
        rotary_start=row - size if latent else 0,
        rotary_size=size,
        normalized=normalized,
        **rotation(rotary, size // 2),
    )


def configured_key_content(field: str, value: object) -> KeyContent | None:
    """Return the `KeyContent` that a user has configured by its fields, or None for None.

    Raises:
        SpecError: If *value* has other fields. The error names *field*.

    >>> configured_key_content("key_content", {"rotary": "pairs", "rotary_size": 64}).rotary
    'pairs'
    """
    if value is None or isinstance(value, KeyContent):
        return value
    names = [each.name for each in attrs.fields(KeyContent)]
    fields = mapping(field, value, f"fields of KeyContent: {', '.join(names)}")
    if "rotary" not in fields or not set(fields) <= set(names):
        raise SpecError(field, value, f"rotary, and any of {', '.join(names[1:])}")
    return KeyContent(**fields)


def agreed_key_content(
    field: str, configured: KeyContent | None, found: KeyContent | None
) -> KeyContent | None:
    """Return the meaning of the keys of one layer, or None if it is unknown.

    Args:
        field: The setting and the layer, for the error message.
        configured: The meaning that a user has configured for all layers.
        found: The result of `key_content_of` for this layer.

    Raises:
        SpecError: If the two rotate other elements. The bytes would be permuted in a wrong way.

    >>> pairs = KeyContent(rotary="pairs", rotary_size=64)
    >>> agreed_key_content("key_content", pairs, KeyContent(rotary="none"))
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvspec.errors.SpecError: key_content=KeyContent(...): expected KeyContent(rotary='none', ...
    """
    if configured is None or found is None:
        return configured or found
    # A norm may have a name that is not known, so the user knows better whether there is one.
    agreed = attrs.evolve(found, normalized=configured.normalized)
    difference = without_rotation(configured) != without_rotation(agreed)
    if difference or rotation_difference(configured, agreed) is not None:
        raise SpecError(field, configured, f"{found}, as the model's module has")
    # Where both state a number of the rotation, the two are equal but for rounding.
    missing = {
        name: getattr(configured, name)
        for name in ("frequencies", "magnitude")
        if getattr(agreed, name) is None
    }
    return attrs.evolve(agreed, **missing)
