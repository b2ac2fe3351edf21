"""Prompts that engines hold for others: how they are told of over a router, and how they are read.

Law: what a router passes on is what was said, or refused by name: a producer seals it by the secret
that the engines share; with none, whoever can write to the router is believed. A producer is met
when a prompt of it is first asked for; nothing waits for that, and nothing raises. Whatever becomes
of a prompt, its producer is told, or its lease is over.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.errors import KVSpecError, SpecError, TransferError
from kvspec.inputs import instance, mapping, positive_int, seconds, sequence
from kvspec.nixl.introduction import secret_of
from kvspec.nixl.notifications import LAST_WAIT
from kvspec.protocol.handshake import is_name
from kvspec.protocol.seal import MAC, Secret
from kvspec.session.introduction import key_of
from kvspec.session.load import LoadState, SessionLoad
from kvspec.session.session import Session

ABSENT = 2.0
"""Seconds for which a producer that nobody is found of is tried: it was there when it answered."""
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


class PromptLoad:
    """What `Prompts.load` returns: as a `SessionLoad`, also while its producer is not met yet.

    *request*: what moves. *load*: what moves it, once its producer was met.
    """

    def __init__(
        self,
        request: TransferRequest,
        meeting: Future[None],
        begin: Callable[[], SessionLoad],
        release: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self.request = request
        self.load: SessionLoad | None = None
        self._refused: Exception | None = None
        self._begin, self._release, self._failed = begin, release, failed
        self._lock = threading.Lock()
        meeting.add_done_callback(self._met)

    def __repr__(self) -> str:
        return (
            f"<PromptLoad {self.request.request_id!r}: {self.load or self._refused or 'to meet'}>"
        )

    @property
    def undefined(self) -> dict[str, tuple[int, ...]]:
        """As a `SessionLoad` has it; of one that did not begin, nothing."""
        return {} if self.load is None else self.load.undefined

    @property
    def untouched(self) -> npt.NDArray[np.uint64]:
        """As a `SessionLoad` has it; of one that did not begin, nothing."""
        return np.empty((0, 2), np.uint64) if self.load is None else self.load.untouched

    @property
    def error(self) -> Exception | None:
        """None unless it failed, or is about to: nobody was met, it does not fit, or was lost."""
        return self._refused if self.load is None else self.load.error

    def poll(self) -> LoadState:
        """Move everything of the session on and return how this stands; never raises."""
        if self.load is None:
            return "moving" if self._refused is None else "failed"
        state = self.load.poll()
        if state == "failed":
            self._failed()
        return state

    def wait(self) -> None:
        """Poll until it is done; raise `error` if it failed."""
        while self.poll() == "moving":
            time.sleep(LAST_WAIT)
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Give it up: it fails as soon as nothing can write its blocks any more, or at once."""
        with self._lock:
            if self.load is None and self._refused is None:
                name = self.request.request_id
                self._refused = TransferError("cancelled", request=name, state="stopped")
        if self.load is not None:
            self.load.cancel()

    def _met(self, meeting: Future[None]) -> None:
        """Begin after a *meeting*; what is wrong with it, or then, is the error."""
        try:
            meeting.result()
            with self._lock:
                if self._refused is None:
                    self.load = self._begin()
            if self.load is None:
                self._release()
        except Exception as error:  # noqa: BLE001 - whatever it was, it fails this request alone
            self._refused = self._refused or error
            self._failed()


class Prompts:
    """What one rank's *session* reads of prompts that other engines hold.

    *timeout*: seconds within which a prompt is read once its producer was met. *patience*: seconds,
    at most as many, within which a producer that is there answers; meanwhile no other is met.
    """

    def __init__(self, session: Session, *, timeout: float, patience: float = 30.0) -> None:
        self.session = session
        self._timeout = seconds("timeout", timeout)
        self._patience = min(self._timeout, seconds("patience", patience))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvspec-meet")
        self._meetings: dict[tuple[str, ...], Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, prompt: HeldPrompt, request: TransferRequest) -> PromptLoad:
        """Start reading *request*, of `HeldPrompt.request`; its producer is met before, if need be.

        Never raises: what is wrong is the load's error, and the producer is told.
        """

        def begin() -> SessionLoad:
            try:
                return self.session.load(
                    request,
                    remote_id=prompt.remote_id,
                    engine_id=prompt.engine_id,
                    timeout=self._timeout,
                )
            except BaseException:
                release()
                raise

        def release() -> None:
            self._release(prompt)

        meeting = self._meeting(prompt.addresses)
        part = partial(self._part, prompt.addresses, meeting)
        return PromptLoad(request, meeting, begin, release, part)

    def release(self, prompt: HeldPrompt) -> None:
        """Tell a producer that nothing is read; one that cannot be told waits for its lease."""
        self._meeting(prompt.addresses).add_done_callback(lambda _: self._release(prompt))

    def close(self) -> None:
        """Meet nobody any more; the session is the caller's to close."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _release(self, prompt: HeldPrompt) -> None:
        with contextlib.suppress(KVSpecError):
            self.session.release(prompt.remote_id, engine_id=prompt.engine_id)

    def _meeting(self, addresses: tuple[str, ...]) -> Future[None]:
        """Return when a producer is met, or was; one that could not be met is tried again."""
        known = self._meetings.get(addresses)
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            known = self._meetings[addresses] = self._thread.submit(self._meet, addresses)
        return known

    def _meet(self, addresses: tuple[str, ...]) -> None:
        wait = self._patience
        found = self.session.fetch(addresses, wait, absent=min(wait, ABSENT))
        self.session.meet(found, timeout=wait)

    def _part(self, addresses: tuple[str, ...], meeting: Future[None]) -> None:
        """Meet a producer anew when it is next asked for, since something of it was lost."""
        if self._meetings.get(addresses) is meeting:
            del self._meetings[addresses]
