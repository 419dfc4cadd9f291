"""One rank of a run: joins the mesh, builds, trains, and writes its verdict to its events.

torchrun turns every exit code of a worker into 1, so what ended a rank (code, cause, step, traceback) stands
in its event file; whoever started the run ends with that code.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field

import torch

from checkpointing.errors import CheckpointError
from checkpointing.peers import Peers
from conf.schema import Config
from orchestra.data.ledger import Ledger
from orchestra.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    OrchestraError,
    StopRequested,
    UnusableCheckpointError,
)
from orchestra.events import EventWriter, rank_writer
from orchestra.flops import num_parameters
from orchestra.frozen import read_config
from orchestra.heartbeat import Heart, Phase, silent_heart
from orchestra.jsonl import JsonLinesWriter
from orchestra.metrics_file import MFU_CONVENTION
from orchestra.parallel.low_precision import refuse_missing_hardware
from orchestra.parallel.mesh import Mesh, RankEnvironment, open_mesh, rank_environment
from orchestra.parallel.peers import open_peers
from orchestra.rundir import RunDir
from orchestra.train.beginning import Setting
from orchestra.train.build import Training, build_loader, build_training, set_numerics
from orchestra.train.checkpoints import Checkpoints
from orchestra.train.faults import Faults, planned_faults
from orchestra.train.loop import Course, Progress, Recorder, train
from orchestra.train.memory_report import is_out_of_memory, out_of_memory
from orchestra.train.metrics import Meter, meter_settings, totals_of_nothing
from orchestra.train.micro_batch import with_micro_batch_size
from orchestra.train.moments import Moments
from orchestra.train.peak import device_peak_flops
from orchestra.train.position import Position
from orchestra.train.profile import StepProfiler
from orchestra.train.replay import Replay
from orchestra.train.state import TensorState
from orchestra.train.step_times import StepTimes, step_clock
from orchestra.train.stopping import RequestWatch, Stopping
from orchestra.train.wandb_mirror import WandbMirror

# How long a stopped run waits for wandb. Slurm kills 30 s after SIGTERM, the save included, and the node
# agent gives what is left 10 s more; the next attempt's mirror sends all rows that are not there.
_STOPPED_MIRROR_S = 8.0


@dataclass(frozen=True)
class Records:
    """Where one rank writes, and how far it has come."""

    run: RunDir
    attempt: int
    events: EventWriter
    progress: Progress
    # The step whose copies in memory the attempt begins with; None: the newest checkpoint.
    from_memory: int | None = None
    heart: Heart = field(default_factory=silent_heart)


def run_rank(run: RunDir, attempt: int, from_memory: int | None = None, heart: Heart | None = None) -> int:
    """Train the frozen run as this process's rank; return the exit code that the verdict carries."""
    ranks = rank_environment()
    events = EventWriter(run, rank_writer(attempt, ranks.rank), attempt, rank=ranks.rank)
    records = Records(run, attempt, events, Progress(), from_memory, heart or silent_heart())
    mirror: WandbMirror | None = None
    mirror_limit_s: float | None = None
    try:
        config = read_config(run.config)
        if ranks.rank == 0:
            mirror = WandbMirror.start(run, config, events)
        _train(config, ranks, records)
        events.write("finished", code=EXIT_DONE, step=config.train.steps)
        return EXIT_DONE
    except StopRequested as stop:
        mirror_limit_s = min(config.wandb.finish_timeout_s, _STOPPED_MIRROR_S)
        _stopped(stop, records)
        return EXIT_STOPPED
    except BaseException as error:  # noqa: BLE001  whatever ends a rank must become its verdict
        return _failed(error, records)
    finally:
        records.heart.beat(Phase.stop, records.progress.step)
        # After the verdict: waiting for wandb must not hold back the news of a failure.
        if mirror is not None:
            mirror.close(mirror_limit_s)


def _stopped(stop: StopRequested, records: Records) -> None:
    step, cause = records.progress.step, type(stop).__name__
    records.events.write("failed", code=EXIT_STOPPED, cause=cause, step=step, message=str(stop))
    sys.stderr.write(f"stopped behind step {step}: {stop}\n")


def _failed(error: BaseException, records: Records) -> int:
    code = _exit_code(error)
    records.events.write(
        "failed",
        code=code,
        cause=type(error).__name__,
        step=records.progress.step,
        message=str(error),
        # The message tells users all; the traceback is for whoever reads the code.
        explained=isinstance(error, OrchestraError | CheckpointError),
        traceback=traceback.format_exc(),
    )
    traceback.print_exc()
    return code


def _exit_code(error: BaseException) -> int:
    if isinstance(error, OrchestraError):
        return error.exit_code
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED


def _train(config: Config, ranks: RankEnvironment, records: Records) -> None:
    """Train to the end. After an exception nothing is closed here: that could wait for ranks that wait for
    this one, and the verdict comes first.
    """
    with open_mesh(config, ranks) as mesh:
        refuse_missing_hardware(config, mesh.device)
        set_numerics(config, mesh.device)
        train_on(mesh, config, ranks, records)


