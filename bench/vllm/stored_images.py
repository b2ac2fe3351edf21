"""Stored pages of prompts with images: found with the same picture, and only with it.

The first engine stores prompts with two pictures of one size, so that all their token ids are
equal. The second engine gets the same prompts, and others that differ in a picture, its place, its
processing, or the UUID that a client has given it. vLLM believes such a UUID, so two pictures may
have the same one, and one picture two. An answer must be that of a single engine without stored
pages, and the pages before the first difference must be those that are loaded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pair
from models import IMAGE, PIXELS, VOCABULARY, make
from PIL import Image
from process import Failed, Process, started
from stored import PAGE, Stored, side

SCENARIO = Stored("image", "llava-2", (2, 1), (32, 64), head_groups=2)
NAME = "stored: image, TP 2 -> 1, blocks 32 -> 64"
PROCESSING = "stored: other processing in the engine"
_SETTINGS = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2},
    "enable_prompt_embeds": True,
}
# A step has fewer tokens than an image, so each image is computed in several steps. Without its
# cache of processed images, vLLM takes the pixels of each request.
_FIRST = {**_SETTINGS, "max_num_batched_tokens": 64, "mm_processor_cache_gb": 0}
# vLLM then has other identifiers for the same pictures.
_SECOND = {**_SETTINGS, "mm_hasher_algorithm": "sha256"}
_NO_RESCALE = {"mm_processor_kwargs": {"do_rescale": False}}
_WHY = re.compile(r": (\d+ of \d+ pages? are stored.*)")
_SPACE = re.compile(r"pages of another space: (.*)")


@attrs.frozen
class Ask:
    """A prompt with images.

    Attributes:
        name: What differs from the stored prompts. "" for nothing.
        tokens: Token ids, with one IMAGE for each picture. A number for prompt embeddings.
        pictures: The pictures, or the name of the embeddings.
        loaded: Number of its stored tokens.
        uuid: The UUID that its first picture has. "" for none.
        more: More fields of vLLM's prompt.
    """

    name: str
    tokens: tuple[int, ...] | int
    pictures: tuple[str, ...]
    loaded: int = 0
    uuid: str = ""
    more: dict[str, Any] = attrs.field(factory=dict)

    @property
    def content(self) -> str:
        """Everything on which the right answer depends."""
        return repr((self.tokens, self.pictures, self.more))

    def prompt(self) -> dict[str, Any]:
        """Return vLLM's prompt."""
        if isinstance(self.tokens, int):
            return {"prompt_embeds": embeddings(self.tokens, self.pictures[0])}
        asked = {"prompt_token_ids": list(self.tokens), **self.more}
        if self.pictures:
            asked["multi_modal_data"] = {"image": list(map(picture, self.pictures))}
        if self.uuid:
            asked["multi_modal_uuids"] = {"image": [self.uuid]}
        return asked


def picture(name: str) -> Image.Image:
    """Return a picture of noise."""
    draw = np.random.default_rng(sum(name.encode()))
    return Image.fromarray(draw.integers(0, 256, (PIXELS, PIXELS, 3), np.uint8))


def embeddings(count: int, name: str) -> Any:  # noqa: ANN401 - a tensor
    """Return embeddings of *count* tokens."""
    import torch  # noqa: PLC0415 - after the environment is set

    draw = np.random.default_rng(sum(name.encode()))
    return torch.from_numpy(draw.normal(size=(count, 96)).astype(np.float32))


def words(count: int, seed: int) -> list[int]:
    """Return *count* tokens that are no image."""
    draw = random.Random(seed)  # noqa: S311 - the same each time
    return [draw.randrange(IMAGE + 1, VOCABULARY) for _ in range(count)]


# The image has 100 tokens: from 40 to 139, from 20 and from 129, from 32, and so on.
TALE = (*words(40, 1), IMAGE, *words(50, 2))
PAIR = (*words(20, 3), IMAGE, *words(9, 4), IMAGE, *words(30, 5))
EDGE = (*words(32, 6), IMAGE, *words(40, 7))
NAMED = (*words(33, 8), IMAGE, *words(40, 9))
REUSED = (*words(35, 10), IMAGE, *words(40, 11))
BATCH = (*words(36, 12), IMAGE, *words(40, 13))
STORED = (
    Ask("", TALE, ("cat",), 160),
    Ask("", PAIR, ("cat", "dog"), 256),
    Ask("", EDGE, ("cat",), 160, "u-1"),
    Ask("", NAMED, ("cat",), 160, "u-2"),
    Ask("", 70, ("sun",), 64),
    Ask("", REUSED, ("cat",), 160, "u-4"),
)
# The tokens of these two are equal, and they run together.
TOGETHER = (Ask("", BATCH, ("cat",), 160), Ask("", BATCH, ("dog",), 160))
# After the last one of STORED. vLLM computes it with the picture of that one.
REUSE = Ask("", REUSED, ("dog",), 32, "u-4")
OTHERS = (
    Ask("another image", TALE, ("dog",), 32),
    Ask("two images swapped", PAIR, ("dog", "cat"), 0),
    Ask("another second image", PAIR, ("cat", "cat"), 128),
    Ask("the image at another place", (*TALE[:40], *words(1, 14), *TALE[40:]), ("cat",), 32),
    Ask("its tokens without an image", (*TALE[:40], *[IMAGE] * 100, *TALE[41:]), (), 32),
    Ask("other processing in the request", TALE, ("cat",), 32, more=_NO_RESCALE),
    Ask("the UUID of another image", EDGE, ("dog",), 32, "u-1"),
    Ask("the image under another UUID", NAMED, ("cat",), 160, "u-3"),
    Ask("an image whose UUID another one had", REUSED, ("dog",), 32),
    Ask("other prompt embeddings", 70, ("moon",), 0),
    Ask("the token ids of prompt embeddings", (0,) * 70, (), 0),
)


