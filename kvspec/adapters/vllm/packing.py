"""How the content of a page of vLLM's is packed, given the format that its backend keeps.

Law: what a spec says of slots and content has to be what its backend's format makes of the heads;
the letters of the layout are vLLM's own, or those that say the packing.
"""

from __future__ import annotations

from typing import Any

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.backends import ROWS
from kvspec.dtypes import itemsize
from kvspec.errors import SpecError
from kvspec.specs.formats import is_opaque

PLANES = ("planes", "x-packed", "opaque:aiter")
"""Formats with two head slots: the keys, and the values, of all heads of a rank."""


PACKED = ("opaque:turboquant", "opaque:ultraquant")
"""Formats of rows of packed bytes, whose number does not say what is in them: int4's rows of scale
and codes are as long as UltraQuant's."""


def packing(given_spec: FieldReader, page_format: str) -> dict[str, Any]:
    """Return the fields of a spec with heads that say its packing, none where k lies beside v."""
    content = given_spec.get("state_content_bytes").size_or_none()
    local, width = given_spec.get("num_kv_heads").size(), itemsize(given_spec.get("dtype").dtype())
    size = given_spec.get("head_size").size()
    size_v = given_spec.get("head_size_v").size(size)
    plain = content in (None, (size + size_v) * width)
    if page_format in PLANES:
        if content != local * size * width or size != size_v:
            wanted = f"{local * size * width}: keys or values of {local} heads in each slot"
            raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
        return {} if page_format == "planes" else {"page_format": page_format}
    if page_format == ROWS:
        return {} if plain else {"state_content_bytes": content}
    if page_format == "scaled planes":
        return _scaled(given_spec, content)
    if page_format == "opaque:msa":
        slot = given_spec.get("state_content_bytes").size()
        return {"state_content_bytes": 2 * slot, "page_format": page_format}
    if page_format.startswith(PACKED):
        return {"state_content_bytes": content, "page_format": page_format}
    if not plain:
        wanted = f"None or {(size + size_v) * width}: a key and a value"
        raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
    return {"page_format": page_format}


def _scaled(given_spec: FieldReader, content: int | None) -> dict[str, Any]:
    """Return FlashInfer's NVFP4: half a byte an element, a scale for 16 of them.

    The page is the data of all keys, their scales, the data of all values, theirs. Scales of four
    tokens of a head lie in an order of their own.
    """
    size, local = given_spec.get("head_size").size(), given_spec.get("num_kv_heads").size()
    slots, bytes_of_slot = given_spec.get("num_head_slots"), size // 2 + size // 16
    if size % 16 or given_spec.get("head_size_v").size(size) != size or content != bytes_of_slot:
        wanted = f"{bytes_of_slot}: the data and scales of {size} elements, a multiple of 16"
        raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
    if slots.value != 2 * local:
        raise SpecError(slots.path, slots.value, f"{2 * local}: a key and a value of each head")
    return {
        "head_size": size // 2,
        "head_size_v": size // 2,
        "scale_dtype": "float8_e4m3fn",
        "elements_per_scale": 8,
        "tokens_per_scale": 4,
    }


def layout_of(layout: str, page_format: str) -> str:
    """Return the layout of rows of tokens: vLLM's letters, or those that say the packing.

    Two head slots are planes, K outside the tokens; where heads are cut in chunks, a head has all
    its rows before the next. A page that is opaque lies in one chunk.
    """
    if page_format in ("planes", "x-packed", "keys-transposed"):
        if "K" in layout:
            raise SpecError("layout", layout, f"no K where pages are {page_format}")
        if page_format == "keys-transposed":
            return layout.replace("N", "KN")
        planes = layout.replace("H", "K")
        return planes.replace("C", "HC") if page_format == "planes" else planes.replace("N", "HN")
    whole = page_format == "scaled planes" or is_opaque(page_format)
    if whole and layout[:2] != outer(layout):
        wanted = f"L and B outermost: a page that is {page_format} lies in one chunk"
        raise SpecError("layout", layout, wanted)
    if page_format == "scaled planes" and layout.index("N") < layout.index("H"):
        wanted = "H outside N: scales of four tokens of a head lie together"
        raise SpecError("layout", layout, wanted)
    return layout


def outer(layout: str) -> str:
    """Return layers and blocks, in the order of the *layout*."""
    return "".join(letter for letter in layout if letter in "LB")


def real_page(given_spec: FieldReader) -> int | None:
    """Return the bytes of a page without padding, if vLLM says them."""
    found = given_spec.get("unpadded_page_size_bytes").size_or_none()
    return given_spec.get("real_page_size_bytes").size_or_none() if found is None else found
