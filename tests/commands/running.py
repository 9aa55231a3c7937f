"""Running a command in this process, as the command line does."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from django.core.management import CommandError, ManagementUtility, call_command

__all__ = ["Ended", "command_line", "read_by_a_program", "run"]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command wrote, and the exit code that the command line would have."""

    out: str
    err: str
    code: int

    @property
    def data(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(alias: str, *arguments: str, terminal: bool = False) -> Ended:
    """``manage.py`` with these arguments on a database. The message of an error is in ``err``."""
    out, err = (Terminal(), Terminal()) if terminal else (io.StringIO(), io.StringIO())
    code = 0
    try:
        call_command(*arguments, "--database", alias, stdout=out, stderr=err)
    except CommandError as exc:
        code = exc.returncode
        err.write(str(exc))
    return Ended(out.getvalue(), err.getvalue(), code)


def command_line(*arguments: str) -> Ended:
    """``manage.py`` with these arguments, as a process runs it: the parser's errors have their exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            ManagementUtility(["manage.py", *arguments]).execute()
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
    return Ended(out.getvalue(), err.getvalue(), code)


def read_by_a_program(text: str) -> Any:
    """JSON as another program reads it from a pipe: ``jq`` where it is installed."""
    program = ["jq", "."] if shutil.which("jq") else [sys.executable, "-m", "json.tool"]
    read = subprocess.run(program, input=text, capture_output=True, text=True, check=True, timeout=30)
    return json.loads(read.stdout)
