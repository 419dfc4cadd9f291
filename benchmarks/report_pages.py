"""Measures pages of `orchestra report`: what writing one takes, its size, how soon a browser shows it.

    python benchmarks/report_pages.py [--steps 100000] [--ranks 64] [--members 1000] [--repeats 3]

The runs are files as real ones leave them (tests/support/long_runs.py). Processor seconds are of the command
and its children; a page is opened in headless Chromium, from the navigation to the page's own word that it is
drawn and two frames after it.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

RANKS_PER_NODE = 8


def written(folder: Path, name: str) -> tuple[Path, float, float]:
    """Return the page of a run or a sweep, and the seconds and processor seconds that writing it took."""
    page = folder / f"{name}.html"
    command = [sys.executable, "-m", "orchestra", "report", name, "-o", str(page)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, began = _children_s(), time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return page, time.perf_counter() - began, _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    from support.browser import Browser
    from support.long_runs import long_run, long_sweep

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = long_run(folder / "runs", steps=arguments.steps, nodes=arguments.ranks // RANKS_PER_NODE)
        sweep = long_sweep(folder / "runs", arguments.members)
        with Browser(folder / "browser") as browser:
            for path in (run.path, sweep.path):
                read = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                page, wall_s, processor_s = written(folder, path.name)
                opened = []
                for _ in range(arguments.repeats):
                    began = time.perf_counter()
                    browser.open(page)
                    assert browser.value("document.documentElement.dataset.drawn") == "true"
                    opened.append(time.perf_counter() - began)
                print(
                    f"{path.name}: {read / 1e6:.1f} MB of files; written in {wall_s:.1f} s "
                    f"({processor_s:.1f} s of processors), {page.stat().st_size / 1e6:.2f} MB; opened in "
                    f"{min(opened):.2f} to {max(opened):.2f} s; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
