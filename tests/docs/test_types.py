"""The examples that a reader copies first pass a strict type check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_examples import BLOCK, ROOT


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_examples_pass_strict_type_checks(page: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text("\n".join(block[1] for block in BLOCK.finditer((ROOT / page).read_text())))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
