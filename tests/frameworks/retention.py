"""The retention policy of the example project, some days from now."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.db.models import F

from example_project.settings import HELIX_STORE
from helix_store.core import moments
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.models import Session
from helix_store.retention import RetentionPolicy, apply_retention
from tests.databases import CommittedDatabase

__all__ = ["assert_deleted_thirty_days_after_the_last_write"]


def assert_deleted_thirty_days_after_the_last_write(
    db: CommittedDatabase, write: Callable[[], object]
) -> None:
    """``write`` adds something to the only session of the database, which it creates."""
    write()
    Session.objects.using(db.alias).update(updated_at=F("updated_at") - timedelta(days=40))
    write()
    assert _left_after(db, 29) == 1
    assert _left_after(db, 31) == 0


def _left_after(db: CommittedDatabase, days: int) -> int:
    """The number of sessions that the policy leaves, so many days from now."""
    policy = RetentionPolicy(**HELIX_STORE["RETENTION"])
    later = datetime_to_milliseconds(moments.now() + timedelta(days=days))
    apply_retention(using=db.alias, policy=policy, now=later)
    return Session.objects.using(db.alias).count()
