"""Every suite on every database, or those that are named: ``python -m tests.upstream strands``.

It prints what each one said. Two run side by side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_SUITES: Final = (
    "langgraph",
    "langgraph_conformance",
    "langgraph_store",
    "openai_agents",
    "strands",
    "not_in_dev",
)
_DATABASES: Final = ("sqlite", "postgres")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"{', '.join(_SUITES)}; by default all")
    suites = parser.parse_args().suites or _SUITES
    if unknown := set(suites) - set(_SUITES):
        parser.error(f"There is no suite {', '.join(sorted(unknown))}.")
    runs = [(suite, database) for suite in suites for database in _DATABASES]
    failed = []
    with ThreadPoolExecutor(len(_DATABASES)) as pool:
        for (suite, database), (code, printed, seconds) in zip(runs, pool.map(_run, runs), strict=True):
            name = f"{suite} on {database}"
            print(f"\n+ {name}\n{printed}\n{name}: {'FAILED' if code else 'ok'}, {seconds:.0f} s", flush=True)
            if code:
                failed.append(name)
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return int(bool(failed))


def _run(suite_and_database: tuple[str, str]) -> tuple[int, str, float]:
    """The exit code, what was printed, and the seconds."""
    suite, database = suite_and_database
    began = time.monotonic()
    command = [sys.executable, "-m", f"tests.upstream.{suite}", "--database", database]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout, time.monotonic() - began


if __name__ == "__main__":
    raise SystemExit(main())
