"""How the content of a page of vLLM's is packed, given the format that its backend keeps.

Law: what a spec says of slots and content has to be what its backend's format makes of the heads;
the letters of the layout are vLLM's own, or those that say the packing.
"""

from __future__ import annotations

from typing import Any

from kvspec.adapters.given import Given
from kvspec.adapters.vllm.backends import ROWS
from kvspec.dtypes import itemsize
from kvspec.errors import SpecError
from kvspec.specs import AttentionSpec
from kvspec.specs.formats import is_opaque

PLANES = ("planes", "x-packed", "opaque:aiter")
"""Formats with two head slots: the keys, and the values, of all heads of a rank."""


def packing(given_spec: Given, page_format: str, tokens: int) -> dict[str, Any]:
    """Return the fields of a spec with heads that say its packing, none where k lies beside v.

    *tokens*: of a block in memory.
    """
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
        return _scaled(given_spec, content, local, tokens)
    if page_format == "opaque:msa":
        slot = given_spec.get("state_content_bytes").size()
        return {"state_content_bytes": 2 * slot, "page_format": page_format}
    if not plain:
        wanted = f"None or {(size + size_v) * width}: a key and a value"
        raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
    return {"page_format": page_format}


def _scaled(given_spec: Given, content: int | None, local: int, tokens: int) -> dict[str, Any]:
    """Return a page that is one piece: neither its heads nor its tokens can be cut."""
    block = given_spec.get("block_size").size()
    rows = block // given_spec.get("tokens_per_state").size(1)
    slots = given_spec.get("num_head_slots").size(local)
    page = real_page(given_spec) if content is None else slots * rows * content
    if page is None or page % local:
        wanted = f"{local} heads of equal size: content for each of num_head_slots={slots}"
        raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
    return {
        "state_content_bytes": page // local * tokens // block,
        "tokens_per_state": tokens,
        "spans_heads": True,
    }


def layout_of(layout: str, spec: AttentionSpec, page_format: str) -> str:
    """Return the layout of rows of tokens: vLLM's letters, or those that say the packing.

    Two head slots are planes, K outside the tokens; where heads are cut in pieces, a head has all
    its rows before the next. A page that is opaque lies in one piece.
    """
    if page_format in ("planes", "x-packed", "keys-transposed"):
        if "K" in layout:
            raise SpecError("layout", layout, f"no K where pages are {page_format}")
        if page_format == "keys-transposed":
            return layout.replace("N", "KN")
        planes = layout.replace("H", "K")
        return planes.replace("C", "HC") if page_format == "planes" else planes.replace("N", "HN")
    if (spec.spans_heads or is_opaque(page_format)) and layout[:2] != outer(layout):
        wanted = "L and B outermost: a page whose packing spans heads lies in one piece"
        raise SpecError("layout", layout, wanted)
    return layout


def outer(layout: str) -> str:
    """Return layers and blocks, in the order of the *layout*."""
    return "".join(letter for letter in layout if letter in "LB")


def real_page(given_spec: Given) -> int | None:
    """Return the bytes of a page without padding, if vLLM says them."""
    found = given_spec.get("unpadded_page_size_bytes").size_or_none()
    return given_spec.get("real_page_size_bytes").size_or_none() if found is None else found
