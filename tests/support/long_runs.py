"""Runs and sweeps as large as users have them, written as files without training: for pages of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from conf.schema import Config
from orchestra.run.config_file import to_yaml, write_config
from orchestra.run.events import EventWriter, node_writer, rank_writer
from orchestra.run.files import Record
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, to_json

BEGAN = 1.79e9
STEP_S = 0.5
START_S, RESTORE_S = 40.0, 6.0
POWER_W = 600.0


def lines(file: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def row(step: int, time: float, attempt: int = 0, **more: object) -> Record:
    """Return a row of metrics.jsonl."""
    loss = 2.0 + 8.0 / math.sqrt(1.0 + step / 50)
    rates = {"tokens_per_s": 2.0e6, "mfu": 0.43, "hfu": 0.46, "mfu_convention": "palm"}
    times = {"step_time_s": STEP_S, "data_time_s": 0.001}
    facts = {"loss": loss, "grad_norm": 1.0 + (step * 7919 % 100) / 100, "lr": 3e-4, "tokens": step * 1000}
    return {"step": step, "time": time, **facts, **rates, **times, "attempt": attempt, **more}


@dataclass
class _Telling:
    """What the processes of a run tell, and the time."""

    now: float = BEGAN
    events: dict[str, list[Record]] = field(default_factory=dict)

    def tell(self, writer: str, attempt: int, event: str, **more: object) -> None:
        told = {"time": self.now, "attempt": attempt, "event": event, **more}
        self.events.setdefault(writer, []).append(told)


def long_run(folder: Path, *, steps: int, nodes: int, slow: tuple[int, float] = (13, 1.3)) -> RunDir:
    """Return a run of eight ranks a node that lost a node after 60 % of its steps, and the steps after half.

    Rank `slow[0]` takes `slow[1]` times as long as the others.
    """
    run = RunDir(folder / "long")
    run.events.mkdir(parents=True)
    write_config(run.config, Config())
    run.record.write_text(json.dumps({"name": "long", "created": BEGAN, "steps": steps, "jobs": []}))
    hosts = [f"node{number}" for number in range(1, nodes + 1)]
    lost, back = steps * 6 // 10, steps // 2
    rows: list[Record] = []
    telling = _Telling()
    for attempt, (begin, end) in enumerate(((0, lost), (back, steps))):
        _start(telling, attempt, begin, hosts)
        rank = rank_writer(attempt, 0)
        for step in range(begin + 1, end + 1):
            telling.now += STEP_S
            used = {"energy_j": POWER_W * STEP_S * 8 * nodes, "power_w": POWER_W}
            rows.append(row(step, telling.now, attempt, **used))
            if step % back == 0:
                facts = {"rank": 0, "step": step, "blocked_s": 0.25}
                telling.tell(rank, attempt, "checkpoint_started", **facts)
                telling.tell(rank, attempt, "checkpoint_committed", **facts, bytes=10**9, seconds=4.0)
        for number in range(8 * nodes):
            timed = range(begin + 10, end + 1, 10)
            factor = slow[1] if number == slow[0] else 1.0
            own = [round(0.4 * factor * (1 + (step * 31 + number * 17) % 7 / 1000), 6) for step in timed]
            record = {"host": hosts[number // 8], "steps": [*timed], "own_s": own}
            lines(run.times / f"{rank_writer(attempt, number)}.jsonl", [record])
        if attempt == 0:
            _lose_node(telling, hosts)
    telling.tell(node_writer(1, 0), 1, "finished", host=hosts[0], code=0, cause="finished", step=steps)
    lines(run.metrics, rows)
    for writer, records in telling.events.items():
        lines(run.event_file(writer), records)
    return run


def _start(telling: _Telling, attempt: int, begin: int, hosts: list[str]) -> None:
    leader, rank = node_writer(attempt, 0), rank_writer(attempt, 0)
    own = {"host": hosts[0], "node": 0, "pid": 1, "pid_started": 1}
    telling.tell(leader, attempt, "attempt_started", **own, nodes=len(hosts), ranks_per_node=8, hosts=hosts)
    telling.now += START_S
    if attempt:
        read = {"step": begin, "seconds": RESTORE_S, "source": "checkpoint", "skipped": []}
        telling.tell(rank, attempt, "restored", rank=0, **read)
    device = {"device": "NVIDIA H100", "peak_flops_per_s": 989e12, "mfu_convention": "palm"}
    telling.tell(rank, attempt, "training_started", rank=0, world_size=8 * len(hosts), **device)


def _lose_node(telling: _Telling, hosts: list[str]) -> None:
    """Let the last node of attempt 0 be lost."""
    leader, telling.now = node_writer(0, 0), telling.now + 5.0
    telling.tell(leader, 0, "node_lost", host=hosts[-1], node=len(hosts) - 1, cause="silent")
    telling.tell(leader, 0, "failed", host=hosts[0], code=1, cause="node lost", message="silent")
    words = {"decision": "replace", "rule": "spare_node", "reason": "a spare takes its place"}
    told = {"host": hosts[0], "code": 1, "wait_s": 0.0, "exclude": [hosts[-1]], "after": "node lost"}
    telling.tell(leader, 0, "restarting", **told, **words)


def long_sweep(folder: Path, num_members: int) -> SweepDir:
    """Return a sweep of learning rates and seeds whose members have finished, but for each tenth."""
    sweep = SweepDir(folder / "lr-sweep")
    members = []
    config = to_yaml(Config())
    for index in range(num_members):
        run = sweep.member(index)
        run.path.mkdir(parents=True)
        run.config.write_text(config)
        record = {"name": f"{index:03d}", "sweep": sweep.name, "member": index, "steps": 20, "jobs": []}
        run.record.write_text(json.dumps(record))
        rate = 10 ** (-4 + 2 * (index % 40) / 40)
        members.append(SweepMember(index, str(index), (f"optim.lr={rate:.3g}", f"train.seed={index // 40}")))
        loss = 2.5 + (math.log10(rate) + 3.1) ** 2 + index // 40 * 0.001
        lines(run.metrics, [row(step, BEGAN + step, loss=loss + 1.0 / step) for step in range(1, 21)])
        events = EventWriter(run, node_writer(0, 0), 0, host="node1")
        events.write("attempt_started", pid=1, pid_started=1)
        if index % 10 == 9:
            events.write("failed", code=1, cause="OutOfMemoryError")
        else:
            events.write("finished", code=0)
        events.close()
    sweep.record.write_text(to_json(Sweep(sweep.name, "x", (), tuple(members), (), BEGAN)))
    return sweep
