"""What tests install once for this machine: workers that run at the same time wait for the first of them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

__all__ = ["installed_once"]

_PATIENCE_SECONDS: Final = 300.0


def installed_once(name: str, *commands: Sequence[str]) -> Path:
    """The folder that the commands have filled, each with exit code 0, or a skip with the reason.

    An installation that was not completed is made again.
    """
    folder = Path(tempfile.gettempdir()) / f"helix-{name}"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for command in commands:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE_SECONDS
                )
                if done.returncode:
                    pytest.skip(f"{' '.join(command)}: {done.stderr[-300:]}")
            (folder / "installed").touch()
    return folder
