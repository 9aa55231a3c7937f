"""Our tests of the frameworks that the extra ``dev`` leaves out: ``python -m tests.upstream.not_in_dev``.

Google ADK and Microsoft Agent Framework publish no suite for a session store. They are in the extra
``upstream``, because they are large and need older versions of packages that other frameworks share.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Final

from tests.test_layout import NOT_IN_DEV

_ON_EACH_DATABASE: Final = ("tests/frameworks/agent_framework", "tests/frameworks/google_adk")
_ON_POSTGRES: Final = (
    "tests/frameworks/test_extras.py",
    "tests/frameworks/test_the_example.py",
    "tests/test_layout.py",
    "tests/example/test_frameworks.py",
    "tests/docs/test_examples.py::test_the_examples_of_a_page_run[agent-framework.md]",
    "tests/docs/test_examples.py::test_the_examples_of_a_page_run[google-adk.md]",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    database = parser.parse_args().database
    missing = [module for module in NOT_IN_DEV.values() if not _is_installed(module)]
    if missing:
        # The tests would be skipped, and look as if they had passed.
        print(f"Not installed: {', '.join(missing)}")
        return 1
    tests = (*_ON_EACH_DATABASE, *(_ON_POSTGRES if database == "postgres" else ()))
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "HELIX_TEST_DATABASES": database}
    return subprocess.run(command, env=environment, check=False).returncode


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
