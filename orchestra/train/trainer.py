"""One rank of a run: joins the mesh, builds, trains, and writes its verdict to its events.

`run_rank` is called by `python -m orchestra.train` on every rank. torchrun turns every exit code of a worker
into 1, so what ended a rank (code, cause, step, traceback) is written to its event file; the node agent ends
with that code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.peers import Peers
from conf.schema import Config, ContextMethod, TrainConfig
from orchestra.data.loader import Batch, Loader
from orchestra.data.order import Ledger
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
from orchestra.model.attention_backend import attention_backend, loaded_cudnn, slow_attention
from orchestra.parallel.blocks import refuse_missing_hardware
from orchestra.parallel.context.piece_attention import piece_backend
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh, RankEnvironment, open_mesh, open_peers, rank_environment
from orchestra.parallel.shared_devices import nccl_version
from orchestra.precision.policies import policy
from orchestra.run.config_file import read_config
from orchestra.run.control.stop_requests import StopRequest
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.files import JsonLinesWriter, to_log
from orchestra.run.heartbeat import Heart, Phase, silent_heart
from orchestra.run.metrics_file import MFU_CONVENTION, is_eval_column
from orchestra.run.paths import RunDir, offload_folder
from orchestra.run.planned_faults import planned_faults
from orchestra.run.record import fallback_place, wandb_id
from orchestra.run.rollback import BadSteps
from orchestra.run.secret import key_of_attempt
from orchestra.run.step_times import StepTimesFile
from orchestra.sizes.flops import head_dim, num_active_parameters, num_parameters
from orchestra.sizes.step_shares import Part
from orchestra.sizes.topology import batch_problems
from orchestra.train.build import (
    BuiltModel,
    build_callbacks,
    build_loader,
    build_model_and_optimizer,
    build_step,
    set_numerics,
    with_compilation,
)
from orchestra.train.checkpoints import Checkpoints, build_checkpoints
from orchestra.train.hooks import HeartbeatHook, LedgerHook, StepHooks, TrainedStep
from orchestra.train.inference.evaluation import Evaluated, Evaluation, build_evaluation, score_of
from orchestra.train.memory.micro_batch import with_micro_batch_size
from orchestra.train.memory.out_of_memory import is_out_of_memory, out_of_memory
from orchestra.train.memory_copies import build_memory_copies
from orchestra.train.metrics import Meter, MetricsLog, device_peak_flops, initial_totals, meter_settings
from orchestra.train.state import CheckpointContext, Position, TensorState, facts
from orchestra.train.step import TrainingStep
from orchestra.train.stopping import RequestWatch, SaveClock, Stopping
from orchestra.train.watch.bad_losses import NonFiniteGuard, OverflowLog
from orchestra.train.watch.energy import EnergyWatch, build_energy_watch, members_on_device
from orchestra.train.watch.epochs import Epochs, build_epochs
from orchestra.train.watch.flight_recorder import answer_for_collectives
from orchestra.train.watch.inject_faults import Faults, planned_loss_factor
from orchestra.train.watch.noise_scale import NoiseScale, build_noise_scale
from orchestra.train.watch.profile import StepProfiler
from orchestra.train.watch.replay import Replay, ReplayError
from orchestra.train.watch.source_losses import SourceLosses, build_source_losses
from orchestra.train.watch.stragglers import DeviceClock, HostClock, StepTimes
from orchestra.train.watch.tensorboard_files import TensorBoardFiles
from orchestra.train.watch.wandb_mirror import WandbMirror

# How long a stopped run waits for wandb. Slurm kills 30 s after SIGTERM, the save included, and the node
# agent gives what is left 10 s more; the next attempt's mirror sends all rows that are not there.
_STOPPED_MIRROR_S = 8.0


@dataclass
class RankAttempt:
    """One rank's part in an attempt of a run: its records, and for the verdict how far it has come."""

    run: RunDir
    attempt: int
    events: EventWriter
    # The step whose copies in memory the attempt begins with; None: the newest checkpoint.
    from_memory: int | None = None
    heart: Heart = field(default_factory=silent_heart)
    # The step that is being trained, 0 before the first, and the one after which the attempt began.
    step: int = 0
    begin: int = 0


