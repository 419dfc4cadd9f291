"""The fault matrix: every row that can be shown on one machine, with as many seeds as are asked for.

`python tests/slurm/matrix.py --seeds 3` (`make matrix SEEDS=3`) starts a cluster of four hosts, lets runs be
hurt, and prints a table: row, what befell, what followed. The seed decides victims and steps. It needs root
and Slurm's packages. Exit code 1 where anything differed from what must follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from matrix_courses import COURSES, LENGTH, QUICK_COURSES, Shown, go_through, table  # noqa: E402
from matrix_field import Field, opened_at  # noqa: E402
from matrix_oracle import References  # noqa: E402
from matrix_policy import POLICY_CASES, try_policy  # noqa: E402
from matrix_rest import ELSEWHERE, STORM_RESTARTS, storm  # noqa: E402


def main() -> int:
    """Go through all of it, print each line when it is known and the table at last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, default=1, help="how often each course is gone through (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--only", default="", help="courses, cases and `storm`, comma-separated (all)")
    parser.add_argument("--restarts", type=int, default=STORM_RESTARTS, help="of the storm (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep cluster and runs there; else all is removed")
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.only.split(",")))
    shown: list[Shown] = []
    with opened_at(arguments.folder) as field:
        for lines in _all(
            field,
            wanted,
            range(arguments.first_seed, arguments.first_seed + arguments.seeds),
            arguments.restarts,
        ):
            shown += lines
            for line in lines:
                tell(f"{line.row:8} {line.what}: {line.result}")
    tell(table([*shown, *ELSEWHERE]))
    return int(any(line.result.startswith("FAILED") for line in shown))


def _all(field: Field, wanted: set[str], seeds: range, restarts: int) -> Iterable[list[Shown]]:
    references = References(field, LENGTH, "matrix")
    for seed in seeds:
        named = [course for course in (*COURSES, *QUICK_COURSES) if course.name in wanted]
        for course in named if wanted else COURSES:
            yield go_through(course, field, references, seed)
        for case in POLICY_CASES:
            if not wanted or case.name in wanted:
                yield try_policy(case, field, references, seed)
    if not wanted or "storm" in wanted:
        yield storm(field, restarts)


def tell(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
