"""Media items of vLLM's requests are stated by their content, never by an identifier alone."""

from __future__ import annotations

import gc
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_serving import Request, installed
from vllm_stored import computed, ended, engine, stored

from kvspec.adapters.vllm import media
from kvspec.adapters.vllm.content import prompt_of_request
from kvspec.adapters.vllm.media import MediaContents, digest_of

pytestmark = [pytest.mark.adapters, pytest.mark.usefixtures("simulated")]
torch = pytest.importorskip("torch")

PIXELS = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
OTHER = PIXELS + 1


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """Provide the base class of vLLM for the connector."""
    with installed():
        yield


def feature(
    identifier: str = "u",
    *,
    modality: str = "image",
    mask: Any = None,
    offset: int = 5,
    fields: dict[str, Any] | None = None,
    **arrays: Any,
) -> Any:
    """Return the `MultiModalFeatureSpec` of an item of three tokens."""
    arrays = arrays or {"pixel_values": PIXELS}
    given = {name: SimpleNamespace(data=value) for name, value in (fields or arrays).items()}
    place = SimpleNamespace(offset=offset, length=3, is_embed=mask)
    data: Any = UserDict(given)
    return SimpleNamespace(identifier=identifier, modality=modality, data=data, mm_position=place)


def contents(**config: Any) -> MediaContents:
    """Return the items of an engine."""
    return MediaContents(SimpleNamespace(**config), 4)


def digests(*features: Any) -> list[Any]:
    return [digest_of(each) for each in features]


def test_digest_depends_on_all_that_the_encoder_reads() -> None:
    """Only the identifier and the place are no part of it: the name of a page has the place."""
    grid = {"pixel_values": PIXELS, "grid": torch.tensor([1, 2, 2])}
    found = digests(
        feature(),
        feature(pixel_values=OTHER),
        feature(pixel_values=PIXELS.double()),
        feature(pixel_values=PIXELS.to(torch.bfloat16)),
        feature(pixel_values=PIXELS.reshape(3, 2, 4)),
        feature(pixel_values=[PIXELS]),
        feature(pixel_values=[*PIXELS]),
        feature(pixel_values=PIXELS.numpy()),
        feature(image_embeds=PIXELS),
        feature(modality="video"),
        feature(mask=torch.tensor([True, False, True])),
        feature(mask=torch.tensor([True, True, True])),
        feature(fields=grid),
        feature(fields={**grid, "grid": torch.tensor([1, 1, 4])}),
        feature(fields={**grid, "grid": [1, 1, 4]}),
        feature(fields={**grid, "grid": ["1", 1, 4]}),
        feature(fields={**grid, "grid": [[1, 1], 4]}),
        feature(fields={**grid, "grid": [True, 1, 4]}),
        feature(fields={**grid, "grid": [1.0, 1, 4]}),
        feature(pixel_values=PIXELS[:0]),
    )
    assert None not in found
    assert len(found) == len(set(found))
    same = digests(
        feature("v", offset=9),
        feature(pixel_values=PIXELS.clone()),
        feature(pixel_values=PIXELS.transpose(0, 2).contiguous().transpose(0, 2)),
    )
    assert {found[0]} == set(same)


@pytest.mark.parametrize(
    "fields",
    [
        {"pixel_values": None},
        {"pixel_values": PIXELS, "grid": None},
        {"pixel_values": PIXELS, "grid": object()},
        {"pixel_values": np.array([object()])},
        {"pixel_values": PIXELS.to_sparse()},
        # vLLM has put the item into shared memory. Another picture may get the same address.
        {"address": 64, "monotonic_id": 3, "signature": [1, 2]},
    ],
)
def test_item_whose_arrays_are_not_here_has_no_digest(fields: dict[str, Any]) -> None:
    assert digest_of(feature(fields=fields)) is None
    request = Request("r", 14, mm_features=[feature(fields=fields)])
    assert ("media",) == tuple(
        name for name in prompt_of_request(request, None, contents()).unstated if name == "media"
    )
    assert digest_of(SimpleNamespace(**{**vars(feature()), "data": None})) is None


def test_identifier_with_another_content_is_not_stated_any_more() -> None:
    """VLLM may compute each of these requests with the first picture: its caches have it."""
    items = contents()
    one, two = feature("u"), feature("u", pixel_values=OTHER)
    assert items.stated([one]) is not None
    known = items.digests([one])
    assert items.stated([feature("u")]) is not None
    assert known == items.digests([one])
    assert items.stated([two]) is None
    # Not the running request of the first picture either, nor a later one.
    assert [None] == items.digests([one])
    assert items.stated([one]) is None
    assert items.stated([feature("v", pixel_values=OTHER)]) is not None


