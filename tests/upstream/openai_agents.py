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

__all__ = ["FAILS"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_FILES: Final = (
    "tests/memory/test_session.py",
    "tests/memory/test_session_limit.py",
    "tests/extensions/memory/test_encrypt_session.py",
)
_LEFT_OUT: Final = "close or corrupt or file_lock or failed_ or rollback or post_commit"
"""Tests that reach into connections, files and tables of ``SQLiteSession``."""

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
            "OPENAI_API_KEY": "not-used",
        }
        environment.pop("DJANGO_SETTINGS_MODULE", None)
        suite = subprocess.run(
            [*command, "-p", "no:django", "-p", "helix_openai_agents", *_FILES, "-k", f"not ({_LEFT_OUT})"],
            cwd=unpacked("openai-agents"),
            env=environment,
            check=False,
        )
    return corpus.returncode or suite.returncode


if __name__ == "__main__":
    raise SystemExit(main())
