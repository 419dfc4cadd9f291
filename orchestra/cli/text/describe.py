"""A configuration, an ending and where the time went in a few lines for people, as commands print them."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import ClusterConfig, Device, LauncherName
from orchestra.cli.text import figures
from orchestra.config.home import run_folder
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_STOPPED
from orchestra.optim.schedule import learning_rate
from orchestra.recovery.incidents import UNHEARD, Verdict
from orchestra.report.attempts import read_accounts, slow_ranks
from orchestra.report.run_state import FailedSaves, SweepState, failed_saves, fallback_of, name_of
from orchestra.report.spending import Spending
from orchestra.run.files import Record
from orchestra.run.paths import RunDir, SweepDir, is_sweep
from orchestra.run.record import RunPhase
from orchestra.run.run_lineage import newest_checkpoint
from orchestra.sizes.flops import num_active_parameters, num_parameters
from orchestra.sizes.pipeline_check import check
from orchestra.sizes.pipeline_schedule import pipeline_shape, schedule
from orchestra.sizes.step_shares import read_shares
from orchestra.sizes.topology import batch_ramp, batch_shape, global_batch_size, has_open_micro_batch, layout
from orchestra.sizes.units import first_few
from orchestra.submit.launch import threads_per_rank, usable_cores

if TYPE_CHECKING:
    # `status` and its like need none of these, and answer faster without.
    from conf.schema import Config, ModelConfig, TrainConfig
    from orchestra.cli.text.progress import Summary
    from orchestra.sizes.topology import Layout

_TRACEBACK_LINES = 12
_LOG_BYTES = 1 << 14
# Columns of a line's first word.
_INDENT = 8
# Keys of the cluster that a run on this machine has no use for.
_OF_JOBS = (
    *("partition", "account", "qos", "time_limit", "constraint", "exclude", "max_switches", "segment"),
    *("setup", "container", "slurm_extra", "srun_extra"),
)


def header(config: Config, run: RunDir, attempt: int = 0, from_step: int | None = None) -> list[str]:
    """Return what is about to be trained: run, model, layout, batch and device, one line each.

    An attempt after the first says from which step it is expected to go on.
    """
    mesh = layout(config.parallelism, world_size(config))
    size = global_batch_size(config.train, mesh.dp)
    model, seq_len = config.model, config.train.seq_len
    begins = "from step 1: nothing was committed" if from_step is None else f"from step {from_step}"
    return [
        f"run     {name_of(run)}",
        f"model   {_size(model)}, {config.precision.name.value}",
        f"layout  {_layout(mesh, config)}",
        *ramp_lines(config.train),
        f"batch   {size} × {seq_len} = {size * seq_len:,} tokens per step",
        f"        {_shares(mesh, config)}",
        *_pipeline(mesh, config),
        *_only_step(config),
        f"device  {_device(config)}",
        *_left_to_slurm(config.cluster),
        *([f"attempt {attempt}, {begins}"] if attempt else []),
    ]


def _left_to_slurm(cluster: ClusterConfig) -> list[str]:
    """Say which keys were given that only a job on Slurm has."""
    if cluster.launcher is not LauncherName.local:
        return []
    usual = {field.name: getattr(ClusterConfig(), field.name) for field in dataclasses.fields(cluster)}
    given = [f"cluster.{name}" for name in _OF_JOBS if getattr(cluster, name) != usual[name]]
    said = f"{', '.join(given)}: for jobs on Slurm"
    return figures.wrapped(said, "unused  ", " " * _INDENT) if given else []


def ramp_lines(train: TrainConfig) -> list[str]:
    """Say how the batch grows: a line for each of its sizes."""
    counts = batch_ramp(train).num_steps(train.steps) if train.batch_ramp else []
    return [
        f"ramp    {stage.global_batch_size:,} × {train.seq_len:,} = "
        f"{stage.global_batch_size * train.seq_len:,} tokens per step, {count:,} steps from step "
        f"{stage.first_step:,} on"
        for stage, count in counts
    ]


def _size(model: ModelConfig) -> str:
    active = f" ({num_active_parameters(model):,} active)" if model.num_experts else ""
    return f"{model.name}: {num_parameters(model):,} parameters{active}"


def _only_step(config: Config) -> list[str]:
    """Say what rate a run of one step has: that of a schedule's end."""
    if config.train.steps > 1:
        return []
    rate = learning_rate(config.optim, config.train, 1)
    if math.isclose(rate, config.optim.lr):
        return []
    return [f"rate    {rate:.3g}: a run of one step has only its schedule's end (optim.min_lr)"]


def _shares(mesh: Layout, config: Config) -> str:
    if has_open_micro_batch(config.train):
        return f"micro-batch auto: the largest that fits, found when the ranks begin; dp {mesh.dp}"
    batch = batch_shape(config.train, mesh.dp)
    return f"micro-batch {batch.micro_batch_size} × accumulation {batch.accumulation} × dp {batch.dp}"


