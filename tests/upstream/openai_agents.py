"""The tests of OpenAI Agents SDK, on `DjangoSession`: ``python -m tests.upstream.openai_agents``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.upstream.databases import NAMES, database
from tests.upstream.sdists import unpacked

__all__ = ["FAILS", "LEFT_OUT"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_FILES: Final = (
    "tests/memory/test_session.py",
    "tests/memory/test_session_limit.py",
    "tests/extensions/memory/test_encrypt_session.py",
)
_CONNECTIONS: Final = "it closes, counts or breaks connections of SQLiteSession"
_ROWS: Final = "it damages rows of SQLiteSession; tests/frameworks/openai_agents does so with ours"
_LOCK: Final = "it looks at the lock of a file that SQLiteSession has"

LEFT_OUT: Final[dict[str, str]] = {
    "test_sqlite_session_close_closes_worker_thread_connections": _CONNECTIONS,
    "test_sqlite_session_closes_retired_connections_before_the_next_allocation": _CONNECTIONS,
    "test_sqlite_session_closed_rejects_empty_add_items": _CONNECTIONS,
    "test_sqlite_session_pop_item_skips_corrupt_most_recent": _ROWS,
    "test_sqlite_session_pop_item_returns_none_after_dropping_only_corrupt_rows": _ROWS,
    "test_sqlite_session_get_items_limit_skips_corrupt_newest_rows": _ROWS,
    "test_sqlite_session_get_items_session_settings_limit_skips_corrupt_rows": _ROWS,
    "test_sqlite_session_file_lock_is_shared_across_instances": _LOCK,
    "test_sqlite_session_failed_add_items_releases_write_lock": _CONNECTIONS,
    "test_sqlite_session_failed_clear_session_rolls_back": _CONNECTIONS,
    "test_sqlite_session_failed_pop_item_releases_write_lock": _CONNECTIONS,
    "test_sqlite_session_rollback_failure_evicts_connection": _CONNECTIONS,
    "test_sqlite_session_close_retries_quarantined_connection": _CONNECTIONS,
    "test_sqlite_session_post_commit_cancellation_propagates_after_known_outcome": _CONNECTIONS,
    "test_encrypted_pop_cancellation_waits_for_authentication_rollback": _CONNECTIONS,
}
"""Tests that reach into ``SQLiteSession``, with the reason."""

_THREADS: Final = "it looks into the connections of SQLiteSession"
_NATIVE: Final = "EncryptedSession authenticates before it pops for isinstance(session, SQLiteSession) alone"

FAILS: Final[dict[str, str]] = {
    "test_sqlite_session_reaps_connections_from_exited_worker_threads": _THREADS,
    "test_sqlite_session_keeps_connections_of_live_worker_threads": _THREADS,
    "test_encrypted_pop_wrong_key_preserves_recoverable_history[False]": _NATIVE,
    "test_encrypted_pop_wrong_key_preserves_recoverable_history[True]": _NATIVE,
    "test_encrypted_pop_rechecks_authentication_after_expired_tail": _NATIVE,
    "test_encrypted_pop_authentication_is_atomic_with_concurrent_mutations[append]": _NATIVE,
    "test_encrypted_pop_authentication_is_atomic_with_concurrent_mutations[clear]": _NATIVE,
    "test_encrypted_pop_wrong_key_preserves_row_identity": _NATIVE,
}
"""Tests that no session but ``SQLiteSession`` can pass, with the reason."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=NAMES, default="sqlite")
    name = parser.parse_args().database
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rsxXfE",
        "--tb=line",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    own = {"HELIX_TEST_DATABASES": name}
    corpus = subprocess.run(
        [*command, str(Path(__file__).with_name("openai_agents_corpus.py"))],
        env={**os.environ, **own},
        check=False,
    )
    with database(name) as settings:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(_ROOT / "tests" / "upstream" / "plugins"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
            ),
            "HELIX_UPSTREAM_DATABASE": json.dumps(settings),
            "HELIX_UPSTREAM_FAILS": json.dumps(FAILS),
            "HELIX_UPSTREAM_LEFT_OUT": json.dumps(LEFT_OUT),
            "OPENAI_API_KEY": "not-used",
        }
        environment.pop("DJANGO_SETTINGS_MODULE", None)
        suite = subprocess.run(
            [*command, "-p", "no:django", "-p", "helix_openai_agents", *_FILES],
            cwd=unpacked("openai-agents"),
            env=environment,
            check=False,
        )
    return corpus.returncode or suite.returncode


if __name__ == "__main__":
    raise SystemExit(main())
