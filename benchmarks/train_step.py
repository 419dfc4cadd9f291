"""Measures orchestra's training step beside its peers, interleaved, and prints medians and ratios.

    python benchmarks/train_step.py                 one rank, two threads
    python benchmarks/train_step.py --compile       the same with torch.compile on every model
    python benchmarks/train_step.py --ranks 2       two ranks with gloo, one thread each, beside torch's DDP
    python benchmarks/train_step.py --device cuda --precision bf16 --model llama_1b

Every variant has processes of its own (one per rank), started as its user would start them: orchestra's with
the environment that `orchestra run` gives its workers, the peers with none of it (`--same-environment` gives
it to them too). They take one step in turn, round after round, so that all meet the same machine. All train
on the same tokens with the same shape of model; the peers keep their own initial values.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

OURS = "orchestra"
LIMIT = "matrix products alone"
VARIANTS = (
    OURS,
    "bare loop, orchestra's model",
    "bare loop, plain model",
    "bare loop, transformers",
    LIMIT,
)
WARMUP_ROUNDS = 2


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a preset of conf/model; default: the sizes below")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "bf16_fp32_grad"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--same-environment", action="store_true")
    parser.add_argument("--skip", nargs="*", default=[], choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # set in the processes that this script starts
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    if arguments.variant:
        serve(arguments)
        return 0
    names = [name for name in VARIANTS if name not in arguments.skip]
    started = {name: Variant(name, arguments) for name in names}
    try:
        times: dict[str, list[float]] = {name: [] for name in names}
        for round_number in range(arguments.repeats + WARMUP_ROUNDS):
            for name, variant in started.items():
                seconds = variant.step()
                if round_number >= WARMUP_ROUNDS:  # allocations, optimizer state, compilation
                    times[name].append(seconds)
        report(arguments, started[names[0]].facts, times)
    finally:
        for variant in started.values():
            variant.close()
    return 0


class Variant:
    """The processes of one variant; they do a step when they are told to."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        environment = clean_environment(arguments)
        if name == OURS or arguments.same_environment:
            environment |= worker_settings(arguments)
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": str(arguments.ranks),
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv, "--variant", name],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(arguments.ranks)
        ]
        self.facts = json.loads(self._lines()[0])

    def step(self) -> float:
        """Let all ranks do one step; return the slowest rank's seconds."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write("step\n")
            process.stdin.flush()
        return max(float(line) for line in self._lines())

    def _lines(self) -> list[str]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(lines):
            sys.exit("a process of the benchmark ended early; its error stands above")
        return lines

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def clean_environment(arguments: argparse.Namespace) -> dict[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // arguments.ranks))
    kept = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    return {**kept, "OMP_NUM_THREADS": threads}


def worker_settings(arguments: argparse.Namespace) -> dict[str, str]:
    from orchestra.submit.launch import worker_environment

    return worker_environment(config_of(arguments), arguments.ranks)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def serve(arguments: argparse.Namespace) -> None:
    """Be one rank of one variant: print the facts, then time one step for each line on standard input."""
    import torch

    from orchestra.parallel.mesh import open_mesh, rank_environment
    from orchestra.sizes.flops import num_parameters

    config = config_of(arguments)
    with open_mesh(config, rank_environment()) as mesh:
        step = build_variant(arguments, config, mesh)
        is_gpu = mesh.device.type == "cuda"
        facts = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if is_gpu else "cpu",
            "threads": torch.get_num_threads(),
            "parameters": num_parameters(config.model),
        }
        print(json.dumps(facts), flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            step()
            if is_gpu:
                torch.cuda.synchronize()
            print(time.perf_counter() - began, flush=True)


def config_of(arguments: argparse.Namespace):
    from conf.schema import (
        ClusterConfig,
        Config,
        Device,
        ModelConfig,
        PrecisionConfig,
        PrecisionName,
        TrainConfig,
    )

    if arguments.model:
        from orchestra.config.compose import compose

        model = compose([f"model={arguments.model}"]).config.model
    else:
        model = ModelConfig(
            name="bench",
            hidden_size=arguments.hidden,
            intermediate_size=arguments.intermediate,
            num_hidden_layers=arguments.layers,
            vocab_size=arguments.vocab,
        )
    return Config(
        model=model,
        precision=PrecisionConfig(name=PrecisionName(arguments.precision)),
        train=replace(
            TrainConfig(),
            steps=1000,
            seq_len=arguments.sequence,
            micro_batch_size=arguments.micro_batch,
            global_batch_size=arguments.micro_batch * arguments.ranks,
            compile=arguments.compile,
        ),
        cluster=ClusterConfig(device=Device(arguments.device)),
    )


def build_variant(arguments: argparse.Namespace, config, mesh) -> Callable[[], object]:
    import torch
    from peers import MeanLoss, PlainLlama, TransformersLoss, bare_step, matrix_products, transformers_llama
    from torch.nn.parallel import DistributedDataParallel

    generator = torch.Generator().manual_seed(mesh.rank)
    shape = (arguments.micro_batch, arguments.sequence + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator).to(mesh.device)
    dtype = torch.float32 if arguments.precision == "fp32" else torch.bfloat16
    if arguments.variant == OURS:
        return orchestra_step(config, mesh, tokens)
    if arguments.variant == LIMIT:
        return matrix_products(config.model, tokens[:, 1:].numel(), mesh.device, dtype)
    makers = {
        "bare loop, orchestra's model": lambda: MeanLoss(config.model),
        "bare loop, plain model": lambda: PlainLlama(config.model),
        "bare loop, transformers": lambda: TransformersLoss(transformers_llama(config.model)),
    }
    module: torch.nn.Module = makers[arguments.variant]().to(mesh.device, dtype)
    if arguments.compile:
        module.compile()
    if mesh.world_size > 1:
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return bare_step(module, tokens)


def orchestra_step(config, mesh, tokens) -> Callable[[], object]:
    """Return orchestra's own step, the loss read as the loop reads it when it logs every step."""
    from orchestra.train.build import build_training

    step = build_training(config, mesh).step
    count = iter(range(1, 1_000_000))
    return lambda: float(step.run(next(count), tokens.unsqueeze(0)).loss)


