"""A sound database with something of everything, and what is done to it in a transaction that is undone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import transaction

from tests.databases import CommittedDatabase
from tests.doctor.sample import write_sample


@pytest.fixture
def sample(empty_db: CommittedDatabase) -> Iterator[CommittedDatabase]:
    """A database with the sample, inside a transaction."""
    with transaction.atomic(using=empty_db.alias):
        write_sample(empty_db)
        yield empty_db
        transaction.set_rollback(True, using=empty_db.alias)
