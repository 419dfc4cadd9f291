"""`orchestra site init [NAME]`: write a site file from what sinfo, scontrol, sacctmgr and doctor see here.

The file is a preset of the group `cluster`. It is never written over another one without --force.
"""

from __future__ import annotations

import json
import re
import socket
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from launchers import SlurmMissing, SlurmSilent
from launchers.slurm.commands import NO_CLUSTER
from orchestra.cli.text.describe import shown
from orchestra.cli.text.resolve import path_argument
from orchestra.config.home import home_file, read_home
from orchestra.config.preset_files import own_folder
from orchestra.doctor.hardware_checks import nccl_settings, rdma_ports
from orchestra.doctor.site_file import asked, local_site, slurm_site
from orchestra.errors import EXIT_DONE, ConfigError, LaunchError
from orchestra.run.files import write_atomically
from orchestra.sizes.hardware import detect_gpus
from orchestra.submit.site import note

# What Hydra, a shell and a file system take as it is.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_EXPLAINED = """\
  orchestra site init                 NAME is the cluster's own, Slurm's word
  orchestra site init lab --dry-run   print it
  orchestra site init lab --output /shared/sites/cluster/lab.yaml

Without --output it goes to the first folder of `searchpath` in ~/.config/orchestra/config.yaml; where there
is no such file, one is made, with a folder beside it. Then `orchestra submit cluster=NAME` uses it.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "orchestra site init [NAME] [--output FILE] [--force] [--dry-run]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="what cluster=NAME will select")
    parser.add_argument("--output", type=path_argument, metavar="FILE", help="write it there")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--dry-run", action="store_true", help="print it; write nothing")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Write the file and return 0. Raises ConfigError where it is there, LaunchError for a silent Slurm."""
    name, text, is_local = _site(arguments)
    if arguments.dry_run:
        print(text, end="")
        return EXIT_DONE
    place = arguments.output or _folder() / "cluster" / f"{name}.yaml"
    if (own_folder() / "cluster" / f"{place.stem}.yaml").exists():
        raise ConfigError(
            f"cluster={place.stem} is a preset of orchestra's own, which is found first; give the site "
            "another name: orchestra site init NAME"
        )
    if place.parent.name != "cluster":
        raise ConfigError(
            f"{place}: presets of the group cluster lie in a folder of this name; use "
            f"{place.parent / 'cluster' / place.name}"
        )
    if place.exists() and not arguments.force:
        raise ConfigError(f"{place} is there already; --force replaces it, --output FILE writes another")
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(place, text)
    print(f"wrote   {shown(place)}")
    folder = place.parent.parent
    is_found = str(folder) in read_home().searchpath or _makes_home(folder)
    words = "" if is_found else f"hydra.searchpath=[{folder}] "
    words += f"cluster={place.stem}"
    verb = "run" if is_local else "submit"
    print(f"next    `orchestra doctor {words}`, `orchestra {verb} {words} --dry-run`")
    return EXIT_DONE


def _site(arguments: Namespace) -> tuple[str, str, bool]:
    """Return the site's name, the text of its file, and whether it is for this machine alone."""
    output: Path | None = arguments.output
    of_output = None if output is None else output.stem
    chosen = of_output if arguments.name is None else arguments.name
    if chosen is not None and _NAME.fullmatch(chosen) is None:
        allowed = "letters, digits, dashes, dots and underscores"
        raise ConfigError(f"{chosen!r} is no name of a preset; use {allowed}, such as lab")
    where = f"Written by `orchestra site init` on {socket.gethostname()}, {time.strftime('%Y-%m-%d')}."
    head = [where, "Each comment says where the value below it comes from: edit what is not as you want it."]
    try:
        facts = asked()
    except SlurmMissing as error:
        return _local(chosen, head, str(error))
    except SlurmSilent as error:
        if NO_CLUSTER in str(error):
            return _local(chosen, head, str(error))
        raise LaunchError(f"{error}; nothing was written") from error
    name, ports = chosen or facts.name, [port for port in rdma_ports() if port.is_active]
    return name, slurm_site(name, facts, head, nccl_settings(ports)), False


def _local(chosen: str | None, head: list[str], reason: str) -> tuple[str, str, bool]:
    note(f"{reason}: the site file is for this machine alone")
    name = chosen or "here"
    return name, local_site(name, detect_gpus(), head), True


def _folder() -> Path:
    """Return the folder with presets that the user's own configuration names, or the one that it will."""
    searchpath = read_home().searchpath
    return Path(searchpath[0]) if searchpath else home_file().parent / "presets"


def _makes_home(folder: Path) -> bool:
    """Let the user's configuration name the folder where there is none yet; tell whether it does now."""
    if home_file().exists() or folder != home_file().parent / "presets":
        return False
    write_atomically(home_file(), f"searchpath: [{json.dumps(str(folder))}]\n")
    print(f"wrote   {shown(home_file())}")
    return True
