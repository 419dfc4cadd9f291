"""`orchestra plan --tokens N [overrides]`: how many GPUs a model needs, and how long N tokens take.

What nobody said is assumed as anybody would train it, and told: bf16, the model's own context, a usual global
batch, and of the layouts that orchestra's trainer has the fastest that fits.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conf.schema import Config, ModelConfig
from orchestra.cli.plan import Mode, layout_words, print_result, search_mode
from orchestra.cli.text import figures
from orchestra.config.machine import tokens_per_step
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.plan.frameworks import OWN
from orchestra.plan.predict import Prediction, run_seconds
from orchestra.plan.search import peak_that_fits, search
from orchestra.plan.space import space_of
from orchestra.sizes.flops import num_parameters

_EXPLAINED = """\
--tokens N says how many GPUs are the fewest that fit, and how long N tokens take on 64 (or on cluster.nodes,
where given). What is not given is assumed and told: bf16, the model's own context, a usual batch, and the
fastest layout that fits. It ends with 1 where nothing fits.
"""
# Most nodes that are tried for the fewest GPUs that fit.
_MOST_NODES = 128
_USUAL_GPUS = 64
_SIZE = ("cluster.nodes", "cluster.gpus_per_node")
# Tokens of a step below this many parameters: GPT-3's of its smallest model (arXiv:2005.14165, table 2.1);
# from there on Llama 3's first (arXiv:2407.21783, section 3.4.1), which grows later.
_LARGE_MODEL = 3_000_000_000
_SMALL_BATCH_TOKENS, _LARGE_BATCH_TOKENS = 1 << 19, 1 << 22


@dataclass(frozen=True)
class GpuPlan:
    """The fastest layout that fits on some GPUs, and the command for it."""

    prediction: Prediction
    seconds: float
    command: Sequence[str]

    @property
    def num_gpus(self) -> int:
        """Ranks of the layout."""
        return self.prediction.case.layout.world_size

    def facts(self) -> dict[str, Any]:
        """Return it for programs."""
        hours = self.seconds / 3600 * self.num_gpus
        return {"gpus": self.num_gpus, "run_s": self.seconds, "gpu_hours": hours} | layout_words.facts(
            self.prediction
        )


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--tokens", metavar="N", help="tokens to train on, such as 1e12 or 1T")


def _run(arguments: Namespace) -> int:
    """Print the fewest GPUs that fit and the time on 64, and return 0, or 1 where nothing fits."""
    assumed = _assumed(arguments.overrides, arguments.tokens)
    overrides = [*arguments.overrides, *assumed, f"train.tokens={arguments.tokens}"]
    framework = arguments.framework or OWN
    nodes_given = _given(arguments.overrides, "experiment", *_SIZE)
    request = search_mode.ask(overrides)
    config = request.config
    usual = replace(config.cluster, nodes=max(1, _USUAL_GPUS // _per_node(config)))
    whole = config if nodes_given else replace(config, cluster=usual)
    asked = _planned(overrides, whole.cluster.nodes, _per_node(config), framework)
    fewest = _fewest(request, overrides, framework)
    print_result(
        arguments,
        lambda: {
            "assumed": assumed,
            "tokens": config.train.tokens,
            "steps": config.train.steps,
            "fewest": None if fewest is None else fewest.facts(),
            "asked": None if asked is None else asked.facts(),
        },
        lambda: _lines(whole, assumed, fewest, asked),
    )
    return EXIT_DONE if (asked if nodes_given else fewest) else EXIT_FAILED


MODE = Mode("tokens", _EXPLAINED, _add_arguments, _run)


def _given(overrides: Sequence[str], *names: str) -> bool:
    """Whether one of the keys or groups is said."""
    return any(text.lstrip("+").partition("=")[0] in names for text in overrides)


def _assumed(overrides: Sequence[str], tokens: str) -> list[str]:
    """Return what anybody would add where nothing is said. Raises ConfigError for wrong overrides."""
    if _given(overrides, "train.steps", "train.tokens"):
        raise ConfigError(f"--tokens {tokens} says the same as train.steps or train.tokens; give one of them")
    config = search_mode.ask(overrides).config
    if _given(overrides, "experiment"):
        # It says them all.
        return []
    ours = [] if _given(overrides, "precision", "precision.name") else ["precision=bf16"]
    seq_len = config.train.seq_len
    if not _given(overrides, "train", "train.seq_len"):
        seq_len = _context(config.model)
        ours.append(f"train.seq_len={seq_len}")
    if not _given(
        overrides, "train", "train.global_batch_size", "train.global_batch_tokens", "train.batch_ramp"
    ):
        is_large = num_parameters(config.model) >= _LARGE_MODEL
        usual = _LARGE_BATCH_TOKENS if is_large else _SMALL_BATCH_TOKENS
        # Shared out evenly among the devices that are asked for.
        ranks = config.cluster.nodes * _per_node(config) if _given(overrides, *_SIZE) else 1
        sequences = max(1, usual // seq_len)
        if ranks <= sequences:
            sequences = -(-sequences // ranks) * ranks
        ours.append(f"train.global_batch_tokens={sequences * seq_len}")
    return ours


def _context(model: ModelConfig) -> int:
    """Return the length that a model is trained on from its start: before its positions are stretched."""
    scaling = model.rope_scaling
    return scaling.original_max_position_embeddings if scaling.enabled else model.max_position_embeddings


def _per_node(config: Config) -> int:
    ranks = config.cluster.gpus_per_node
    return ranks if isinstance(ranks, int) else 8


def _fewest(request: search_mode.SearchRequest, overrides: Sequence[str], framework: str) -> GpuPlan | None:
    """Return the fastest layout on the fewest GPUs on which any fits; None where it takes too many."""
    whole, least = _per_node(request.config), 1
    parts = [(1, ranks) for ranks in range(1, whole)]
    for nodes, ranks in [*parts, *((nodes, whole) for nodes in range(1, _MOST_NODES + 1))]:
        if nodes * ranks < least:
            continue
        cluster = replace(request.config.cluster, nodes=nodes, gpus_per_node=ranks)
        sized = replace(request.config, cluster=cluster)
        space = space_of(sized, framework, request.num_sequences, request.fixed)
        # Looked at before a search, which takes seconds.
        if peak_that_fits(replace(space, wide=True)) is None:
            continue
        if (plan := _planned(overrides, nodes, ranks, framework)) is not None:
            return plan
        # What orchestra's trainer does not run fits: it hardly will on one more.
        least = 2 * nodes * ranks
    return None


def _planned(overrides: Sequence[str], nodes: int, ranks: int, framework: str) -> GpuPlan | None:
    """Return the fastest layout that fits and that orchestra can train; None where there is none."""
    others = [text for text in overrides if not _given([text], *_SIZE)]
    sized = [*others, f"cluster.nodes={nodes}", f"cluster.gpus_per_node={ranks}"]
    try:
        request = search_mode.ask(sized)
    except ConfigError:
        # Its own layout may need more devices.
        return None
    space = space_of(request.config, framework, request.num_sequences, request.fixed)
    if peak_that_fits(replace(space, wide=True)) is None:
        return None
    found = search(space, 1, search_mode.runs_today(request.config)).chosen
    if not found:
        return None
    seconds = run_seconds(found[0], request.config.train)
    return GpuPlan(found[0], seconds, search_mode.command(request, found[0].case))


def _lines(
    config: Config, assumed: Sequence[str], fewest: GpuPlan | None, asked: GpuPlan | None
) -> Iterator[str]:
    train = config.train
    assert train.tokens is not None
    up_to = "up to " if train.batch_ramp else ""
    steps = f"{train.steps:,} steps of {up_to}{tokens_per_step(config):,}"
    whole = f"{figures.quantity(float(train.tokens))} = {steps}"
    yield from layout_words.model_lines(config.model, config.precision.name)
    yield f"tokens  {whole} in sequences of {train.seq_len:,}"
    told = [*assumed, "the fastest layout that fits (parallelism, micro-batch, recomputation)"]
    yield from figures.wrapped(f"{', '.join(told)}; nothing fails", "assumed ", " " * 8, keeps_words=True)
    yield ""
    gpus = config.cluster.nodes * _per_node(config)
    if fewest is None:
        yield f"none    does not fit on up to {_MOST_NODES * _per_node(config):,} {config.cluster.hardware}"
    else:
        yield from _of(f"fewest GPUs that fit: {fewest.num_gpus:,}", fewest)
    if asked is None:
        yield f"on {gpus:,}: does not fit, or no layout shares out the batch"
    else:
        yield from _of(f"on {gpus:,}", asked)
        yield ""
        yield from asked.command


def _of(title: str, plan: GpuPlan) -> Iterator[str]:
    days = figures.duration(plan.seconds)
    hours = plan.seconds / 3600 * plan.num_gpus
    device = plan.prediction.case.device
    mfu = figures.percent(plan.prediction.mfu)
    yield f"{title} × {device.name}, {days}, {hours:,.0f} GPU-hours, MFU {mfu}"
    peak = layout_words.of_usable(plan.prediction, device.usable_bytes)
    yield from figures.wrapped(f"{layout_words.line(plan.prediction)}; {peak}", " " * 8, " " * 8)
