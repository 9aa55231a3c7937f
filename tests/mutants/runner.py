"""Applies each mutant to a copy of the project, and runs the tests that must notice it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutants.table import Mutant, Suite
from tests.postgres import PostgresCluster

__all__ = ["PACKAGE", "BrokenTable", "Copy", "Verdict", "mutated"]

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "helix_store"
_COPIED: Final = ("helix_store", "tests", "example_project", "docs", "pyproject.toml", "manage.py")
_PASSED, _FAILED = 0, 1


class BrokenTable(Exception):
    """A mutant cannot be applied, or its tests do not run."""


@dataclass(frozen=True)
class Verdict:
    """``killer`` is the suite that failed; ``None`` for a survivor."""

    mutant: Mutant
    killer: Suite | None


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

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[Copy]:
        with tempfile.TemporaryDirectory(prefix="helix-mutants-") as folder:
            for name in _COPIED:
                source, target = ROOT / name, Path(folder) / name
                if source.is_dir():
                    shutil.copytree(
                        source, target, ignore=shutil.ignore_patterns("__pycache__", "*.sqlite3*")
                    )
                else:
                    shutil.copy(source, target)
            with PostgresCluster() as cluster:
                yield cls(Path(folder), cluster.url)

    def require_passing(self, suites: Iterable[Suite]) -> None:
        """Without a mutant every suite passes; else a failure would prove nothing."""
        for suite in suites:
            if self._run(suite) != _PASSED:
                raise BrokenTable(f"{' '.join(suite)} fails without a mutant.")

    def verdict(self, mutant: Mutant) -> Verdict:
        file = self.folder / "helix_store" / mutant.file
        original = file.read_text()
        file.write_text(mutated(mutant))
        try:
            for suite in mutant.suites:
                if (code := self._run(suite)) == _FAILED:
                    return Verdict(mutant, suite)
                if code != _PASSED:
                    raise BrokenTable(f"{mutant}: {' '.join(suite)} ended with exit code {code}.")
            return Verdict(mutant, None)
        finally:
            file.write_text(original)

    def _run(self, suite: Suite) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--reuse-db", *suite]
        # A file that changes within a second could be taken for its compiled older text.
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self.folder),
            "HELIX_TEST_POSTGRES_URL": self.server,
        }
        ran = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, check=False)
        return ran.returncode
