"""The largest payloads and numbers that a store accepts."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Limits"]

MAX_DEPTH = 200
"""The deepest nesting of a payload. Python 3.11's parser fails at about 1,000."""

MAX_INT_DIGITS = 1_000
"""The longest integer, in decimal digits. Python refuses to read more than 4,300."""

MAX_BIGINT = 2**63 - 1
"""The largest value of a ``bigint`` column."""

UNLIMITED = 2**62
"""A limit that is never reached; small numbers can be added to it without exceeding a ``bigint``."""

MAX_TTL_MS = 7 * 24 * 60 * 60 * 1000
"""The longest term of a lock: seven days, because the name of a crashed holder is held for the rest of it."""

MAX_BATCH = 1_000
"""The most rows of one batch of background work."""

_KIB = 1024
_MIB = 1024 * _KIB

MAX_ID_CHARACTERS = 255

MAX_ID_BYTES = 3 * MAX_ID_CHARACTERS
"""In UTF-8. PostgreSQL refuses an index row of more than 2,704 bytes, and an index holds up to three ids."""

MAX_LONG_ID_BYTES = 850
"""The limit for an indexed id that a framework generates; an index holds up to three such ids."""

MAX_CHECKPOINT_ID_CHARACTERS = 320
"""A step checkpoint's id holds the session's id, a step number, a time and a random part."""

MAX_LANE_BYTES = 1_000
"""The name of a lane, and the key of an item. One index holds both: see `MAX_ID_BYTES`."""

MAX_NAMESPACE_BYTES = _KIB
"""The limit for all labels of a namespace together, which share an index with a tenant and a key."""

MAX_TITLE_BYTES = 4 * _KIB
MAX_DIRECTORY_BYTES = 4 * _KIB

MAX_REASON_BYTES = 8 * _KIB
"""The limit for the reason of a failure, an interrupt, a decision, or the end of a run."""

MAX_TAGS_BYTES = 16 * _KIB
"""The limit for all tags of a session together, as JSON. A list of sessions reads them."""

MAX_METADATA_BYTES = 64 * _KIB
"""The limit for the metadata of a session, as JSON. A list of sessions reads it."""

MAX_CALL_ITEMS = 100_000
"""The maximum number of messages, chunks, entries, refs, calls or keys in one call."""

MAX_CALL_BYTES = 64 * _MIB
"""The limit for all messages or chunks of one call, unless ``Limits`` allows a single one to be larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds in bytes of UTF-8 JSON text, each applied to the text that would be stored.

    ``max_waiting_posts`` is the number of posts that may wait in one session, and ``max_effects`` the number
    of effects of one session.

    Example::

        sessions = DatabaseStateStore(limits=Limits(max_message_bytes=64 * 1024))
        sessions.append_messages("trip", [{"role": "user", "content": "A short message."}])
    """

    max_state_bytes: int = 8 * _MIB
    max_message_bytes: int = 1 * _MIB
    max_staged_bytes: int = 1 * _MIB
    max_chunk_bytes: int = 256 * _KIB
    max_waiting_posts: int = 1_000
    max_effects: int = 10_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name} must be a whole number, at least 1; got {value!r}")


AS_STORED = Limits(max_state_bytes=UNLIMITED)
"""Used for stored states: a restore or branch must not fail because the limits have been lowered since."""