def outcomes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what becomes of the prompts in an engine of other sizes."""
    model = make(SCENARIO.model, folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    same = [attrs.evolve(ask, uuid="") for ask in (*STORED, *TOGETHER)]
    processed = attrs.evolve(STORED[0], loaded=0)
    try:
        with started(*side(SCENARIO, 0, folder, settings=_FIRST)) as first:
            store(first)
        expected = alone(model, [*same, *OTHERS], folder)
        with started(*side(SCENARIO, 1, folder, settings=_SECOND)) as second:
            found = [asked(second, ask, expected[ask.content], folder) for ask in same]
            yield NAME, next((each for each in found if not each.startswith("same")), found[0])
            for ask in OTHERS:
                yield f"stored: {ask.name}", asked(second, ask, expected[ask.content], folder)
        answer = expected[attrs.evolve(processed, more=_NO_RESCALE).content]
        with started(*side(SCENARIO, 1, folder, settings=_SECOND | _NO_RESCALE)) as second:
            found = [asked(second, processed, answer, folder)]
        why = _SPACE.search((folder / "second.log").read_text(errors="replace"))
        yield PROCESSING, f"{found[0]}; {why[1]}" if why else "different: no word in the log"
    except Failed as failed:
        yield NAME, pair.refused(folder, str(failed))


def store(engine: Process) -> None:
    """Let *engine* answer the prompts, until it has stored their pages."""
    for ask in STORED:
        first = engine.generate_all([ask.prompt()], pair.TOKENS)
    if engine.generate_all([REUSE.prompt()], pair.TOKENS)[0]["tokens"] != first[0]["tokens"]:
        raise Failed("vLLM has computed a picture that it knew by another UUID")
    engine.generate_all([ask.prompt() for ask in TOGETHER], 1)
    if held := engine.held():
        raise Failed(f"{held} requests or saves have not ended")


def alone(model: Path, asks: list[Ask], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the answers of a single engine without a connector, by content. All differ."""
    settings = pair.settings(model, 1, 64) | _SETTINGS
    asks = [attrs.evolve(ask, uuid="") for ask in asks]
    with started(folder / "alone.log", {}, settings, None) as single:
        found = {ask.content: single.generate_all([ask.prompt()], pair.TOKENS)[0] for ask in asks}
    if len({tuple(answer["tokens"]) for answer in found.values()}) < len(found):
        raise Failed("two prompts have the same answer")
    return found


def asked(engine: Process, ask: Ask, expected: dict[str, Any], folder: Path) -> str:
    """Return the outcome of a prompt of which *ask.loaded* tokens are stored."""
    log = folder / "second.log"
    before = log.stat().st_size
    # Its prefix cache would hide what is stored. Its caches of images stay.
    if not engine.call("clear", 1.0):
        raise Failed("a request still holds blocks")
    (actual,) = engine.generate_all([ask.prompt()], pair.TOKENS)
    if engine.held():
        raise Failed("the second engine holds requests or saves")
    worst = max(pair.distances(expected, actual))
    loaded, length = actual["loaded"], actual["length"]
    if worst > pair.CLOSE:
        return f"different: {loaded} tokens loaded, and another answer than a single engine's"
    if loaded != ask.loaded or actual["computed"] != length - loaded + pair.TOKENS - 1:
        return f"different: {loaded} of {length} tokens loaded, {ask.loaded} are stored"
    outcome = f"same: {loaded} of {length} tokens loaded, log probabilities within {worst:.0e}"
    if loaded == (length - 1) // PAGE * PAGE:
        return outcome
    text = log.read_bytes()[before:].decode(errors="replace")
    why = _WHY.search(text)
    return f"{outcome}, because {why[1]}" if why else "different: no word in the log"
