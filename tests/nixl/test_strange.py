"""Test that strange arguments of public calls are accepted, or raise an error of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from builders import engine, gqa
from builders import request as make_request
from nixl_pair import Pair
from strange import STRANGE

import kvspec
from kvspec import KVSpecError, RankId
from kvspec.nixl import NixlRank, Staging
from kvspec.session import TcpChannel, new_remote_id
from kvspec.testing import FakeNixl
from kvspec.tickets import ContentIdentity, MediaItem, PrefillTicket, content_of, sampling_of

Call = tuple[Callable[..., Any], dict[str, Any]]


@pytest.fixture
def ranks() -> Iterator[Pair]:
    """Return two ranks over a fake NIXL."""
    with FakeNixl(), NixlRank(secret=b"") as near, NixlRank(secret=b"") as far:
        yield Pair(near, far)


def rank_calls(ranks: Pair) -> dict[str, Call]:
    """Return the methods of a rank with valid arguments."""
    local, remote = ranks.lists([(0, 512, 512, 4)], [(0, 512, 512, 4)])
    near, ids = ranks.near, np.arange(4)
    sides = {"local": local, "local_ids": ids, "remote": remote, "remote_ids": ids}
    more = {"request": "r", "timeout": 5.0}
    rows = np.zeros((0, 5), np.uint64)
    return {
        "register": (near.register, {"memories": []}),
        "connect": (near.connect, {"metadata": ranks.far.metadata()}),
        "disconnect": (near.disconnect, {"peer": "x"}),
        "prepare": (near.prepare, {"rows": rows, "memory_type": "DRAM", "peer": None}),
        "read": (near.read, sides | more),
        "write": (near.write, sides | more),
        "move": (near.move, {"pairs": {0: tuple(sides.values())}} | more),
    }


RANK = (
    "register",
    "connect",
    "disconnect",
    "prepare",
    "read",
    "write",
    "move",
)


def foreign_errors(call: Callable[..., Any], valid: dict[str, Any]) -> list[str]:
    """Return the arguments for which *call* raises an error of another library."""
    errors = []
    for argument in valid:
        for value in STRANGE:
            try:
                call(**valid | {argument: value})
            except KVSpecError:
                continue
            except Exception as error:  # noqa: BLE001 - the test reports all other errors
                errors.append(f"{argument}={value!r}: {error!r}")
    return errors


@pytest.mark.parametrize("name", RANK)
def test_rank_survives_strange_arguments(ranks: Pair, name: str) -> None:
    """The rank reads right bytes afterwards."""
    calls = rank_calls(ranks)
    assert [] == foreign_errors(*calls[name])
    ranks.local[:] = 0
    ranks.read(0, 8).wait()
    assert ranks.right(0, 8)


P, C = engine(gqa(), tp=2), engine(gqa())
PLAN = kvspec.plan_transfer(P, C)
CACHES = kvspec.plan_memory(P, RankId(), 8, 4096), kvspec.plan_memory(C, RankId(), 8, 1 << 30)
TABLE = kvspec.build_table(PLAN, *CACHES)
REQUEST = make_request(20, [1, 2], [3, 4])
TICKET_FIELDS: dict[str, Any] = {
    "engine_id": "P", "addresses": ["a:1"], "remote_id": new_remote_id("p"), "computed_tokens": 20,
    "tables": {"g": [1, 2]}, "content": ContentIdentity.of_text(range(20)),
}  # fmt: skip
TICKET = PrefillTicket(**TICKET_FIELDS)
CALLS: dict[str, Call] = {
    "request": (kvspec.TransferRequest, {
        "request_id": "r", "num_tokens": 20, "producer_blocks": {"g": [1, 2]},
        "consumer_blocks": {"g": [3, 4]}, "cached_tokens": 0, "encoder_tokens": None,
        "state_tokens": None,
    }),
    "block table": (kvspec.BlockTable, {"block_ids": [1, 2], "first_token": 0}),
    "build_table": (kvspec.build_table, {
        "plan": PLAN, "producer_cache": CACHES[0], "consumer_cache": CACHES[1], "layers": None,
    }),
    "select": (TABLE.select, {"request": REQUEST, "tokens": None}),
    "descriptors": (TABLE.descriptors, {"request": REQUEST, "tokens": None}),
    "unwritten_ranges": (TABLE.unwritten_ranges, {"request": REQUEST}),
    "dead_bytes": (TABLE.dead_bytes, {"request": REQUEST}),
    "explain": (partial(kvspec.explain, TABLE), {"consumer_id": None, "request": None}),
    "traffic": (partial(kvspec.traffic, PLAN), {"num_tokens": 20}),
    "verify": (kvspec.verify, {
        "plan": PLAN, "producers": {RankId(): CACHES[0]}, "consumers": {}, "request": REQUEST,
    }),
    "staging": (Staging, {"buffer": 4096, "stage_below": 1, "always": False}),
    "ticket": (PrefillTicket, TICKET_FIELDS),
    "from_params": (PrefillTicket.from_params, {"given": TICKET.to_params(), "secret": None}),
    "request of a ticket": (TICKET.request, {
        "request_id": "r", "num_tokens": 20, "blocks": {"g": [3, 4]}, "cached": 0,
    }),
    "content of a ticket": (ContentIdentity.of, {
        "token_ids": [1, 2], "num_tokens": 1, "weights": "", "adapter": "", "media": [["a", 0, 1]],
        "embeddings": "", "salt": "",
    }),
    "params of a content": (ContentIdentity.from_params, {
        "given": ContentIdentity.of_text([1]).to_params(),
    }),
    "media": (MediaItem, {"identifier": "a", "start": 0, "length": 1}),
    "sampled": (TICKET.sampled, {"token_ids": [1, 2], "sampling": "greedy"}),
    "sampling_of": (sampling_of, {
        "temperature": 0.5, "settings": {"top_p": 0.5}, "others": {"grammar": "x"},
    }),
    "content_of": (content_of, {"token_ids": [1, 2]}),
    "new_remote_id": (new_remote_id, {"request_id": "r"}),
    "channel": (lambda **given: TcpChannel(**given).close(), {"port": 0, "public": ""}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CALLS])
def test_call_with_a_strange_argument_raises_only_errors_of_the_library(name: str) -> None:
    """Some strange values are valid, so a call may also succeed."""
    assert [] == foreign_errors(*CALLS[name])
