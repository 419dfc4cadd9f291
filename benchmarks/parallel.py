"""Measures orchestra's ways to train in parallel beside their peers on 2 ranks of gloo, interleaved.

    python benchmarks/parallel.py                      all modes
    python benchmarks/parallel.py --modes zero3 tp     some of them
    python benchmarks/parallel.py --modes cp --sequence 2048 --global-batch 1
    python benchmarks/parallel.py --repeats 15 --same-environment

Modes and peers (each of these on transformers' Llama, and on orchestra's own model where that is fair):
DistributedDataParallel beside ZeRO-0; DDP with ZeroRedundancyOptimizer beside ZeRO-1; FSDP2 that keeps
parameters gathered beside ZeRO-1 and -2, and that releases them beside ZeRO-3; DTensor's `parallelize_module`
beside tensor parallelism, with and without sequence parallelism; torch.distributed.pipelining beside two
stages, or two on each rank, of our modules and cut as ours; keys and values from a plain all-gather, with
torch's attention and DDP, beside both methods of context parallelism; ZeRO-1 beside itself with its state on
disk (`--modes disk`); accelerate in DDP and FSDP2 (a variant whose library is not there is left out, and said
so).

Every variant has processes of its own, one a rank with one thread, started as its user would start them:
orchestra's with the environment that `orchestra run` gives its workers, the peers with none of it
(`--same-environment` gives it to them too). They take one step in turn, round after round. All have the same
tokens, initial values, AdamW and clipping; their first losses must agree before anything is timed. Process
time (all threads, summed over the ranks) is the main number on a machine that others use too: time in which
a process waits for a core is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

RANKS = 2
# These steps are compared by their losses, and not timed.
CHECKED_STEPS = 3
LOSS_TOLERANCE = 2e-4
OURS = "orchestra"
MODES: dict[str, tuple[str, ...]] = {
    "zero0": (f"{OURS} zero0", "ddp ours", "ddp transformers", "accelerate ddp"),
    "zero1": (f"{OURS} zero1", "ddp+zro ours", "fsdp-keep ours", "fsdp-keep transformers"),
    "zero2": (f"{OURS} zero2", "fsdp-keep ours", "fsdp-keep transformers"),
    "zero3": (f"{OURS} zero3", "fsdp ours", "fsdp transformers", "accelerate fsdp"),
    "tp": (f"{OURS} tp", "dtensor plain", "dtensor transformers"),
    "disk": (f"{OURS} zero1", f"{OURS} zero1+disk"),
    "cp": (f"{OURS} cp", f"{OURS} cp+ulysses", "gathered-kv ours"),
    "tp+sp": (f"{OURS} tp+sp", "dtensor+sp plain", "dtensor+sp transformers"),
    "pp": (f"{OURS} pp 1f1b", "pipelining 1f1b", f"{OURS} pp zero_bubble", f"{OURS} pp zbv"),
    "pp v": (f"{OURS} pp interleaved", "pipelining interleaved"),
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--skip", nargs="*", default=[], metavar="WORD", help="variants with one of these words"
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4, help="of 8 heads")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=8, help="sequences a step over both ranks")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline's step")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder for the state of zero1+disk")
    parser.add_argument("--same-environment", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # set in the processes that this script starts
    return parser.parse_args()


@dataclass(frozen=True)
class Timed:
    """One step: seconds of the slowest rank, processor seconds of all ranks."""

    wall_s: float
    cpu_s: float


def main() -> int:
    arguments = parsed()
    if arguments.variant:
        serve(arguments)
        return 0
    load_before = os.getloadavg()[0]
    rows = [row for mode in arguments.modes for row in measured(mode, arguments)]
    header = {
        "ranks": RANKS,
        "threads": 1,
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "tokens": arguments.global_batch * arguments.sequence,
        "repeats": arguments.repeats,
        "same_environment": arguments.same_environment,
        "cores": os.cpu_count(),
        "load_before": round(load_before, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    if arguments.json:
        print(json.dumps({**header, "rows": rows}, indent=1))
    else:
        show(header, rows)
    return 0


def measured(mode: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return the rows of one mode."""
    started: list[Variant] = []
    try:
        for name in wanted(mode, arguments.skip):
            # One by one, so that what has started is closed where another one fails.
            started += [Variant(name, arguments)]
        running = [variant for variant in started if variant.is_ready()]
        check_losses(mode, running)
        times: dict[str, list[Timed]] = {variant.name: [] for variant in running}
        for _ in range(arguments.repeats):
            for variant in running:
                times[variant.name].append(variant.step()[0])
    finally:
        for variant in started:
            variant.close()
    return [row_of(mode, name, times) for name in times]


