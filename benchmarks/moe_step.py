"""Measures a mixture of experts beside transformers' with the same weights, and beside as many FLOPs dense.

    python benchmarks/moe_step.py                      one layer, forward and backward
    python benchmarks/moe_step.py --layers 4           a whole step of a model with so many layers
    python benchmarks/moe_step.py --precision bf16

Every contestant has a process of its own, ours with the environment that `orchestra run` gives its workers.
They take one step in turn, round after round; ratios are medians over rounds, each against the same round of
ours, of wall time and of processor time, which other work on the machine disturbs less. Transformers' are
MixtralSparseMoeBlock and MixtralForCausalLM with each implementation of experts that a CPU has room for, in a
bare loop with torch's fused AdamW where there are layers. With bf16 they have parameters of 16 bits alone,
and under autocast, as ours, parameters in fp32, which the products round. Whole models are compiled as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

OURS, DENSE, COMPILED = "orchestra", "orchestra, dense of the same FLOPs", "orchestra, compiled"
THEIRS = {"transformers, grouped_mm": "grouped_mm", "transformers, eager": "eager"}
# Compiled, and with parameters in fp32.
THEIRS_COMPILED, THEIRS_AUTOCAST = "transformers, grouped_mm, compiled", "transformers, grouped_mm, autocast"
# The first steps of a compiled model compile.
WARMUP_ROUNDS = 3


def main() -> int:
    """Measure and print; return 0."""
    arguments = parsed()
    if arguments.serve:
        serve(arguments)
        return 0
    names = contestants(arguments)
    started = {name: Contestant(name, arguments.threads) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    try:
        for number in range(arguments.repeats + WARMUP_ROUNDS):
            for name, contestant in started.items():
                taken = contestant.step()
                if number >= WARMUP_ROUNDS:
                    times[name].append(taken)
    finally:
        for contestant in started.values():
            contestant.close()
    report(arguments, started[OURS].facts, times)
    return 0


def contestants(arguments: argparse.Namespace) -> list[str]:
    """Return their names, ours first."""
    compiled = [COMPILED, THEIRS_COMPILED] if arguments.layers else []
    autocast = [THEIRS_AUTOCAST] if arguments.layers and arguments.precision == "bf16" else []
    return [OURS, DENSE, *THEIRS, *compiled, *autocast]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=0, help="0: one feed-forward layer alone")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=1408, help="of one expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--chosen", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # in the processes that this script starts
    return parser.parse_args()


class Contestant:
    """A process that does a step when it is told to."""

    def __init__(self, name: str, threads: int) -> None:
        from conf.schema import Config
        from orchestra.submit.launch import worker_environment

        environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
        if is_ours(name):
            environment |= worker_environment(Config(), 1)
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, *sys.argv, "--serve", name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = json.loads(self._line())

    def step(self) -> tuple[float, float]:
        """Let it do one step; return its seconds, by the clock and of the processor."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        wall_s, processor_s = map(float, self._line().split())
        return wall_s, processor_s

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a process of the benchmark ended early; its error stands above")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def is_ours(name: str) -> bool:
    return name in (OURS, DENSE, COMPILED)


def serve(arguments: argparse.Namespace) -> None:
    """Be one contestant: print the facts, then time one step for each line on standard input."""
    import torch
    import transformers

    step = (model_step if arguments.layers else layer_step)(arguments)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**facts, "threads": torch.get_num_threads()}), flush=True)
    for _ in sys.stdin:
        began, began_processor = time.perf_counter(), time.process_time()
        step()
        print(time.perf_counter() - began, time.process_time() - began_processor, flush=True)


def config_of(arguments: argparse.Namespace) -> Any:
    """Return our configuration of a contestant: of the dense one, as wide as all experts of a token."""
    from conf.schema import Config, ModelConfig, MoeBalance, PrecisionConfig, PrecisionName, TrainConfig

    is_dense = arguments.serve == DENSE
    model = ModelConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.inner * (arguments.chosen if is_dense else 1),
        num_hidden_layers=max(1, arguments.layers),
        vocab_size=8192,
        num_experts=0 if is_dense else arguments.experts,
        num_experts_per_tok=arguments.chosen,
        # Transformers' Mixtral has no bias either.
        moe_balance=MoeBalance.none,
    )
    num_sequences = arguments.tokens // arguments.sequence
    train = replace(
        TrainConfig(),
        steps=1000,
        seq_len=arguments.sequence,
        micro_batch_size=num_sequences,
        global_batch_size=num_sequences,
        compile=arguments.serve == COMPILED,
    )
    return Config(model=model, precision=PrecisionConfig(PrecisionName(arguments.precision)), train=train)


