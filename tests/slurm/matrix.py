"""The fault matrix: every row that can be shown on one machine, with as many seeds as are asked for.

`python tests/slurm/matrix.py --seeds 3` (`make matrix SEEDS=3`) starts four hosts, injects faults into
runs, and prints a table: row, what happened, what followed. The seed decides victims and steps. It needs root
and Slurm's packages. Exit code 1 where anything differed from what must follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from matrix_injections import FAULTY_RUNS, LENGTH, QUICK_RUN, ShownRow, table, train_with_faults
from matrix_oracle import References
from matrix_policy import POLICY_CASES, try_policy
from matrix_storm import STORM_RESTARTS, storm
from sites import Site, opened_at

from tests.support.watched_past import false_alarms

ELSEWHERE = (
    ShownRow(
        "8", "30 % of packets lost, 500 ms of delay", "cannot be shown here: needs the kernel's sch_netem"
    ),
    ShownRow("15", "killed at each moment of a save", "tests/e2e/kill_points.py (make torture)"),
    ShownRow("17-24", "full disks, damage, other layouts, the ledger", "tests/e2e, tests/ranks"),
    ShownRow("27-29", "warning, time limit, preemption, requeue", "tests/slurm/test_requeue.py"),
    ShownRow("32", "two runs on the same nodes", "tests/slurm/test_survival.py"),
    ShownRow("35", "wandb away, killed, resumed", "tests/e2e"),
    ShownRow(
        "36", "a clock jumps", "cannot be shown here: Linux's time namespaces do not move the time of day"
    ),
    ShownRow("37", "a stale shared file system", "cannot be shown here: needs NFS or Lustre"),
)


def main() -> int:
    """Go through all of it, print each line when it is known and the table at last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="how often each run is trained (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--only", default="", help="runs, cases and `storm`, comma-separated (all)")
    parser.add_argument("--restarts", type=int, default=STORM_RESTARTS, help="of the storm (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep cluster and runs there; else all is removed")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    shown: list[ShownRow] = []
    with opened_at(arguments.folder) as site:
        for line in _all(site, wanted, seeds, arguments.restarts):
            shown.append(line)
            write_line(f"{line.row:8} {line.what}: {line.result}")
    write_line(table([*shown, *ELSEWHERE]))
    return int(any(line.result.startswith("FAILED") for line in shown))


def _all(site: Site, wanted: set[str], seeds: range, restarts: int) -> Iterable[ShownRow]:
    references = References(site, LENGTH, "matrix")
    for seed in seeds:
        named = [faulty for faulty in (*FAULTY_RUNS, QUICK_RUN) if faulty.name in wanted]
        for faulty in named if wanted else FAULTY_RUNS:
            yield from train_with_faults(faulty, site, references, seed)
        for case in POLICY_CASES:
            if not wanted or case.name in wanted:
                yield try_policy(case, site, references, seed)
    if not wanted or "storm" in wanted:
        yield storm(site, restarts)
    for ranks in references.trained:
        alarms = false_alarms(references.of(ranks))
        result = f"FAILED: {'; '.join(alarms)}" if alarms else "passed"
        yield ShownRow("", f"no false alarm over the undisturbed run of {ranks} ranks", result)


def write_line(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