def train_on(mesh: Mesh, config: Config, ranks: RankEnvironment, records: Records) -> Training:
    """Build, restore and train to the end on a mesh that is open; return what was trained. *Collective*.

    Raises StopRequested, on all ranks behind the same step, where somebody asked for it before the end, and
    OutOfMemoryError on a rank whose memory does not suffice.
    """
    config = with_micro_batch_size(config, mesh, ranks, records.events)
    try:
        return _train_on(mesh, config, ranks, records)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        step, begin = records.progress.step, records.progress.begin
        raise out_of_memory(error, config, mesh.layout, mesh.device, step=step, begin=begin) from error


def _train_on(mesh: Mesh, config: Config, ranks: RankEnvironment, records: Records) -> Training:
    training = build_training(config, mesh)
    planned = planned_faults(config.recovery.inject)
    faults = Faults(planned, records.attempt, mesh.rank, records.events, mesh.device)
    moments = training.step.moments = Moments(records.heart, faults)
    moments.enter(Phase.setup)
    peers = open_peers(mesh, ranks, records.attempt, config.checkpoint.timeout_s)
    checkpoints = _checkpoints(config, ranks, mesh, training, records, faults, peers)
    training.step.before_update = checkpoints.let_change
    moments.enter(Phase.restore)
    begin = checkpoints.begin()
    _refuse_past_end(config, begin)
    if training.step.loss_scale is not None and begin.loss_scale is not None:
        training.step.loss_scale.state = begin.loss_scale
    if training.step.spikes is not None:
        training.step.spikes.recent = begin.recent_losses
    loader = build_loader(config, mesh, training.batch, begin.samples, begin.left_out)
    watch = RequestWatch(records.run, records.attempt) if mesh.rank == 0 else None
    stopping = Stopping(peers, watch)
    clock, listener = step_clock(mesh.device), records.events if mesh.rank == 0 else None
    step_times = StepTimes(config.recovery, peers, clock, listener)
    recorder = _recorder(config, mesh, training, stopping, records, begin)
    training.step.replay = replay_of(config, mesh, training, peers, listener, begin, records.attempt)
    try:
        request = train(
            config, training, Course(loader, checkpoints, stopping, moments, step_times), recorder, begin
        )
    finally:
        stopping.close()
        step_times.close()
    checkpoints.close()
    moments.enter(Phase.stop, records.progress.step)
    recorder.profiler.close()
    training.parallelized.stage.settle()
    loader.close()
    stopping.leave()
    if request is not None:
        raise StopRequested(str(request))
    return training


def replay_of(
    config: Config,
    mesh: Mesh,
    training: Training,
    peers: Peers,
    events: EventWriter | None,
    begin: Position,
    attempt: int,
) -> Replay | None:
    """Return what computes steps again; None where that is not asked for or not possible any more: a run that
    goes on with other nodes or fewer is not to end for it. *Collective*. Raises ConfigError in a first
    attempt.
    """
    if config.recovery.replay_every_steps is None:
        return None
    try:
        return Replay(config, training.parallelized, mesh, peers, events, begin.step)
    except ConfigError as error:
        if attempt == 0:
            raise
        if events is not None:
            events.write("replay_off", cause=str(error))
        return None


def _refuse_past_end(config: Config, begin: Position) -> None:
    if begin.step > config.train.steps:
        raise UnusableCheckpointError(
            f"the newest checkpoint is of step {begin.step}, and train.steps={config.train.steps} ends "
            f"before it; use more than {begin.step}, or another checkpoint.dir"
        )


def _checkpoints(
    config: Config,
    ranks: RankEnvironment,
    mesh: Mesh,
    training: Training,
    records: Records,
    faults: Faults,
    peers: Peers,
) -> Checkpoints:
    state = TensorState(training.parallelized, training.optimizer, mesh)
    attempt, from_memory = records.attempt, records.from_memory
    setting = Setting(config, records.run, attempt, ranks, mesh, peers, records.events, from_memory)
    return Checkpoints(setting, state, faults)


def _recorder(
    config: Config, mesh: Mesh, training: Training, stopping: Stopping, records: Records, begin: Position
) -> Recorder:
    run, events = records.run, records.events
    ledger = Ledger(run, mesh.rank, records.attempt) if config.data.ledger else None

    def settle() -> None:
        training.parallelized.stage.settle()
        stopping.settle()

    profiler = StepProfiler(config.train.profile, run, mesh.rank, mesh.traffic, settle)
    if mesh.rank != 0:
        return Recorder(events, records.progress, profiler, ledger, meter=None, metrics=None)
    peak = device_peak_flops(config, mesh.device)
    _announce(config, mesh, training, peak, events)
    settings = meter_settings(config, mesh.world_size, peak, mesh.device)
    meter = Meter(settings, begin.totals or totals_of_nothing(run))
    return Recorder(events, records.progress, profiler, ledger, meter, JsonLinesWriter(run.metrics))


def _announce(
    config: Config, mesh: Mesh, training: Training, peak_flops_per_s: float | None, events: EventWriter
) -> None:
    """Record what this attempt trains on, so that its numbers can be read without the machine at hand."""
    is_gpu = mesh.device.type == "cuda"
    events.write(
        "training_started",
        device=torch.cuda.get_device_name(mesh.device) if is_gpu else "cpu",
        threads=None if is_gpu else torch.get_num_threads(),
        torch=torch.__version__,
        world_size=mesh.world_size,
        accumulation=training.batch.accumulation,
        num_parameters=num_parameters(config.model),
        peak_flops_per_s=peak_flops_per_s,
        mfu_convention=MFU_CONVENTION,
    )
