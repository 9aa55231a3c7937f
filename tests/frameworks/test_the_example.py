"""What `python -m example_project.frameworks` leaves in the database, through the whole life of a session."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest

from example_project.settings import HELIX_STORE
from helix_store.catalogue import tables
from helix_store.cleanup import erase
from helix_store.core import moments
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.models import Session
from helix_store.retention import RetentionPolicy, apply_retention
from tests.asgi_server import database_url
from tests.databases import CommittedDatabase, delete_all_rows
from tests.transfer.files import exported, imported


@pytest.fixture
def example_db(empty_db: CommittedDatabase) -> CommittedDatabase:
    """The database after the agents of the installed frameworks have run."""
    environment = {
        **os.environ,
        "DATABASE_URL": database_url(empty_db, "frameworks"),
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
    }
    subprocess.run([sys.executable, "-m", "example_project.frameworks"], env=environment, check=True)
    return CommittedDatabase(alias=empty_db.alias, tenant="")


def _rows(database: CommittedDatabase) -> dict[str, int]:
    counted = {
        each.model.__name__: each.model._base_manager.using(database.alias).count() for each in tables()
    }
    return {name: count for name, count in counted.items() if count}


def _left_after(database: CommittedDatabase, days: int) -> int:
    """The number of sessions that the example's policy leaves, so many days from now."""
    later = datetime_to_milliseconds(moments.now() + timedelta(days=days))
    apply_retention(using=database.alias, policy=RetentionPolicy(**HELIX_STORE["RETENTION"]), now=later)
    return Session.objects.using(database.alias).count()


def test_its_sessions_are_exported_expire_and_are_erased_without_a_trace(
    example_db: CommittedDatabase,
) -> None:
    sessions = Session.objects.using(example_db.alias)
    first = exported(example_db)
    agent_types = set(sessions.values_list("agent_type", flat=True))
    assert agent_types >= {"claude-agent", "langgraph", "openai_agents", "pydantic_ai", "strands"}
    assert set(sessions.values_list("user_id", flat=True)) == {"ada"}
    number = sessions.count()

    delete_all_rows(example_db.alias)
    imported(example_db, first)
    assert exported(example_db) == first

    erased = erase(using=example_db.alias, user_id="ada")
    assert erased.complete
    assert erased.trees == number
    assert _rows(example_db) == {"Tombstone": number}

    imported(example_db, first)
    assert _left_after(example_db, 29) == number
    assert _left_after(example_db, 31) == 0