@dataclass(frozen=True)
class Trainer:
    """One rank's training from its first step to its last. `assemble` builds it."""

    config: TrainConfig
    # recovery.stop_timeout_s
    stop_timeout_s: float
    rank: RankAttempt
    begin: Position
    built: BuiltModel
    loader: Loader
    step: TrainingStep
    hooks: StepHooks
    guard: NonFiniteGuard
    checkpoints: Checkpoints
    stopping: Stopping
    step_times: StepTimes
    profiler: StepProfiler
    # None where the data has one source alone.
    sources: SourceLosses | None
    # None where it is not measured.
    noise: NoiseScale | None
    # Rank 0's, where the run goes through its data more than once.
    epochs: Epochs | None
    # Rank 0's; None on the others.
    metrics: MetricsLog | None
    # None on a CPU.
    energy: EnergyWatch | None
    # None without held-out data.
    evaluation: Evaluation | None
    # run.metric
    metric: str

    def train(self) -> StopRequest | None:
        """Train up to train.steps, or until a stop is asked for. *Collective*.

        Returns the request where it ended before the last step, its state saved; all ranks are then after the
        same step. Raises NonFiniteError, LossSpikeError or RollBackError by the policies.
        """
        begin, last_step = self.begin.step, self.config.steps
        self.rank.step = self.rank.begin = begin
        if begin < last_step and self.stopping.begin(begin):
            return self._request(begin)
        self._trace_next(begin)
        if begin < last_step and self.evaluation is not None:
            is_stop_due = self.stopping.piece_check().is_stop_due
            at_start = self.evaluation.begin(begin, lambda: self.hooks.enter(Phase.setup), is_stop_due)
            if at_start.was_left:
                return self._request(begin)
            self._show(at_start.columns("_at_start"))
        for step in range(begin + 1, last_step + 1):
            self.rank.step = step
            with self.hooks.around_step(step):
                trained = self._train_step(step)
            self.hooks.after_step(trained)
            self.hooks.enter(Phase.agree, step)
            is_stop = self.stopping.is_due(step) and step < last_step
            self._trace_next(step)
            request = self._request(step) if is_stop else None
            self.hooks.enter(Phase.record, step)
            self.profiler.write()
            if (request := self._record_and_save(trained, request)) is not None:
                return request
        return None

    def _trace_next(self, step: int) -> None:
        """Trace the steps after `step` where all ranks have just agreed to."""
        if (order := self.stopping.trace) is not None:
            self.profiler.trace(step + 1, order.steps, order.ranks, order.token)

    def _train_step(self, step: int) -> TrainedStep:
        """Wait for the batch and train it."""
        began = time.perf_counter()
        self.hooks.enter(Phase.data, step)
        with marked(Part.data):
            batch = self.loader.next_batch()
        data_time_s = time.perf_counter() - began
        try:
            result = self.step.run(step, batch.tokens)
        except ReplayError as error:
            raise self._roll_back(error.bad, step, batch) from error
        return TrainedStep(step, batch, result, began, data_time_s)

    def _record_and_save(self, trained: TrainedStep, request: StopRequest | None) -> StopRequest | None:
        """Write the step's row and save the state, each where it is due. A `request` ends the attempt here,
        and so does one that comes during an evaluation: return it.

        Raises the error that the hooks' verdict asks for: after the row is written, before anything is saved.
        """
        step, is_last = trained.step, request is not None
        # Who was asked to stop saves first: time may be short.
        is_evaluated = not is_last and self.evaluation is not None and self.evaluation.is_due(step)
        is_logged = is_last or is_evaluated or step % self.config.log_every == 0 or step == self.config.steps
        is_logged = is_logged or (self.evaluation is not None and self.evaluation.shows_start(step))
        is_saved = self.checkpoints.is_due(step, is_last=is_last, by_clock=self.stopping.is_save_due)
        is_copied = not is_last and self.checkpoints.is_copy_due(step)
        must_read = is_logged or is_saved or is_copied
        verdict = self.hooks.verdict(step, trained.result, must_read=must_read)
        evaluated = self._evaluated(step) if is_evaluated and verdict is None else Evaluated()
        if evaluated.was_left and step < self.config.steps:
            request, is_last, is_copied = self._request(step), True, False
            is_saved = is_saved or self.checkpoints.context.saves
        is_row = is_logged or verdict is not None
        if is_row:
            self._show_beside(trained)
        if self.metrics is not None:
            failed_saves = self.checkpoints.health.failed_in_a_row
            self.metrics.add(
                trained,
                is_logged=is_row,
                num_skipped=self.guard.num_skipped,
                failed_saves=failed_saves,
                elsewhere_s=evaluated.seconds,
            )
        if verdict is not None:
            raise self._roll_back(verdict, step, trained.batch) if isinstance(verdict, BadSteps) else verdict
        if not (is_saved or is_copied):
            return request
        waits = is_saved and self.checkpoints.waits_for_storage(step, is_last=is_last)
        self.hooks.enter(Phase.commit if waits else Phase.save, step)
        position = self._position(trained, evaluated)
        if is_saved:
            self.checkpoints.save(
                position,
                is_last=is_last,
                left_s=lambda: self.stopping.seconds_left(self.stop_timeout_s),
                goes_on=lambda: self.hooks.enter(Phase.commit, step),
            )
        if is_copied:
            self.checkpoints.copy(position)
        return request

    def _show_beside(self, trained: TrainedStep) -> None:
        """Give a step's row what sources, the noise, epochs and the experts' balance add. *Collective*."""
        if self.sources is not None:
            self._show(self.sources.columns(trained))
        if self.noise is not None and self.metrics is not None:
            self._show(self.noise.columns())
        if self.epochs is not None:
            self._show(self.epochs.columns(trained.batch.position))
        balance = self.built.parallelized.expert_balance
        if balance is not None and self.metrics is not None:
            self._show(balance.columns())

    def _evaluated(self, step: int) -> Evaluated:
        """Evaluate the model after a step whose result has been read; leave it for a stop. *Collective*."""
        assert self.evaluation is not None
        # Each micro-batch beats: however long the whole takes, it is no hang. Its limit is that of a record,
        # which the storage may hold up too.
        is_stop_due = self.stopping.piece_check().is_stop_due
        found = self.evaluation.run(step, lambda: self.hooks.enter(Phase.record, step), is_stop_due)
        self._show(found.columns())
        return found

    def _show(self, columns: Mapping[str, float | list[int]]) -> None:
        """Give the next row of metrics some more columns."""
        if self.metrics is not None:
            self.metrics.beside.update(columns)

    def _roll_back(self, bad: BadSteps, step: int, batch: Batch) -> TrainingError:
        """Decide where the run goes back to; return the error that ends the attempt. *Collective*."""
        # It waits for the save under way, which takes as long as the storage needs.
        self.hooks.enter(Phase.commit, step)
        ramp = self.built.batches.ramp
        # The data of the last bad step ends before that of the steps that were trained since.
        reached = batch.position - (ramp.sequences_through(step) - ramp.sequences_through(bad.last))
        return self.checkpoints.roll_back(bad, reached, ramp)

    def _request(self, step: int) -> StopRequest:
        """Return the request that ends the training after `step`; rank 0 records it. *Collective*."""
        request = self.stopping.request()
        if self.metrics is not None:
            evidence = {"reason": request.reason, "user": request.user, "asked_on": request.host}
            since = {"asked_at": request.time, "seconds": time.time() - request.time}
            # A full disk takes the record; the other ranks go on to the save, and so must this one.
            with contextlib.suppress(OSError):
                self.rank.events.write("stop_requested", step=step, **evidence, **since)
        return request

    def _position(self, trained: TrainedStep, evaluated: Evaluated) -> Position:
        """Return where the run stands after a step. The totals are rank 0's, which alone writes them down."""
        loss = float(trained.result.loss)
        if is_eval_column(self.metric):
            loss = evaluated.columns().get(self.metric, math.nan)
        loss_scale, spikes, history = self.step.loss_scale, self.step.spikes, self.step.scale_history
        return Position(
            step=trained.step,
            samples=trained.batch.position,
            nonfinite=self.guard.counts(),
            totals=None if self.metrics is None else self.metrics.totals(),
            score=loss if math.isfinite(loss) else None,
            loss_scale=None if loss_scale is None else loss_scale.state,
            recent_losses=() if spikes is None else tuple(spikes.recent),
            fp8_sizes={} if history is None else history.state,
            callbacks={} if self.metrics is None else self.metrics.callbacks.states(),
            noise=() if self.noise is None or self.metrics is None else self.noise.measured,
        )

    def stop_threads(self) -> None:
        """End the threads that watch the training, after a failure too. Waits for no rank and no device."""
        self.stopping.close()
        self.step_times.close()
        if self.energy is not None:
            self.energy.close()
        if self.metrics is not None:
            self.metrics.close()

    def close(self) -> None:
        """Wait for what is under way and release what is held, after a good end. *Collective*."""
        self.checkpoints.close()
        self.hooks.enter(Phase.stop, self.rank.step)
        self.profiler.close()
        self.built.parallelized.stage.settle()
        if self.built.parallelized.pipeline is not None:
            self.built.parallelized.pipeline.close()
        self.loader.close()
        self.stopping.leave()


