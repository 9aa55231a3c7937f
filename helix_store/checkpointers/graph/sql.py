"""The SQL that copies the checkpoints of a fork."""

from __future__ import annotations

from typing import Final

from helix_store.engine.statement import Statement, table
from helix_store.models import Checkpoint

_THIS_ONE: Final = "{row}.kind = 'graph' AND {row}.id = %(forked)s"
# A later version of the same namespace would replace the forked checkpoint as the fork's latest one.
_ALL_UP_TO_THIS_ONE: Final = """{row}.kind = 'graph' AND {row}.id <= %(forked)s
    AND ({row}.namespace <> %(namespace)s OR {row}.version <= %(version)s)"""


def _copy(is_copied: str) -> Statement:
    """Return the statement that copies checkpoints. The id of a copy is a prefix and the original's key, so
    the same statement can translate the ids of parents. The forked checkpoint has the original as its parent.
    A parent that is not copied stays unchanged.
    """
    text = f"""
        INSERT INTO {table(Checkpoint)} (
            session_id, kind, namespace, version, checkpoint_id, parent_checkpoint_id, source, run_id,
            step_id, step_count, status, message_count, stream_sequence, payload, envelope, size_bytes,
            created_at
        )
        SELECT
            %(target)s, original.kind, original.namespace, original.version,
            %(id_prefix)s || {{original_digits}},
            CASE WHEN original.id = %(forked)s THEN original.checkpoint_id
                 WHEN parent.id IS NULL THEN original.parent_checkpoint_id
                 ELSE %(id_prefix)s || {{parent_digits}} END,
            CASE WHEN original.id = %(forked)s THEN 'fork' ELSE original.source END,
            original.run_id, original.step_id, original.step_count, original.status,
            CASE WHEN original.message_count < %(message_count)s THEN original.message_count
                 ELSE %(message_count)s END,
            original.stream_sequence, original.payload, original.envelope, original.size_bytes,
            CASE WHEN original.id = %(forked)s THEN %(at)s ELSE original.created_at END
        FROM {table(Checkpoint)} AS original
        LEFT JOIN {table(Checkpoint)} AS parent ON parent.session_id = %(source)s
            AND parent.checkpoint_id = original.parent_checkpoint_id AND {is_copied.format(row="parent")}
        WHERE original.session_id = %(source)s AND {is_copied.format(row="original")}
        ORDER BY original.id"""

    def with_digits(digits: str) -> str:
        """Return the SQL that computes the last 12 digits of a UUID from the keys of the rows."""
        return text.format(
            original_digits=digits.format("original.id & 281474976710655"),
            parent_digits=digits.format("parent.id & 281474976710655"),
        )

    return Statement(
        postgresql=with_digits("lpad(to_hex({}), 12, '0')"), sqlite=with_digits("printf('%%012x', {})")
    )


COPY_CHECKPOINT: Final = _copy(_THIS_ONE)
COPY_HISTORY: Final = _copy(_ALL_UP_TO_THIS_ONE)
