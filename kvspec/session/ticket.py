"""What a producer's scheduler tells, over a router, of a prompt that all its ranks hold.

Law: what a router passes on is what was said, or refused by name: a producer seals it by the secret
that the engines share; with none, whoever can write to the router is believed. Nothing is asked of
a prompt that is not held.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable, Tables, TransferRequest, tables_of
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int, sequence
from kvspec.nixl.envelope import secret_of
from kvspec.protocol.handshake import is_name
from kvspec.protocol.seal import MAC, Secret
from kvspec.session.introduction import key_of

_SAID = {
    "engine_id": "remote_engine_id",
    "addresses": "remote_addresses",
    "remote_id": "remote_request_id",
    "num_tokens": "remote_num_tokens",
    "tables": "remote_block_ids",
    "content": "remote_content",
}
"""How a router has each field."""
_ADDRESSES = "where the producer's ranks are, each a text"
_TABLE = "the first token, and ids"
_SEAL = "what the producer sealed, with the same secret, all as it said it"
PROMPT = b"kvspec-prompt-1\n"


def _tables(value: Tables) -> Mapping[str, BlockTable]:
    return tables_of("tables", value)


def _addresses(value: object) -> tuple[str, ...]:
    given = sequence("addresses", value, _ADDRESSES)
    if not given or not all(isinstance(address, str) for address in given):
        raise SpecError("addresses", given, _ADDRESSES)
    return given


@attrs.frozen(kw_only=True)
class PrefillTicket:
    """A request that all ranks of a producer hold, as its scheduler tells whoever is to read it.

    *engine_id*: the producer's name; *addresses*: of its ranks' channels; *remote_id*: of
    `new_remote_id`; *num_tokens*: how many have gone through its model; *tables*: by its groups.
    *content*: of `content_of` the prompt's tokens, as far as they are among those; or "".
    """

    engine_id: str
    addresses: tuple[str, ...] = attrs.field(converter=_addresses)
    remote_id: str
    num_tokens: int
    tables: Mapping[str, BlockTable] = attrs.field(converter=_tables)
    content: str = ""

    def __attrs_post_init__(self) -> None:
        is_name("engine_id", self.engine_id)
        key_of(self.remote_id)
        positive_int("num_tokens", self.num_tokens)
        instance("content", self.content, str)

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise `SpecError` if another prompt than *token_ids* is held, as far as was said."""
        own = _sum(_tokens(token_ids)[: self.num_tokens])
        if self.content not in ("", own):
            raise SpecError(
                "remote_content", self.content, f"{own}, of the prompt that is asked for"
            )

    def check_held(self, request: TransferRequest) -> None:
        """Raise `SpecError` if *request* asks for tokens or blocks that are not this prompt's."""
        self._check_count(request.num_tokens)
        asked = request.producer_blocks
        if asked != self.tables:
            names = {**self.tables, **asked}
            name = next(name for name in names if asked.get(name) != self.tables.get(name))
            wanted = "the table of the prompt that is held"
            raise SpecError(f"producer_blocks[{name!r}]", asked.get(name), wanted)

    def _check_count(self, num_tokens: int) -> None:
        positive_int("num_tokens", num_tokens, least=0)
        if num_tokens > self.num_tokens:
            raise SpecError("num_tokens", num_tokens, f"at most {self.num_tokens}, as are held")

    def to_params(self, secret: str | bytes | None = None) -> dict[str, Any]:
        """Return what `from_params` reads: texts, ints, lists and dicts, so that it can be JSON.

        *secret*: as a `NixlRank` has it, the environment's `KVSPEC_SECRET` unless given.
        """
        return {**self._said(), "remote_seal": self._mac(secret).hex()}

    def _said(self) -> dict[str, Any]:
        said = {name: getattr(self, field) for field, name in _SAID.items()}
        tables = {name: [t.first_token, t.block_ids.tolist()] for name, t in self.tables.items()}
        return said | {"remote_addresses": list(self.addresses), "remote_block_ids": tables}

    def _mac(self, secret: str | bytes | None) -> bytes:
        """Return the code by which who knows *secret* knows that nothing of this was changed."""
        body = json.dumps(self._said(), sort_keys=True).encode()
        return Secret(secret_of(secret) or b"").seal(PROMPT, body)[len(PROMPT) :][:MAC]

    @staticmethod
    def from_params(given: Mapping[str, Any], secret: str | bytes | None = None) -> PrefillTicket:
        """Return what *given* says, beside anything else; `SpecError` for what no producer said.

        Nor for what was changed since, or sealed by another *secret* than the producer's: without
        any, that shows what was changed by accident only.
        """
        told = mapping("remote", given, "names to what a producer said")
        said: dict[str, Any] = {field: told.get(name) for field, name in _SAID.items()}
        field, tables = _SAID["tables"], dict[str, BlockTable]()
        for group, table in mapping(field, said["tables"], "groups to tables").items():
            pair = sequence(f"{field}[{group!r}]", table, _TABLE)
            if len(pair) != 2:  # noqa: PLR2004 - as `to_params` writes it
                raise SpecError(f"{field}[{group!r}]", pair, _TABLE)
            tables[str(group)] = BlockTable(pair[1], first_token=pair[0])
        try:
            prompt = PrefillTicket(**said | {"tables": tables})
        except SpecError as error:
            name = _SAID.get(error.field, error.field)
            raise SpecError(name, error.value, error.expected) from error
        seal = told.get("remote_seal")
        if not hmac.compare_digest(prompt._mac(secret).hex().encode(), str(seal).encode()):
            raise SpecError("remote_seal", seal, _SEAL)
        return prompt

    def request(
        self, request_id: str, num_tokens: int, blocks: Mapping[str, BlockTable], cached: int = 0
    ) -> TransferRequest:
        """Return what a consumer moves of it into *blocks*: the first *num_tokens*, less *cached*.

        Raises as `TransferRequest` does, and for more tokens than are held.
        """
        self._check_count(num_tokens)
        return TransferRequest(
            request_id=request_id,
            num_tokens=num_tokens,
            cached_tokens=cached,
            state_tokens=self.num_tokens,
            producer_blocks=self.tables,
            consumer_blocks=blocks,
        )


def content_of(token_ids: Sequence[int]) -> str:
    """Return a sum of a prompt's tokens, by which a prompt that a router mixed up is found."""
    return _sum(_tokens(token_ids))


def _tokens(value: object) -> npt.NDArray[Any]:
    """Return a prompt's tokens; `SpecError` for what are none, which a sum could take for some."""
    try:
        ids = np.asarray(value)
    except (ValueError, TypeError):
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise SpecError("token_ids", value, "a sequence of ints")
    return ids


def _sum(ids: npt.NDArray[Any]) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:32]
