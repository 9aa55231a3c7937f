"""``python -m benchmarks``: ratios of our API to the database's own limit, and their spread."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

from benchmarks.pgbench import Limit
from benchmarks.rounds import Leg, Result, run_rounds, timed
from benchmarks.server import benchmark_databases


def main() -> int:
    arguments = _arguments()
    with benchmark_databases() as cluster:
        from benchmarks.paths import PATHS, prepare_sessions
        from benchmarks.reference import prepare_reference

        prepare_reference()
        prepare_sessions("default")
        figures = []
        for path in PATHS:
            if arguments.only and arguments.only not in path.name:
                continue
            legs = [
                Leg("limit", Limit(cluster, path.script)),
                Leg("ours", partial(timed, path.operation("default", 0))),
            ]
            results = run_rounds(legs, rounds=arguments.rounds, seconds=arguments.seconds)
            figures.append(_figure(path.name, results, path.floor, path.aim))
            print(_row(figures[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="per leg and round")
    parser.add_argument("--only", help="paths whose name holds this text")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def _figure(name: str, results: dict[str, Result], floor: float, aim: float) -> dict[str, object]:
    ratios = results["ours"].ratios_to(results["limit"])
    return {
        "path": name,
        "limit_per_second": round(results["limit"].rate),
        "ours_per_second": round(results["ours"].rate),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "floor": floor,
        "aim": aim,
    }


def _row(figure: dict[str, object]) -> str:
    return (
        f"{figure['path']:<28} limit {figure['limit_per_second']:>6}/s  "
        f"ours {figure['ours_per_second']:>6}/s  ratio {figure['ratio']:<6} "
        f"({figure['lowest']} to {figure['highest']})  floor {figure['floor']} aim {figure['aim']}"
    )


if __name__ == "__main__":
    sys.exit(main())
