"""TensorBoard's files beside `metrics.jsonl` (train.tensorboard), by torch's own writer. *Rank 0 only.*

Each attempt writes a file of its own into <run>/tensorboard/, which begins by voiding what older ones hold of
the steps from its first one on: TensorBoard then shows each step once. Rows are handed to a thread, so that
no step waits for a file system; what it cannot take is in `metrics.jsonl` all the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
from typing import Any

from orchestra.errors import ConfigError
from orchestra.run.events import is_number
from orchestra.run.files import Record
from orchestra.run.paths import RunDir

# Rows that wait for a file system that does not answer; those beyond them are left out.
_MOST_ROWS = 1_000
# How long the end of an attempt waits for the last rows.
_CLOSING_S = 2.0
# Those that say where a row belongs.
_NO_CURVES = ("step", "time", "attempt")


class TensorBoardFiles:
    """Writes the numbers of rows. A file that cannot be written ends no training.

    Raises ConfigError where TensorBoard's package is missing.
    """

    def __init__(self, run: RunDir, attempt: int, begin: int) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "train.tensorboard=true needs the package tensorboard, which is not installed on this node; "
                "pip install 'orchestra-train[tensorboard]', or use train.tensorboard=false"
            )
        self._run, self._attempt, self._begin = run, attempt, begin
        self._rows: queue.Queue[Record | None] = queue.Queue(_MOST_ROWS)
        self._thread = threading.Thread(target=self._follow, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, row: Record) -> None:
        """Take a row of metrics. Never waits."""
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(row)

    def close(self) -> None:
        """Write what is left, and wait for that two seconds at most."""
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(_CLOSING_S)

    def _follow(self) -> None:
        with contextlib.suppress(OSError):
            self._write_all()
        # Nobody takes rows any more: `add` drops them once the queue is full.

    def _write_all(self) -> None:
        # Here, since it takes a second.
        from torch.utils.tensorboard import SummaryWriter

        folder, suffix = self._run.tensorboard, f".attempt-{self._attempt:03d}"
        writer: Any = SummaryWriter(str(folder), purge_step=self._begin + 1, filename_suffix=suffix)
        while (row := self._rows.get()) is not None:
            for name, value in row.items():
                if name not in _NO_CURVES and is_number(value):
                    writer.add_scalar(name, value, row["step"], walltime=row["time"])
            if self._rows.empty():
                writer.flush()
        writer.close()
