"""Messages of graph sessions: add and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from helix_store.checkpointers.graph_calls import GraphCalls
from helix_store.core import validation
from helix_store.core.graph import StoredMessage
from helix_store.core.graph_payloads import encode_message, encode_messages
from helix_store.core.snapshots import optional_count
from helix_store.exceptions import InvalidQuery
from helix_store.stores.api.base import guard
from helix_store.stores.async_twins import async_twin

__all__ = ["GraphMessageCalls"]


class GraphMessageCalls(GraphCalls):
    def add_message(
        self,
        session_id: str,
        *,
        role: str,
        content: str | None = None,
        tool_calls: Any = None,
        tool_results: Any = None,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        fencing_token: int | None = None,
    ) -> StoredMessage:
        """Append a message and return it as it was stored.

        One transaction under the session's lock: ids increase in append order, and times do too. Tool calls
        and results may hold typed values. Raises `SessionNotFound`, `InvalidPayload`, `LimitExceeded` beyond
        ``max_message_bytes``, and `FencedOutError`. A repeat appends again.
        """
        validation.identifier(session_id, "session_id")
        message = {
            "role": role,
            "content": content,
            "tool_calls": tool_calls,
            "tool_results": tool_results,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }
        encoded = encode_message(message, self.limits)
        return self._messages.add(session_id, [encoded], guard(fencing_token=fencing_token))[0]

    def add_messages(
        self, session_id: str, messages: Sequence[Mapping[str, Any]], *, fencing_token: int | None = None
    ) -> list[StoredMessage]:
        """Append messages in order, all or nothing; each is a dict of what `add_message` takes."""
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, self.limits)
        return self._messages.add(session_id, encoded, guard(fencing_token=fencing_token))

    def get_messages(
        self, session_id: str, *, before: int | datetime | None = None, limit: int | None = None
    ) -> list[StoredMessage]:
        """The newest ``limit`` messages before a message id or a time, oldest first; all without a limit.

        Give the id of a page's first message as ``before`` of the page before it. A message that cannot be
        read is there, and raises `IntegrityFault` when its content is asked for. Raises `SessionNotFound` and
        `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        return self._messages.page(
            session_id, before=_checked_before(before), limit=optional_count(limit, "limit")
        )

    aadd_message = async_twin(add_message)
    aadd_messages = async_twin(add_messages)
    aget_messages = async_twin(get_messages)


def _checked_before(before: int | datetime | None) -> int | datetime | None:
    if isinstance(before, datetime):
        return validation.aware_datetime(before, "before")
    if before is None:
        return None
    if type(before) is not int or not 0 <= before < 2**63:
        raise InvalidQuery("before must be a message id or an aware datetime.", path="before")
    return before
