"""An event that the tables do not have raises an error with role, state and event."""

from __future__ import annotations

import pytest

from kvspec.completion.consumer import ConsumerLedger
from kvspec.completion.producer import ProducerLedger
from kvspec.completion.states import CONSUMER, PRODUCER, row_of
from kvspec.errors import TransferError


def test_impossible_event_raises_an_error_with_role_state_and_event() -> None:
    """It is a bug of kvspec, so the state is `bug`."""
    with pytest.raises(TransferError) as caught:
        row_of("producer", PRODUCER, "freed", "abort")
    assert "bug" == caught.value.state
    for word in ("producer", "'freed'", "'abort'"):
        assert word in str(caught.value)


def test_ledgers_have_a_method_for_each_action() -> None:
    """A search for an action finds its method."""
    assert {"", "fail", *ConsumerLedger.ACTIONS} == {row.action for row in CONSUMER.values()}
    assert {"", *ProducerLedger.ACTIONS} == {row.action for row in PRODUCER.values()}
