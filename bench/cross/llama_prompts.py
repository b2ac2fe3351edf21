"""Exchange prompts between llama.cpp and other engines, by copies of its sequence state.

The adapter was run with llama-cpp-python 0.3.36. It reads and writes the third version of the
format of a sequence's state, and refuses all others.

Invariant: only `llama_state_seq_get_data` and `llama_state_seq_set_data` read and write the cache
of llama.cpp, and each byte of a state that is not a key or a value has the expected value.

How it works:
    llama.cpp has one cache of cells, and does not return their addresses. So `hold` copies a prompt
    into a `PromptBuffer`, which a session registers, and `load` copies it from a buffer into an
    empty sequence. The state of N tokens of a model with L layers consists of these, all of them
    little-endian:

        magic, number of the sequence, number of streams (1), N     4 x 4 bytes
        for each cell: position, number of its sequences (1), theirs    12 bytes
        whether the values are transposed, L                        2 x 4 bytes
        for each layer: type, bytes of a row, N rows of keys        4 + 8 bytes + rows
        for each layer: type, bytes of a row, N rows of values      4 + 8 bytes + rows

    Without flash attention, values are transposed. Then a layer has its type, the bytes of an
    element, the elements of a row, and for each element of a row the elements of N cells.

    A Llama's keys lie in pairs, because the converter of llama.cpp exchanges rows of the weights.
    Those of Qwen3 lie in halves, and are normalised. So the description comes from running the
    model, one token at a time (`rotation_of`). Keys are normalised if the squares of a row's
    elements, each divided by one number for all tokens, have the same sum in all rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, c_uint8
from importlib import import_module
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.adapters.prompt_buffer import PromptBuffer, groups_of, name_layers
from kvspec.adapters.rotation import rotation_of
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.session import Session
from kvspec.specs import FullAttentionSpec
from kvspec.tickets import ContentIdentity, PrefillTicket

# llama_cpp is not imported here. This is a `llama_context_p`.
Context: TypeAlias = Any

Bytes = npt.NDArray[np.uint8]

VERSION = 3
MAGIC = 0xAF143CD8

# Types of ggml: dtype, bytes of an element, and how much two rounded elements differ.
TYPES = {
    0: ("float32", 4, 2.0**-23),
    1: ("float16", 2, 2.0**-10),
    30: ("bfloat16", 2, 2.0**-7),
}

# Models with another memory than one cache of full attention.
OTHER_MEMORY = ("is_recurrent", "is_hybrid", "has_encoder", "n_swa")

# Tokens of the probe at each position but 0.
_TOKENS = 8

# Norms of normalised keys differ by less, because of the small number that a norm adds before it
# divides. Norms of other keys differ by a tenth or more.
_EQUAL = 0.01


@attrs.frozen
class StateFormat:
    """All that a state contains besides keys, values and positions.

    Attributes:
        layers: Number of layers.
        kind: Type of keys and values, a key of `TYPES`.
        key_row: Bytes of the keys of one token.
        value_row: Bytes of the values of one token.
        transposed: Whether the values are transposed.
    """

    layers: int
    kind: int
    key_row: int
    value_row: int
    transposed: bool

    @property
    def row_sizes(self) -> list[int]:
        """Bytes of a row of each layer: keys, then values."""
        return [self.key_row] * self.layers + [self.value_row] * self.layers

    @classmethod
    def of(cls, state: Bytes, layers: int) -> StateFormat:
        """Return the format of the *state* of one token of a model with *layers* layers.

        Raises:
            SpecError: If it has another format.
        """
        start = struct.unpack_from("<IiIIiIiIIiQ", state.tobytes().ljust(48, b"\0"))
        magic, _, streams, cells, _, sequences, _, transposed, count, kind, key_row = start
        for name, found, wanted in (
            ("magic", magic, [MAGIC]),
            ("streams", streams, [1]),
            ("cells", cells, [1]),
            ("sequences", sequences, [1]),
            ("transposed", transposed, [0, 1]),
            ("layers", count, [layers]),
            ("type_k", kind, TYPES),
        ):
            if found not in wanted:
                raise SpecError(f"state.{name}", found, " or ".join(map(str, wanted)))
        header = state[36 + layers * (12 + key_row) :][:12].tobytes()
        if not header:
            raise SpecError("state.values", None, "values of each layer: MLA is not supported")
        value_kind, size, width = struct.unpack("<iII", header.ljust(12, b"\0"))
        if value_kind != kind:
            raise SpecError("state.type_v", value_kind, f"{kind}, the type of the keys")
        # A row of values that are not transposed has 8 bytes for its size.
        value_row = size * width if transposed else size + (width << 32)
        found = cls(layers, kind, key_row, value_row, bool(transposed))
        found.read(state)
        return found

    def read(self, state: Bytes) -> tuple[npt.NDArray[np.int32], list[Bytes]]:
        """Return the positions of the cells, and for each layer [cells, bytes]: keys, then values.

        Raises:
            SpecError: If the state has another format.
        """
        cells = int(state[12:16].view("<u4")[0])
        table = state[16 : 16 + 12 * cells].view("<i4").reshape(-1, 3)
        number = state[4:8].view("<i4")[0]
        if len(state) == self._size(cells):
            blank, rows = self._start(number, table[:, 0]), list[Bytes]()
            same = bytes(state[: len(blank)]) == blank
            for header, found, part in self._sections(state, cells):
                same &= header == found.tobytes()
                rows.append(np.ascontiguousarray(part).view(np.uint8))
            if same:
                return table[:, 0], rows
        raise SpecError("state", f"{len(state)} bytes of another format", f"{self}")

    def write(self, rows: Sequence[Bytes]) -> Bytes:
        """Return the state of a sequence with *rows*, as `read` returns them."""
        cells = len(rows[0])
        state, start = np.empty(self._size(cells), np.uint8), self._start(0, np.arange(cells))
        state[: len(start)] = np.frombuffer(start, np.uint8)
        for (header, place, part), found in zip(self._sections(state, cells), rows, strict=True):
            place[:] = np.frombuffer(header, np.uint8)
            part[...] = np.ascontiguousarray(found).view(part.dtype)
        return state

    def _size(self, cells: int) -> int:
        return 24 + 12 * cells + sum(12 + cells * row for row in self.row_sizes)

    def _start(self, number: int, positions: npt.NDArray[Any]) -> bytes:
        """Return all bytes before the keys."""
        table = [(position, 1, number) for position in positions.tolist()]
        start = struct.pack("<IiII", MAGIC, number, 1, len(table))
        end = struct.pack("<II", self.transposed, self.layers)
        return start + np.array(table, "<i4").tobytes() + end

    def _sections(self, state: Bytes, cells: int) -> Iterator[tuple[bytes, Bytes, Any]]:
        """Yield for each layer the expected header, its place, and the rows [cells, elements]."""
        at, size = 24 + 12 * cells, TYPES[self.kind][1]
        for number, row in enumerate(self.row_sizes):
            end = at + 12 + cells * row
            rows = state[at + 12 : end].view(f"V{size}")
            if self.transposed and number >= self.layers:
                header = struct.pack("<iII", self.kind, size, row // size)
                yield header, state[at : at + 12], rows.reshape(-1, cells).T
            else:
                header = struct.pack("<iQ", self.kind, row)
                yield header, state[at : at + 12], rows.reshape(cells, -1)
            at = end


class Prompts:
    """The prompts of one sequence of a llama.cpp context, in blocks that a `Session` registers.

    Not for several threads at once.

    Args:
        context: A `llama_context_p`, such as ``llama_cpp.Llama(...).ctx``. Its cache has float32,
            float16 or bfloat16. It computes some tokens.
        num_blocks: Number of blocks of each group, as for transformers.
        block_size: Tokens of a block.
        layer_name: The peer's name of a layer, with ``{}`` in place of its number.
        sequence: Number of the sequence. It must be empty.

    Attributes:
        engine: The description of the model.
        cache: The buffer. Pass it to the session.

    Raises:
        SpecError: If llama.cpp has another version, or the model has another memory than keys and
            values of full attention, or keys that are not rotated in a known order.
    """

    def __init__(
        self,
        context: Context,
        *,
        num_blocks: int,
        block_size: int = 16,
        layer_name: str = "model.layers.{}.self_attn.attn",
        sequence: int = 0,
    ) -> None:
        self._api = api = import_module("llama_cpp")
        if api.LLAMA_STATE_SEQ_VERSION != VERSION:
            raise SpecError("LLAMA_STATE_SEQ_VERSION", api.LLAMA_STATE_SEQ_VERSION, str(VERSION))
        model = api.llama_get_model(context)
        for name in OTHER_MEMORY:
            if found := getattr(api, f"llama_model_{name}")(model):
                raise SpecError(f"llama_model_{name}", found, "0: only full attention is supported")
        self._context, self._sequence = context, sequence
        self._check_empty()
        specs = self._probe(model, block_size)
        self._layers = name_layers(layer_name, specs)
        self._buffer = PromptBuffer(EngineSpec(groups=groups_of(self._layers)), num_blocks)
        self.engine, self.cache = self._buffer.engine, self._buffer.cache
        self._parts = [(name, part) for part in "kv" for name in self._layers]

    def _probe(self, model: Any, block_size: int) -> list[FullAttentionSpec]:  # noqa: ANN401
        """Return what each layer stores. It computes single tokens at three positions."""
        api, heads = self._api, self._api.llama_model_n_head_kv(model)
        layers, last = api.llama_model_n_layer(model), api.llama_model_n_ctx_train(model) - 1
        self._format = form = StateFormat.of(self._token(model, 0, 0.5), layers)
        dtype, size, resolution = TYPES[form.kind]
        if form.key_row % (heads * size) or form.value_row % (heads * size):
            wanted = f"multiples of {heads} heads of {dtype}"
            raise SpecError("state.rows", (form.key_row, form.value_row), wanted)
        head_size = form.key_row // heads // size
        # To tell normalised keys from others, there must be more rows than elements of a row.
        counts = {last: _TOKENS, 1: _TOKENS, 0: max(_TOKENS, 3 * head_size // heads + 1)}
        keys = []
        for position, count in counts.items():
            places = np.linspace(0, 1, counts[0])[:count]
            states = [form.read(self._token(model, position, place))[1] for place in places]
            rows = np.array([state[:layers] for state in states]).swapaxes(0, 1)
            keys.append(_numbers(rows, dtype).reshape(layers, -1, head_size))
        specs = []
        for number, rows in enumerate(zip(*keys, strict=True)):
            moved = [each[: _TOKENS * heads] for each in rows]
            content = rotation_of(f"state.keys[{number}]", moved, resolution)
            normalized = _normalized(rows[-1], max(_EQUAL, 8 * resolution))
            specs.append(
                FullAttentionSpec(
                    block_size=block_size,
                    total_num_kv_heads=heads,
                    head_size=head_size,
                    head_size_v=form.value_row // heads // size,
                    dtype=dtype,
                    key_content=attrs.evolve(content, normalized=normalized),
                )
            )
        return specs

    def _token(self, model: Any, position: int, place: float) -> Bytes:  # noqa: ANN401
        """Return the state of one token at *position*. *place* is its place in the vocabulary."""
        api = self._api
        tokens = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        batch = api.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.n_seq_id[0], batch.logits[0] = 1, 1, True
        batch.token[0], batch.pos[0] = int(place * (tokens - 1)), position
        batch.seq_id[0][0] = self._sequence
        status = api.llama_decode(self._context, batch)
        api.llama_batch_free(batch)
        if status:
            raise SpecError("llama_decode", status, "0")
        state = self._state()
        api.llama_memory_seq_rm(api.llama_get_memory(self._context), self._sequence, -1, -1)
        return state

    def _state(self) -> Bytes:
        """Return the state of the sequence."""
        size = self._api.llama_state_seq_get_size(self._context, self._sequence)
        state = np.empty(size, np.uint8)
        pointer = state.ctypes.data_as(POINTER(c_uint8))
        done = self._api.llama_state_seq_get_data(self._context, pointer, size, self._sequence)
        if done != size:
            raise SpecError("llama_state_seq_get_data", done, str(size))
        return state

    def _check_empty(self) -> None:
        memory = self._api.llama_get_memory(self._context)
        last = self._api.llama_memory_seq_pos_max(memory, self._sequence)
        if last >= 0:
            raise SpecError("sequence", f"{last + 1} tokens", "an empty sequence")

    def hold(
        self,
        session: Session,
        request_id: str,
        tokens: Sequence[int],
        sampled: Mapping[str, Any] | None = None,
        *,
        lease: float | None = None,
    ) -> PrefillTicket:
        """Hold a prompt that the sequence has computed, and return its ticket.

        Args:
            session: The session that has registered `cache`.
            request_id: Name of the request.
            tokens: All tokens of the prompt. The sequence begins with them.
            sampled: The fields of the ticket that may be None, by name, such as `first_token`.
            lease: As in `Session.hold`.

        Raises:
            SpecError: If the sequence has fewer tokens, or too few blocks are free.
        """
        positions, rows = self._format.read(self._state())
        order, count = np.argsort(positions), len(tokens)
        if not 0 < count <= len(order) or (positions[order] != np.arange(len(order))).any():
            raise SpecError("sequence", f"{len(order)} tokens", f"the {count} tokens of the prompt")
        self._buffer.reclaim(session)
        tables = self._buffer.take(count - 1, count)
        try:
            for (name, part), found in zip(self._parts, rows, strict=True):
                heads = self._layers[name].total_num_kv_heads
                cells = found[order[:count]].reshape(count, heads, -1)
                self._buffer.write(tables, name, part, range(count), cells)
            return self._buffer.hold(session, request_id, tokens, tables, sampled, lease=lease)
        except BaseException:
            self._buffer.give(tables)
            raise

    def load(
        self, session: Session, ticket: PrefillTicket, tokens: Sequence[int], timeout: float = 30.0
    ) -> int:
        """Load a prompt into the empty sequence, but for its last token. Waits.

        If the call raises, the sequence is still empty.

        Args:
            session: The session that has registered `cache`.
            ticket: The ticket of the producer.
            tokens: All tokens of the prompt.
            timeout: As in `Session.load`.

        Returns:
            The number of tokens that were loaded. Decode the others.

        Raises:
            SpecError: If the ticket is of another prompt or for another consumer, or the sequence
                is not empty or has too few cells, or too few blocks are free.
            TransferError: If the load fails. Its `__cause__` names what does not fit.
        """
        content = ContentIdentity.of_text(tokens, ticket.computed_tokens)
        ticket.check(content, session.me.engine_id)
        self._check_empty()
        end = min(ticket.computed_tokens, len(tokens) - 1)
        with self._buffer.loaded(session, ticket, end, timeout) as tables:
            parts = [self._buffer.read(tables, *part, range(end)) for part in self._parts]
            state = self._format.write([rows.reshape(end, -1) for rows in parts])
            pointer, size = state.ctypes.data_as(POINTER(c_uint8)), len(state)
            done = self._api.llama_state_seq_set_data(self._context, pointer, size, self._sequence)
            if done != size:
                raise SpecError("llama_state_seq_set_data", done, f"{size}: {end} cells are needed")
        return end


def _numbers(rows: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Return the elements in the bytes of *rows*."""
    if dtype == "bfloat16":  # The upper half of a float32.
        return (rows.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return rows.view(dtype).astype(np.float64)


def _normalized(rows: npt.NDArray[np.float64], most: float) -> bool:
    """Return whether an RMS norm has made *rows*.

    >>> rows = np.random.default_rng(0).normal(size=(64, 4))
    >>> norms = np.sqrt((rows**2).mean(axis=1, keepdims=True))
    >>> _normalized(rows, 0.01), _normalized(rows / norms * [1, 2, 3, 0.5], 0.01)
    (False, True)
    """
    ones = np.ones(len(rows))
    weights = np.linalg.lstsq(rows**2, ones, rcond=None)[0]
    return bool(abs(rows**2 @ weights - ones).max() < most)
