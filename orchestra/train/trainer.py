"""One rank of a run: joins the mesh, builds, trains, and writes its verdict to its events.

torchrun turns every exit code of a worker into 1, so what ended a rank (code, cause, step, traceback) stands
in its event file; whoever started the run ends with that code.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import traceback
from dataclasses import dataclass, field

import torch

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.peers import Peers
from conf.schema import Config
from orchestra.data.ledger import Ledger
from orchestra.data.loader import Batch, Loader
from orchestra.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    OrchestraError,
    StopRequested,
    TrainingError,
    UnusableCheckpointError,
)
from orchestra.parallel.low_precision import refuse_missing_hardware
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh, RankEnvironment, open_mesh, open_peers, rank_environment
from orchestra.run.config_file import read_config
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.heartbeat import Heart, Phase, silent_heart
from orchestra.run.metrics_file import MFU_CONVENTION
from orchestra.run.paths import RunDir
from orchestra.run.rollback import BadSteps
from orchestra.run.stop_requests import StopRequest
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.step_shares import Part
from orchestra.train.build import Training, build_loader, build_training, set_numerics
from orchestra.train.checkpoints import Checkpoints
from orchestra.train.memory.micro_batch import with_micro_batch_size
from orchestra.train.memory.out_of_memory import is_out_of_memory, out_of_memory
from orchestra.train.metrics import Meter, device_peak_flops, meter_settings, totals_of_nothing
from orchestra.train.starting_point import Setting
from orchestra.train.state import Position, TensorState
from orchestra.train.step import StepResult, TrainingStep
from orchestra.train.stopping import RequestWatch, Stopping
from orchestra.train.watch.inject_faults import Faults, Moments, planned_faults
from orchestra.train.watch.nonfinite import NonFiniteGuard, OverflowLog
from orchestra.train.watch.profile import StepProfiler
from orchestra.train.watch.replay import Replay, ReplayError
from orchestra.train.watch.stragglers import StepTimes, step_clock
from orchestra.train.watch.wandb_mirror import WandbMirror

# The training loop: batch, step, record, save, stop. It builds nothing and knows no parallelism.


@dataclass
class Progress:
    """The step that is being trained, for whoever has to say where it ended, and the one behind which the
    attempt began; 0 before the first.
    """

    step: int = 0
    begin: int = 0


@dataclass
class Recorder:
    """Where the loop's records go. Only rank 0 has a meter and a metrics file."""

    events: EventWriter
    progress: Progress
    profiler: StepProfiler
    ledger: Ledger | None
    meter: Meter | None
    metrics: JsonLinesWriter | None


@dataclass(frozen=True)
class Course:
    """What feeds, keeps, ends and disturbs the training: data, checkpoints, stop requests, and who hears
    of its moments and times.
    """

    loader: Loader
    checkpoints: Checkpoints
    stopping: Stopping
    moments: Moments
    step_times: StepTimes


def train(
    config: Config, training: Training, course: Course, recorder: Recorder, begin: Position
) -> StopRequest | None:
    """Run the steps after `begin` up to train.steps, or until a stop is asked for. *Collective*.

    Returns the request where it ended before the last step, its state saved; all ranks then stand behind the
    same step. Raises NonFiniteError, LossSpikeError or RollBackError by the policy.
    """
    guard = _guard(config, training, recorder, begin)
    overflows = OverflowLog(training.step.loss_scale, recorder.events)
    last_step, moments = config.train.steps, course.moments
    recorder.progress.step = recorder.progress.begin = begin.step
    if begin.step < last_step and course.stopping.begin(begin.step):
        return _requested(begin.step, course, recorder)
    for step in range(begin.step + 1, last_step + 1):
        recorder.progress.step = step
        course.step_times.begin(step)
        moments.enter(Phase.step, step)
        with recorder.profiler.step(step):
            began = time.perf_counter()
            batch, result, data_time_s = _trained(step, training, course)
        course.step_times.end()
        if recorder.ledger is not None:
            recorder.ledger.write(step, batch.sample_ids)
        moments.enter(Phase.agree, step)
        is_stop = course.stopping.is_due(step) and step < last_step
        request = _requested(step, course, recorder) if is_stop else None
        moments.enter(Phase.record, step)
        is_logged = step % config.train.log_every == 0 or step == last_step or request is not None
        is_saved = course.checkpoints.is_due(step, is_last=request is not None)
        is_copied = request is None and course.checkpoints.is_copy_due(step)
        failure = guard.failure(step, result, must_read=is_logged or is_saved or is_copied)
        if recorder.meter is not None:
            is_row = is_logged or failure is not None
            # Waits for the device: before the clock is read.
            loss = float(result.loss) if is_row else math.nan
            recorder.meter.add_step(time.perf_counter() - began, data_time_s, training.batch.tokens_per_step)
            if is_row:
                _log(step, loss, result, recorder, guard.num_skipped, overflows)
        if failure is not None:
            if isinstance(failure, BadSteps):
                failure = _rolled_back(failure, step, batch, training, course)
            raise failure
        if is_saved or is_copied:
            waits = is_saved and course.checkpoints.waits_for_storage(step, is_last=request is not None)
            moments.enter(Phase.commit if waits else Phase.save, step)
            behind = _position(step, batch, result, guard, recorder, training.step)
            if is_saved:
                course.checkpoints.save(behind, is_last=request is not None)
            if is_copied:
                course.checkpoints.copy(behind)
        if request is not None:
            return request
    return None


