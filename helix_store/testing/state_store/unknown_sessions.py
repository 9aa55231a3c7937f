"""What every method does for a session that is not there."""

from __future__ import annotations

import pytest

from helix_store.core.contracts import StateStore
from helix_store.exceptions import SessionNotFound
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.calls import (
    ANSWERING_READS,
    DELETE,
    RAISING_READS,
    WRITES,
    Call,
)

__all__ = ["UnknownSessionContract"]


class UnknownSessionContract(StoreTests):
    @pytest.mark.parametrize("call", ANSWERING_READS, ids=str)
    def test_these_reads_answer_that_there_is_nothing(self, store: StateStore, call: Call) -> None:
        assert not call.invoke(store, "nobody")

    @pytest.mark.parametrize("call", RAISING_READS, ids=str)
    def test_every_other_read_says_that_the_session_is_not_found(self, store: StateStore, call: Call) -> None:
        with pytest.raises(SessionNotFound) as caught:
            call.invoke(store, "nobody")
        assert caught.value.session_id == "nobody"

    @pytest.mark.parametrize("call", WRITES, ids=str)
    def test_every_write_says_that_the_session_is_not_found(self, store: StateStore, call: Call) -> None:
        with pytest.raises(SessionNotFound) as caught:
            call.invoke(store, "nobody")
        assert caught.value.session_id == "nobody"
        assert store.list_sessions().total == 0

    def test_deleting_it_deletes_none(self, store: StateStore) -> None:
        assert DELETE.invoke(store, "nobody") == 0
