"""``python -m benchmarks.compare --base CHECKOUT``: this checkout against another one.

Both run on one PostgreSQL server, each on databases that its own migrations made.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.compare import callgrind
from benchmarks.compare.checkouts import Checkout, WorkerProcess
from benchmarks.compare.measure import BASE, NEW, Rates, Scale, bytes_of_a_step, instructions, rates
from benchmarks.compare.names import BYTES_NAMES, NAMES
from benchmarks.compare.table import BYTES_HEADER, HEADER, Row, bytes_row, row, summary
from benchmarks.server import OPTIONS
from tests.postgres import PostgresCluster

# Short rounds: a stall of a shared disk that lasts longer than a round hits both sides.
FULL = Scale(rounds=60, seconds=0.06)
QUICK = Scale(rounds=20, seconds=0.05)


def main() -> int:
    arguments = _arguments()
    started = time.monotonic()
    with (
        TemporaryDirectory(prefix="helix-compare-") as directory,
        PostgresCluster(options=OPTIONS) as cluster,
    ):
        roots = {NEW: Path(__file__).resolve().parents[2], BASE: arguments.base}
        if arguments.new:
            roots[NEW] = arguments.new
        checkouts = {side: Checkout(side, root, Path(directory), cluster) for side, root in roots.items()}
        rows = _compare(checkouts, arguments)
    print(f"\n{time.monotonic() - started:.0f} s.")
    print(summary(rows))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Rates, client instructions and bytes of this checkout against another one's.",
    )
    parser.add_argument("--base", type=_checkout, required=True, help="the checkout to compare with")
    parser.add_argument("--new", type=_checkout, help="compare this checkout instead of the one run from")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="paths whose name holds this text or matches this pattern; repeatable",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--no-instructions", action="store_true", help="leave the instructions out")
    return parser.parse_args()


def _checkout(text: str) -> Path:
    if not Path(text, "helix_store", "__init__.py").exists():
        raise argparse.ArgumentTypeError(f"{text} has no package helix_store")
    return Path(text).resolve()


def _compare(checkouts: Mapping[str, Checkout], arguments: argparse.Namespace) -> list[Row]:
    scale = QUICK if arguments.quick else FULL
    names = _wanted(NAMES, arguments.only)
    is_counted = callgrind.is_available() and not arguments.no_instructions
    print(f"new: {checkouts[NEW].root}\nbase: {checkouts[BASE].root}")
    print(
        f"{scale.rounds} interleaved rounds of {scale.seconds:g} s a side.", _said_of_the_client(is_counted)
    )
    with ExitStack() as stack:
        workers = _workers(checkouts, stack)
        for side, checkout in checkouts.items():
            checkout.create_database()
            workers[side].ask("migrate")
        _print_bytes(checkouts, workers, _wanted(tuple(BYTES_NAMES), arguments.only))
        for name in names:
            for worker in workers.values():
                worker.ask("create", name)
        for checkout in checkouts.values():
            checkout.settle()
        counted = _counted(checkouts, names) if is_counted else {}
        return _print_rows(workers, names, scale, counted)


def _wanted(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        if not patterns
        or any(each.lower() in name.lower() or fnmatch.fnmatch(name, each) for each in patterns)
    ]


def _said_of_the_client(is_counted: bool) -> str:
    if is_counted:
        return "Client instructions by valgrind's callgrind, of all threads of the worker's process."
    return "No instructions: the client's column is processor time of the worker's process."


def _workers(
    checkouts: Mapping[str, Checkout], stack: ExitStack, *, under_callgrind: bool = False
) -> dict[str, WorkerProcess]:
    return {
        side: stack.enter_context(checkout.worker(under_callgrind=under_callgrind))
        for side, checkout in checkouts.items()
    }


def _print_bytes(
    checkouts: Mapping[str, Checkout], workers: Mapping[str, WorkerProcess], names: Sequence[str]
) -> None:
    if names:
        print(f"\n{BYTES_HEADER}", flush=True)
    for name in names:
        written = {side: bytes_of_a_step(checkouts[side], workers[side], name) for side in checkouts}
        print(bytes_row(name, written[NEW], written[BASE]), flush=True)


def _counted(checkouts: Mapping[str, Checkout], names: Sequence[str]) -> dict[str, dict[str, float]]:
    with ExitStack() as stack:
        workers = _workers(checkouts, stack, under_callgrind=True)
        return {name: instructions(workers, name) for name in names}


def _print_rows(
    workers: Mapping[str, WorkerProcess],
    names: Sequence[str],
    scale: Scale,
    counted: Mapping[str, Mapping[str, float]],
) -> list[Row]:
    print(f"\n{HEADER}", flush=True)
    chance = random.Random(1)  # noqa: S311  an order, not a secret
    rows = []
    for name in names:
        measured: Rates = rates(workers, name, scale, chance)
        rows.append(Row(name, measured, counted.get(name)))
        print(row(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
