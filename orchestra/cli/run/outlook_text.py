"""What jobs cost and how the account stands, in lines for `orchestra submit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestra.cli.text.figures import number_of
from orchestra.sizes.units import first_few

if TYPE_CHECKING:
    from launchers.slurm.fair_share import Standing
    from launchers.slurm.sbatch import Estimate
    from orchestra.submit.fair.outlook import JobCost, Outlook
    from orchestra.submit.fair.predecessors import Following


def outlook_lines(outlook: Outlook) -> Iterator[str]:
    """Yield what the jobs cost at most, what the site bills for them, and how the account stands."""
    words = [_of_kind(cost) for cost in outlook.costs]
    text = f"one of: {'; '.join(words)}" if outlook.are_alternatives else "; ".join(words)
    yield f"cost    {text}{_in_all(outlook)}"
    if outlook.goes_on and any(cost.limit_s is not None for cost in outlook.costs):
        yield "        at most, and as much again each time that a run goes on in another job"
    yield from _bill_lines(outlook)
    if outlook.no_standing is not None:
        yield f"share   not known: {outlook.no_standing}"
    else:
        yield f"share   {first_few([_standing(each) for each in outlook.standings])}"


def start_line(estimate: Estimate | None, following: Following) -> str:
    """Return when the job may start."""
    names = " and ".join(following.awaited)
    if names:
        # Slurm estimates without dependencies.
        sooner = "" if estimate is None else f", not before {estimate.start} as Slurm expects"
        return f"starts  when {names} {'is' if len(following.awaited) == 1 else 'are'} done{sooner}"
    if estimate is None:
        return "starts  not known: Slurm gave no estimate"
    return f"starts  {estimate.start}, as Slurm expects"


def after_line(following: Following) -> str:
    """Return what a run waits for, and what is done already."""
    done = [each.name for each in following.predecessors if each.name not in following.awaited]
    words = [f"{' and '.join(following.awaited)} (job {', '.join(following.jobs) or 'not known'})"]
    return "after   " + "; ".join(
        [*(words if following.awaited else []), *(f"{name} is done already" for name in done)]
    )


def _of_kind(cost: JobCost) -> str:
    """Return the cost of one job of a kind, and how many of them there are."""
    nodes = number_of(cost.most_nodes, "node")
    if cost.fewest_nodes < cost.most_nodes:
        nodes = f"{cost.fewest_nodes} to {nodes}"
    gpus = cost.gpus_per_node
    has = f" × {number_of(gpus, 'GPU')}" if gpus else ""
    if not gpus and cost.cores_per_node:
        has = f" × {number_of(cost.cores_per_node, 'core')}"
    kind = f" ({cost.constraint})" if cost.constraint else ""
    many = f"{cost.num_jobs} jobs of {nodes}" if cost.num_jobs > 1 else nodes
    if cost.limit_s is None:
        return f"{_hours(cost, 1.0)} for each hour of {many}{has}{kind}: no time limit is given"
    return f"{_hours(cost, cost.limit_s / 3600)} for {many}{has} × {_clock(cost.limit_s)}{kind}"


def _hours(cost: JobCost, hours: float) -> str:
    """Return what one job takes in so many hours."""
    gpus = cost.gpus_per_node
    unit = "node-hour" if gpus == 0 else "GPU-hour"
    if gpus is None:
        return "an unknown number of GPU-hours"
    most, fewest = (nodes * (gpus or 1) * hours for nodes in (cost.most_nodes, cost.fewest_nodes))
    cores = ""
    if gpus == 0 and cost.cores_per_node:
        cores = f" ({_counted(cost.most_nodes * cost.cores_per_node * hours, 'core-hour')})"
    each = " each" if cost.num_jobs > 1 else ""
    return f"{f'{_number(fewest)} to ' if fewest < most else ''}{_counted(most, unit)}{cores}{each}"


def _in_all(outlook: Outlook) -> str:
    hours, price = outlook.gpu_hours, outlook.price
    several = sum(cost.num_jobs for cost in outlook.costs) > 1 and not outlook.are_alternatives
    in_all = f", {_counted(hours, 'GPU-hour')} in all" if several and hours else ""
    if not in_all and several and all(cost.gpus_per_node == 0 for cost in outlook.costs):
        node_hours = [(cost.hours(1), cost.num_jobs) for cost in outlook.costs]
        known = [each * number for each, number in node_hours if each is not None]
        in_all = f", {_counted(sum(known), 'node-hour')} in all" if len(known) == len(node_hours) else ""
    if price:
        in_all += f", {' '.join(filter(None, (f'{price:.2f}', outlook.currency)))}"
    return in_all


def _bill_lines(outlook: Outlook) -> Iterator[str]:
    """Yield what a site bills that has weights of its own."""
    if outlook.no_weights is not None:
        yield f"bills   not known: {outlook.no_weights}"
    if not outlook.weights:
        return
    bills = []
    for cost in outlook.costs:
        if cost.billing is None:
            continue
        each = " each" if cost.num_jobs > 1 else ""
        left_out = f" without {', '.join(cost.not_billed)}" if cost.not_billed else ""
        total = "" if cost.limit_s is None else f", {_number(cost.billing * cost.limit_s / 3600)} at most"
        bills.append(f"{_number(cost.billing)} an hour{total}{each}{left_out}")
    yield f"bills   {'; '.join(bills)} ({outlook.weights})"


def _standing(standing: Standing) -> str:
    return (
        f"account {standing.account}: fair-share factor {standing.factor:.2f} of 1; it used "
        f"{standing.used:.1%}, its shares are {standing.shares:.1%}"
    )


def _counted(value: float, unit: str) -> str:
    number = _number(value)
    return f"{number} {unit}{'' if number == '1' else 's'}"


def _number(value: float) -> str:
    """Return a number with as many digits as it is worth: 1,536, 12.5, 0.083."""
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def _clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