def test_content_that_is_known_too_late_is_not_stated() -> None:
    """The arrays come later than a request that was computed with the identifier."""
    items = contents()
    assert items.stated([feature("u", fields={"address": 64})]) is None
    assert items.stated([feature("u")]) is None


def test_content_that_is_not_here_any_more_is_not_stated() -> None:
    items, held = contents(), feature("u")
    assert items.stated([held]) is not None
    del held
    gc.collect()
    assert items.stated([SimpleNamespace(**{**vars(feature("u")), "data": None})]) is None


def test_two_items_of_a_request_with_one_identifier_are_not_stated() -> None:
    assert contents().stated([feature("u"), feature("u", pixel_values=OTHER)]) is None
    assert contents().stated([feature("u"), feature("u", offset=9)]) is not None


def test_items_that_another_engine_encodes_are_not_stated() -> None:
    """VLLM's connectors for encoder outputs know an item by its identifier."""
    assert contents(ec_transfer_config=SimpleNamespace()).stated([feature()]) is None
    assert contents(ec_transfer_config=None).stated([feature()]) is not None


def test_arrays_that_vllm_passes_again_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation has the same pictures in each turn, and vLLM's cache has their arrays."""
    items, calls, first = contents(), list[Any](), feature()

    def counted(each: Any) -> str | None:
        calls.append(each)
        return digest_of(each)

    monkeypatch.setattr(media, "digest_of", counted)
    wanted = items.stated([first])
    again = SimpleNamespace(**{**vars(first), "identifier": first.identifier})
    assert wanted == items.stated([again])
    assert 1 == len(calls)
    # vLLM has forgotten them. Other arrays may have the address of the old ones.
    del first, again
    calls.clear()
    gc.collect()
    assert wanted == items.stated([feature()])
    assert 1 == len(calls)


def test_number_of_remembered_identifiers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came last are remembered."""
    monkeypatch.setattr(media, "REMEMBERED_AT_LEAST", 3)
    items = MediaContents(SimpleNamespace(), 2)  # Two for each of two blocks.
    for name in ("a", "b", "a", "c", "d", "e"):
        assert items.stated([feature(name)]) is not None
    assert [True, False, True] == [
        items.digests([feature(name)]) != [None] for name in ("a", "b", "e")
    ]


def test_pages_are_found_with_the_same_picture_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The page before the picture is found in any case. The UUIDs decide nothing."""
    with engine("one", tmp_path) as one:
        ended(one, computed(one, mm_features=[feature("u")]))
    tables = [3, 5, 7, 9], [0, 8, 6, 4]
    with engine("two", tmp_path) as two:

        def found(name: str, *features: Any) -> int:
            count, _ = two.decode(Request(name, 14, mm_features=list(features)), *tables)
            assert isinstance(count, int)
            return count

        assert 4 == found("a", feature("u", pixel_values=OTHER))
        assert 4 == found("b")
        assert 4 == found("c", feature("v", offset=6))
        assert 12 == found("d", feature("v"))
        with caplog.at_level("INFO"):
            assert 0 == found("e", feature("v", pixel_values=OTHER))
    assert "'v'" in caplog.text
    assert "media" in caplog.text


def test_pages_of_a_reused_identifier_are_not_stored(tmp_path: Path) -> None:
    """While the first request runs, a second one brings another picture with the same UUID."""
    with engine("one", tmp_path) as one:
        request = computed(one, mm_features=[feature("u")], num_tokens=10)
        request._all_token_ids += [7, 8, 9]
        request.num_computed_tokens = 13
        other = feature("u", pixel_values=OTHER)
        one.scheduler.on_new_request(Request("b", 14, mm_features=[other]))
        ended(one, request)
    # The two pages that it has computed before.
    assert [("full", 12), ("window-8", 12)] == stored(tmp_path)


def test_pages_of_a_picture_from_another_engine_are_not_stored(tmp_path: Path) -> None:
    """A ticket names the picture by its identifier, under which the producer may know another."""
    with engine("one", tmp_path) as one:
        request = Request("a", 14, mm_features=[feature("u")])
        one.scheduler.on_new_request(request)
        pages = one.scheduler._pages
        pages.loaded_by_ticket("a", {})
        assert [None] == pages._media.digests(request.mm_features)
        ended(one, computed(one, "b", mm_features=[feature("u")]))
    assert [] == stored(tmp_path)
