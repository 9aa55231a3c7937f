"""A page that builds a project: blocks that begin with a file's name are files, console blocks are commands.

A block of a settings module is added to it; any other file is written as the page shows it.
In an output ``…`` stands for what differs: on a line of its own for any lines, else for a part of the line.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

from tests.docs.test_examples import ROOT

__all__ = ["Command", "File", "Project", "blocks_of", "stages_of"]

_BLOCK: Final = re.compile(
    r"^```(?:python\n(?=# ([\w/]+\.py)\n)|console\n)(.*?)^```$", re.MULTILINE | re.DOTALL
)
_DONE: Final = "The command has ended with code"
_TIMEOUT_SECONDS: Final = 120


@dataclass(frozen=True)
class File:
    path: str
    text: str


@dataclass(frozen=True)
class Command:
    line: str
    output: str

    def prints(self, printed: str) -> bool:
        """Whether this is what the page shows."""
        pattern = "".join(
            r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
            for line in self.output.splitlines()
        )
        return re.fullmatch(pattern, printed) is not None


Block: TypeAlias = File | Command


def blocks_of(text: str) -> Iterator[Block]:
    """The files and the commands of a page, in their order."""
    for path, body in _BLOCK.findall(text):
        if not path:
            for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
                yield Command(command, output)
        else:
            yield File(path, body)


def stages_of(text: str) -> list[dict[str, str]]:
    """The files of a page by path, once more for each time that a file is replaced."""
    stages: list[dict[str, str]] = [{}]
    for block in blocks_of(text):
        if isinstance(block, File) and not block.path.endswith("settings.py"):
            if block.path in stages[-1]:
                stages.append(dict(stages[-1]))
            stages[-1][block.path] = block.text
    return stages


class Project:
    """An empty folder and one shell in it, both as a reader has them.

    With an interpreter of another environment, the package is the one that is installed there.
    """

    def __init__(self, folder: Path, interpreter: Path | None = None) -> None:
        self.folder = folder
        self._errors = (folder / "stderr.log").open("w+")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("DATABASE_URL", "DJANGO_SETTINGS_MODULE", "FORCE_COLOR")
        }
        paths = [] if interpreter else [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {
            "COLUMNS": "80",
            "PATH": os.pathsep.join([str((interpreter or Path(sys.executable)).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
        }
        self._shell = subprocess.Popen(
            ["bash", "--norc"],  # noqa: S607  the reader's shell
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line.rstrip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The group: also what a failed test has left in the background.
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()
        self._reader.join()
        for stream in (self._shell.stdin, self._shell.stdout, self._errors):
            assert stream is not None
            stream.close()

    def follow(self, text: str) -> int:
        """Do what a page says, compare what is printed, and return the number of commands."""
        commands = 0
        for block in blocks_of(text):
            if isinstance(block, File):
                self.write(block)
            else:
                printed = self.run(block.line, lines=block.output.count("\n"))
                assert block.prints(printed), f"$ {block.line}\n{printed}\n{self.errors()}"
                commands += 1
        return commands

    def write(self, file: File) -> None:
        (root,) = [path.parent for path in self.folder.glob("*/manage.py")]
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if file.path.endswith("settings.py") else ""
        path.write_text(before + file.text)

    def run(self, line: str, *, lines: int = 0) -> str:
        """Run a command to its end, or one with ``&`` until it has printed that many lines."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{{ {line}\n}} </dev/null; echo {_DONE} $?\n")
        self._shell.stdin.flush()
        printed = ""
        code = None
        while code is None or (line.endswith("&") and printed.count("\n") < lines):
            try:
                got = self._lines.get(timeout=_TIMEOUT_SECONDS)
            except queue.Empty:
                raise AssertionError(f"$ {line}\n{printed}\n{self.errors()}") from None
            if got.startswith(_DONE):
                code = got.removeprefix(_DONE).strip()
            else:
                printed += got + "\n"
        assert code == "0", f"$ {line}\n{printed}\n{self.errors()}"
        return printed

    def errors(self) -> str:
        """What the commands have printed to stderr."""
        self._errors.flush()
        return (self.folder / "stderr.log").read_text()
