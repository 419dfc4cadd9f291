"""Measures a training step on one GPU beside its peers and the limit, round by round, in nine minutes.

    make gpu SHAPE=8b8                                     or, without make:
    python benchmarks/gpu.py 8b8                           a shape of SHAPES
    python benchmarks/gpu.py llama_1b --seq-len 2048 --micro-batch 8
    python benchmarks/gpu.py 8b8 --only compiled transformers limit
    python benchmarks/gpu.py tiny --device cpu --precision fp32      does it work at all

Every contestant has a process of its own. They take turns: a turn builds the training from the same initial
values, warms it up, times some steps and gives the device's memory back, so that a model which fills the GPU
can be compared too. Rounds end when the time is used; ratios are medians over rounds, each against the same
round of the other. A contestant that cannot run here, or fails, stands below the table with the reason.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_report import CONTESTANTS, ON_REQUEST, PEERS, Measured, rows_of, table  # noqa: E402  beside this file
from gpu_shapes import SHAPES, Shape  # noqa: E402

# With what starting and writing take, all of it stays within nine minutes.
BUDGET_S = 520.0
MOST_ROUNDS = 9


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--micro-batch", type=int, help="sequences")
    parser.add_argument("--accumulation", type=int, help="micro-batches of a step")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    usual = [name for name in CONTESTANTS if name not in ON_REQUEST]
    parser.add_argument("--only", nargs="+", default=usual, choices=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=3, help="timed in a turn")
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="at most")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: runs/gpu-SHAPE.json")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)  # set in the processes that this starts
    return parser.parse_args(argv)


def shape_of(arguments: argparse.Namespace) -> Shape:
    shape = SHAPES[arguments.shape]
    return Shape(
        shape.model,
        arguments.seq_len or shape.seq_len,
        arguments.micro_batch or shape.micro_batch,
        arguments.accumulation or shape.accumulation,
    )


class Contestant:
    """The process of one contestant: it answers every line with a line of JSON."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_s = 0.0
        self._process = subprocess.Popen(
            [sys.executable, *sys.argv, "--contestant", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, limit_s: float) -> dict[str, Any]:
        """Let it take a turn; return what it measured, or an `error`."""
        assert self._process.stdin
        assert self._process.stdout
        began = time.monotonic()
        try:
            self._process.stdin.write("turn\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "its process ended; what it wrote stands above"}
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return {"error": f"its turn was not over when the time was used ({limit_s:.0f} s)"}
        line = self._process.stdout.readline()
        self.last_s = time.monotonic() - began
        found = json.loads(line) if line else {"error": "its process ended; what it wrote stands above"}
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    arguments = parsed()
    if arguments.contestant:
        from gpu_contestants import serve

        serve(arguments.contestant, arguments, shape_of(arguments))
        return 0
    deadline = time.monotonic() + arguments.budget_s
    contestants = [Contestant(name) for name in CONTESTANTS if name in arguments.only]
    try:
        measured, left_out, rounds = play(contestants, arguments.rounds, deadline)
    finally:
        for contestant in contestants:
            contestant.close()
    return report(arguments, measured, left_out, rounds)


def play(
    contestants: list[Contestant], most_rounds: int, deadline: float
) -> tuple[dict[str, Measured], dict[str, str], int]:
    """Let all take turns, round after round; return what was measured, who is left out and why, and how many
    rounds were whole.
    """
    measured: dict[str, Measured] = {}
    left_out: dict[str, str] = {}
    for number in range(most_rounds):
        racing = [contestant for contestant in contestants if contestant.name not in left_out]
        # A later round is begun only where all of it has room.
        if number and time.monotonic() + sum(each.last_s for each in racing) > deadline:
            return measured, left_out, number
        for contestant in racing:
            found = contestant.turn(max(0.0, deadline - time.monotonic()))
            if "error" in found:
                left_out[contestant.name] = found["error"]
                measured.pop(contestant.name, None)
                contestant.close()
                continue
            measured.setdefault(contestant.name, Measured()).add(found)
            print(
                f"round {number + 1}  {CONTESTANTS[contestant.name]:36} {found['seconds']:9.4f} s", flush=True
            )
    return measured, left_out, most_rounds


def report(
    arguments: argparse.Namespace, measured: dict[str, Measured], left_out: dict[str, str], rounds: int
) -> int:
    """Print the table, write the JSON; return 1 where nothing was measured."""
    from orchestra.sizes.flops import model_flops_per_token
    from orchestra.sizes.hardware import peak_flops

    if not measured:
        print("\n".join(f"{CONTESTANTS[name]}: {reason}" for name, reason in left_out.items()))
        return 1
    shape = shape_of(arguments)
    facts = next(iter(measured.values())).facts
    flops = model_flops_per_token(shape.model, shape.seq_len)
    rows = rows_of(measured, shape.tokens, flops, peak_flops(facts["device"], arguments.precision))
    header = {
        **facts,
        **{key: value for key, value in asdict(shape).items() if key != "model"},
        "shape": arguments.shape,
        "precision": arguments.precision,
        "rounds": rounds,
        "steps_of_a_turn": arguments.steps,
    }
    print("\n" + "  ".join(f"{key}={value}" for key, value in header.items()))
    print("\n".join(table(rows)))
    for name, reason in left_out.items():
        print(f"left out: {CONTESTANTS[name]}: {reason}")
    if not any(name in measured for name in PEERS):
        print("without a peer: no ratio to the best one")
    output = arguments.output or ROOT / "runs" / f"gpu-{arguments.shape}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**header, "rows": rows, "left_out": left_out}, indent=1) + "\n")
    print(f"written: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