def assemble(config: Config, mesh: Mesh, ranks: RankEnvironment, rank: RankAttempt) -> Trainer:
    """Build one rank's trainer, its state restored. *Collective*.

    The hooks' order is the order in which they act: a planned fault is recorded by the heartbeat before it
    strikes, is part of the step's time, and comes before a replay sees what it did.
    """
    built = build_model_and_optimizer(config, mesh)
    faults = _faults(config, mesh, built, rank)
    heartbeat = HeartbeatHook(rank.heart)
    before_steps = StepHooks((heartbeat, faults))
    before_steps.enter(Phase.setup)
    timeout_s = config.checkpoint.timeout_s
    peers = open_peers(mesh, ranks, rank.attempt, timeout_s, key_of_attempt(rank.attempt))
    context = checkpoint_context(config, mesh, ranks, peers, rank)
    state = TensorState(built.parallelized, built.optimizer, mesh)
    copies = build_memory_copies(config.recovery.memory_copy_every_steps, context, state)
    checkpoints = build_checkpoints(config, context, state, copies, faults.strike)
    before_steps.enter(Phase.restore)
    begin = checkpoints.begin(lambda: before_steps.enter(Phase.restore))
    _refuse_begin(config.train, mesh.layout.dp, begin)
    loader = build_loader(config, mesh, built.batches, begin.step, begin.samples, begin.left_out)
    stopping = _stopping(config, mesh, peers, rank)
    events_of_rank_0 = rank.events if mesh.rank == 0 else None
    step_times = _step_times(config, mesh, peers, rank)
    ledger = _ledger(config, mesh, rank)
    profiler = _profiler(config, mesh, built, stopping, rank)
    peak_flops = _announced_peak_flops(config, mesh, built, rank.events) if mesh.rank == 0 else None
    replay = build_replay(config, mesh, built, peers, events_of_rank_0, begin, rank.attempt)
    guard = _nonfinite_guard(config, built, rank.events, begin)
    sources = build_source_losses(loader.source, built.parallelized.model, mesh)
    noise = build_noise_scale(config.train, built.parallelized, built.batches, mesh, begin.noise)
    # The first trace imports torch's compiler, for seconds: before a step begins whose time has a limit.
    used = (profiler, step_times, heartbeat, faults, replay, sources, noise, copies, ledger, guard)
    hooks = StepHooks(used)
    step = build_step(config, mesh, built, hooks, begin.loss_scale, begin.recent_losses, begin.fp8_sizes)
    energy = build_energy_watch(mesh, ranks, peers, events_of_rank_0)
    metrics = _metrics(config, mesh, built, step, peak_flops, begin, rank, energy) if mesh.rank == 0 else None
    evaluation = build_evaluation(config, built.parallelized, built.batch, mesh, events_of_rank_0)
    return Trainer(
        config=config.train,
        stop_timeout_s=config.recovery.stop_timeout_s,
        rank=rank,
        begin=begin,
        built=built,
        loader=loader,
        step=step,
        hooks=hooks,
        guard=guard,
        checkpoints=checkpoints,
        stopping=stopping,
        step_times=step_times,
        profiler=profiler,
        sources=sources,
        noise=noise,
        epochs=build_epochs(loader.source, built.batches, config.train.steps, events_of_rank_0, begin),
        metrics=metrics,
        energy=energy,
        evaluation=evaluation,
        metric=config.run.metric,
    )


