"""Run the mutants: ``python -m tests.mutants``, or some: ``--kind fence``, ``--sample 5 --seed 3``."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from tests.mutants.mutant import Mutant
from tests.mutants.runner import Copy, Verdict, is_beyond_quick
from tests.mutants.table import MUTANTS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", epilog="example: python -m tests.mutants --kind fence"
    )
    parser.add_argument("--kind", choices=sorted({mutant.kind for mutant in MUTANTS}))
    parser.add_argument("--sample", type=int, help="how many mutants to run; all without it")
    parser.add_argument("--seed", type=int, default=1, help="which ones the sample has")
    parser.add_argument(
        "--skip-baseline", action="store_true", help="trust that the tests pass without a mutant"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run only tests of the quick tier, which README's command runs",
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at a time, each in its own copy")
    given = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if given.kind in (None, mutant.kind)]
    if given.sample is not None:
        # Races of processes, which kill the others, take minutes.
        chosen = [each for each in chosen if not all(is_beyond_quick(test) for test in each.tests)]
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))  # noqa: S311
    made, killed = Counter[str](), Counter[str]()
    with ExitStack() as stack, ThreadPoolExecutor(given.jobs) as pool:
        copies = [stack.enter_context(Copy.made(is_quick=given.quick)) for _ in range(given.jobs)]
        if not given.skip_baseline:
            copies[0].require_passing(test for mutant in chosen for test in mutant.tests)
            print("every test passes without a mutant", flush=True)  # noqa: T201
        free = SimpleQueue[Copy]()
        for copy in copies:
            free.put(copy)

        def judge(mutant: Mutant) -> Verdict:
            copy = free.get()
            try:
                return copy.verdict(mutant)
            finally:
                free.put(copy)

        for verdict in pool.map(judge, chosen):
            kind = verdict.mutant.kind
            made[kind] += 1
            killed[kind] += verdict.killer is not None
            print(f"{kind}: {verdict.mutant}\n    {verdict} in {verdict.seconds:.0f} s", flush=True)  # noqa: T201
    for kind in made:
        print(f"{kind}: {killed[kind]} of {made[kind]} killed")  # noqa: T201
    return 0 if made == killed else 1


if __name__ == "__main__":
    sys.exit(main())
