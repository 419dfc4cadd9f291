"""Has ranks whose collectives stall write down what these did last, and keeps that in the attempt's logs.

Called by the hang watch of a node, before anybody is ended. How a rank answers is in
`orchestra.train.watch.flight_recorder`, what the records mean in `orchestra.recovery.collectives`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launchers import processes
from launchers.processes import Process
from orchestra.run.files import write_atomically
from orchestra.run.heartbeat import COLLECTIVES_SIGNAL
from orchestra.run.paths import RunDir

# A rank answers within milliseconds, unless its thread holds the interpreter's lock.
_ANSWER_S = 2.0
_POLL_S = 0.05

# The user's own value of either name stays: the first is today's, the other what it was called before.
_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
}
# torch's own default since 2.9.
_COLLECTIVES = 2000


def recorder_environment(run: RunDir, attempt: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is added to the ranks' `environment`, so that torch records collectives and NCCL's
    watchdog, which ends ranks after recovery.collective_timeout_s, dumps them into the attempt's logs.
    """
    ours = {
        "TORCH_FR_BUFFER_SIZE": str(_COLLECTIVES),
        "TORCH_FR_DUMP_TEMP_FILE": str(run.nccl_dumps(attempt)),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    return {
        name: value
        for name, value in ours.items()
        if name not in environment and _NAMES[name] not in environment
    }


@dataclass(frozen=True)
class RecordRequest:
    """One rank that is to tell: the file that it writes itself, and the one that is kept."""

    process: Process
    answer: Path
    target: Path


def keep_records(requests: Mapping[int, RecordRequest]) -> None:
    """Ask ranks for their records and keep what they answer within two seconds."""
    asked, before = {}, {}
    for rank, request in requests.items():
        # One that is stopped cannot answer, and one that does not block the signal would die of it. The file
        # is there, and empty, from when somebody waits to be asked.
        can_answer = processes.state(request.process) not in ("T", "t", "Z", None)
        before[rank] = _file_number(request.answer)
        if can_answer and before[rank] and processes.blocks(request.process, COLLECTIVES_SIGNAL):
            asked[rank] = request
    processes.send([request.process for request in asked.values()], COLLECTIVES_SIGNAL)
    deadline = time.monotonic() + _ANSWER_S
    while asked and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for rank, request in list(asked.items()):
            # The rank replaces it as a whole.
            if _file_number(request.answer) not in (0, before[rank]):
                del asked[rank]
                # A full disk takes the record, not the agent.
                with contextlib.suppress(OSError):
                    request.target.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(request.target, request.answer.read_text(), is_synced=False)


def _file_number(path: Path) -> int:
    """Return what tells a file from one that replaced it; 0 where there is none."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116
    except OSError:
        return 0