def wanted(mode: str, skipped: list[str]) -> list[str]:
    """Return the variants of a mode without those that have one of some words; orchestra's always stays."""
    return [
        name for name in MODES[mode] if name.startswith(OURS) or not any(word in name for word in skipped)
    ]


def check_losses(mode: str, variants: list[Variant]) -> None:
    """Refuse to time what does not train the same."""
    losses = {it.name: [it.step()[1] for _ in range(CHECKED_STEPS)] for it in variants}
    expected = losses[variants[0].name]
    for name, found in losses.items():
        for mine, theirs in zip(expected, found, strict=True):
            if not abs(mine - theirs) <= LOSS_TOLERANCE * abs(mine):
                sys.exit(f"{mode}: the losses of {name} are {found}, those of {variants[0].name} {expected}")
    print(f"{mode}: losses agree: {', '.join(f'{loss:.5f}' for loss in expected)}", file=sys.stderr)


class Variant:
    """The processes of one variant; they do a step when they are told to."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
        if name.startswith(OURS) or arguments.same_environment:
            environment |= worker_settings(arguments)
        environment |= {
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": str(RANKS),
        }
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the processes
        self._processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv, "--variant", name],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def is_ready(self) -> bool:
        """Wait until all ranks are built; false where the variant's library is not there."""
        answers = [json.loads(line) for line in self._lines()]
        if any("missing" in answer for answer in answers):
            print(f"left out: {self.name} ({answers[0]['missing']})", file=sys.stderr)
            return False
        return True

    def step(self) -> tuple[Timed, float]:
        """Let all ranks do one step; return its times and the mean of the ranks' losses."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write("step\n")
            process.stdin.flush()
        answers = [json.loads(line) for line in self._lines()]
        walls, cpus = [it["wall_s"] for it in answers], [it["cpu_s"] for it in answers]
        return Timed(max(walls), sum(cpus)), statistics.fmean(it["loss"] for it in answers)

    def _lines(self) -> list[str]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(lines):
            self._errors.seek(0)
            sys.exit(f"a process of {self.name} ended early:\n{self._errors.read()[-4000:]}")
        return lines

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._errors.close()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def worker_settings(arguments: argparse.Namespace) -> dict[str, str]:
    from orchestra.submit.launch import worker_environment

    return worker_environment(config_of(arguments, OURS), RANKS)


def config_of(arguments: argparse.Namespace, variant: str):
    from conf.schema import (
        ClusterConfig,
        Config,
        ContextMethod,
        Device,
        ModelConfig,
        Offload,
        OptimConfig,
        ParallelismConfig,
        PipelineSchedule,
        TrainConfig,
    )

    mode = variant.removeprefix(OURS).strip()
    tp, cp = (RANKS if mode.startswith(axis) else 1 for axis in ("tp", "cp"))
    micro_batch_size = arguments.global_batch * tp * cp // RANKS
    pipeline = {}
    if is_pipeline(variant):
        kind = mode.split(" ")[-1]
        chunks = 2 if kind == "interleaved" else 1
        pipeline = {"pp": RANKS, "schedule": PipelineSchedule[kind], "virtual_stages": chunks}
        micro_batch_size = arguments.global_batch // arguments.micro_batches
    return Config(
        model=ModelConfig(
            name="bench",
            hidden_size=arguments.hidden,
            intermediate_size=arguments.intermediate,
            num_hidden_layers=arguments.layers,
            vocab_size=arguments.vocab,
            num_key_value_heads=arguments.kv_heads,
        ),
        parallelism=ParallelismConfig(
            zero=int(mode[4]) if mode.startswith("zero") else 0,
            tp=tp,
            sequence_parallel=mode == "tp+sp",
            **pipeline,
            cp=cp,
            cp_method=ContextMethod.ulysses if mode.endswith("ulysses") else ContextMethod.all_gather,
            offload=Offload.optimizer_disk if mode.endswith("+disk") else Offload.none,
            offload_dir=arguments.disk,
        ),
        # Hardly any decay of the learning rate over the steps of a benchmark: the peers have none.
        optim=OptimConfig(lr=3e-4, min_lr=3e-4, warmup_steps=0),
        train=TrainConfig(
            steps=100_000,
            seq_len=arguments.sequence,
            micro_batch_size=micro_batch_size,
            global_batch_size=arguments.global_batch,
        ),
        cluster=ClusterConfig(device=Device.cpu),
    )


def is_pipeline(variant: str) -> bool:
    return variant.startswith((f"{OURS} pp", "pipelining"))


def serve(arguments: argparse.Namespace) -> None:
    """Be one rank of one variant: say that it is ready, then do a step for each line on standard input."""
    import torch

    from orchestra.parallel.mesh import open_mesh, rank_environment

    torch.set_num_threads(1)
    config = config_of(arguments, arguments.variant)
    with open_mesh(config, rank_environment()) as mesh:
        shape = (arguments.global_batch, arguments.sequence + 1)
        whole = torch.randint(0, arguments.vocab, shape, generator=torch.Generator().manual_seed(1))
        whole_on = ("tp", "dtensor", "cp", "gathered-kv", "pp", "pipelining")
        is_cut = any(word in arguments.variant for word in whole_on)
        tokens = (whole if is_cut else whole.chunk(RANKS)[mesh.rank]).contiguous()
        try:
            step = built(arguments.variant, config, mesh, tokens)
        except ImportError as error:
            print(json.dumps({"missing": str(error)}), flush=True)
            return
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            loss = float(step())
            timed = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            print(json.dumps({**timed, "loss": loss}), flush=True)


def built(variant: str, config, mesh, tokens) -> Callable[[], object]:
    """Build a variant on this rank and return its step."""
    if variant.startswith(OURS):
        return orchestra_step(config, mesh, tokens)
    import parallel_peers as peers

    how, kind = variant.split(" ")
    arguments = (kind, config, mesh.device, tokens)
    if how == "accelerate":
        return peers.accelerated(config, mesh.device, tokens, is_sharded=kind == "fsdp")
    if how == "pipelining":
        return peers.pipelined(config, mesh.device, tokens)
    if how == "gathered-kv":
        return peers.gathered_keys(*arguments)
    if how.startswith("ddp"):
        return peers.ddp(*arguments, is_sharded=how == "ddp+zro")
    if how.startswith("fsdp"):
        return peers.fsdp(*arguments, reshards=how == "fsdp")
    return peers.dtensor_tp(*arguments, is_sequence_parallel=how == "dtensor+sp")


def orchestra_step(config, mesh, tokens) -> Callable[[], object]:
    from orchestra.train.build import build_training

    training = build_training(config, mesh)
    count = iter(range(1, 1_000_000))
    tokens_ABS = tokens.view(training.batch.accumulation, -1, tokens.shape[1])

    def step() -> object:
        loss = training.step.run(next(count), tokens_ABS).loss
        if training.parallelized.units.state_file is not None:
            # Else the update would go on while the other variant's step is timed.
            training.parallelized.stage.settle()
        return loss

    return step


def row_of(mode: str, name: str, times: dict[str, list[Timed]]) -> dict[str, object]:
    """Return a variant's row; ratios are medians over rounds, each against orchestra's step of that round."""
    mine, ours = times[name], times[next(iter(times))]
    pairs = list(zip(mine, ours, strict=True))
    return {
        "mode": mode,
        "variant": name,
        "wall_s": statistics.median(it.wall_s for it in mine),
        "cpu_s": statistics.median(it.cpu_s for it in mine),
        "wall_ratio": statistics.median(theirs.wall_s / my.wall_s for theirs, my in pairs),
        "cpu_ratio": statistics.median(theirs.cpu_s / my.cpu_s for theirs, my in pairs),
    }


def show(header: dict[str, object], rows: list[dict[str, object]]) -> None:
    print("  ".join(f"{key}={value}" for key, value in header.items()))
    print("medians; ratios are peer / orchestra: above 1 orchestra is faster")
    print(f"{'mode':7} {'variant':26} {'wall s':>8} {'cpu s':>8} {'wall ratio':>11} {'cpu ratio':>10}")
    for row in rows:
        print(
            f"{row['mode']:7} {row['variant']:26} {row['wall_s']:8.3f} {row['cpu_s']:8.3f} "
            f"{row['wall_ratio']:10.2f}x {row['cpu_ratio']:9.2f}x"
        )


if __name__ == "__main__":
    sys.exit(main())