def report(arguments: argparse.Namespace, facts: dict[str, object], times: dict[str, list[float]]) -> None:
    tokens = arguments.micro_batch * arguments.sequence * arguments.ranks
    rows = [row_of(name, times, tokens) for name in times]
    settings = {"ranks": arguments.ranks, "precision": arguments.precision, "compile": arguments.compile}
    header = {
        **facts,
        **settings,
        "same_environment": arguments.same_environment,
        "repeats": arguments.repeats,
    }
    if arguments.json:
        print(json.dumps({**header, "rows": rows}, indent=1))
        return
    print("  ".join(f"{key}={value}" for key, value in header.items()))
    print(
        f"{'variant':30} {'median s':>9} {'min':>7} {'max':>7} {'tokens/s':>9} {'of limit':>9} {'ours is':>8}"
    )
    for row in rows:
        share = "" if row["share_of_limit"] is None else f"{row['share_of_limit']:.1%}"
        faster = "" if row["orchestra_is_faster_by"] is None else f"{row['orchestra_is_faster_by']:.2f}x"
        print(
            f"{row['variant']:30} {row['median_s']:9.3f} {row['min_s']:7.3f} {row['max_s']:7.3f} "
            f"{row['tokens_per_s']:9.0f} {share:>9} {faster:>8}"
        )


def row_of(name: str, times: dict[str, list[float]], tokens: int) -> dict[str, object]:
    """Return a variant's row; ratios are medians over rounds, each against the same round of the other."""
    values = times[name]

    def ratio(other: str) -> float | None:
        if other not in times:
            return None
        return statistics.median(mine / theirs for mine, theirs in zip(values, times[other], strict=True))

    limit_ratio = ratio(LIMIT)
    return {
        "variant": name,
        "median_s": statistics.median(values),
        "min_s": min(values),
        "max_s": max(values),
        "tokens_per_s": tokens / statistics.median(values),
        "share_of_limit": None if limit_ratio is None else 1 / limit_ratio,
        "orchestra_is_faster_by": ratio(OURS),
    }


if __name__ == "__main__":
    sys.exit(main())
