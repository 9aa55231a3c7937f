"""``python -m benchmarks``: ratios of our API to the database's own limit and to peers, and their spread."""

from __future__ import annotations

import json
import sys
import time

from benchmarks.arguments import Options, parse_arguments
from benchmarks.figures import Figure, LeftOut
from benchmarks.machine import machine_facts
from benchmarks.server import benchmark_server
from benchmarks.table import HEADER, row, summary
from tests.postgres import PostgresCluster


def main() -> int:
    options = parse_arguments()
    started = time.monotonic()
    with benchmark_server(commit_delay=options.commit_delay) as cluster:
        machine = machine_facts(cluster)
        print(options.describe())
        print(", ".join(f"{name} {machine[name]}" for name in ("cpu", "cores", "postgresql", "python")))
        print(f"\n{HEADER}", flush=True)
        figures = _measured(cluster, options)
    print(f"\n{summary(figures)}")
    print(f"{time.monotonic() - started:.0f} s.")
    if options.json:
        run = {"is_quick": options.is_quick, "scale": vars(options.scale), "machine": machine}
        run["figures"] = [figure.to_dict() for figure in figures]
        options.json.write_text(json.dumps(run, indent=2))
    return 0


def _measured(cluster: PostgresCluster, options: Options) -> list[Figure | LeftOut]:
    # Models can be imported only now that Django knows its settings.
    from benchmarks.bench import Bench
    from benchmarks.paths import cases

    figures = []
    with Bench(cluster, options.scale) as bench:
        for case in cases(options.scale):
            for figure in case.measure(bench, options.wants):
                figures.append(figure)
                print(row(figure), flush=True)
    return figures


if __name__ == "__main__":
    sys.exit(main())