def layer_step(arguments: argparse.Namespace) -> Callable[[], object]:
    """Return the forward and backward pass of one feed-forward layer, with the same weights for all."""
    import torch
    from torch import nn

    from orchestra.model.transformer import make_feed_forward

    model = config_of(arguments).model
    dtype = torch.float32 if arguments.precision == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    ours = make_feed_forward(model, 0)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    layer = ours if is_ours(arguments.serve) else their_layer(arguments, ours)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    shape = (arguments.tokens // arguments.sequence, arguments.sequence, arguments.hidden)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(shape, generator=generator).to(dtype)

    def step() -> None:
        for parameter in (x, *layer.parameters()):
            parameter.grad = None
        layer(x).backward(grad)

    return step


def their_config(arguments: argparse.Namespace) -> Any:
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.inner,
        num_hidden_layers=max(1, arguments.layers),
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        num_local_experts=arguments.experts,
        num_experts_per_tok=arguments.chosen,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = THEIRS.get(arguments.serve, "grouped_mm")
    return config


def their_layer(arguments: argparse.Namespace, ours: Any) -> Any:
    import torch
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    layer = MixtralSparseMoeBlock(their_config(arguments)).train()
    with torch.no_grad():
        layer.gate.weight.copy_(ours.gate.weight)
        layer.experts.gate_up_proj.copy_(torch.cat([ours.experts.gate_proj, ours.experts.up_proj], 1))
        layer.experts.down_proj.copy_(ours.experts.down_proj)
    return layer


def model_step(arguments: argparse.Namespace) -> Callable[[], object]:
    """Return a whole optimizer step: ours as the trainer takes it, theirs in a bare loop."""
    import torch

    config = config_of(arguments)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.tokens // arguments.sequence, arguments.sequence + 1)
    tokens = torch.randint(0, 8192, shape, generator=generator)
    if is_ours(arguments.serve):
        from orchestra.parallel.mesh import make_mesh
        from orchestra.sizes.topology import Layout
        from orchestra.train.build import build_training, set_numerics

        set_numerics(config, torch.device("cpu"))
        step = build_training(config, make_mesh(0, Layout(1), torch.device("cpu"))).step
        count = iter(range(1, 1_000_000))
        return lambda: float(step.run(next(count), tokens.unsqueeze(0)).loss)
    import transformers

    is_bf16, is_cast = arguments.precision == "bf16", arguments.serve == THEIRS_AUTOCAST
    dtype = torch.bfloat16 if is_bf16 and not is_cast else torch.float32
    model = transformers.MixtralForCausalLM(their_config(arguments)).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    call = torch.compile(model) if arguments.serve == THEIRS_COMPILED else model

    def step_of_theirs() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            logits = call(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step_of_theirs


def report(
    arguments: argparse.Namespace, facts: dict[str, Any], times: dict[str, list[tuple[float, float]]]
) -> None:
    rows = {}
    for name, taken in times.items():
        pairs = list(zip(taken, times[OURS], strict=True))
        rows[name] = {
            "median_s": statistics.median(wall for wall, _ in taken),
            "processor_s": statistics.median(processor for _, processor in taken),
            "ours_is_faster_by": statistics.median(theirs[0] / mine[0] for theirs, mine in pairs),
            "in_processor_time": statistics.median(theirs[1] / mine[1] for theirs, mine in pairs),
        }
    hidden = ("serve", "json")
    header = {**facts, **{key: value for key, value in vars(arguments).items() if key not in hidden}}
    if arguments.json:
        print(json.dumps({**header, "rows": rows}, indent=1))
        return
    print("  ".join(f"{key}={value}" for key, value in header.items()))
    print(
        f"{'contestant':36} {'median s':>9} {'processor s':>12} {'ours is faster by':>18} {'processor':>10}"
    )
    for name, row in rows.items():
        print(
            f"{name:36} {row['median_s']:9.4f} {row['processor_s']:12.4f} {row['ours_is_faster_by']:17.2f}x "
            f"{row['in_processor_time']:9.2f}x"
        )


if __name__ == "__main__":
    sys.exit(main())