def _step_times(config: Config, mesh: Mesh, peers: Peers, rank: RankAttempt) -> StepTimes:
    clock = DeviceClock() if mesh.device.type == "cuda" else HostClock()
    events = rank.events if mesh.rank == 0 else None
    own_times = StepTimesFile(rank.run, rank.attempt, mesh.rank)
    return StepTimes(config.recovery, peers, clock, events, mesh.layout.pp, own_times)


def _ledger(config: Config, mesh: Mesh, rank: RankAttempt) -> LedgerHook | None:
    place = mesh.coordinates
    # One of the ranks that share samples writes them down.
    has_ledger = config.data.ledger and place.tp == place.cp == place.pp == 0
    return LedgerHook(Ledger(rank.run, mesh.rank, rank.attempt)) if has_ledger else None


def _faults(config: Config, mesh: Mesh, built: BuiltModel, rank: RankAttempt) -> Faults:
    planned = planned_faults(config.recovery.inject)
    # One whose gradient comes from autograd, where it can be changed on its way.
    vectors = [item for item in built.parallelized.trained if item.parameter.dim() == 1]
    flipped = (vectors or built.parallelized.trained)[-1].parameter
    return Faults(planned, rank.attempt, mesh.rank, rank.events, mesh.device, flipped)


def checkpoint_context(
    config: Config, mesh: Mesh, ranks: RankEnvironment, peers: Peers, rank: RankAttempt
) -> CheckpointContext:
    """Return whose state is saved and restored."""
    return CheckpointContext(
        settings=config.checkpoint,
        facts=facts(config),
        score_of=score_of(config, mesh.layout.dp),
        last_step=config.train.steps,
        run=rank.run,
        wandb_id=wandb_id(rank.run),
        attempt=rank.attempt,
        events=rank.events,
        mesh=mesh,
        peers=peers,
        local_world_size=ranks.local_world_size,
        from_memory=rank.from_memory,
        # What keeps state out of memory keeps its image out of it too.
        staging_dir=offload_folder(config.parallelism),
        fallback=fallback_place(rank.run, config.checkpoint.fallback_dir),
    )


