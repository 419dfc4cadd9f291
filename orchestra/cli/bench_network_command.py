"""`orchestra bench network [overrides]`: measure the network between real ranks, print it, and keep it.

Here by default; with `cluster=slurm` in a job, which it waits for. It reports and judges nothing.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from conf.schema import Device, LauncherName
from orchestra.cli.hydra_options import add_config_dir, with_home
from orchestra.cli.text.describe import shown
from orchestra.cli.text.figures import table
from orchestra.config.machine import Situation, this_machine
from orchestra.errors import EXIT_DONE, ConfigError, LaunchError
from orchestra.sizes.network import write_measured
from orchestra.sizes.units import binary
from orchestra.submit.network_bench import file_of, measure_as_job, measure_here, planned_script
from orchestra.submit.site import Site, ask

if TYPE_CHECKING:
    from conf.schema import Config
    from launchers.slurm.queue import JobState
    from orchestra.sizes.network import Measurement

_VERB = "bench"
_EXPLAINED = """\
  orchestra bench network                between the ranks of this machine
  orchestra bench network cluster=slurm  in a job on 2 nodes, inside and between
  orchestra bench network cluster=slurm cluster.network.interface=ib0

Ranks are started as for a training run, and all-reduces and messages from 8 bytes to 64 MiB (256 MiB between
GPUs) are timed: some seconds, after the ranks have started. Ctrl-C cancels the job.

The figures are kept for this cluster, by device, in $XDG_DATA_HOME/orchestra/network/ (~/.local/share without
it), and stand in wherever cluster.network.* says nothing.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "orchestra bench network [overrides] [--dry-run] [--json]\n  [--config-dir DIR]"
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="overrides", help="KEY=VALUE or GROUP=NAME"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be started; start and write nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as JSON; progress goes to stderr"
    )
    add_config_dir(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Measure, keep, print and return 0. Raises ConfigError before anything starts, LaunchError after."""
    from orchestra.config.compose import chosen_launcher, compose

    overrides = with_home(arguments)
    if chosen_launcher(overrides) is not LauncherName.slurm:
        config = compose(overrides, this_machine(_VERB, starts=not arguments.dry_run)).config
        return _here(config, arguments)
    if not any(override.startswith("cluster.nodes=") for override in overrides):
        # The fewest that show what lies between nodes.
        overrides.append("cluster.nodes=2")
    site = replace(ask(is_dry=arguments.dry_run), instead="measure here with cluster=local")
    config = compose(overrides, Situation(_VERB, cluster=site)).config
    site.require()
    return _in_a_job(config, site, arguments)


def _here(config: Config, arguments: Namespace) -> int:
    ranks = int(config.cluster.gpus_per_node)
    if ranks < 2:
        raise ConfigError(
            "cluster.gpus_per_node=1: one rank has no network to measure; use 2 or more, or cluster=slurm "
            "with cluster.nodes=2"
        )
    if config.cluster.share_devices and config.cluster.device is Device.cuda:
        raise ConfigError(
            "cluster.share_devices=true: ranks on one GPU have no network to measure; leave it out"
        )
    device = config.cluster.device.value
    if arguments.dry_run:
        plan = {"ranks": ranks, "device": device, "nodes": 1}
        print(json.dumps(plan) if arguments.json else f"would start {ranks} {device} ranks on this machine")
        return EXIT_DONE
    _note(f"starting {ranks} {device} ranks on this machine")
    return _finished(config, measure_here(config), arguments)


def _in_a_job(config: Config, site: Site, arguments: Namespace) -> int:
    share = site.share_of_nodes(config)
    if config.cluster.nodes * int(config.cluster.gpus_per_node) < 2:
        raise ConfigError("one node with one rank has no network to measure; use cluster.nodes=2")
    if arguments.dry_run:
        script = planned_script(config, share)
        sys.stdout.write(json.dumps({"script": script}) + "\n" if arguments.json else script)
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
    keys = {key: value for key, value in asdict(figures).items() if key.startswith(("intra_", "inter_"))}
    file, problem = file_of(config), None
    try:
        write_measured(file, figures)
    except OSError as error:
        problem = f"{file}: {error.strerror}; put the figures into cluster.network.* yourself"
    if arguments.json:
        record = asdict(measurement)
        for link, row in zip(measurement.links, record["links"], strict=True):
            row["bytes_per_s"] = link.bytes_per_s
        print(json.dumps({**record, "file": None if problem else str(file), "network": keys}))
    else:
        _print(measurement)
        for key, value in keys.items():
            if value is not None:
                print(f"cluster.network.{key}={value:.4g}")
        if problem is None:
            print(f"kept in {shown(file)} for ranks on {measurement.device}")
    if problem:
        raise LaunchError(f"not kept: {problem}")
    return EXIT_DONE


def _print(measurement: Measurement) -> None:
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


def _time(seconds: float) -> str:
    return _in_unit(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})


def _rate(bytes_per_s: float) -> str:
    return _in_unit(bytes_per_s, {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3})


def _in_unit(value: float, units: Mapping[str, float]) -> str:
    """Return three digits in the largest unit of which `value` is at least one, else in the smallest."""
    fitting = (name for name, unit in units.items() if value >= unit)
    name = next(fitting, [*units][-1])
    return f"{value / units[name]:.3g} {name}"
