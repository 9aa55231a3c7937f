"""The examples that a reader copies first pass a strict type check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.projects import stages_of
from tests.docs.test_examples import BLOCK, ROOT

TUTORIAL = stages_of((ROOT / "docs" / "tutorial.md").read_text())
WORKERS = stages_of((ROOT / "docs" / "workers.md").read_text().partition("## A Celery task")[0])
STAGES = [*TUTORIAL, *({**TUTORIAL[-1], **stage} for stage in WORKERS)]


def test_the_examples_of_the_readme_pass_strict_type_checks(tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text("\n".join(block[1] for block in BLOCK.finditer((ROOT / "README.md").read_text())))
    require_strict_types(program)


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_the_files_of_the_tutorial_pass_strict_type_checks_at_each_stage(stage: int, tmp_path: Path) -> None:
    files = [tmp_path / path for path in STAGES[stage]]
    for file, text in zip(files, STAGES[stage].values(), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "desk" / "__init__.py").touch()
    require_strict_types(*files)


def require_strict_types(*files: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
