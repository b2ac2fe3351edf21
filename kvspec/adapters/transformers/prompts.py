"""Hold prompts of a transformers model for consumers, and load prompts into its cache.

Invariant: the tensors of transformers are never registered. They are copied.

How it works:
    A `DynamicCache` concatenates its tensors at each step, so their addresses change. `hold` copies
    the rows of a prompt into a `PromptBuffer`, which a session registers once. `load` copies them
    from a buffer into an empty cache.

    A window layer forgets tokens. After N tokens the four kinds of layers hold these rows, for a
    window of w tokens:

        layer                        rows of the tensor   positions
        DynamicLayer                 N                    0 to N - 1
        DynamicSlidingWindowLayer    min(N, w - 1)        the last ones
        StaticLayer                  all, of any number   0 to N - 1, then zeros
        StaticSlidingWindowLayer     w                    the last ones; if N < w, zeros follow

    A consumer that computes the last token of the prompt itself reads position N - w, which a
    window layer has lost then. So `hold` computes prompts with a cache that forgets nothing,
    ``DynamicCache()`` without a config. The masks of the model hide what is outside the window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from kvspec.adapters.prompt_buffer import HeldTables, PromptBuffer, groups_of, name_layers
from kvspec.adapters.transformers.probe import (
    SLIDING,
    AttentionLayer,
    Network,
    check_cache,
    check_evaluation,
    layer_specs,
    longest_prompt,
)
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.session import Session
from kvspec.specs import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from kvspec.stored import PromptIdentity, RankPages, Saved
from kvspec.tickets import ContentIdentity, PrefillTicket, sampling_of

# transformers and torch are not imported here. These are a `Cache`, and a tensor.
Cache: TypeAlias = Any
AnyTensor: TypeAlias = Any

# The attribute of a cache with zeros for tokens that a window has passed. A consumer must never
# read these. A copy of the cache has the attribute, too.
_HAS_ZEROS = "kvspec_has_zeros"

# The fields of a config with the tokens that stand for parts of an image, a film or a sound.
_MEDIA_TOKEN = re.compile("(image|video|audio)_token_(id|index)")
GREEDY = sampling_of(0.0)  # How the first token of a ticket is chosen.


class Prompts:
    """The prompts of one transformers model, in blocks that a `Session` registers.

    Not for several threads at once.

    Args:
        network: A causal language model of transformers, in evaluation mode. It computes 24 tokens.
        num_blocks: Number of blocks of each group. A prompt of N tokens takes N / *block_size* of
            them, from `hold` until its consumer is done, or during `load`.
        block_size: Tokens of a block.
        layer_name: The peer's name of a layer, with ``{}`` in place of its number, such as
            ``model.layers.{}.self_attn.attn``.

    Attributes:
        engine: The description of the model. Layers that store the same are one group.
        cache: The buffer. Pass it to the session.

    Raises:
        SpecError: If the model has a layer of an unknown kind, or keys that are not rotated in a
            known order.
    """

    def __init__(
        self,
        network: Network,
        *,
        num_blocks: int,
        block_size: int = 16,
        layer_name: str = "layers.{}",
    ) -> None:
        self._network, specs = network, layer_specs(network, block_size)
        self._layers = name_layers(layer_name, specs)
        self._buffer = PromptBuffer(EngineSpec(groups=groups_of(self._layers)), num_blocks)
        self.engine, self.cache = self._buffer.engine, self._buffer.cache

    def hold(
        self,
        session: Session,
        request_id: str,
        input_ids: AnyTensor,
        cache: Cache = None,
        *,
        lease: float | None = None,
        consumer: str | None = None,
        top_logprobs: int = 1,
    ) -> PrefillTicket:
        """Compute a prompt and hold it for a consumer.

        It can be read by consumers that compute the last token of the prompt themselves, and by
        those that begin with the first new token. The ticket contains that token, chosen greedily.

        Args:
            session: The session that has registered `cache`.
            request_id: Name of the request.
            input_ids: All tokens of one prompt, at least two: shape (tokens,) or (1, tokens).
            cache: A cache with the first tokens of the prompt, or none. They are not computed
                again, and the cache has all tokens afterwards. If it has all of them before, the
                ticket has no first token. If the model has windows, it must be a
                ``DynamicCache()`` without a config, which forgets nothing.
            lease: As in `Session.hold`.
            consumer: Name of the engine that the prompt is meant for.
            top_logprobs: Number of log probabilities in the ticket, from the likeliest token on.

        Returns:
            The ticket for the consumer.

        Raises:
            SpecError: If too few blocks are free, or *cache* does not fit the model or the prompt.
        """
        tokens = self._prompt(input_ids)
        sampled, rows = self._computed(tokens, cache, top_logprobs)
        self._buffer.reclaim(session)
        tables = self._buffer.take(len(tokens) - 1, len(tokens))
        try:
            self._copy(rows, tables, len(tokens))
            sampled["consumer"] = consumer
            return self._buffer.hold(
                session, request_id, tokens, tables, sampled, adapter=self._adapter, lease=lease
            )
        except BaseException:
            self._buffer.give(tables)
            raise

    def save(
        self,
        pages: RankPages,
        input_ids: AnyTensor,
        cache: Cache = None,
        *,
        adapter: str | None = None,
        salt: str | bytes = "",
    ) -> Saved:
        """Compute a prompt and save its whole pages, so that any engine continues from them.

        Args:
            pages: ``store.rank_pages(prompts.cache)``, for a store whose placement this engine
                fits.
            input_ids: As for `hold`. They may end with generated tokens.
            cache: As for `hold`.
            adapter: As in `PromptIdentity`. "" by default, if the model has no adapter.
            salt: The salt that separates tenants. None by default.

        Returns:
            What was written.

        Raises:
            SpecError: As `hold`, or if the adapter of the model is not stated.
            MismatchError: If the model does not fit the placement.
            StoreError: If an object cannot be written.
        """
        tokens = self._prompt(input_ids)
        names = self._names(pages, tokens, adapter, salt)
        _, rows = self._computed(tokens, cache, 0)
        # A stored page has all tokens, so a window needs its earlier blocks, too.
        tables = self._buffer.take(0, len(tokens))
        try:
            self._copy(rows, tables, len(tokens))
            return pages.save(names, 0, len(names), tables)
        finally:
            self._buffer.give(tables)

    def _names(
        self, pages: RankPages, tokens: list[int], adapter: str | None, salt: str | bytes
    ) -> tuple[str, ...]:
        """Return the names of the whole pages of a prompt."""
        if pages.cache is not self.cache:
            raise SpecError("pages", pages, "those of the `cache` of this object")
        own = self._adapter if adapter is None else adapter
        if own == "" and self._adapter is None:
            raise SpecError("adapter", own, "the name of the adapter, because the model has one")
        prompt = PromptIdentity.of(adapter=own, media=(), embeddings="", salt=salt)
        return pages.store.names(tokens, prompt)

    def _computed(
        self, tokens: list[int], cache: Cache, top_logprobs: int
    ) -> tuple[dict[str, Any], dict[str, dict[str, AnyTensor]]]:
        """Return what was sampled after the prompt, and the rows of each part of each layer."""
        from transformers import DynamicCache  # noqa: PLC0415 - a caller with a model has loaded it

        if cache is None:
            cache = DynamicCache()
        elif (known := self._check(cache)) > len(tokens):
            raise SpecError("cache", known, f"at most the {len(tokens)} tokens of the prompt")
        elif _has_zeros(cache, known):
            wanted = "a cache that has all tokens, because the model has windows"
            raise SpecError("cache", "one that `load` has filled", wanted)
        sampled, end = self._compute(tokens, cache, top_logprobs), len(tokens)
        # A wrapper of the model may have added tokens of its own, such as those of prompt tuning.
        if (computed := self._check(cache)) != end:
            raise SpecError("cache", f"{computed} tokens", f"the {end} tokens of the prompt")
        layers = zip(self._layers, cache.layers, strict=True)
        return sampled, {name: self._rows(name, layer, end) for name, layer in layers}

    def _copy(
        self, rows: Mapping[str, Mapping[str, AnyTensor]], tables: HeldTables, end: int
    ) -> None:
        """Copy the rows of a prompt into the blocks of *tables*."""
        for name, parts in rows.items():
            first = tables[self.engine.homes[name].name].first_token
            for part, each in parts.items():
                found = each[first:end].contiguous().cpu()
                bytes_ = found.view(dtype=_torch().uint8).numpy()
                self._buffer.write(tables, name, part, range(first, end), bytes_)

    @property
    def _adapter(self) -> str | None:
        """The adapter of the model: "" for none, or None, because its weights have no name."""
        loaded = getattr(self._network, "_hf_peft_config_loaded", False)
        return None if loaded or hasattr(self._network, "peft_config") else ""

    def _content(self, tokens: list[int], num_tokens: int) -> ContentIdentity:
        """Return the content of the first tokens of a prompt for this model."""
        return ContentIdentity.of_text(tokens, num_tokens, adapter=self._adapter)

    def _prompt(self, input_ids: AnyTensor) -> list[int]:
        """Return the tokens of one prompt."""
        tokens, settings = _tokens(input_ids), getattr(self._network, "generation_config", None)
        pad, end = (getattr(settings, f"{name}_token_id", None) for name in ("pad", "eos"))
        # `generate` masks these tokens, and counts no positions for them. A ticket has no mask.
        if pad in tokens and pad not in (end if isinstance(end, list) else [end]):
            raise SpecError("input_ids", f"padding (token {pad})", "a prompt without padding")
        # A prompt with an image leaves a shift of positions in the model. It is added to those of
        # the next prompt whose cache is not empty, although text has no shift.
        for module in self._network.modules():
            shift = getattr(module, "rope_deltas", None)
            if shift is not None and bool(shift.any()):
                rule = "an earlier prompt with an image shifts the positions: set it to None"
                raise SpecError("network.rope_deltas", shift.tolist(), rule=rule)
        # The tokens do not identify an image, and its positions are not in a cache.
        for name, token in vars(self._network.config).items():
            if _MEDIA_TOKEN.fullmatch(name) and token in tokens:
                raise SpecError("input_ids", f"{name} {token}", "a prompt of text only")
        return tokens

    def _compute(self, tokens: list[int], cache: Cache, top_logprobs: int) -> dict[str, Any]:
        """Compute the tokens that *cache* lacks. Return what was sampled after the last one."""
        check_evaluation(self._network)
        if (most := longest_prompt(self._network)) is not None and len(tokens) > most:
            wanted = f"at most {most}: the rotation of a longer prompt is another one"
            raise SpecError("input_ids", f"{len(tokens)} tokens", wanted)
        count = positive_int("top_logprobs", top_logprobs, least=0)
        prompt = _torch().tensor([tokens], device=self._network.device)
        with _torch().no_grad():
            # The logits of all tokens would need much memory, so only the last token gets them.
            if (known := cache.get_seq_length()) < len(tokens) - 1:
                self._network.base_model(prompt[:, known:-1], past_key_values=cache)
            if cache.get_seq_length() == len(tokens):
                return {}
            logits = self._network(prompt[:, -1:], past_key_values=cache).logits[0, -1].float()
        # If the best logits are equal, `generate` chooses the first one, and `topk` any of them. In
        # bfloat16 they are often equal.
        ids = logits.sort(descending=True, stable=True).indices[: max(count, 1)]
        pairs = [*zip(ids.tolist(), logits.log_softmax(-1)[ids].tolist(), strict=True)]
        first: dict[str, Any] = {"first_token": pairs[0][0], "sampling": GREEDY}
        return first | {"first_logprobs": pairs[:count]}

    def _rows(self, name: str, layer: Cache, end: int) -> dict[str, AnyTensor]:
        """Return the rows of each part of a layer, [tokens, heads, size]."""
        if (rows := layer.keys.shape[-2]) < end:
            wanted = f"all {end} tokens: pass a DynamicCache() without a config"
            raise SpecError(f"cache of {name!r}", f"the last {rows} tokens", wanted)
        found = [each[0, :, :end].transpose(0, 1) for each in (layer.keys, layer.values)]
        spec = self._layers[name]
        if isinstance(spec, MLAAttentionSpec):
            found = [_torch().cat(found, dim=-1)]
        return {part.name: each for part, each in zip(spec.parts, found, strict=True)}

    def load(
        self,
        session: Session,
        ticket: PrefillTicket,
        input_ids: AnyTensor,
        cache: Cache,
        *,
        timeout: float = 30.0,
    ) -> None:
        """Load a prompt into an empty *cache*, but for its last token. Waits.

        Then call ``network.generate(input_ids, past_key_values=cache)``. It computes the tokens
        that the cache does not have. If the call raises, the cache is still empty: then generate
        without the ticket.

        Args:
            session: The session that has registered `cache`.
            ticket: The ticket of the producer.
            input_ids: All tokens of the prompt: shape (tokens,) or (1, tokens).
            cache: ``DynamicCache(config=network.config)``, or a `StaticCache`.
            timeout: As in `Session.load`.

        Raises:
            SpecError: If the ticket is of another prompt or for another consumer, if *cache* is not
                empty or of another model, or if too few blocks are free.
            TransferError: If the load fails. Its `__cause__` names what does not fit.
        """
        tokens = self._prompt(input_ids)
        ticket.check(self._content(tokens, ticket.computed_tokens), session.me.engine_id)
        end = min(ticket.computed_tokens, len(tokens) - 1)
        self._check_room(cache, end)
        with self._buffer.loaded(session, ticket, end, timeout) as tables:
            self._fill(cache, tables, end)

    def load_saved(
        self,
        pages: RankPages,
        input_ids: AnyTensor,
        cache: Cache,
        *,
        adapter: str | None = None,
        salt: str | bytes = "",
    ) -> int:
        """Load the longest saved prefix of a prompt into an empty *cache*.

        The last token is never loaded, so that the model computes at least one. Then call
        ``network.generate(input_ids, past_key_values=cache)``, as after `load`.

        Args:
            pages: As for `save`.
            input_ids: As for `load`.
            cache: As for `load`.
            adapter: As for `save`.
            salt: As for `save`.

        Returns:
            The number of tokens in the cache. 0 if no page is stored: `PageStore.explain` says why.

        Raises:
            SpecError: As `load`.
            MismatchError: If the model does not fit the placement.
            LoadError: If a page is absent or damaged. The cache is still empty.
        """
        tokens = self._prompt(input_ids)
        names = self._names(pages, tokens, adapter, salt)
        names = names[: (len(tokens) - 1) // pages.store.placement.page_tokens]
        with pages.store.lookup(names, self.engine) as hit:
            self._check_room(cache, hit.num_tokens)
            if not hit.num_pages:
                return 0
            tables = self._buffer.take(hit.num_tokens, hit.num_tokens)
            try:
                pages.load(hit, hit.num_pages, tables)
                self._fill(cache, tables, hit.num_tokens)
            finally:
                self._buffer.give(tables)
            return hit.num_tokens

    def _check_room(self, cache: Cache, end: int) -> None:
        """Raise `SpecError` unless *cache* is empty, and can have *end* tokens."""
        if known := self._check(cache):
            raise SpecError("cache", f"{known} tokens", "an empty cache")
        _has_zeros(cache, known)
        for (name, spec), layer in zip(self._layers.items(), cache.layers, strict=False):
            needed = len(spec.live_tokens(end)) if type(layer).__name__ in SLIDING else end
            if (most := getattr(layer, "max_cache_len", needed)) < needed:
                wanted = f"at least {needed}, the tokens to load"
                raise SpecError(f"cache of {name!r}.max_cache_len", most, wanted)

    def _fill(self, cache: Cache, tables: HeldTables, end: int) -> None:
        """Put the first *end* tokens of a prompt into an empty *cache*."""
        number_of_layers = len(cache.layers)
        try:
            for number, (name, spec) in enumerate(self._layers.items()):
                cache.update(*self._padded(tables, name, end), number)
                if spec.live_tokens(end).start:
                    setattr(cache, _HAS_ZEROS, True)
        except BaseException:
            # A model would take the number of tokens of the first layer for that of all layers.
            cache.reset()
            del cache.layers[number_of_layers:]
            raise

    def _padded(self, tables: HeldTables, name: str, end: int) -> list[AnyTensor]:
        """Return the keys and values of a loaded layer, [1, heads, tokens, size]."""
        spec = self._layers[name]
        live, padded = spec.live_tokens(end), list[AnyTensor]()
        for part in spec.parts:
            found = _torch().from_numpy(self._buffer.read(tables, name, part.name, live))
            rows = found.view(_dtype(spec)).transpose(0, 1)[None].to(self._network.device)
            # Zeros stand for the tokens that a window has passed. So the layer counts them, and it
            # forgets them itself.
            padded.append(rows.new_zeros((*rows.shape[:2], end, rows.shape[3])))
            padded[-1][:, :, live.start :] = rows
        if isinstance(spec, MLAAttentionSpec):
            padded = [*padded[0].split(_sizes(spec), dim=-1)]
        return padded

    def _check(self, cache: Cache) -> int:
        """Return the number of tokens in *cache*. Raise `SpecError` if it is of another model."""
        check_cache("cache", cache)
        windows = [isinstance(spec, SlidingWindowSpec) for spec in self._layers.values()]
        sliding = [type(layer).__name__ in SLIDING for layer in cache.layers]
        # A cache without a config has no layers at first. Its layers forget nothing, so they can
        # have the place of a window.
        if sliding and (len(sliding) != len(windows) or any(map(bool.__gt__, sliding, windows))):
            wanted = f"layers with windows {windows}: create it with config=network.config"
            raise SpecError("cache.layers", sliding, wanted)
        for (name, spec), layer in zip(self._layers.items(), cache.layers, strict=False):
            _check_layer(f"cache of {name!r}", spec, layer)
        # An interrupted computation leaves more tokens in the first layers.
        lengths = {int(layer.get_seq_length()) for layer in cache.layers} or {0}
        if len(lengths) > 1:
            raise SpecError("cache.layers", f"{sorted(lengths)} tokens", "equal numbers of tokens")
        return lengths.pop()


def _has_zeros(cache: Cache, known: int) -> bool:
    """Return whether *cache* has zeros among its *known* tokens. An empty one was reset."""
    if known == 0 and hasattr(cache, _HAS_ZEROS):
        delattr(cache, _HAS_ZEROS)
    return hasattr(cache, _HAS_ZEROS)


def _check_layer(field: str, spec: AttentionLayer, layer: Cache) -> None:
    """Raise `SpecError` if the tensors of a layer of a cache do not have the rows of *spec*."""
    if (window := getattr(layer, "sliding_window", None)) is not None:
        wanted = getattr(spec, "sliding_window", None)
        if window != wanted:
            raise SpecError(f"{field}.sliding_window", window, f"{wanted}, as the model has")
    for name, size in zip(("keys", "values"), _sizes(spec), strict=True):
        tensor = getattr(layer, name)
        if tensor is None or not tensor.numel():
            continue
        batch, heads, _, found = tensor.shape
        if batch != 1:
            raise SpecError("cache.batch_size", batch, "1")
        rows = heads, found, tensor.dtype
        if (expected := (spec.parts[0].units, size, _dtype(spec))) != rows:
            wanted = f"{expected}, the heads, elements and dtype of the model"
            raise SpecError(f"{field}.{name}", rows, wanted)


def _sizes(spec: AttentionLayer) -> tuple[int, int]:
    """Return the elements of a row of keys and of a row of values."""
    if isinstance(spec, FullAttentionSpec):
        return spec.head_size, spec.head_size_v or spec.head_size
    # The cache of MLA has the latent as its keys and the rotated part as its values.
    cut = spec.key_content.rotary_start if spec.key_content is not None else 0
    return cut, spec.head_size - cut


def _dtype(spec: AttentionLayer) -> Any:  # noqa: ANN401 - a dtype of torch
    return getattr(_torch(), spec.dtype)


def _torch() -> Any:  # noqa: ANN401 - a module
    import torch  # noqa: PLC0415 - a caller with a model has loaded torch

    return torch


def _tokens(input_ids: AnyTensor) -> list[int]:
    """Return the tokens of one prompt."""
    tokens = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if len(tokens) == 1 and isinstance(tokens[0], list):
        (tokens,) = tokens
    if len(tokens) < 2 or not all(type(token) is int for token in tokens):  # noqa: PLR2004
        raise SpecError("input_ids", tokens, "at least two tokens of one prompt")
    return tokens
