"""Every suite on every database: ``python -m tests.upstream``. Prints what each one said last."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Final

_SUITES: Final = ("langgraph", "langgraph_conformance", "langgraph_store", "openai_agents", "strands")
_DATABASES: Final = ("sqlite", "postgres")


def main() -> int:
    failed = []
    for suite in _SUITES:
        for database in _DATABASES:
            name = f"{suite} on {database}"
            print(f"\n+ {name}", flush=True)
            began = time.monotonic()
            command = [sys.executable, "-m", f"tests.upstream.{suite}", "--database", database]
            code = subprocess.run(command, check=False).returncode
            print(f"{name}: {'ok' if code == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
            if code:
                failed.append(name)
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
