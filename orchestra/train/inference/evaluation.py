"""The loss on held-out data: forward passes of the model as it stands, between two steps.

It leaves nothing behind: no gradient is made, no random number drawn, and the samples are the same ones every
time, whatever the layout. Called by the trainer, and on one rank by `orchestra eval`.

Shape letters: B sequences of one micro-batch, S sequence length, N samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config, DataConfig, EvalConfig
from orchestra.data.held_out import content_of, evaluates, held_out_data, other_separator
from orchestra.data.order import Int64
from orchestra.data.plugged_source import PluggedSamples
from orchestra.data.source import SampleSource, open_source, separator_of
from orchestra.errors import DataError
from orchestra.model.loss import IGNORED_TARGET
from orchestra.model.transformer import Transformer
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.pipeline.passes import Pipeline
from orchestra.run.events import EventWriter
from orchestra.run.metrics_file import eval_column, score_column
from orchestra.sizes.topology import BatchShape, global_batch_size

# Of the order in which a source's samples are chosen. Not the run's: runs are compared.
_SEED = 0


@dataclass(frozen=True)
class Evaluated:
    """The mean losses in nats per token by source, and the seconds that they took."""

    losses: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    # Whether it was left for a stop that was asked for meanwhile; there are no losses then.
    was_left: bool = False

    def columns(self, suffix: str = "") -> dict[str, float]:
        """Return what a row of metrics.jsonl says of it."""
        if not self.losses:
            return {}
        losses = {f"{eval_column(name)}{suffix}": loss for name, loss in self.losses.items()}
        return losses if suffix else {**losses, "eval_time_s": self.seconds}


class _LeftError(Exception):
    """All ranks leave an evaluation before the same micro-batch."""


class HeldOutLoss:
    """The mean loss over the held-out samples of each source. *Collective* over all ranks.

    Micro-batches have the training's shape, so that nothing is compiled again for other sizes; without
    gradients they need less memory than in training, and no size of their own is looked for. `forward` is
    called before each: what the layout does before a forward pass whose gradients nobody wants.
    """

    def __init__(
        self,
        sources: Mapping[str, SampleSource],
        limit: int | None,
        model: Transformer,
        batch: BatchShape,
        mesh: Mesh,
        forward: Callable[[], None] = lambda: None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """`limit` is the largest number of samples of each source; None: all of them."""
        self._sources = sources
        self._ids = {name: _chosen(source, limit) for name, source in sources.items()}
        self._model = model
        self._batch = batch
        self._mesh = mesh
        self._forward = forward
        self._pipeline = pipeline

    @property
    def num_tokens(self) -> dict[str, int]:
        """The tokens whose losses are averaged, by source."""
        return {name: len(ids) * self._batch.seq_len for name, ids in self._ids.items()}

    @torch.no_grad()
    def compute(self, beat: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Return the losses in nats per token, the same on all ranks. Waits for the device.

        `beat` is called before each micro-batch.
        """
        totals = []
        for name in self._sources:
            # Sums of fp32 numbers are exact enough in fp64 to be the same in any order.
            total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
            for tokens_BS, targets_BS in self._micro_batches(name):
                beat()
                total += self._loss(tokens_BS, targets_BS)
            totals.append(total)
        sums = torch.stack(totals)
        if self._mesh.loss_group is not None:
            dist.all_reduce(sums, group=self._mesh.loss_group)
        pairs = zip(self.num_tokens.items(), sums.tolist(), strict=True)
        return {name: total / count for (name, count), total in pairs}

    @torch.no_grad()
    def warm_up(self) -> None:
        """Take one forward pass: what is compiled for it is compiled now."""
        self._loss(*next(self._micro_batches(next(iter(self._sources)))))

    def _loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        if self._pipeline is not None:
            return self._pipeline.evaluate(tokens_BS, targets_BS)
        self._forward()
        bounds = self._model.document_bounds(tokens_BS)
        device = self._mesh.device
        loss: Tensor = self._model(tokens_BS.to(device), targets_BS.to(device), 1.0, bounds)
        return loss

    def _micro_batches(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's tokens and targets [B, S] (int64, host): equally many on every rank, the last
        ones filled up with sequences that do not count.
        """
        source, ids, batch = self._sources[name], self._ids[name], self._batch
        size, seq_len = batch.micro_batch_size, batch.seq_len
        for begin in range(0, len(ids), size * batch.dp):
            mine = ids[begin + self._mesh.coordinates.dp * size :][:size]
            samples = np.zeros((size, seq_len + 1), dtype=np.int64)
            for place, sample_id in enumerate(mine):
                source.read(int(sample_id), samples[place])
            tokens = torch.from_numpy(samples)
            targets = tokens[:, 1:].clone()
            targets[len(mine) :] = IGNORED_TARGET
            yield tokens[:, :-1], targets


def _chosen(source: SampleSource, limit: int | None) -> Int64:
    """Return the ids [N] of the samples to evaluate: all in their order, or some spread over the source."""
    if limit is None or limit >= source.num_samples:
        return np.arange(source.num_samples, dtype=np.int64)
    return source.ids_at(0, limit, _SEED)


def open_held_out(sources: Mapping[str, DataConfig], config: Config) -> dict[str, SampleSource]:
    """Open the sources of `held_out_data`. Raises DataError where the model cannot read one."""
    opened = {}
    seq_len = config.train.seq_len
    ours = separator_of(config.data, seq_len) if config.data.document_masks else None
    for name, data in sources.items():
        source = open_source(data, seq_len, held_out=True)
        if ours is not None:
            is_packed = not isinstance(source, PluggedSamples)
            theirs = (
                source.separator_id if isinstance(source, PluggedSamples) else separator_of(data, seq_len)
            )
            if theirs is not None and theirs != ours:
                # Where they can be seen there, the rules have checked this before anything started.
                raise DataError(other_separator(name, theirs, ours, is_packed=is_packed))
        if source.vocab_size > config.model.vocab_size:
            raise DataError(
                f"eval.data.{name} has {source.vocab_size} tokens in its vocabulary, the model "
                f"model.vocab_size={config.model.vocab_size}; pack it as the training's data"
            )
        opened[name] = source
    return opened


class Evaluation:
    """When a run is evaluated, and what is written of it. *Collective*, the training thread's."""

    def __init__(
        self,
        config: EvalConfig,
        last_step: int,
        loss: HeldOutLoss,
        events: EventWriter | None,
        *,
        compiles: bool,
    ) -> None:
        """`events` are rank 0's. `compiles`: the first forward pass takes as long as a compiler."""
        self._config = config
        self._last_step = last_step
        self._loss = loss
        self._events = events
        self._compiles = compiles

    def begin(
        self, step: int, beat: Callable[[], None], is_stop_due: Callable[[], bool] = lambda: False
    ) -> Evaluated:
        """Make ready, before the first step of an attempt that goes on from `step`; return what is known of
        the model that a run begins with, where that is asked for.
        """
        if step == 0 and self._config.at_start:
            return self.run(step, beat, is_stop_due)
        if self._compiles and self._config.every_steps is not None:
            # In the midst of training so long a silence would pass for a hang.
            self._loss.warm_up()
        return Evaluated()

    def is_due(self, step: int) -> bool:
        """Whether the model after `step` is evaluated."""
        every = self._config.every_steps
        return every is not None and (step % every == 0 or step == self._last_step)

    def shows_start(self, step: int) -> bool:
        """Whether the row of `step` is written for what was measured before the first one: it is there before
        anything is saved from which the run could go on without.
        """
        return step == 1 and self._config.at_start

    def run(
        self, step: int, beat: Callable[[], None], is_stop_due: Callable[[], bool] = lambda: False
    ) -> Evaluated:
        """Evaluate the model as it is after `step`, but leave it where all ranks are to stop: it may take
        longer than whoever asked waits for the save.

        `is_stop_due` is called before each micro-batch, after `beat`, and says the same on all ranks.
        """
        began = time.perf_counter()

        def go_on() -> None:
            beat()
            if is_stop_due():
                raise _LeftError

        try:
            losses = self._loss.compute(go_on)
        except _LeftError:
            return self._left(step, time.perf_counter() - began)
        found = Evaluated(losses, time.perf_counter() - began)
        if self._events is not None:
            known = {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
            # A full disk takes the record; the other ranks train on.
            with contextlib.suppress(OSError):
                self._events.write("evaluated", step=step, losses=known, seconds=found.seconds)
        return found

    def _left(self, step: int, seconds: float) -> Evaluated:
        if self._events is not None:
            cause = "a stop was asked for"
            with contextlib.suppress(OSError):
                self._events.write("evaluation_left", step=step, seconds=seconds, cause=cause)
        return Evaluated(seconds=seconds, was_left=True)


def build_evaluation(
    config: Config,
    parallel: Parallelized,
    batch: BatchShape,
    mesh: Mesh,
    events: EventWriter | None,
) -> Evaluation | None:
    """Return the evaluation of a run that trains; None where it has none. Raises DataError, ConfigError."""
    if not evaluates(config):
        return None
    sources = open_held_out(held_out_data(config), config)
    forward, pipeline = parallel.stage.begin_forward, parallel.pipeline
    limit = num_samples(config.eval, batch.global_batch_size)
    loss = HeldOutLoss(sources, limit, parallel.model, batch, mesh, forward, pipeline)
    return Evaluation(config.eval, config.train.steps, loss, events, compiles=config.train.compile is True)


def num_samples(config: EvalConfig, batch_size: int) -> int | None:
    """Return how many samples of each source are evaluated at most; `batch_size` is the global one."""
    return None if config.steps is None else config.steps * batch_size


def score_of(config: Config, dp: int) -> str:
    """Return which loss checkpoint.keep_best compares on `dp` data-parallel ranks: its column, and a digest
    of what it is measured by and on. Raises DataError, ConfigError.
    """
    column, train = score_column(config.run.metric), config.train
    measured: list[Any] = [] if train.loss is None else [train.loss, train.loss_options]
    sources = {eval_column(name): data for name, data in held_out_data(config).items()}
    if column in sources:
        limit = num_samples(config.eval, global_batch_size(train, dp))
        masks = config.data.document_masks
        measured += [content_of(sources[column]), limit, train.seq_len, masks]
    text = json.dumps(measured, sort_keys=True, default=str)
    return f"{column} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
