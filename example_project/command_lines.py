"""Command lines for the reader of the demo, which work without an activated virtual environment."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from django.conf import settings

__all__ = ["approval_line", "server_line"]


def server_line() -> str:
    """Return the command that starts an ASGI server, which serves the admin and the live page."""
    folder = [] if Path.cwd() == settings.BASE_DIR else ["--app-dir", str(settings.BASE_DIR)]
    return _line("-m", "uvicorn", *folder, "example_project.asgi:application")


def approval_line(session_id: str, **options: str) -> str:
    """Return the command that approves a session's calls, with the ``options`` of `demo.approve`."""
    arguments = [json.dumps(session_id)]
    arguments += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in options.items()]
    code = f"from example_project.demo import approve; print(approve({', '.join(arguments)}))"
    return _line(_shown(settings.BASE_DIR / "manage.py"), "shell", "-c", code)


def _line(*arguments: str) -> str:
    return shlex.join([_shown(Path(sys.executable)), *arguments])


def _shown(path: Path) -> str:
    """Return a path relative to the current folder if that is shorter. Links are kept."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
