"""Whether the best learning rate of a narrow model is that of wider ones, by each parametrization.

`python -m benchmarks.mup sweep OUT.jsonl` trains small models of several widths at several rates on the bytes
of this interpreter's library, one line each; it goes on where it ended. `figure OUT.jsonl FOLDER` prints the
table and draws it; `coordinates FOLDER` draws how large activations get with the width in the first steps.
On a CPU, one thread.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from conf.schema import Config, ModelConfig, MupConfig, OptimConfig, Parametrization, Schedule, TrainConfig
from orchestra.model.transformer import Transformer
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_loader, build_training, set_numerics

WIDTHS, BASE, HEAD, LAYERS = (64, 128, 256), 64, 16, 2
RATES = tuple(2.0**power for power in range(-10, -4))
# What the sweep found at the base width.
BEST = 2.0**-7
# About 1/√64: what the base width would take by its fan-in.
INIT_STD = 0.1
SEEDS, STEPS, LAST = 3, 150, 30
COLORS = {64: "#2a6fb0", 128: "#c0541f", 256: "#3a8a3f", 512: "#7a3fa0"}


def config_of(way: Parametrization, width: int, lr: float, seed: int, steps: int = STEPS) -> Config:
    """Return a model whose heads grow in number with its width."""
    model = ModelConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        init_std=INIT_STD,
    )
    mup = MupConfig(base_hidden=BASE) if way is Parametrization.mup else MupConfig()
    optim = OptimConfig(lr=lr, warmup_steps=15, schedule=Schedule.linear, parametrization=way, mup=mup)
    train = TrainConfig(
        steps=steps, seq_len=64, global_batch_size=8, micro_batch_size=8, compile=False, seed=seed
    )
    return replace(Config(), model=model, optim=optim, train=train)


def losses(config: Config) -> Iterator[tuple[float, Transformer]]:
    """Train; yield the loss of each step, and the model after it."""
    mesh = make_mesh(0, Layout(1), torch.device("cpu"))
    set_numerics(config, mesh.device)
    training = build_training(config, mesh)
    loader = build_loader(config, mesh, training.batches, 0, 0)
    try:
        for step in range(1, config.train.steps + 1):
            loss = float(training.step.run(step, loader.next_batch().tokens).loss)
            yield loss, training.parallelized.model
    finally:
        loader.close()


def sweep(out: Path) -> None:
    """Train what the file does not have yet."""
    done = (
        {tuple(json.loads(line)["key"]) for line in out.read_text().splitlines()} if out.exists() else set()
    )
    for seed in range(SEEDS):
        for width in WIDTHS:
            # At the base width both are the same.
            for way in Parametrization if width > BASE else [Parametrization.standard]:
                for lr in RATES:
                    key = (way.value, width, lr, seed)
                    if key in done:
                        continue
                    found = [loss for loss, _ in losses(config_of(way, width, lr, seed))]
                    last = statistics.fmean(found[-LAST:])
                    mean = last if math.isfinite(last) else None
                    with out.open("a") as file:
                        file.write(json.dumps({"key": key, "loss": mean}) + "\n")


def means_of(file: Path) -> dict[tuple[str, int], dict[float, float]]:
    """Return the mean loss over the seeds by rate, of each way and width."""
    found: dict[tuple[str, int], dict[float, list[float]]] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        way, width, lr, _ = record["key"]
        ways = [each.value for each in Parametrization] if width == BASE else [way]
        for each in ways:
            loss = math.inf if record["loss"] is None else record["loss"]
            found.setdefault((each, width), {}).setdefault(lr, []).append(loss)
    return {key: {lr: statistics.fmean(each) for lr, each in of.items()} for key, of in found.items()}


def best(by_rate: dict[float, float]) -> float:
    """Return the rate with the lowest loss."""
    return min(by_rate, key=lambda lr: by_rate[lr])


def panel(curves: dict[str, list[tuple[float, float]]], title: str, left: int, marks: bool) -> list[str]:
    """Draw curves over log2 of their first numbers, within 330 × 260 pixels from `left` on."""
    points = [point for curve in curves.values() for point in curve]
    low_x, high_x = (f(math.log2(x) for x, _ in points) for f in (min, max))
    low, high = (f(y for _, y in points) for f in (min, max))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low_x) / (high_x - low_x)
        return left + 40 + 270 * across, 230 - 195 * (y - low) / (high - low)

    parts = [f'<text x="{left + 40}" y="18" font-weight="bold">{title}</text>']
    parts += [
        f'<path d="M{left + 40} {at(2.0**low_x, y)[1]:.1f}h270" stroke="#ddd"/>'
        f'<text x="{left + 34}" y="{at(2.0**low_x, y)[1] + 4:.1f}" text-anchor="end">{y:.2f}</text>'
        for y in (low + (high - low) * part / 4 for part in range(5))
    ]
    for power in range(math.ceil(low_x), math.floor(high_x) + 1):
        label = f"2^{power}" if power < 0 else f"{2**power}"
        parts.append(f'<text x="{at(2.0**power, low)[0]:.1f}" y="250" text-anchor="middle">{label}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        color = list(COLORS.values())[number % len(COLORS)]
        line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 48 + 62 * number}" y="34" fill="{color}">{name}</text>')
        if marks:
            x, y = at(*min(curve, key=lambda point: point[1]))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>')
    return parts


def drawing(panels: list[list[str]]) -> str:
    """Return an SVG of panels side by side."""
    width = 340 * len(panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 260" font-size="11">'
    background = f'<rect width="{width}" height="260" fill="#fff"/>'
    return "\n".join([head, background, *(part for each in panels for part in each), "</svg>", ""])


def figure(file: Path, folder: Path) -> None:
    """Print the table, and draw loss over rate."""
    means = means_of(file)
    print("| parametrization | hidden | " + " | ".join(f"{lr:.2g}" for lr in RATES) + " | best |")
    print("|" + "---|" * (len(RATES) + 3))
    panels = []
    for number, way in enumerate(Parametrization):
        of_way = {width: means[way.value, width] for width in WIDTHS if (way.value, width) in means}
        for width, by_rate in of_way.items():
            row = " | ".join(f"{by_rate[lr]:.3f}" if lr in by_rate else "" for lr in RATES)
            print(f"| {way.value} | {width} | {row} | {best(by_rate):.2g} |")
        lowest = min(min(by_rate.values()) for by_rate in of_way.values())
        curves = {
            str(width): [(lr, loss) for lr, loss in by_rate.items() if loss < lowest + 0.9]
            for width, by_rate in of_way.items()
        }
        panels.append(panel(curves, f"{way.value}: loss by learning rate", 340 * number, marks=True))
    (folder / "mup-rates.svg").write_text(drawing(panels))


def activations(model: Transformer, tokens: torch.Tensor) -> dict[str, float]:
    """Return the root mean squares of what a layer adds, and of the logits."""
    sizes: dict[str, float] = {}

    def keep(name: str) -> None:
        def hook(_: torch.nn.Module, __: object, out: torch.Tensor) -> None:
            sizes[name] = float(out.detach().float().square().mean().sqrt())

        hooks.append(model.get_submodule(name).register_forward_hook(hook))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    last = LAYERS - 1
    names = {
        "attention": f"layers.{last}.self_attn.o_proj",
        "mlp": f"layers.{last}.mlp.down_proj",
        "logits": "lm_head",
    }
    for name in names.values():
        keep(name)
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return {
        "attention": sizes[f"layers.{last}.self_attn.o_proj"],
        "mlp": sizes[f"layers.{last}.mlp.down_proj"],
    } | {"logits": sizes["lm_head"]}


def coordinates(folder: Path) -> None:
    """Draw the sizes after some steps over the width, and print their growth for each doubling."""
    widths, steps = (64, 128, 256, 512), 6
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    panels = []
    for number, way in enumerate(Parametrization):
        curves: dict[str, list[tuple[float, float]]] = {}
        for width in widths:
            of_seeds: dict[str, list[float]] = {}
            for seed in range(SEEDS):
                config = replace_steps(config_of(way, width, BEST, seed), steps)
                *_, (_, model) = losses(config)
                for name, size in activations(model, tokens).items():
                    of_seeds.setdefault(name, []).append(math.log2(size))
            for name, sizes in of_seeds.items():
                curves.setdefault(name, []).append((width, statistics.fmean(sizes)))
        for name, curve in curves.items():
            doublings = math.log2(widths[-1] / widths[0])
            growth = 2 ** ((curve[-1][1] - curve[0][1]) / doublings)
            print(f"{way.value:9} {name:10} × {growth:.2f} for each doubling of the width")
        panels.append(
            panel(curves, f"{way.value}: log2 of sizes after {steps} steps", 340 * number, marks=False)
        )
    (folder / "mup-coordinates.svg").write_text(drawing(panels))


def replace_steps(config: Config, steps: int) -> Config:
    """Return a constant rate without warm-up for a few steps."""
    optim = replace(config.optim, warmup_steps=0, schedule=Schedule.constant)
    return replace(config, optim=optim, train=replace(config.train, steps=steps))


def main(words: list[str]) -> None:
    """Do what the module says."""
    torch.set_num_threads(1)
    if words[0] == "sweep":
        sweep(Path(words[1]))
    elif words[0] == "figure":
        figure(Path(words[1]), Path(words[2]))
    else:
        coordinates(Path(words[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
