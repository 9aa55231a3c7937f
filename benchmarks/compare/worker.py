"""A worker process: one checkout's helix_store on a database that is its alone.

It reads a request a line from standard input, ``[verb, path, count]`` as JSON, and answers with a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import django
from django.conf import settings

__all__ = ["ENVIRONMENT_VARIABLE"]

ENVIRONMENT_VARIABLE = "HELIX_COMPARED"
"""Tells a worker its modules, its databases, and where callgrind writes to, as JSON."""


class Worker:
    def __init__(self, callgrind_output: str | None) -> None:
        # Models can be imported only now that Django is set up.
        from benchmarks.compare.callgrind import Callgrind
        from benchmarks.compare.operations import Operation
        from benchmarks.compare.paths import PATHS

        self._paths = PATHS
        self._callgrind = Callgrind(Path(callgrind_output)) if callgrind_output else None
        self._operations: dict[str, Operation] = {}

    def answer(self, verb: str, name: str, count: int) -> Any:
        """Do what one request asks for."""
        from django.test.utils import override_settings

        if verb == "migrate":
            return _migrate()
        path = self._paths[name]
        with override_settings(HELIX_STORE=dict(path.helix_store)):
            operation = self._operations.get(name)
            if operation is None:
                operation = self._operations[name] = path.make(path.alias, name)
            if verb == "create":
                # Each process loads what it works on when it first runs.
                return self._operations.pop(name).create()
            if verb == "check":
                return operation.check()
            operation.prepare(count)
            if verb == "count":
                assert self._callgrind is not None
                return self._callgrind.instructions_of(lambda: _repeat(operation, count))
            started, cpu_started = time.perf_counter(), time.process_time()
            _repeat(operation, count)
            return time.perf_counter() - started, time.process_time() - cpu_started


def main() -> None:
    given = json.loads(os.environ[ENVIRONMENT_VARIABLE])
    settings.configure(
        DATABASES=given["databases"],
        INSTALLED_APPS=["django.contrib.contenttypes", "helix_store"],
        USE_TZ=True,
        SECRET_KEY="compared",  # noqa: S106  signs cursors for the length of a run
        HELIX_STORE={},
    )
    django.setup()
    import helix_store

    package = Path(helix_store.__file__).resolve().parent
    assert package == Path(given["modules"], "helix_store").resolve(), package
    answers = sys.stdout
    # What else is printed does not get between the answers.
    sys.stdout = sys.stderr
    _serve(Worker(given["callgrind_output"]), answers)


def _serve(worker: Worker, answers: TextIO) -> None:
    for line in sys.stdin:
        print(json.dumps(worker.answer(*json.loads(line))), file=answers, flush=True)


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _migrate() -> None:
    from django.core.management import call_command

    for alias in settings.DATABASES:
        call_command("migrate", database=alias, verbosity=0, skip_checks=True)


if __name__ == "__main__":
    main()