def _pipeline(mesh: Layout, config: Config) -> list[str]:
    """Say how a pipeline's passes follow each other, how long ranks wait, and what ZeRO-3 costs there."""
    if mesh.pp == 1:
        return []
    kind, shape = config.parallelism.schedule, pipeline_shape(config.parallelism)
    words = [kind.name, *([f"{shape.num_chunks} stages on each rank"] if shape.num_chunks > 1 else [])]
    if not has_open_micro_batch(config.train):
        count = batch_shape(config.train, mesh.dp).accumulation
        bubble = check(schedule(kind, shape, count), shape, count).bubble
        words.append(f"idle for {bubble:.0%} of a step (less with more micro-batches)")
    lines = [f"stages  {', '.join(words)}"]
    if config.parallelism.zero == 3:
        lines.append("warning ZeRO-3 gathers a stage twice for each micro-batch; zero=2 does not")
    return lines


def world_size(config: Config) -> int:
    """Return the number of ranks of a resolved configuration."""
    return config.cluster.nodes * int(config.cluster.gpus_per_node)


def _layout(mesh: Layout, config: Config) -> str:
    degrees = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "ep": mesh.ep, "zero": config.parallelism.zero}
    used = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > (0 if axis == "zero" else 1)]
    if config.parallelism.sequence_parallel:
        used.insert(1, "sequence parallel")
    if config.parallelism.zero and mesh.replicate > 1:
        used[-1] += f" over {mesh.shard}"
    return f"{figures.number_of(mesh.world_size, 'rank')}: {', '.join([f'dp {mesh.dp}', *used])}"


def _device(config: Config) -> str:
    ranks = int(config.cluster.gpus_per_node)
    if config.cluster.device is not Device.cpu:
        return f"{ranks} × {config.cluster.device.value}"
    threads = threads_per_rank(config, ranks, usable_cores())
    return f"cpu, {ranks} × {figures.number_of(threads, 'thread')}"


def summary_lines(run: RunDir, summary: Summary, verdict: Verdict) -> list[str]:
    """Return how it went, in numbers, and where everything lies."""
    step = summary.step or 0
    if verdict.code in (EXIT_DONE, EXIT_STOPPED):
        # A full disk may have taken no row of the last ones.
        step = max(step, verdict.step or 0)
    lines = ["", f"{verdict.state} after {step} of {summary.steps} steps, {figures.duration(summary.wall_s)}"]
    if verdict.code == EXIT_STOPPED:
        lines.append(f"reason  {verdict.message}")
    if summary.num_skipped:
        lines.append(f"skipped {skipped_words(summary.num_skipped)}")
    if summary.first_loss is not None:
        lines.append(
            f"loss    {figures.loss(summary.first_loss)} → {figures.loss(summary.last_loss)} nats per token"
        )
        if summary.train:
            lines.append(f"train   {figures.named_losses(summary.train)}")
        if summary.eval:
            lines.append(f"eval    {figures.named_losses(summary.eval)}")
        lines.append(f"speed   {figures.quantity(summary.tokens_per_s)} tokens/s (median), {_mfu(summary)}")
    shares = read_shares(run.profile)
    if shares is not None:
        lines += ["profile " + shares.table()[0], *shares.table()[1:]]
    written = {"metrics": run.metrics, "logs": run.logs, "wandb": run.wandb}
    lines += [f"{name:<7} {shown(path)}" for name, path in written.items() if path.exists()]
    return lines


def skipped_words(num_steps: int | None) -> str:
    """Return how many steps had no update since the run began, and why; nothing for none."""
    steps = figures.number_of(num_steps or 0, "step")
    return f"{steps}, whose loss or gradient was not finite" if num_steps else ""


def checkpoint_lines(config: Config, run: RunDir, events: Iterable[Record]) -> list[str]:
    """Return what can be gone on from, and why a save failed where the newest one did."""
    events = list(events)
    step, failed = newest_checkpoint(events), failed_saves(events)
    lines = []
    if step is not None:
        place = fallback_of(events, step) or config.checkpoint.dir or shown(run.checkpoints)
        lines.append(f"saved   step {step} in {place}")
    if failed is not None:
        lines.append(f"warning {failed_saves_words(failed)}")
    return lines


def failed_saves_words(failed: FailedSaves) -> str:
    """Return in a sentence how many saves in a row failed, since when and why."""
    if failed.count == 1:
        return failed.why
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(failed.since))
    return f"{failed.count} saves in a row have failed since {since}; {failed.why}"


