"""Measures orchestra's checkpoints beside torch's, interleaved, and the limits; prints medians and targets.

    python benchmarks/checkpoint.py                                     2 and 4 ranks, 1.5 GB, both layouts
    python benchmarks/checkpoint.py --gigabytes 0.3 --repeats 1         a quick look
    python benchmarks/checkpoint.py --device cuda --ranks 1 --model llama_1b --layouts replicated

While a save is written a training goes on: steps of matrix products for about 50 ms and an all-reduce. The
time that a save takes from it is the time blocked in the call plus the slowdown of the steps until all ranks
are through, against the median step before and after. Every turn gets a folder of its own, and what can be
prepared before a save is (memory, processes). DCP is torch.distributed.checkpoint with its best options; all
savers sync their files, and training never waits for DCP's asynchronous staging, as a real optimizer would.

The disk's limit is the faster of buffered and direct writes, synced, by all ranks at once without training;
that of memcpy is a rank's share of the state, copied by all ranks at once, the best of three. Memory is how
far a rank's resident memory rises; that of DCP's process is not in it. What a restore brings back is checked.
To drop the page cache, which is the whole machine's, root is needed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from checkpoint_report import SAVERS, report, tables_of  # noqa: E402  found by the line above


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the whole state")
    parser.add_argument("--model", default="", help="a preset of conf/model with AdamW; no --gigabytes")
    parser.add_argument(
        "--layouts", nargs="+", default=["replicated", "sharded"], choices=["replicated", "sharded"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--caches", nargs="+", default=["warm", "dropped"], choices=["warm", "dropped"])
    parser.add_argument("--skip", nargs="*", default=[], choices=SAVERS, metavar="SAVER")
    parser.add_argument("--no-restore", action="store_true")
    parser.add_argument("--count", action="store_true", help="count bytes by a file system under fsspec too")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--scratch", default="", help="a folder on the disk to measure; all in it is removed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="say nothing on standard error meanwhile")
    parser.add_argument("--results", help=argparse.SUPPRESS)  # set in the processes that this script starts
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    if arguments.results:
        from checkpoint_rank import serve

        serve(arguments)
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=arguments.scratch or None))
    try:
        refuse_what_does_not_fit(arguments, scratch)
        results = [measured(ranks, scratch) for ranks in arguments.ranks]
        file_system = file_system_of(scratch)
    finally:
        shutil.rmtree(scratch)
    tables = [row for result in results for row in tables_of(result)]
    if arguments.json:
        print(json.dumps({"file_system": file_system, "tables": tables, "measured": results}, indent=1))
    else:
        report(results, tables, file_system)
    return 0


def refuse_what_does_not_fit(arguments: argparse.Namespace, scratch: Path) -> None:
    """Leave with a message where the machine has too little memory or disk."""
    if arguments.model:  # its size is known to the ranks only
        return
    state = int(arguments.gigabytes * 1e9)
    # Every rank holds a replicated state and DCP stages all of it again; orchestra stages each byte once.
    memory = state * (2 * max(arguments.ranks) + 1 if "replicated" in arguments.layouts else 4)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    free = shutil.disk_usage(scratch).free
    if available < memory:
        sys.exit(f"{available / 1e9:.1f} GB of memory are available, about {memory / 1e9:.1f} are needed")
    if free < 3 * state:
        sys.exit(f"{free / 1e9:.1f} GB are free in {scratch}, {3 * state / 1e9:.1f} are needed")


def measured(ranks: int, scratch: Path) -> dict[str, Any]:
    """Start the processes of so many ranks; return what rank 0 wrote down."""
    results = scratch / f"results-{ranks}.json"
    words = [sys.executable, *sys.argv, "--scratch", str(scratch), "--results", str(results)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    processes = [
        subprocess.Popen(words, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        wait_for(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    content: dict[str, Any] = json.loads(results.read_text())
    return content


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended well; leave where one has not."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            sys.exit("a process of the benchmark failed; its error stands above")
        if all(code == 0 for code in codes):
            return
        time.sleep(0.2)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def file_system_of(folder: Path) -> str:
    """Return the type of the file system that a folder lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(inside, key=lambda mount: len(mount[0]))[1]


if __name__ == "__mp_main__":
    # This is DCP's process: its log would fill the screen.
    logging.disable(logging.INFO)
if __name__ == "__main__":
    sys.exit(main())
