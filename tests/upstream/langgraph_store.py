"""The tests of LangGraph's PostgresStore, on `DjangoStore`: ``python -m tests.upstream.langgraph_store``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["LEFT_OUT"]

_SWEEPER: Final = "it waits 17 seconds for the thread that deletes expired rows; this store starts none"
_INTERNAL: Final = "it tests the statements of PostgresStore, and no store"

LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "test_store": {
        "test_escape_like_literal": _INTERNAL,
        "test_namespace_match_pattern": _INTERNAL,
        "test_nonnull_migrations": _INTERNAL,
        "test_omit_expired_search_pagination": f"{_INTERNAL}: it writes times by a cursor",
        "test_store_ttl": _SWEEPER,
    },
    "test_async_store": {
        "test_large_batches_async": "it passes, but its 60,000 calls take four minutes",
        "test_no_running_loop": "a sync call beside a running loop is Django's SynchronousOnlyOperation",
        "test_abatch_uses_single_pool_checkout": _INTERNAL,
        "test_invalid_namespace_only_fails_its_own_call": f"{_INTERNAL}: it joins the calls of one tick",
        "test_sync_methods_reject_invalid_namespace_labels": "a sync call beside a running loop",
        "test_omit_expired_filters_read_paths": "as in test_store; its rows are written by a cursor",
        "test_omit_expired_disabled_preserves_expired_rows": "as in test_store",
        "test_omit_expired_refresh_ttl_only_refreshes_live_rows": "as in test_store",
        "test_omit_expired_search_pagination": _INTERNAL,
        "test_store_ttl": _SWEEPER,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    database = parser.parse_args().database
    for module, tests in LEFT_OUT.items():
        for name, reason in tests.items():
            print(f"not run: {module}::{name}: {reason}")
    if database == "sqlite":
        print("not run: all tests of vectors, which need PostgreSQL")
    suite = Path(__file__).with_name("langgraph_store_suite.py")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(suite)]
    return subprocess.run(
        command, env={**os.environ, "HELIX_TEST_DATABASES": database}, check=False
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
