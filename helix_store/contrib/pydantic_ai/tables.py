"""The tables of conversations, for the catalogue."""

from __future__ import annotations

from typing import Final

from django.db.models import Model

from helix_store.catalogue import AppTable, Branch
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry, ConversationFamily
from helix_store.contrib.pydantic_ai.reachability import (
    entries_of_sessions,
    families_of_sessions,
    faults_of_conversations,
    faults_of_entries,
    release_entries,
)
from helix_store.core import moments
from helix_store.core.ids import new_id
from helix_store.core.payloads import decode_object, encode


def _fork_to_branch(model: type[Model], branch: Branch) -> None:
    """Create a fork of the conversation for a branch of its session, with the same history but no branches.
    Until the commit, the lock on the source protects its entries, and thus those of the fork.
    """
    source = Conversation._base_manager.using(branch.db.alias).filter(session=branch.source).first()
    if source is None:
        return
    record = decode_object(source.document)
    at = moments.now()
    revision = new_id()
    record |= {
        "conversation_id": branch.target_id,
        "forked_from": record["conversation_id"],
        "forked_at": source.head_id,
        "branches": [],
        "revision": revision,
        "updated_at": at.isoformat(),
    }
    Conversation._base_manager.using(branch.db.alias).create(
        session_id=branch.target,
        tenant=source.tenant,
        family=source.family,
        head_id=source.head_id,
        revision=revision,
        scope=source.scope,
        updated_at=at,
        document=encode(record, limit=branch.db.limits.max_state_bytes, path="record"),
    )


# An entry is exported once, regardless of how many conversations share it.
TABLES: Final = (
    AppTable(
        ConversationFamily,
        record="pydantic_family",
        parent="tenant",
        order=("family",),
        of_sessions=families_of_sessions,
    ),
    AppTable(
        ConversationEntry,
        record="pydantic_entry",
        parent="tenant",
        order=("entry_id",),
        of_sessions=entries_of_sessions,
        check=faults_of_entries,
    ),
    AppTable(
        Conversation,
        record="pydantic_conversation",
        branch=_fork_to_branch,
        before_delete=release_entries,
        check=faults_of_conversations,
    ),
)
