"""Trains a tiny mixture of experts on real text with each way of balancing, and prints how even the load is.

    python benchmarks/moe_balance.py [--steps 500] [--seeds 0 1] [--figure docs/images/moe_balance.svg]

The text is the interpreter's own *.py (`data.source=stdlib`). Load: the tokens of a layer's busiest expert
over those of the mean one, the worst layer's. Printed are that of single steps, the mean over the last tenth
of them, and that of the last tenth's tokens together: a step's few tokens are never even.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from conf.schema import Config, MoeAuxScope, MoeBalance, TrainConfig  # noqa: E402
from orchestra.config.compose import compose  # noqa: E402

WAYS = {
    "bias": {"moe_balance": MoeBalance.bias},
    "aux, sequence": {"moe_balance": MoeBalance.aux, "moe_aux_scope": MoeAuxScope.sequence},
    "aux, batch": {"moe_balance": MoeBalance.aux, "moe_aux_scope": MoeAuxScope.batch},
    "none": {"moe_balance": MoeBalance.none},
}
COLORS = {
    "bias": "#1f6f43",
    "aux, sequence": "#2457a6",
    "aux, batch": "#7aa2d6",
    "none": "#b0413e",
}


@dataclass(frozen=True)
class Course:
    """The load and the loss of each step, and the load of the last tenth of the steps together."""

    loads: list[float]
    losses: list[float]
    load_together: float

    def last(self, values: Sequence[float]) -> float:
        """Return the mean over the last tenth."""
        return statistics.fmean(values[-max(1, len(values) // 10) :])


def main() -> int:
    """Train, print, and draw; return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path, help="write every step's numbers there")
    arguments = parser.parse_args()
    courses: dict[str, list[Course]] = {}
    print(f"the last tenth of {arguments.steps} steps")
    print(f"{'balance':16} {'load':>7} {'together':>9} {'loss':>8}")
    for way in WAYS:
        courses[way] = [course(way, arguments.steps, seed) for seed in arguments.seeds]
        load = statistics.fmean(each.last(each.loads) for each in courses[way])
        loss = statistics.fmean(each.last(each.losses) for each in courses[way])
        together = statistics.fmean(each.load_together for each in courses[way])
        print(f"{way:16} {load:7.3f} {together:9.3f} {loss:8.4f}", flush=True)
    if arguments.json is not None:
        found = {way: [vars(each) for each in of_way] for way, of_way in courses.items()}
        arguments.json.write_text(json.dumps(found))
    if arguments.figure is not None:
        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        arguments.figure.write_text(figure({way: of_way[0].loads for way, of_way in courses.items()}))
    return 0


def config_of(way: str, steps: int, seed: int) -> Config:
    """Return a run of a model with 8 experts in each of 2 layers, of which a token goes through two."""
    config = compose(["model=debug", "data=stdlib"]).config
    model = replace(
        config.model,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        **WAYS[way],
    )
    train = replace(
        TrainConfig(),
        steps=steps,
        seq_len=128,
        micro_batch_size=16,
        global_batch_size=16,
        seed=seed,
        compile=False,
    )
    return replace(config, model=model, train=train, optim=replace(config.optim, lr=2e-3))


def course(way: str, steps: int, seed: int) -> Course:
    """Train with one way of balancing."""
    import torch

    from orchestra.parallel.mesh import make_mesh
    from orchestra.sizes.topology import Layout
    from orchestra.train.build import build_loader, build_training, set_numerics

    config = config_of(way, steps, seed)
    mesh = make_mesh(0, Layout(1), torch.device("cpu"))
    set_numerics(config, mesh.device)
    training = build_training(config, mesh)
    loader = build_loader(config, mesh, training.batches, 0, 0)
    balance = training.parallelized.expert_balance
    assert balance is not None
    loads, losses = [], []
    late: dict[int, list[int]] = {}
    try:
        for step in range(1, steps + 1):
            losses.append(float(training.step.run(step, loader.next_batch().tokens).loss))
            layers = balance.loads()
            loads.append(max(load.largest_over_mean for load in layers.values()))
            if step > steps - max(1, steps // 10):
                for number, load in layers.items():
                    before = late.get(number, [0] * len(load.tokens_per_expert))
                    late[number] = [sum(pair) for pair in zip(before, load.tokens_per_expert, strict=True)]
    finally:
        loader.close()
    return Course(loads, losses, max(max(each) * len(each) / sum(each) for each in late.values()))


# The figure: steps to the right, load upwards, in pixels.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 300, 48, 36, 14
_MEAN_OF = 10


def figure(loads: dict[str, list[float]]) -> str:
    """Return an SVG of the loads over the steps, each point the mean of ten."""
    num_steps = max(len(values) for values in loads.values())
    smooth = {
        way: [statistics.fmean(values[at : at + _MEAN_OF]) for at in range(0, len(values), _MEAN_OF)]
        for way, values in loads.items()
    }
    most = max(max(values) for values in smooth.values())

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 120) * step / num_steps

    def y(load: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (load - 1) / (most - 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    ticks = [1 + number * 0.5 for number in range(int((most - 1) / 0.5) + 1)]
    for tick in (*ticks, 1.3):
        dash = ' stroke-dasharray="4 3"' if tick == 1.3 else ""
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{x(num_steps):.1f}" stroke="#ccc"{dash}/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<text x="{x(step):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{step}</text>'
        for step in range(0, num_steps + 1, max(1, num_steps // 5))
    ]
    for way, values in smooth.items():
        points = " ".join(f"{x((at + 0.5) * _MEAN_OF):.1f},{y(value):.1f}" for at, value in enumerate(values))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLORS[way]}" stroke-width="2"/>'
            f'<text x="{x(num_steps) + 6:.1f}" y="{y(values[-1]) + 4:.1f}" fill="{COLORS[way]}">{way}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
