"""`orchestra bench network [overrides]`: measure the network between real ranks, print it, and keep it.

Here by default; with `cluster=slurm` in a job, which it waits for. It reports and judges nothing.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from conf.schema import LauncherName
from orchestra.cli.text.describe import shown
from orchestra.cli.text.figures import table
from orchestra.config.machine import Situation, this_machine
from orchestra.errors import EXIT_DONE, ConfigError, LaunchError
from orchestra.sizes.network import to_record, write_measured
from orchestra.sizes.units import binary
from orchestra.submit.job import Share
from orchestra.submit.network_bench import file_of, measure_as_job, measure_here, planned_script
from orchestra.submit.site import Site, ask, cpus_of_share

if TYPE_CHECKING:
    from pathlib import Path

    from conf.schema import Config
    from launchers.slurm.queue import JobState
    from orchestra.sizes.network import Measured, Measurement

_VERB = "bench"
_EXPLAINED = """\
  orchestra bench network                   between 2 CPU ranks, or all GPUs, of this machine
  orchestra bench network cluster=slurm     in a job on 2 nodes, inside and between them
  orchestra bench network cluster=slurm cluster.nodes=4 cluster.network.interface=ib0

Ranks are started as for a training run, and all-reduces and messages from 8 bytes to 64 MiB (256 MiB between
GPUs) are timed: some seconds, after the ranks have started. Ctrl-C cancels the job.

The figures are kept for this cluster, by device, in $XDG_DATA_HOME/orchestra/network/ (~/.local/share without
it), and stand in wherever cluster.network.* says nothing.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra bench network` takes."""
    parser.usage = "orchestra bench network [overrides] [--dry-run] [--json]"
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be started; start and write nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as JSON; progress goes to stderr"
    )
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Measure, keep, print and return 0. Raises ConfigError before anything starts, LaunchError after."""
    from orchestra.config.compose import compose

    overrides = list(arguments.overrides)
    is_job = _wants_slurm(overrides)
    if is_job and not any(override.startswith("cluster.nodes=") for override in overrides):
        # The fewest that show what lies between nodes.
        overrides.append("cluster.nodes=2")
    if not is_job:
        config = compose(overrides, this_machine(_VERB, starts=not arguments.dry_run)).config
        return _here(config, arguments)
    site = replace(ask(), instead="measure here with cluster=local")
    config = compose(overrides, Situation(_VERB, cluster=site)).config
    if config.cluster.launcher is LauncherName.local:
        return _here(config, arguments)
    site.require()
    return _in_a_job(config, site, arguments)


def _wants_slurm(overrides: Sequence[str]) -> bool:
    chosen = ("cluster=", "+cluster=", "cluster.launcher=", "experiment=")
    named = [override for override in overrides if override.startswith(chosen)]
    return any(override.partition("=")[2] != "local" for override in named)


def _here(config: Config, arguments: Namespace) -> int:
    ranks = int(config.cluster.gpus_per_node)
    if ranks < 2:
        raise ConfigError(
            "cluster.gpus_per_node=1: between one rank and itself there is no network; use 2 or more, or "
            "cluster=slurm with cluster.nodes=2"
        )
    if arguments.dry_run:
        device = config.cluster.device.value
        plan = {"ranks": ranks, "device": device, "nodes": 1}
        print(json.dumps(plan) if arguments.json else f"would start {ranks} {device} ranks on this machine")
        return EXIT_DONE
    _note(f"starting {ranks} {config.cluster.device.value} ranks on this machine")
    return _finished(config, measure_here(config), arguments)


def _in_a_job(config: Config, site: Site, arguments: Namespace) -> int:
    share = Share(cpus_of_share(config, site.partitions or ()))
    if config.cluster.nodes * int(config.cluster.gpus_per_node) < 2:
        raise ConfigError("one node with one rank has no network to measure; use cluster.nodes=2")
    if arguments.dry_run:
        script = planned_script(config, share)
        print(
            json.dumps({"script": script}) if arguments.json else script, end="\n" if arguments.json else ""
        )
        return EXIT_DONE
    return _finished(config, measure_as_job(config, share, _show), arguments)


def _show(state: JobState) -> None:
    where = f" on {state.nodes}" if state.nodes else ""
    why = f" ({state.reason})" if state.reason not in ("", "None") else ""
    _note(f"job {state.job}: {state.state.lower()}{where or why}")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finished(config: Config, measurement: Measurement, arguments: Namespace) -> int:
    """Keep the figures and print them; what cannot be kept is still printed."""

    figures = measurement.figures()
    file, problem = file_of(config), None
    try:
        write_measured(file, figures)
    except OSError as error:
        problem = f"{file}: {error.strerror}; put the figures into cluster.network.* yourself"
    if arguments.json:
        links = [
            {**link, "bytes_per_s": measurement.links[number].bytes_per_s}
            for number, link in enumerate(to_record(measurement)["links"])
        ]
        kept = {"file": None if problem else str(file), "network": _keys(figures)}
        print(json.dumps({**to_record(measurement), "links": links, **kept}))
    else:
        _print(measurement, figures, file if problem is None else None)
    if problem:
        raise LaunchError(f"not kept: {problem}")
    return EXIT_DONE


def _print(measurement: Measurement, figures: Measured, file: Path | None) -> None:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(measurement.time))
    interface = measurement.interface or "of NCCL's choice"
    nodes = len(measurement.hosts)
    print(f"nodes    {nodes} × {measurement.ranks_per_node} ranks: {', '.join(measurement.hosts)}")
    print(f"device   {measurement.device} ({measurement.device_name}), {measurement.backend}")
    print(f"network  interface {interface}, {when}\n")
    rows = []
    for link in measurement.links:
        for sample in link.samples:
            bus, send = link.bus_bytes_per_s(sample), sample.send_s
            one_way = ("-", "-") if send is None else (_time(send), _rate(sample.size_bytes / send))
            name = f"{link.kind}, {link.what}" if sample is link.samples[0] else ""
            size = binary(sample.size_bytes)
            rows.append((name, size, _time(sample.all_reduce_s), _rate(bus), *one_way))
    print(table(("", "message", "all-reduce", "bus", "one way", "rate"), rows))
    print("\nbus: bytes per second that each rank sends in a ring, 2 (n - 1) / n of the message. Medians.\n")
    for key, value in _keys(figures).items():
        if value is not None:
            print(f"cluster.network.{key}={value:.4g}")
    if file is not None:
        print(f"kept in {shown(file)} for ranks on {measurement.device}")


def _keys(figures: Measured) -> dict[str, float | None]:
    return {
        "intra_node_bytes_per_s": figures.intra_node_bytes_per_s,
        "inter_node_bytes_per_s": figures.inter_node_bytes_per_s,
        "intra_node_latency_s": figures.intra_node_latency_s,
        "inter_node_latency_s": figures.inter_node_latency_s,
    }


def _time(seconds: float) -> str:
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _rate(bytes_per_s: float) -> str:
    for limit, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= limit:
            return f"{bytes_per_s / limit:.3g} {unit}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"
