"""A prompt that an engine holds for others, as its scheduler tells of it over a router.

Law: what a router passes on is what was said, or refused by name: a producer seals it by the secret
that the engines share; with none, whoever can write to the router is believed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int, sequence
from kvspec.nixl.introduction import secret_of
from kvspec.protocol.handshake import is_name
from kvspec.protocol.seal import MAC, Secret
from kvspec.session.introduction import key_of

_ADDRESSES = "where the producer's ranks are, each a text"
_TABLE = "the first token, and ids"
_SEAL = "what the producer sealed, with the same secret, all as it said it"
PROMPT = b"kvspec-prompt-1\n"


@attrs.frozen(kw_only=True)
class HeldPrompt:
    """A request that all ranks of a producer hold, as its scheduler tells whoever is to read it.

    *engine_id*: the producer's name; *addresses*: of its ranks' channels; *remote_id*: of
    `new_remote_id`; *num_tokens*: how many have gone through its model; *tables*: by its groups.
    *content*: of `content_of` the prompt's tokens, as far as they are among those; or "".
    """

    engine_id: str
    addresses: tuple[str, ...]
    remote_id: str
    num_tokens: int
    tables: Mapping[str, BlockTable]
    content: str = ""

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise `SpecError` if another prompt than *token_ids* is held, as far as was said."""
        own = content_of(token_ids[: self.num_tokens])
        if self.content not in ("", own):
            raise SpecError(
                "remote_content", self.content, f"{own}, of the prompt that is asked for"
            )

    def plain(self, secret: str | bytes | None = None) -> dict[str, Any]:
        """Return what `of` reads: texts, ints, lists and dicts, so that it can be JSON.

        *secret*: as a `NixlRank` has it, the environment's `KVSPEC_SECRET` unless given.
        """
        return {**self._said(), "remote_seal": self._mac(secret).hex()}

    def _said(self) -> dict[str, Any]:
        tables = {name: [t.first_token, t.block_ids.tolist()] for name, t in self.tables.items()}
        return {
            "remote_engine_id": self.engine_id,
            "remote_addresses": list(self.addresses),
            "remote_request_id": self.remote_id,
            "remote_num_tokens": self.num_tokens,
            "remote_block_ids": tables,
            "remote_content": self.content,
        }

    def _mac(self, secret: str | bytes | None) -> bytes:
        """Return the code by which who knows *secret* knows that nothing of this was changed."""
        body = json.dumps(self._said(), sort_keys=True).encode()
        return Secret(secret_of(secret) or b"").seal(PROMPT, body)[len(PROMPT) :][:MAC]

    @staticmethod
    def of(given: Mapping[str, Any], secret: str | bytes | None = None) -> HeldPrompt:
        """Return what *given* says, beside anything else; `SpecError` for what no producer said.

        Nor for what was changed since, or sealed by another *secret* than the producer's: without
        any, that shows what was changed by accident only.
        """
        addresses = sequence("remote_addresses", given.get("remote_addresses"), _ADDRESSES)
        if not addresses or not all(isinstance(address, str) for address in addresses):
            raise SpecError("remote_addresses", addresses, _ADDRESSES)
        remote_id, field = given.get("remote_request_id"), "remote_block_ids"
        key_of(remote_id)
        tables = {}
        for group, table in mapping(field, given.get(field), "groups to tables").items():
            pair = sequence(f"{field}[{group!r}]", table, _TABLE)
            if len(pair) != 2:  # noqa: PLR2004 - as `plain` writes it
                raise SpecError(f"{field}[{group!r}]", pair, _TABLE)
            tables[str(group)] = BlockTable(pair[1], first_token=pair[0])
        said = HeldPrompt(
            engine_id=is_name("remote_engine_id", given.get("remote_engine_id")),
            addresses=addresses,
            remote_id=str(remote_id),
            num_tokens=positive_int("remote_num_tokens", given.get("remote_num_tokens")),
            tables=tables,
            content=instance("remote_content", given.get("remote_content"), str),
        )
        seal = given.get("remote_seal")
        if not hmac.compare_digest(said._mac(secret).hex().encode(), str(seal).encode()):
            raise SpecError("remote_seal", seal, _SEAL)
        return said

    def request(
        self, request_id: str, num_tokens: int, blocks: Mapping[str, BlockTable], cached: int = 0
    ) -> TransferRequest:
        """Return what a consumer moves of it into *blocks*: the first *num_tokens*, less *cached*.

        Raises as `TransferRequest` does.
        """
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
    ids = np.asarray(token_ids, np.int64).astype("<i8")
    return hashlib.sha256(ids.tobytes()).hexdigest()[:32]
