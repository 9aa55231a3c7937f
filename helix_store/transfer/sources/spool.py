"""Records of one session between source and target: in memory while there are few, then in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, Final

from helix_store.transfer.records import Record, line_of

__all__ = ["Spool"]

_IN_MEMORY: Final = 4_000_000


class Spool:
    """Records that are written once and can be read from the start any number of times."""

    def __init__(self) -> None:
        self._lines: IO[bytes] = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115

    def add(self, record: Record) -> None:
        self._lines.write(line_of(record))

    def records(self) -> Iterator[Record]:
        self._lines.seek(0)
        for line in self._lines:
            yield json.loads(line)

    def close(self) -> None:
        self._lines.close()
