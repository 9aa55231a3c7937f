"""Two projects with different table prefixes work in one database: each has what it would have alone.

A prefix is fixed when a process starts, so each of them is a process. The records of migrations have no
prefix: those of the first project are deleted before the second one migrates.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.migrations.conftest import FreshDatabase

_PREFIXES: Final = ("first_", "second_")
_STORIES: Final = """
from tests.faults.neighbours import live
for seed in range(5):
    beside = live("default", f"tenant-{seed}", seed + %d)
    alone = live("default", f"alone-{seed}", seed + %d)
    assert beside == alone, seed
print("the same")
"""


@pytest.mark.skipif(
    os.environ.get("HELIX_FAULTS_TIER", "1") == "1", reason="two whole migrations: tier 2 and above"
)
def test_projects_with_two_prefixes_do_not_meet(fresh_database: FreshDatabase) -> None:
    first, second = _PREFIXES
    fresh_database.run("migrate", TABLE_PREFIX=first)
    # The app of a third party, whose tables have no prefix.
    fresh_database.run("migrate", "notebook", "zero", TABLE_PREFIX=first)
    with fresh_database.connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app LIKE 'helix_store%'")
    fresh_database.run("migrate", TABLE_PREFIX=second)
    processes = [
        fresh_database.start("shell", "-c", _STORIES % (10 * number, 10 * number), TABLE_PREFIX=prefix)
        for number, prefix in enumerate(_PREFIXES)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all("the same" in output for output in outputs), "\n".join(outputs)
