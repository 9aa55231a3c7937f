"""The instructions of this process, counted by valgrind's callgrind, which has to run it.

Virtual machines often hide the processor's own counter of instructions from `perf_event_open`. Callgrind
needs no counter, and its count of the same work differs by far less than 1 % from run to run.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["Callgrind", "command", "is_available"]

# A function that makes a client request of valgrind, as valgrind.h has it: the request's array in rax, the
# answer in rdx, rotations of rdi by 128 bits in all, and an exchange of rbx with rbx. Without valgrind it
# returns 0.
_REQUEST = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
_RUNNING_ON_VALGRIND = 0x1001
_CALLGRIND = ord("C") << 24 | ord("T") << 16
_DUMP, _ZERO, _START, _STOP = _CALLGRIND, _CALLGRIND + 1, _CALLGRIND + 4, _CALLGRIND + 5


def is_available() -> bool:
    """Whether this machine has valgrind and can run the client requests."""
    return platform.machine() == "x86_64" and shutil.which("valgrind") is not None


def command(output: Path) -> list[str]:
    """The words before a command that run it under callgrind; counts go to files named after ``output``."""
    return [
        "valgrind",
        "--tool=callgrind",
        "--quiet",
        # Start and warm-up are several times faster so.
        "--instr-atstart=no",
        f"--callgrind-out-file={output}",
        f"--log-file={output}.log",
    ]


class Callgrind:
    """Counts the instructions of all threads of this process while a call runs."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._dumps = 0
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._code.write(_REQUEST)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        self._function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(address)
        if not self._request(_RUNNING_ON_VALGRIND):
            raise RuntimeError("This process does not run under valgrind.")

    def instructions_of(self, call: Callable[[], object]) -> int:
        # What the warm-up left is not collected during the call.
        gc.collect()
        gc.freeze()
        self._request(_START)
        self._request(_ZERO)
        call()
        self._request(_DUMP)
        self._request(_STOP)
        self._dumps += 1
        return self._newest_total()

    def _request(self, number: int) -> int:
        words = (ctypes.c_uint64 * 6)(number)
        return int(self._function(ctypes.addressof(words)))

    def _newest_total(self) -> int:
        dump = Path(f"{self._output}.{self._dumps}")
        for line in dump.read_text().splitlines():
            if line.startswith("summary:"):
                dump.unlink()
                return int(line.split()[1])
        raise RuntimeError(f"{dump} has no summary.")