def _stopping(config: Config, mesh: Mesh, peers: Peers, rank: RankAttempt) -> Stopping:
    if mesh.rank != 0:
        return Stopping(peers, None)
    every_s = config.checkpoint.every_s
    clock = None if every_s is None else SaveClock(every_s)
    return Stopping(peers, RequestWatch(rank.run, rank.attempt), clock)


def _refuse_begin(train: TrainConfig, dp: int, begin: Position) -> None:
    if begin.step > train.steps:
        raise UnusableCheckpointError(
            f"the newest checkpoint is of step {begin.step}, and train.steps={train.steps} ends before it; "
            f"use more than {begin.step}, or another checkpoint.dir"
        )
    # It may go back further than its records said, into a batch of a ramp that was over. They say it now: the
    # agents choose other nodes, or end the run where it has none that would do.
    if problems := list(batch_problems(train, dp, begin.step)):
        raise TrainingError("\n".join(problems))


def _profiler(
    config: Config, mesh: Mesh, built: BuiltModel, stopping: Stopping, rank: RankAttempt
) -> StepProfiler:
    def settle() -> None:
        built.parallelized.stage.settle()
        stopping.settle()

    def written(first: int, last: int, token: str | None, problem: str | None) -> None:
        # A full disk takes the record.
        with contextlib.suppress(OSError):
            evidence = {"token": token, "problem": problem}
            given = {key: value for key, value in evidence.items() if value is not None}
            rank.events.write("profiled", step=last, first_step=first, **given)

    return StepProfiler(config.train.profile, rank.run, mesh.rank, mesh.traffic, settle, written)