def resume_lines(
    run: RunDir, verdict: Verdict, events: Iterable[Record], config: Config | None = None
) -> list[str]:
    """Return what to type next: what uses a finished run's model, or goes on with another one; nothing where
    starting again would not help, or the run was removed. Without a configuration it counts as one without
    plug-ins.
    """
    events = list(events)
    if verdict.code == EXIT_DONE and newest_checkpoint(events) is not None:
        return [
            f"{'        ' if number else 'next    '}`{use}`" for number, use in enumerate(_uses(run, config))
        ]
    if verdict.code in (EXIT_DONE, EXIT_DO_NOT_RESTART) or not run.has_records():
        return []
    step = newest_checkpoint(events)
    saves = config is not None and config.checkpoint.every_steps is not None
    if step is None and saves and verdict.message == UNHEARD:
        return [f"resume  `{invocation('resume', run)}` goes on from its newest checkpoint"]
    return [resume_line(run, step)]


def _uses(run: RunDir, config: Config | None) -> list[str]:
    """Return what can be done with a model: without plug-ins also what needs its text, or Llama's layers."""
    has_text = config is None or config.data.source_identity is None
    has_form = config is None or config.model.block is None
    uses = [f"{invocation('generate', run)} TEXT"] if has_text else []
    return [*uses, f"{invocation('checkpoint export', run)} --to FOLDER"] if has_form else uses


def resume_line(run: RunDir, step: int | None) -> str:
    """Return the command that goes on with a run, and from which checkpoint (None: there is none)."""
    where = "starts again at step 1: nothing was committed" if step is None else f"goes on from step {step}"
    return f"resume  `{invocation('resume', run)}` {where}"


def invocation(verb: str, run: RunDir | SweepDir) -> str:
    """Return the command that means this run or sweep from the working directory."""
    return f"orchestra {verb} {typed_name(run)}"


def typed_name(run: RunDir | SweepDir) -> str:
    """Return what to type for a run or a sweep: its name where it lies in the usual folder, else its path."""
    named = Path.cwd() / run_folder()
    if run.path.parent == named:
        return run.name
    if run.path.parent.parent == named and is_sweep(run.path.parent):
        return f"{run.path.parent.name}/{run.name}"
    return shlex.quote(str(run.path))


def mirror_lines(events: Iterable[Record]) -> list[str]:
    """Return lines that say why Weights & Biases did not get everything and what to do; none if it did."""
    failed = [event for event in events if event["event"] == "wandb_failed"]
    if not failed:
        return []
    words = (failed[-1].get("cause", "not everything was mirrored"), failed[-1].get("advice"))
    # Paths and commands stay whole, however long they are.
    text = f"wandb   incomplete: {'; '.join(word for word in words if word)}"
    return figures.wrapped(text, indent=" " * _INDENT, keeps_words=True)


def attention_lines(events: Iterable[Record]) -> list[str]:
    """Return lines that say why the newest attempt's attention is slow and what to do; none if it is not."""
    found = [event for event in events if event["event"] == "attention"][-1:]
    words = [str(event[key]) for event in found for key in ("cause", "advice") if key in event]
    text = f"warning {'; '.join(words)}"
    return figures.wrapped(text, indent=" " * _INDENT, keeps_words=True) if words else []


def _mfu(summary: Summary) -> str:
    if summary.mfu is None and summary.mfu_convention is None:
        return "MFU n/a (the work of layers that are a plug-in is unknown)"
    if summary.mfu is None:
        return "MFU n/a (the device's peak is unknown: set cluster.peak_tflops)"
    convention = f" ({summary.mfu_convention})" if summary.mfu_convention else ""
    causal = f", {figures.percent(summary.mfu_causal)} with causal attention" if summary.mfu_causal else ""
    return f"MFU {figures.percent(summary.mfu)}{convention}{causal}"


def shown(path: Path) -> str:
    """Return a path relative to the working directory where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def failure(run: RunDir, attempt: int, verdict: Verdict) -> str:
    """Return what ended an attempt: who, where, when, why, the end of the traceback or log, and the log.

    An error that explains itself comes without its traceback: it is in the log.
    """
    who = "the run" if verdict.rank is None else f"rank {verdict.rank}"
    where = f" on {verdict.host}" if verdict.host and verdict.rank is not None else ""
    when = f" at step {verdict.step}" if verdict.step is not None else ""
    why = f"{verdict.cause}: {verdict.message}" if verdict.message else verdict.cause
    log = run.node_log(attempt, 0) if verdict.rank is None else run.rank_log(attempt, verdict.rank)
    trace = "" if verdict.explained else verdict.traceback or end_of(log)
    last_lines = last_lines_of(trace)
    place = [f"log: {shown(log)}"] if log.exists() else []
    return "\n".join([f"{who}{where} failed{when}: {why}", *last_lines, *place])


def last_lines_of(text: str) -> list[str]:
    """Return the end of a traceback or of a log, indented."""
    return [f"  {line}" for line in text.rstrip().splitlines()[-_TRACEBACK_LINES:]]


def end_of(log: Path) -> str:
    """Return the last 16 KiB of a log; nothing where it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# The words for the accounts, in the order they are shown.
