"""A damaged row that is its own ancestor ends a walk over its ancestors, with an error or once around."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db.models import F

from helix_store.catalogue import conversations
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.langgraph.models import LangGraphCheckpoint
from helix_store.contrib.pydantic_ai.models import ConversationEntry
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.reports.conversations import messages_of
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put_chain
from tests.frameworks.pydantic_ai.conversations import saved, store_of

AROUND = {"an entry that is its own parent": 1, "a circle of three": 3}


def entries_around(db: CommittedDatabase, length: int) -> list[str]:
    """Store a conversation of four entries, the oldest of which follows the entry at this place."""
    saved(db, "talk", "one", "two")
    rows = ConversationEntry.objects.using(db.alias).filter(tenant=db.tenant)
    ids = list(rows.order_by("id").values_list("entry_id", flat=True))
    assert len(ids) == 4
    assert rows.filter(entry_id=ids[0]).update(parent_id=ids[length - 1]) == 1
    return ids


@for_each("length", list(AROUND.values()), ids=list(AROUND))
def test_a_history_of_pydantic_ai(committed_db: CommittedDatabase, length: int) -> None:
    ids = entries_around(committed_db, length)
    store = store_of(committed_db)
    with pytest.raises(IntegrityFault, match="its own ancestor"):
        async_to_sync(store.read_history)(ids[-1])
    newest = async_to_sync(store.read_history)(ids[-1], limit=2)
    assert [entry.id for entry in newest] == ids[-2:]


@for_each("length", list(AROUND.values()), ids=list(AROUND))
def test_a_download_of_pydantic_ai_has_each_entry_once(committed_db: CommittedDatabase, length: int) -> None:
    entries_around(committed_db, length)
    session = Session.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    db = Database(committed_db.alias, committed_db.tenant)
    (conversation,) = (each for each in conversations() if each.name == "Pydantic AI")
    assert len(list(messages_of(db, session.pk, conversation, None))) == 4


@for_each("length", [1, 3, 70], ids=["a checkpoint that is its own parent", "a circle of three", "two pages"])
def test_the_history_of_a_channel_of_langgraph(committed_db: CommittedDatabase, length: int) -> None:
    saver = DjangoSaver(committed_db.alias, tenant=committed_db.tenant)
    configs: list[Any] = put_chain(saver, "thread", length)
    rows = LangGraphCheckpoint._base_manager.using(committed_db.alias).filter(
        session__tenant=committed_db.tenant
    )
    newest = configs[-1]["configurable"]["checkpoint_id"]
    assert rows.filter(parent_id=None).update(parent_id=newest) == 1
    assert not rows.filter(parent_id=F("checkpoint_id")).exclude(checkpoint_id=newest).exists()
    with pytest.raises(IntegrityFault, match="its own ancestor"):
        saver.get_delta_channel_history(config=config_of("thread"), channels=["absent"])
