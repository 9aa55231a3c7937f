"""The commands that the demo prints, run by a shell that knows no virtual environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
_OF_THE_RUN: Final = ("DJANGO_SETTINGS_MODULE", "DEBUG", "PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Shell:
    """A shell in one folder, with a database that no other test has."""

    folder: Path
    environment: dict[str, str]
    python: str

    def run(self, line: str) -> str:
        ended = subprocess.run(
            ["/bin/sh", "-c", line],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{line}\n{ended.stderr}"
        return ended.stdout + ended.stderr

    @contextmanager
    def serving(self, line: str) -> Iterator[str]:
        """The address of the server that a line starts; ``exec`` makes it the process that is ended."""
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {line} --port 0"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        try:
            lines = []
            for shown in process.stderr:
                lines.append(shown)
                if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", shown):
                    yield found[1]
                    return
            pytest.fail("".join(lines))
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


@pytest.fixture(params=["in the checkout", "in another folder"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_RUN}
    environment |= {
        "PATH": "/usr/bin:/bin",
        "DATABASE_URL": f"sqlite:///{tmp_path / 'new.sqlite3'}",
        "CARD_SERVICE": str(tmp_path / "charges.jsonl"),
    }
    if request.param == "in the checkout":
        return Shell(ROOT, environment, sys.executable)
    # Its name has a space.
    (tmp_path / "my environment").symlink_to(sys.prefix)
    return Shell(tmp_path, environment, f"'my environment/bin/{Path(sys.executable).name}'")


def test_a_shell_without_the_virtual_environment_runs_what_the_demo_prints(shell: Shell) -> None:
    manage = "manage.py" if shell.folder == ROOT else str(ROOT / "manage.py")
    said = shell.run(f"{shell.python} {manage} demo").splitlines()
    server, approval = (line.strip() for line in said if re.match("  .*(uvicorn|shell -c)", line))
    if shell.folder != ROOT:
        assert server.startswith(f"{shell.python} -m uvicorn ")
    paths = [line.split()[0] for line in said if line.startswith("  http://127.0.0.1:8000/")]
    assert paths[:3] == [f"http://127.0.0.1:8000/{page}/" for page in ("admin", "live", "chat")]
    assert re.fullmatch(r"\S+/admin/helix_store/session/\d+/change/\?section=effects", "".join(paths[3:]))
    assert any("DATABASE_URL" in line for line in said)
    with shell.serving(server) as address:
        for path in paths:
            url = path.replace("http://127.0.0.1:8000", address)
            with urllib.request.urlopen(url) as response:  # noqa: S310  the server of this test
                assert response.status == 200
    for _ in range(2):
        assert "booked" in shell.run(approval).lower()
    (session_id,) = re.findall(r'approve\("([^"]+)"', approval)
    state = (
        "from helix_store.stores import DatabaseStateStore; "
        f'print(DatabaseStateStore().load_state("{session_id}").status)'
    )
    assert "completed" in shell.run(f"{shell.python} {manage} shell -c '{state}'")