_WORDS = {
    "productive_s": "productive",
    "lost_s": "lost work",
    "checkpoint_s": "saving",
    "evaluation_s": "evaluating",
    "restart_s": "starts",
    "restore_s": "restores",
    "queue_s": "queue",
    "idle_s": "idle",
}
# Slow ranks that are named.
_NAMED = 4


def spent_lines(
    run: RunDir, events: Sequence[Record], rows: Sequence[Record], state: RunPhase, now: float
) -> list[str]:
    """Return where the time of a run in `state` went and which ranks are slow, in at most 80 columns."""
    lines = []
    accounts = read_accounts(run, events, rows, state, now)
    if accounts.wall_s > 0:
        # What rounds to nothing says nothing.
        spent = {word: getattr(accounts, key) for key, word in _WORDS.items()}
        parts = ", ".join(f"{word} {_exact(seconds)}" for word, seconds in spent.items() if seconds >= 0.05)
        goodput = figures.percent(accounts.goodput)
        lines += _labelled("time", f"{_exact(accounts.wall_s)}, goodput {goodput}: {parts}")
    if slow := slow_ranks(events):
        named = [f"rank {each.rank} on {each.host}, {each.ratio:.1f} × the others" for each in slow[:_NAMED]]
        more = [f"and {len(slow) - _NAMED} more"] if len(slow) > _NAMED else []
        lines += _labelled("slow", "; ".join([*named, *more]))
    return lines


def used_lines(used: Spending) -> list[str]:
    """Return in at most 80 columns what a run used: GPU-hours, energy and cost, or why they are not known."""
    known: list[str] = []
    unknown: dict[str | None, list[str]] = {}
    if used.gpu_hours is not None:
        idle = f", {used.idle_gpu_hours:.2f} of them idle" if used.idle_gpu_hours else ""
        known.append(f"{used.gpu_hours:.2f} GPU-hours{idle}")
    else:
        unknown.setdefault(used.no_gpu_hours, []).append("GPU-hours")
    if used.cost is not None:
        known.append(" ".join(filter(None, (f"{used.cost:.2f}", used.currency))))
    else:
        unknown.setdefault(used.no_cost, []).append("cost")
    if used.joules is not None:
        each = used.joules_per_token
        known.append(f"{figures.quantity(used.joules)} J" + ("" if each is None else f", {each:.3g} a token"))
    else:
        unknown.setdefault(used.no_energy, []).append("energy")
    words = [f"{' and '.join(names)} not measured ({why})" for why, names in unknown.items()]
    return _labelled("used", "; ".join([*known, *words]))


def spent_record(
    run: RunDir, events: Sequence[Record], rows: Sequence[Record], state: RunPhase, now: float
) -> Record:
    """Return the same for `--json`: `accounts` in seconds, `goodput`, `stragglers`."""
    accounts = read_accounts(run, events, rows, state, now)
    slow = [dataclasses.asdict(each) for each in slow_ranks(events)]
    return {"goodput": accounts.goodput, "accounts": accounts.to_json(), "stragglers": slow}


def _exact(seconds: float) -> str:
    """Return a duration; below a minute with one decimal, since restarts are counted in seconds."""
    return f"{seconds:.1f}s" if seconds < 59.95 else figures.duration(seconds)


def _labelled(label: str, text: str) -> list[str]:
    return figures.wrapped(text, label.ljust(_INDENT), " " * _INDENT)


def sweep_summary(state: SweepState) -> str:
    """Return "12 members: 8 finished, 2 running, 2 queued"."""
    phases = f": {figures.counts(state.counts)}" if state.members else ""
    return f"{figures.number_of(len(state.members), 'member')}{phases}"


def unwatched_lines(sweep: SweepDir, runs: Sequence[RunDir]) -> list[str]:
    """Return a line about members that train on although the command that began them is gone."""
    if not runs:
        return []
    names = first_few([f"{sweep.name}/{run.name}" for run in runs])
    one = len(runs) == 1
    what = (
        f"{names} trains on to its end by itself" if one else f"{names} train on to their ends by themselves"
    )
    them, cancel = "it" if one else "them", invocation("cancel", runs[0] if one else sweep)
    return [f"note    {what}: the command that began {them} is gone; `{cancel}` stops {them}"]


def note_unanswered(problems: Iterable[str]) -> None:
    """Say on stderr why Slurm could not be asked, and what is printed in the place of its answer."""
    for problem in problems:
        print(f"note: {problem}; what follows are the runs' own records", file=sys.stderr)