def build_replay(
    config: Config,
    mesh: Mesh,
    built: BuiltModel,
    peers: Peers,
    events: EventWriter | None,
    begin: Position,
    attempt: int,
) -> Replay | None:
    """Return the hook that computes steps again; None where that is not asked for, or not possible any more:
    a run that goes on with other nodes or fewer must not end for it. *Collective*. Raises ConfigError in a
    first attempt.
    """
    if config.recovery.replay_every_steps is None:
        return None
    try:
        is_deterministic = config.train.deterministic
        factor_of = partial(planned_loss_factor, planned_faults(config.recovery.inject), attempt)
        return Replay(
            config.recovery, is_deterministic, built.parallelized, mesh, peers, events, begin.step, factor_of
        )
    except ConfigError as error:
        if attempt == 0:
            raise
        if events is not None:
            events.write("replay_off", cause=str(error))
        return None


def _nonfinite_guard(
    config: Config, built: BuiltModel, events: EventWriter, begin: Position
) -> NonFiniteGuard:
    is_asynchronous = built.parallelized.trained[0].parameter.is_cuda
    action = config.recovery.loss_spike.action
    return NonFiniteGuard(config.train, action, events, not is_asynchronous, begin.nonfinite)


def _announced_peak_flops(config: Config, mesh: Mesh, built: BuiltModel, events: EventWriter) -> float | None:
    """Return the device's peak in FLOP/s, after it is recorded with what else this attempt trains on, so that
    its numbers can be read without the machine. *Rank 0 only*.
    """
    peak_flops_per_s = device_peak_flops(config, mesh.device)
    is_gpu = mesh.device.type == "cuda"
    events.write(
        "training_started",
        device=torch.cuda.get_device_name(mesh.device) if is_gpu else "cpu",
        threads=None if is_gpu else torch.get_num_threads(),
        torch=torch.__version__,
        compiled=config.train.compile,
        world_size=mesh.world_size,
        accumulation=built.batch.accumulation,
        num_parameters=num_parameters(config.model),
        num_active_parameters=num_active_parameters(config.model),
        peak_flops_per_s=peak_flops_per_s,
        mfu_convention=MFU_CONVENTION,
        members_on_device=members_on_device() if is_gpu else None,
    )
    if is_gpu:
        announce_attention(config, mesh.device, events)
    return peak_flops_per_s


def announce_attention(config: Config, device: torch.device, events: EventWriter) -> None:
    """Record and print which kernel computes attention on a GPU, and what makes it slow. *Rank 0 only*."""
    cudnn = loaded_cudnn()
    dtype, with_documents = policy(config.precision).parameter, config.data.document_masks
    if config.parallelism.cp > 1 and config.parallelism.cp_method is ContextMethod.all_gather:
        backend = piece_backend(device, dtype, head_dim(config.model), with_documents=with_documents)
    else:
        backend = attention_backend(
            config.model, config.train.seq_len, dtype, device, with_documents=with_documents
        )
    capability = torch.cuda.get_device_capability(device)
    slow = slow_attention(cudnn, capability, os.environ.get("LD_LIBRARY_PATH"))
    evidence = {} if slow is None else dataclasses.asdict(slow)
    events.write("attention", backend=backend, cudnn=cudnn.version, library=cudnn.library, **evidence)
    to_log(f"attention: {backend}, cuDNN {cudnn.words if cudnn.version else 'none'}\n")
    if slow is not None:
        to_log(f"warning: {slow.cause}; {slow.advice}\n")


def _announce_shared_devices(mesh: Mesh, events: EventWriter) -> None:
    """Record that ranks share a GPU, and what carries their collectives. *Rank 0 only*."""
    nccl = nccl_version()
    version = None if nccl is None else ".".join(map(str, nccl))
    events.write("devices_shared", ranks=mesh.ranks_on_device, backend=mesh.backend, nccl=version)


