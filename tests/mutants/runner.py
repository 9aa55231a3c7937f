"""Applies each mutant to a copy of the project, and runs the tests that must notice it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.mutant import ROOT, Mutant, thorough_tests
from tests.postgres import NOT_DURABLE, PostgresCluster
from tests.tiers import is_left_out

__all__ = ["PACKAGE", "BrokenTable", "Copy", "Verdict", "is_beyond_quick", "mutated"]

PACKAGE: Final = ROOT / "helix_store"
_COPIED: Final = ("helix_store", "tests", "example_project", "docs", "pyproject.toml", "manage.py")
_PASSED, _FAILED, _NO_END = 0, 1, -1
_LONGEST_SECONDS: Final = 600.0


class BrokenTable(Exception):
    """A mutant cannot be applied, or its tests do not run."""


def is_beyond_quick(test: str) -> bool:
    """Whether the quick tier leaves out a test of a mutant."""
    file, _, name = test.partition("::")
    return is_left_out(file) or name in thorough_tests(ROOT / file)


@dataclass(frozen=True)
class Verdict:
    """``killer`` is the test that failed; ``None`` for a survivor, and where the tests did not end.

    A busy machine is no killer: tests that do not end are no verdict.
    """

    mutant: Mutant
    killer: str | None
    seconds: float
    has_ended: bool = True

    def __str__(self) -> str:
        if self.killer:
            return f"killed by {self.killer}"
        return "SURVIVED" if self.has_ended else "NO VERDICT: its tests did not end"


class _Ran(NamedTuple):
    code: int
    failed: str | None
    output: str
    seconds: float


def mutated(mutant: Mutant) -> str:
    """The file of a mutant with its change."""
    source = (PACKAGE / mutant.file).read_text()
    found = source.count(mutant.text)
    if found != 1:
        raise BrokenTable(f"{mutant} stands {found} times in its file; it must stand there once.")
    return source.replace(mutant.text, mutant.replacement)


@dataclass(frozen=True)
class Copy:
    """A copy of the project, and a server for its tests. The working tree is never changed."""

    folder: Path
    server: str
    is_quick: bool = False
    times: Iterator[int] = field(default_factory=lambda: count(1_000_000_000))

    @classmethod
    @contextmanager
    def made(cls, *, is_quick: bool = False) -> Iterator[Copy]:
        with tempfile.TemporaryDirectory(prefix="helix-mutants-") as folder:
            for name in _COPIED:
                source, target = ROOT / name, Path(folder) / name
                if source.is_dir():
                    shutil.copytree(
                        source, target, ignore=shutil.ignore_patterns("__pycache__", "*.sqlite3*")
                    )
                else:
                    shutil.copy(source, target)
            with PostgresCluster(options=NOT_DURABLE) as cluster:
                yield cls(Path(folder), cluster.url, is_quick)

    def require_passing(self, tests: Iterable[str]) -> None:
        """Without a mutant every test passes; else a failure would prove nothing."""
        ran = self._run(tests)
        if ran.code != _PASSED:
            raise BrokenTable(f"{ran.failed or 'pytest'} fails without a mutant:\n{ran.output}")

    def verdict(self, mutant: Mutant) -> Verdict:
        file = self.folder / "helix_store" / mutant.file
        original = file.read_text()
        self._write(file, mutated(mutant))
        try:
            ran = self._run(mutant.tests, "-x", seconds=_LONGEST_SECONDS)
        finally:
            self._write(file, original)
        if ran.code not in (_PASSED, _FAILED, _NO_END):
            raise BrokenTable(f"{mutant} ended with exit code {ran.code}:\n{ran.output}")
        return Verdict(mutant, ran.failed, ran.seconds, has_ended=ran.code != _NO_END)

    def _write(self, file: Path, text: str) -> None:
        """Each text gets a time that no other had: Python knows by it that a compiled file is too old."""
        file.write_text(text)
        at = next(self.times)
        os.utime(file, (at, at))

    def _run(self, tests: Iterable[str], *options: str, seconds: float | None = None) -> _Ran:
        """Run tests in one process; of the quick tier only those that it has."""
        chosen = [each for each in dict.fromkeys(tests) if not (self.is_quick and is_beyond_quick(each))]
        if not chosen:
            return _Ran(_PASSED, None, "", 0.0)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "--reuse-db", "--tb=line"),
            *("-p", "no:cacheprovider", "-p", "pytest_django.plugin", "-p", "pytest_asyncio.plugin"),
            *options,
            *(["--quick"] if self.is_quick else []),
            *chosen,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            # Compiled once for all mutants, and no plugin but those that the tests need: seconds for each.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self.folder / "compiled"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HELIX_TEST_POSTGRES_URL": self.server,
        }
        began = time.monotonic()
        try:
            ran = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _Ran(_NO_END, None, "", time.monotonic() - began)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
        return _Ran(
            ran.returncode, failed and failed[1], ran.stdout[-4_000:] + ran.stderr, time.monotonic() - began
        )
