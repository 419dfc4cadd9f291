"""Scores the planner on measured runs: fits its constants on a random half and predicts the other half.

    python benchmarks/planner/playbook.py playbook_h100.csv [--seeds 3] [--leave-out] [--fit]

The table has the columns of the Ultra-Scale Playbook's benchmark (nanotron on H100). Beside the planner a
crude roofline with eight constants is fitted on the same half. A row is sick by its twin in the whole table,
whichever half that is in. `--leave-out` fits without one model size, or one number of GPUs, and predicts it.
What runs this noisy let anybody reach stands in front (noise.py). `--fit` fits on all rows and prints
the constants, as they stand in `orchestra/plan/frameworks.py`; the shipped ones are scored too, but on
rows they have seen. Published rates of other trainers and devices follow (data/published_speed.csv and
published_experts.csv, a source a row; `inferred` where the source leaves a field open, mostly the micro-batch
or what is recomputed, and recipes or neighbouring rows say it), and last those of published_unseen.csv, on
which no constant was set.

What a half does not fit is the model's form and the limits in `frameworks.Stalls`: both were chosen on all
rows, so the other half is not quite unseen. How much the least certain of these limits gives is shown by a
line without it. Constants of other trainers were set on their published rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fit import Constants, fitted
from noise import rank_correlation_within_reach
from roofline import ROOFLINE, roofline_tokens_per_s
from score import MeasuredRow, Score, score, without_sick

from orchestra.plan.case import PlanCase
from orchestra.plan.frameworks import NANOTRON, Framework
from orchestra.plan.predict import predict
from orchestra.plan.table import Row, cases, read_table
from orchestra.sizes.units import GIB

SPEED = (
    *("elementwise_bytes", "loss_bytes", "host_layer_s", "host_contention_s"),
    *("unsharded_contention", "exposed_reduction", "optimizer_passes", "step_s"),
)
MEMORY = (
    *("logit_bytes", "stale_logit_bytes", "gathered_bytes", "gathered_bytes_waiting"),
    *("whole_bytes", "layer_temporaries", "fixed_bytes"),
)
# Beside the framework's own: what waiting costs, and the latencies of the network.
STALLS = ("hand_over_s", "pressed_layer_s")
LATENCY = ("inside_latency_s", "between_latency_s")
PRODUCTS = "product_flops"
# Errors beyond these (in logarithms) count less: a tenth of the rows is far off for no visible reason.
SPEED_SCALE, MEMORY_SCALE = 0.1, 0.05
_FEWEST_RUNS = 20


@dataclass(frozen=True)
class Sample:
    """One row and its case."""

    row: Row
    case: PlanCase

    @property
    def ran(self) -> bool:
        return self.row["status"] == "ok"

    @property
    def twin(self) -> tuple[str, ...]:
        names = ("model", "num_gpus", "micro_batch_size", "grad_accum", "dp", "tp", "pp")
        return tuple(self.row[name] for name in names)


def samples(file: Path) -> list[Sample]:
    table = read_table(file)
    return [Sample(row, case) for row, case in zip(table.rows, cases(file, table), strict=True)]


def with_constants(case: PlanCase, constants: Constants) -> PlanCase:
    """Return the case under other constants of its framework and network."""
    inside = {name: value for name, value in constants.items() if name in SPEED + MEMORY}
    framework = replace(case.framework, **inside)  # type: ignore[arg-type]
    waiting = {name: value for name, value in constants.items() if name in STALLS}
    if framework.stalls is not None:
        framework = replace(framework, stalls=replace(framework.stalls, **waiting))  # type: ignore[arg-type]
    latency = {name: value for name, value in constants.items() if name in LATENCY}
    network = replace(case.network, **latency)  # type: ignore[arg-type]
    device = replace(case.device, product_flops=constants.get(PRODUCTS, case.device.product_flops))
    return replace(case, framework=framework, network=network, device=device)


def shipped(names: Sequence[str], framework: Framework, case: PlanCase) -> Constants:
    places = (framework, framework.stalls, case.network, case.device)
    return {
        name: next(float(getattr(place, name)) for place in places if hasattr(place, name)) for name in names
    }


def healthy(rows: Sequence[Sample]) -> list[Sample]:
    ran = [sample for sample in rows if sample.ran]
    kept = {id(m.place) for m in without_sick([_measured(s, 0.0, 0.0, fits=True, place=s) for s in ran])}
    return [sample for sample in ran if id(sample) in kept]


def fit_planner(rows: Sequence[Sample], among: Sequence[Sample]) -> Constants:
    """Fit speed on the rows that are healthy `among` all, then memory on all that ran."""
    well = {id(sample) for sample in healthy(among)}
    chosen = [sample for sample in rows if id(sample) in well]
    start = shipped((PRODUCTS, *SPEED, *STALLS, *LATENCY), NANOTRON, rows[0].case)

    def seconds(constants: Constants) -> list[float]:
        return [predict(with_constants(sample.case, constants)).time.total for sample in chosen]

    taken = [
        sample.case.tokens_per_step
        / (float(sample.row["tokens_per_s_per_gpu"]) * sample.case.layout.world_size)
        for sample in chosen
    ]
    speed = fitted(seconds, taken, start, SPEED_SCALE)
    ran = [sample for sample in rows if sample.ran]

    def memory(constants: Constants) -> list[float]:
        changed = [with_constants(sample.case, {**speed, **constants}) for sample in ran]
        return [predict(case).reported_peak.total / GIB for case in changed]

    peaks = [float(sample.row["peak_memory_gib"]) for sample in ran]
    return speed | fitted(memory, peaks, shipped(MEMORY, NANOTRON, rows[0].case), MEMORY_SCALE)


def fit_roofline(rows: Sequence[Sample], among: Sequence[Sample]) -> Constants:
    well = {id(sample) for sample in healthy(among)}
    chosen = [sample for sample in rows if id(sample) in well]
    rates = [float(sample.row["tokens_per_s_per_gpu"]) for sample in chosen]

    def predicted(constants: Constants) -> list[float]:
        return [roofline_tokens_per_s(sample.case, constants) for sample in chosen]

    return fitted(predicted, rates, ROOFLINE, SPEED_SCALE)


def planner_score(rows: Sequence[Sample], constants: Constants, among: Sequence[Sample]) -> Score:
    return score(_predicted(rows, constants), _twins(among))


def _predicted(rows: Sequence[Sample], constants: Constants) -> list[MeasuredRow]:
    found = []
    for sample in rows:
        prediction = predict(with_constants(sample.case, constants))
        peak = prediction.reported_peak.total / GIB
        found.append(_measured(sample, prediction.tokens_per_s_per_device, peak, fits=prediction.fits))
    return found


def roofline_score(rows: Sequence[Sample], constants: Constants, among: Sequence[Sample]) -> Score:
    rate: Callable[[Sample], float] = lambda sample: roofline_tokens_per_s(sample.case, constants)  # noqa: E731
    return score([_measured(sample, rate(sample), 0.0, fits=True) for sample in rows], _twins(among))


def _twins(among: Sequence[Sample]) -> list[MeasuredRow]:
    return [_measured(sample, 0.0, 0.0, fits=True) for sample in among]


def _measured(sample: Sample, rate: float, peak: float, *, fits: bool, place: object = None) -> MeasuredRow:
    row = sample.row
    return MeasuredRow(
        place=place or (row["model"], row["num_gpus"]),
        twin=sample.twin,
        tokens_per_s=float(row["tokens_per_s_per_gpu"]) if sample.ran else None,
        memory_gib=float(row["peak_memory_gib"]) if sample.ran else None,
        predicted_tokens_per_s=rate,
        predicted_memory_gib=peak,
        predicted_fits=fits,
    )


HEADER = (
    f"{'':<28}{'rows':>5}{'median':>8}{'p75':>7}{'p90':>8}{'rank':>7}"
    f"{'memory':>8}{'recall':>8}{'prec.':>7}{'pick':>6}"
)


def line(name: str, found: Score, *, with_memory: bool = True) -> str:
    speed = (
        f"{name:<28}{found.num_rows:>5}{found.median:>8.1%}{found.upper_quartile:>7.0%}"
        f"{found.upper_tenth:>8.0%}{found.rank_correlation:>7.3f}"
    )
    memory = (
        f"{found.memory_mean:>8.1%}{found.out_of_memory_recall:>8.1%}{found.out_of_memory_precision:>7.1%}"
        if with_memory
        else " " * 23
    )
    return f"{speed}{memory}{found.good_picks:>6.0%}"


def without_node_limit(rows: Sequence[Sample]) -> list[Sample]:
    """Return rows whose trainer has no pipelines that wait for being on many nodes."""
    assert NANOTRON.stalls is not None
    framework = replace(NANOTRON, stalls=replace(NANOTRON.stalls, from_nodes=1 << 30))
    return [replace(sample, case=replace(sample.case, framework=framework)) for sample in rows]


def published_lines(file: str) -> list[str]:
    """Return for each trainer and device how far predictions are from a file's published rates and peaks."""
    groups: dict[str, list[tuple[float, float | None]]] = {}
    for sample in published(file):
        row, prediction = sample.row, predict(sample.case)
        speed = prediction.tokens_per_s_per_device / float(row["tokens_per_s_per_gpu"])
        peak = prediction.reported_peak.total / GIB
        memory = peak / float(row["peak_memory_gib"]) if row["peak_memory_gib"] else None
        groups.setdefault(f"{row['framework']} on {row['gpu']}", []).append((speed, memory))
    return [_published_line(name, found) for name, found in groups.items()]


