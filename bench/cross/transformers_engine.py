"""Engines of transformers, which answer the calls of `lines`."""

from __future__ import annotations

from typing import Any

import lines
import torch
import transformers
from buffer_engine import BUFFER, LOADING, LOGPROBS, BufferEngine

from kvspec.adapters.transformers import Prompts
from kvspec.stored import ModelIdentity, PageStore, PromptIdentity, RankPages, StoredSpec
from kvspec.stored.file_objects import FileObjects
from kvspec.tickets import PrefillTicket


class Engine(BufferEngine):
    """A model of transformers, its buffer, and its session."""

    def __init__(
        self,
        name: str,
        path: str,
        model: str,
        revision: str,
        block: int,
        dtype: str = "float32",
        store: dict[str, Any] | None = None,
    ) -> None:
        self.network = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()
        prompts = Prompts(
            self.network,
            num_blocks=BUFFER // block,
            block_size=block,
            layer_name="model.layers.{}.self_attn.attn",
        )
        super().__init__(name, prompts, model, revision)
        if store is not None:
            self.pages = self._opened(store, model, revision)

    def _opened(self, store: dict[str, Any], model: str, revision: str) -> RankPages:
        """Return the pages of this engine in a store."""
        settings = dict(store)
        objects = FileObjects(settings.pop("directory"))
        identity = ModelIdentity(
            model=model,
            revision=revision,
            weights=settings.pop("weights", ""),
            quantization="",
            overrides="",
        )
        placement = StoredSpec.of(self.prompts.engine, **settings)
        return PageStore(placement, identity, objects).rank_pages(self.prompts.cache)

    def save(self, prompt: list[int], **asked: str) -> None:
        """Compute a prompt and store its pages."""
        self.prompts.save(self.pages, prompt, **asked)

    def resume(self, prompt: list[int], count: int, **asked: str) -> dict[str, Any]:
        """Return the answer of an engine that loads what is stored of the prompt."""
        self.forget()
        known = self.prompts.load_saved(self.pages, prompt, self.cache, **asked)
        answer, store = self.generated(prompt, count, known), self.pages.store
        if not known:
            prompts = PromptIdentity.of_text(**asked)
            answer["why"] = store.explain(store.names(prompt, prompts), self.prompts.engine)
            answer["others"] = "; ".join(store.other_spaces())
        return answer

    def forget(self) -> None:
        """Make a new cache."""
        self.cache = transformers.DynamicCache(config=self.network.config)

    def compute(self, tokens: list[int]) -> dict[int, float]:
        """Compute *tokens*. Return the largest log probabilities after the last, sorted."""
        with torch.no_grad():
            output = self.network(torch.tensor([tokens]), past_key_values=self.cache)
        values, ids = output.logits[0, -1].float().log_softmax(-1).topk(LOGPROBS)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))

    def load(self, ticket: PrefillTicket, prompt: list[int]) -> int:
        """Load a prompt into the cache."""
        self.prompts.load(self.session, ticket, prompt, self.cache, timeout=LOADING)
        return int(self.cache.get_seq_length())

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute and hold a prompt."""
        held = self.prompts.hold(self.session, next(self.names), prompt, top_logprobs=LOGPROBS)
        return {"ticket": held.to_params(), "why": None}

    def fill(self, value: float) -> None:
        """Write *value* into the buffer. A cache lives for one prompt only."""
        element = torch.tensor([value], dtype=self.network.dtype)
        self.fill_buffer(element.view(torch.uint8).numpy().tobytes())


def load() -> tuple[type[Engine], str]:
    """Return the class of engines, and the version of transformers."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    return Engine, f"transformers {transformers.__version__}"


if __name__ == "__main__":
    lines.serve(load)