def _metrics(
    config: Config,
    mesh: Mesh,
    built: BuiltModel,
    step: TrainingStep,
    peak_flops: float | None,
    begin: Position,
    rank: RankAttempt,
    energy: EnergyWatch | None,
) -> MetricsLog:
    settings = meter_settings(config, mesh.world_size, peak_flops, mesh.device, rank.attempt)
    meter = Meter(settings, begin.totals or initial_totals(rank.run))
    overflows = OverflowLog(step.loss_scale, rank.events)
    callbacks = build_callbacks(config, begin.callbacks)
    file = JsonLinesWriter(rank.run.metrics)
    board = TensorBoardFiles(rank.run, rank.attempt, begin.step) if config.train.tensorboard else None
    return MetricsLog(meter, file, overflows, built.batches, callbacks, energy, board)


def run_rank(run: RunDir, attempt: int, from_memory: int | None = None, heart: Heart | None = None) -> int:
    """Train the frozen run as this process's rank; return the exit code that the verdict carries."""
    ranks = rank_environment()
    events = EventWriter(run, rank_writer(attempt, ranks.rank), attempt, rank=ranks.rank)
    rank = RankAttempt(run, attempt, events, from_memory, heart or silent_heart())
    mirror: WandbMirror | None = None
    mirror_limit_s: float | None = None
    try:
        config = read_config(run.config)
        if ranks.rank == 0:
            mirror = WandbMirror.start(run, config, events, attempt)
        # After an exception nothing is closed: that could wait for ranks that wait for this one.
        with open_mesh(config, ranks) as mesh:
            if mesh.rank == 0 and mesh.ranks_on_device > 1:
                _announce_shared_devices(mesh, events)
            answer_for_collectives(mesh, rank.heart.collectives)
            refuse_missing_hardware(config, mesh.device)
            set_numerics(config, mesh.device)
            train_on(mesh, config, ranks, rank)
        # A full disk takes no verdict. The agent has the exit code, and the last beat.
        with contextlib.suppress(OSError):
            events.write_surely("finished", code=EXIT_DONE, step=config.train.steps)
        return EXIT_DONE
    except StopRequested as stop:
        mirror_limit_s = min(config.wandb.finish_timeout_s, _STOPPED_MIRROR_S)
        step, cause = rank.step, type(stop).__name__
        with contextlib.suppress(OSError):
            events.write_surely("failed", code=EXIT_STOPPED, cause=cause, step=step, message=str(stop))
        to_log(f"stopped after step {step}: {stop}\n")
        return EXIT_STOPPED
    except BaseException as error:  # noqa: BLE001  whatever ends a rank must become its verdict
        return _record_failure(error, rank)
    finally:
        rank.heart.beat(Phase.stop, rank.step)
        # After the verdict: waiting for wandb must not hold back the news of a failure.
        if mirror is not None:
            mirror.close(mirror_limit_s)


def _record_failure(error: BaseException, rank: RankAttempt) -> int:
    """Write the verdict of a rank that failed; return its exit code."""
    code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
    if isinstance(error, OrchestraError):
        code = error.exit_code
    with contextlib.suppress(OSError):
        rank.events.write_surely(
            "failed",
            code=code,
            cause=type(error).__name__,
            step=rank.step,
            message=str(error),
            # The message says all that a user needs; the traceback is for developers.
            explained=isinstance(error, OrchestraError | CheckpointError),
            traceback=traceback.format_exc(),
        )
    to_log(traceback.format_exc())
    return code


def train_on(mesh: Mesh, config: Config, ranks: RankEnvironment, rank: RankAttempt) -> BuiltModel:
    """Build, restore and train to the end on a mesh that is open; return what was trained. *Collective*.

    Raises StopRequested, on all ranks after the same step, where a stop was asked for before the end, and
    OutOfMemoryError on a rank whose memory does not suffice.
    """
    config = with_compilation(config, mesh, rank.events)
    config = with_micro_batch_size(config, mesh, ranks, rank.events)
    try:
        trainer = assemble(config, mesh, ranks, rank)
        try:
            request = trainer.train()
        finally:
            trainer.stop_threads()
        trainer.close()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        step, begin = rank.step, rank.begin
        raise out_of_memory(error, config, mesh.layout, mesh.device, step=step, begin=begin) from error
    if request is not None:
        raise StopRequested(str(request))
    return trainer.built