def published(file: str) -> list[Sample]:
    return samples(Path(__file__).parents[1] / "data" / file)


def _published_line(name: str, found: list[tuple[float, float | None]]) -> str:
    off = [abs(speed - 1) for speed, _ in found]
    ratio = statistics.median(speed for speed, _ in found)
    text = (
        f"{name:<32}{len(found):>5}{statistics.median(off):>8.1%}   ratio {ratio:.2f}, worst {max(off):.0%}"
    )
    memory = [abs(share - 1) for _, share in found if share is not None]
    return text + (f", memory {statistics.mean(memory):.0%} off in the mean" if memory else "")


def print_halves(rows: Sequence[Sample], num_seeds: int) -> None:
    for seed in range(num_seeds):
        mixed = random.Random(seed).sample(rows, len(rows))
        half = len(rows) // 2
        seen, unseen = mixed[:half], mixed[half:]
        found = planner_score(unseen, fit_planner(seen, rows), rows)
        print(line(f"planner, other half, seed {seed}", found), flush=True)
        roofline = roofline_score(unseen, fit_roofline(seen, rows), rows)
        print(line(f"roofline, other half, seed {seed}", roofline, with_memory=False), flush=True)


def print_left_out(rows: Sequence[Sample]) -> None:
    """Fit without each model, and without each number of GPUs, and score what was left out."""
    for column in ("model", "num_gpus"):
        for value in dict.fromkeys(sample.row[column] for sample in rows):
            unseen = [sample for sample in rows if sample.row[column] == value]
            # Ranks of a handful of runs say nothing.
            if sum(sample.ran for sample in unseen) < _FEWEST_RUNS:
                continue
            constants = fit_planner([sample for sample in rows if sample.row[column] != value], rows)
            found = planner_score(unseen, constants, rows)
            print(line(f"never seen: {column} {value}", found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, help="the measured runs, as CSV")
    parser.add_argument("--seeds", type=int, default=3, help="how many random halves")
    parser.add_argument("--leave-out", action="store_true", help="predict sizes and GPU counts never seen")
    parser.add_argument("--fit", action="store_true", help="fit on all rows and print the constants")
    arguments = parser.parse_args()
    rows = samples(arguments.table)
    low, middle, high = rank_correlation_within_reach(_predicted(rows, {}))
    print(f"rank correlation of exact predictions, by the twins' noise: {middle:.3f} ({low:.3f}-{high:.3f})")
    print(HEADER)
    print(line("shipped constants, all rows", planner_score(rows, {}, rows)))
    print(line("without the limit of 32 nodes", planner_score(without_node_limit(rows), {}, rows)))
    print("\n".join(published_lines("published_speed.csv")))
    print("mixtures of experts:\n" + "\n".join(published_lines("published_experts.csv")))
    print("never set on:\n" + "\n".join(published_lines("published_unseen.csv")))
    if arguments.fit:
        constants = fit_planner(rows, rows)
        print(line("fitted on all rows", planner_score(rows, constants, rows)))
        for name, value in constants.items():
            print(f"  {name} = {value:.4g}")
        return
    print_halves(rows, arguments.seeds)
    if arguments.leave_out:
        print_left_out(rows)


if __name__ == "__main__":
    main()
