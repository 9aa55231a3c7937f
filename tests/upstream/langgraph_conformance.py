"""LangGraph's conformance suite on `DjangoSaver`: ``python -m tests.upstream.langgraph_conformance``.

It runs the released suite, and that of LangGraph's head beside it, whose clauses are in no release. For the
latter, ``HELIX_LANGGRAPH_SOURCE`` names a folder with a source tree of LangGraph.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["SOURCE"]

SOURCE: Final = "HELIX_LANGGRAPH_SOURCE"
_PACKAGE: Final = Path("libs/checkpoint-conformance")
_CLAUSES_OF_THE_HEAD: Final = 89
_CHECKOUT: Final = Path(__file__).parent.parent.parent
_TEST: Final = "tests/frameworks/langgraph/test_conformance.py"


def _run(database: str, **environment: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--no-header", "-p", "no:cacheprovider", _TEST]
    given = {**os.environ, "HELIX_TEST_DATABASES": database, **environment}
    return subprocess.run(command, cwd=_CHECKOUT, env=given, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    database = parser.parse_args().database
    print("The released suite:", flush=True)
    code = _run(database)
    source = os.environ.get(SOURCE)
    if not source:
        print(f"The suite of the head: not run. {SOURCE} names no source tree of LangGraph.")
        return code
    package = Path(source).resolve() / _PACKAGE
    if not (package / "langgraph/checkpoint/conformance").is_dir():
        print(f"{package} holds no conformance suite.")
        return 2
    print("The suite of the head:", flush=True)
    # "langgraph" and "langgraph.checkpoint" are namespaces: this folder has the first place in them.
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    return code or _run(database, PYTHONPATH=path, HELIX_CONFORMANCE_CLAUSES=str(_CLAUSES_OF_THE_HEAD))


if __name__ == "__main__":
    raise SystemExit(main())