def _trained(step: int, training: Training, course: Course) -> tuple[Batch, StepResult, float]:
    """Train a step; return its batch, its result and the seconds that the batch was waited for."""
    began = time.perf_counter()
    course.moments.enter(Phase.data, step)
    with marked(Part.data):
        batch = course.loader.next_batch()
    data_time_s = time.perf_counter() - began
    try:
        return batch, training.step.run(step, batch.tokens), data_time_s
    except ReplayError as error:
        raise _rolled_back(error.bad, step, batch, training, course) from error


def _rolled_back(bad: BadSteps, step: int, batch: Batch, training: Training, course: Course) -> TrainingError:
    """Decide where the run goes back to; return the error that ends the attempt. *Collective*."""
    # It waits for the save under way, which may take as long as the storage likes.
    course.moments.enter(Phase.commit, step)
    size = training.batch.global_batch_size
    # The data of the last bad step ends before that of the steps that were trained since.
    reached = batch.position - (step - bad.last) * size
    return course.checkpoints.roll_back(bad, reached, size)


def _requested(step: int, course: Course, recorder: Recorder) -> StopRequest:
    """Return the request that ends the training behind `step`; rank 0 records it."""
    request = course.stopping.request()
    if recorder.meter is not None:
        evidence = {"reason": request.reason, "user": request.user, "asked_on": request.host}
        since = {"asked_at": request.time, "seconds": time.time() - request.time}
        # A full disk takes the record; the other ranks go on to the save, and so must this one.
        with contextlib.suppress(OSError):
            recorder.events.write("stop_requested", step=step, **evidence, **since)
    return request


def _guard(config: Config, training: Training, recorder: Recorder, begin: Position) -> NonFiniteGuard:
    is_asynchronous = training.parallelized.trained[0].parameter.is_cuda
    return NonFiniteGuard(
        config, recorder.events, reads_every_step=not is_asynchronous, before=begin.nonfinite
    )


def _log(
    step: int,
    loss: float,
    result: StepResult,
    recorder: Recorder,
    num_skipped: int,
    overflows: OverflowLog,
) -> None:
    assert recorder.meter is not None
    assert recorder.metrics is not None
    row = recorder.meter.row(
        step, loss=loss, grad_norm=float(result.grad_norm), lr=result.lr, nonfinite_steps=num_skipped
    )
    recorder.metrics.write({**row, **overflows.columns(step)})


def _position(
    step: int,
    batch: Batch,
    result: StepResult,
    guard: NonFiniteGuard,
    recorder: Recorder,
    trained: TrainingStep,
) -> Position:
    """Return where the run stands behind `step`. The totals are rank 0's, which alone writes them down."""
    loss = float(result.loss)
    return Position(
        step=step,
        samples=batch.position,
        nonfinite=guard.counts(),
        totals=None if recorder.meter is None else recorder.meter.totals(),
        score=loss if math.isfinite(loss) else None,
        loss_scale=None if trained.loss_scale is None else trained.loss_scale.state,
        recent_losses=() if trained.spikes is None else tuple(trained.spikes.recent),
    )


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
