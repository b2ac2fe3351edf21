"""The ticket that a producer's scheduler sends to a consumer for a held prompt, through a router.

Invariant: a changed ticket is refused, and the error names the field. The producer seals it with
the secret of both engines. Without a secret, anyone who can change what the router sends can forge
a ticket. A consumer cannot request more than the ticket holds.

How it works:
    A prompt of N tokens has two numbers. The producer usually computes all of it, so
    `computed_tokens` of the ticket is N. A consumer computes the last token of the prompt itself,
    because it needs the logits. So it usually moves N - 1 tokens, the `num_tokens` of its
    `TransferRequest`:

        prompt             t0  t1  t2  t3  t4
        computed_tokens    x   x   x   x   x      5, in the ticket
        num_tokens         x   x   x   x          4, in the consumer's request

    Some engines do not compute the last token again: their producer samples the first new token,
    and the consumer begins with it. `first_token` carries it. A consumer that needs it calls
    `sampled`, which refuses a ticket without `first_token`, and a token that was sampled after
    another prompt or with other settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvspec.descriptors.request import BlockTable, Tables, TransferRequest, tables_of
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, positive_int, sequence
from kvspec.tickets.identity import ContentIdentity, content_of
from kvspec.tickets.stated import differences
from kvspec.wire.handshake import is_name
from kvspec.wire.messages import key_of
from kvspec.wire.seal import Secret, secret_of

_NAMES = {
    "engine_id": "remote_engine_id",
    "addresses": "remote_addresses",
    "remote_id": "remote_request_id",
    "computed_tokens": "remote_num_tokens",
    "tables": "remote_block_ids",
    "content": "remote_content",
    "first_token": "remote_first_token",
    "first_logprobs": "remote_first_logprobs",
    "tokens_digest": "remote_tokens_digest",
    "sampling": "remote_sampling",
    "consumer": "remote_consumer",
}
"""The name of each field in the parameters that a router carries, which contain no None."""
_ADDRESSES = "the addresses of the producer's ranks, each a str"
_TABLE = "a list of the first token and the block ids"
_LOGPROBS = "pairs of a token, an int >= 0, and its log probability, a finite number <= 0"
_SEAL = "the seal of unchanged parameters, made with the same secret"
PURPOSE = b"kvspec-prompt-2\n"


def _content(value: object) -> ContentIdentity | None:
    if isinstance(value, Mapping):
        return ContentIdentity.from_params(value)
    return None if value is None else instance("content", value, ContentIdentity)


def _tables(value: Tables) -> Mapping[str, BlockTable]:
    return tables_of("tables", value)


def _addresses(value: object) -> tuple[str, ...]:
    given = sequence("addresses", value, _ADDRESSES)
    if not given or not all(isinstance(address, str) for address in given):
        raise SpecError("addresses", given, _ADDRESSES)
    return given


def _logprobs(value: object) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    pairs = [sequence("first_logprobs", pair, _LOGPROBS) for pair in
             sequence("first_logprobs", value, _LOGPROBS)]  # fmt: skip
    for pair in pairs:
        # The types are compared exactly, because True is an int in Python, but no token.
        if [*map(type, pair)] not in ([int, float], [int, int]):
            raise SpecError("first_logprobs", pair, _LOGPROBS)
        if pair[0] < 0 or not -sys.float_info.max <= pair[1] <= 0:
            raise SpecError("first_logprobs", pair, _LOGPROBS)
    return tuple((token, float(logprob)) for token, logprob in pairs)


@attrs.frozen(kw_only=True)
class PrefillTicket:
    """A request that all ranks of a producer hold, as its scheduler describes it.

    Attributes:
        engine_id: Name of the producer.
        addresses: Addresses of the channels of its ranks.
        remote_id: Name of the request, from `new_remote_id`.
        computed_tokens: Number of tokens that the producer has computed, usually the whole prompt.
            The request of a consumer usually has one less.
        tables: Block tables of the producer, by group.
        content: Everything on which the cache of these tokens depends. If it is None, each consumer
            that calls `check` refuses the ticket.
        first_token: The first new token, if the producer has sampled it.
        first_logprobs: Tokens and their log probabilities at the place of *first_token*, in the
            order of the producer. None if it reports none.
        tokens_digest: `content_of` all tokens of the prompt, which *first_token* follows. *content*
            covers only the computed ones.
        sampling: `sampling_of` the settings with which *first_token* was sampled.
        consumer: Name of the engine that the prompt is meant for, or None for any engine.
    """

    engine_id: str
    addresses: tuple[str, ...] = attrs.field(converter=_addresses)
    remote_id: str
    computed_tokens: int
    tables: Mapping[str, BlockTable] = attrs.field(converter=_tables)
    content: ContentIdentity | None = attrs.field(default=None, converter=_content)
    first_token: int | None = None
    first_logprobs: tuple[tuple[int, float], ...] | None = attrs.field(
        default=None, converter=_logprobs
    )
    tokens_digest: str | None = None
    sampling: str | None = None
    consumer: str | None = None

    def __attrs_post_init__(self) -> None:
        is_name("engine_id", self.engine_id)
        key_of(self.remote_id)
        positive_int("computed_tokens", self.computed_tokens)
        if self.content is not None and self.content.num_tokens != self.computed_tokens:
            wanted = f"{self.computed_tokens}, the `computed_tokens` of the ticket"
            raise SpecError("content.num_tokens", self.content.num_tokens, wanted)
        for name in ("tokens_digest", "sampling"):
            if getattr(self, name) is not None:
                instance(name, getattr(self, name), str)
        if self.consumer is not None:
            is_name("consumer", self.consumer)
        if self.first_token is not None:
            positive_int("first_token", self.first_token, least=0)
        elif self.first_logprobs is not None:
            rule = "requires a first_token, whose alternatives they are"
            raise SpecError("first_logprobs", self.first_logprobs, rule=rule)

    def check(self, content: ContentIdentity, consumer: str | None = None) -> None:
        """Compare the content that a consumer was asked for with that of the ticket.

        Args:
            content: The content of the first `computed_tokens` tokens of the requested prompt. Each
                field must be stated on both sides.
            consumer: Name of the consumer, or None if it does not matter.

        Raises:
            SpecError: If the ticket is of another content, or for another consumer. The field is
                that of the content, such as "remote_content.adapter".
        """
        if self.content is None:
            raise SpecError("remote_content", None, "a content that the producer states")
        for name, difference in differences(content, self.content):
            value = getattr(self.content, name)
            raise SpecError(f"remote_content.{name}", value, rule=difference)
        if consumer is not None and self.consumer not in (None, consumer):
            wanted = f"{consumer!r}, the engine that has received the ticket"
            raise SpecError("remote_consumer", self.consumer, wanted)

    def sampled(self, token_ids: Sequence[int], sampling: str | None) -> int:
        """Return the first new token, for a consumer that does not compute the prompt's last token.

        Args:
            token_ids: All tokens of the requested prompt.
            sampling: `sampling_of` the settings of the request.

        Raises:
            SpecError: If the producer has not sampled it, or after another prompt, or with other
                settings, or if a side does not state its settings.
        """
        if self.first_token is None:
            wanted = "the first new token: this consumer does not sample it itself"
            raise SpecError("remote_first_token", None, wanted)
        if self.tokens_digest != (own := content_of(token_ids)):
            wanted = f"{own}, of all tokens of the requested prompt"
            raise SpecError("remote_tokens_digest", self.tokens_digest, wanted)
        if sampling is None or self.sampling != sampling:
            wanted = f"{sampling!r}, the sampling settings of this request, stated on both sides"
            raise SpecError("remote_sampling", self.sampling, wanted)
        return self.first_token

    def check_held(self, request: TransferRequest) -> TransferRequest:
        """Check that *request* asks only for tokens, states and blocks of this ticket.

        Returns:
            The request. If it has no `state_tokens`, it has those of the ticket now: the producer's
            recurrent states have seen all computed tokens.

        Raises:
            SpecError: If it asks for others.
        """
        self._check_count(request.num_tokens)
        if request.state_tokens not in (None, self.computed_tokens):
            wanted = f"{self.computed_tokens}, the `computed_tokens` of the ticket"
            raise SpecError("state_tokens", request.state_tokens, wanted)
        asked = request.producer_blocks
        if asked != self.tables:
            names = {**self.tables, **asked}
            name = next(name for name in names if asked.get(name) != self.tables.get(name))
            wanted = "the block table of the ticket"
            raise SpecError(f"producer_blocks[{name!r}]", asked.get(name), wanted)
        if request.state_tokens is None:
            request = attrs.evolve(request, state_tokens=self.computed_tokens)
        return request

    def _check_count(self, num_tokens: int) -> None:
        positive_int("num_tokens", num_tokens, least=0)
        if num_tokens > self.computed_tokens:
            wanted = f"at most {self.computed_tokens}, the `computed_tokens` of the ticket"
            raise SpecError("num_tokens", num_tokens, wanted)

    def to_params(self, secret: Secret | str | bytes | None = None) -> dict[str, Any]:
        """Return the ticket as plain values that JSON can represent.

        They can be entries of vLLM's `kv_transfer_params`.

        Args:
            secret: Key of the seal, as in `NixlRank`, with the same default.

        Returns:
            The parameters for `from_params`.
        """
        seal = secret_of(secret).mac(PURPOSE, self._sealed()).hex()
        return {**self._params(), "remote_seal": seal}

    def _params(self) -> dict[str, Any]:
        given = {name: getattr(self, field) for field, name in _NAMES.items()}
        params = {name: value for name, value in given.items() if value is not None}
        if self.first_logprobs is not None:
            params["remote_first_logprobs"] = [list(pair) for pair in self.first_logprobs]
        if self.content is not None:
            params["remote_content"] = self.content.to_params()
        tables = {name: [t.first_token, t.block_ids.tolist()] for name, t in self.tables.items()}
        return params | {"remote_addresses": list(self.addresses), "remote_block_ids": tables}

    def _sealed(self) -> bytes:
        """Return the bytes that the seal of the parameters covers."""
        return json.dumps(self._params(), sort_keys=True).encode()

    @staticmethod
    def from_params(
        given: Mapping[str, Any], secret: Secret | str | bytes | None = None
    ) -> PrefillTicket:
        """Return the ticket in *given*. Other entries of *given* are ignored.

        With an empty *secret*, the seal detects only accidental changes.

        Args:
            given: Parameters that contain those of `to_params`.
            secret: Key of the seal, the same as the producer's.

        Returns:
            The ticket.

        Raises:
            SpecError: If a field is missing or malformed, or the seal is wrong.
        """
        params = mapping("remote", given, "parameter names to values")
        fields: dict[str, Any] = {field: params.get(name) for field, name in _NAMES.items()}
        field, tables = _NAMES["tables"], dict[str, BlockTable]()
        for group, table in mapping(field, fields["tables"], "groups to tables").items():
            pair = sequence(f"{field}[{group!r}]", table, _TABLE)
            if len(pair) != 2:  # noqa: PLR2004 - as `to_params` writes it
                raise SpecError(f"{field}[{group!r}]", pair, _TABLE)
            tables[str(group)] = BlockTable(pair[1], first_token=pair[0])
        try:
            ticket = PrefillTicket(**fields | {"tables": tables})
        except SpecError as error:
            first, dot, rest = error.field.partition(".")
            name = f"{_NAMES.get(first, first)}{dot}{rest}"
            raise SpecError(name, error.value, error.expected, rule=error.rule) from error
        seal = params.get("remote_seal")
        if not secret_of(secret).proves(seal, PURPOSE, ticket._sealed()):
            raise SpecError("remote_seal", seal, _SEAL)
        return ticket

    def request(
        self,
        request_id: str,
        num_tokens: int,
        blocks: Tables,
        cached: int | Mapping[str, int] = 0,
    ) -> TransferRequest:
        """Return the request that a consumer moves into *blocks*.

        Args:
            request_id: The consumer's own id of the request.
            num_tokens: Number of tokens to have afterwards, at most `computed_tokens`. Pass one
                token less than the prompt if the consumer computes the last token itself.
            blocks: Block tables of the consumer, by group.
            cached: Leading tokens that the consumer already has, for all groups or by group.

        Returns:
            The request.

        Raises:
            SpecError: As `TransferRequest`, or if the ticket has fewer tokens.
        """
        self._check_count(num_tokens)
        return TransferRequest(
            request_id=request_id,
            num_tokens=num_tokens,
            cached_tokens=cached,
            # The producer's recurrent states have seen all computed tokens. They cannot be rewound,
            # so a request with fewer tokens is refused if it moves such a state.
            state_tokens=self.computed_tokens,
            producer_blocks=self.tables,
            consumer_blocks=blocks,
        )
