"""Messages: append, read, truncate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from helix_store.core import validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.guards import guard
from helix_store.core.types import Message, MessagePage
from helix_store.engine.async_twins import async_iterator_twin, async_twin
from helix_store.exceptions import InvalidQuery
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.requests import decode_messages, encode_messages, without_thinking


class MessageCalls(StoreCalls):
    def append_messages(
        self,
        session_id: str,
        messages: Sequence[AnyMessage],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Append messages in order, all or nothing, and return the new message count.

        Runs in one transaction under the session's lock: parallel appends lose no message and do not
        interleave. Raises `StaleStateError` if ``expected_version`` is not current. A repeat appends again.
        """
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, self.limits)
        return self._backend.messages.append(session_id, encoded, guard(expected_version, fencing_token))

    def get_messages(
        self,
        session_id: str,
        *,
        offset: int = 0,
        limit: int | None = None,
        include_thinking: bool = True,
        order: str = "asc",
    ) -> MessagePage:
        """Return a page of the history; ``limit=None`` reads to the end.

        With ``order="desc"`` the newest message comes first and ``offset`` counts from the end. Without
        thinking, the returned messages omit the key ``thinking`` and content parts of type thinking or
        reasoning. Raises `SessionNotFound`.
        """
        validation.identifier(session_id, "session_id")
        if order not in ("asc", "desc"):
            raise InvalidQuery("order must be asc or desc.", path="order")
        if limit is not None:
            validation.query_number(limit, "limit", minimum=1)
        texts, total = self._backend.messages.page(
            session_id, offset=validation.page_offset(offset), limit=limit, descending=order == "desc"
        )
        messages = decode_messages(texts)
        if not include_thinking:
            messages = [without_thinking(message) for message in messages]
        return MessagePage(messages=messages, total=total, has_more=offset + len(messages) < total)

    def iter_messages(self, session_id: str, *, chunk_size: int = 500) -> Iterator[Message]:
        """Iterate over all messages in order, in constant memory: one query per ``chunk_size`` messages.

        Messages appended during the iteration are included. Raises `SessionNotFound` immediately when called.
        """
        validation.identifier(session_id, "session_id")
        validation.query_number(chunk_size, "chunk_size", minimum=1)
        self._backend.messages.count(session_id)
        return self._iterate(session_id, chunk_size)

    def _iterate(self, session_id: str, chunk_size: int) -> Iterator[Message]:
        sequence = 0
        while texts := self._backend.messages.after(session_id, sequence, chunk_size):
            sequence += len(texts)
            yield from decode_messages(texts)

    def get_message_count(self, session_id: str) -> int:
        """Return the number of messages. Raises `SessionNotFound`."""
        return self._backend.messages.count(validation.identifier(session_id, "session_id"))

    def truncate_messages(self, session_id: str, keep: int, *, expected_version: int | None = None) -> int:
        """Keep the first ``keep`` messages, delete the others and return the version.

        Runs in one transaction that also deletes the checkpoints of deleted messages. The state does not
        change, and neither does the version if there is no message to delete.
        """
        validation.identifier(session_id, "session_id")
        validation.query_number(keep, "keep")
        return self._backend.messages.truncate(session_id, keep, guard(expected_version))

    aappend_messages = async_twin(append_messages)
    aget_messages = async_twin(get_messages)
    aiter_messages = async_iterator_twin(iter_messages)
    aget_message_count = async_twin(get_message_count)
    atruncate_messages = async_twin(truncate_messages)
