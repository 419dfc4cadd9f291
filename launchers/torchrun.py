"""torchrun's command line, and what its output says about ended workers. Pure: text in, text out."""

from __future__ import annotations

import os
import re
import sys

from launchers.spec import LaunchPlace, LaunchSpec, RankFailure

_LOOPBACK = "127.0.0.1"


def command(spec: LaunchSpec, place: LaunchPlace, worker_launcher: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command that starts and watches one node's ranks, each by the `worker_launcher` if given.

    torchrun never restarts workers itself (the agent's caller decides), writes no files of its own, and
    forwards only SIGQUIT: with SIGTERM left out it lives on when Slurm warns all processes of a job.
    """
    address = place.local_address or (_LOOPBACK if spec.num_nodes == 1 else None)
    local = ("--local-addr", address) if address is not None else ()
    meeting = ("--rdzv-id", place.meeting_id) if place.meeting_id is not None else ()
    return (
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(spec.num_nodes)),
        *("--node-rank", str(place.node)),
        *("--nproc-per-node", str(spec.ranks_per_node)),
        *("--rdzv-backend", "static"),
        *meeting,
        *("--master-addr", place.master_address),
        *("--master-port", str(place.master_port)),
        # Without it torchrun looks up this host's full name, which hangs where the name server does not
        # answer.
        *local,
        *("--max-restarts", "0"),
        *("--log-dir", os.devnull),
        "--signals-to-handle=SIGQUIT",
        *(("--no-python", *worker_launcher) if worker_launcher else ("-m",)),
        spec.module,
        *spec.arguments,
    )


_FAILURE = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s*"
    r"exitcode\s*: (?P<exit_code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
_CLOSING = re.compile(r"Sending process (\d+) closing signal")
_KILLING = re.compile(r"Unable to shutdown process (\d+) ")


def failures(log: str) -> tuple[RankFailure, ...]:
    """Return the failed workers in torchrun's closing report, as it names them.

    `log` is torchrun's output. A report that was cut off (torchrun was killed) yields nothing.
    """
    ended_by_torchrun = closing(log)
    return tuple(
        RankFailure(
            rank=int(match["rank"]),
            local_rank=int(match["local_rank"]),
            pid=int(match["pid"]),
            exit_code=int(match["exit_code"]),
            cleaned_up=int(match["pid"]) in ended_by_torchrun,
        )
        for match in _FAILURE.finditer(log)
    )


def closing(log: str) -> frozenset[int]:
    """Return the process ids of the workers that torchrun asked to end because another one had failed."""
    return frozenset(int(pid) for pid in _CLOSING.findall(log))


def killed(log: str) -> frozenset[int]:
    """Return the process ids of the workers that torchrun killed because they did not end when asked to."""
    return frozenset(int(pid) for pid in _KILLING.findall(log))
