"""`orchestra report RUN…`: one HTML file of a run, of several side by side, or of a sweep.

It reads files alone, asks no scheduler, and changes no run: the file goes where -o says, else into the run's
directory as report.html.
"""

from __future__ import annotations

import json
import tempfile
import time
import webbrowser
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from orchestra import __version__
from orchestra.cli.look.serve_page import serve_page
from orchestra.cli.text.describe import shown
from orchestra.cli.text.resolve import (
    TARGET_HELP,
    Target,
    add_directory_option,
    path_argument,
    resolve_target,
)
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.report.page.configurations import differing
from orchestra.report.page.html_page import html_page
from orchestra.report.page.run_page import read_run, run_page
from orchestra.report.page.sweep_page import sweep_page
from orchestra.report.run_state import read_sweep_state
from orchestra.run.files import Record, finite_or_null, write_atomically
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.permissions import open_as_folder

# Beyond that many curves nobody tells one from another.
_MOST_RUNS = 12
_VERSION = 1
# How often a reader's page of --serve is loaded anew.
_REFRESH_S = 15


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=TARGET_HELP)
    parser.add_argument(
        "-o",
        "--output",
        type=path_argument,
        metavar="FILE",
        help="the file to write (default: report.html in the run)",
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve it on this machine's loopback address, refreshed, until Ctrl-C",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port of --serve (default: any that is free)"
    )
    parser.add_argument("--json", action="store_true", help="print the page's data, and write nothing")
    add_directory_option(parser)


def run(arguments: Namespace) -> int:
    """Write the page, say where, and return 0.

    Raises ConfigError for runs that do not go into one page, and where the page cannot be written.
    """
    targets = [resolve_target(text, arguments.dir) for text in arguments.runs]
    if arguments.serve:
        return _serve(targets, arguments)
    if arguments.output is not None and arguments.output.is_dir():
        # An empty one too: Path takes it for the working directory.
        raise ConfigError(f"--output {arguments.output}: it is a folder; give a file's name")
    place = arguments.output or targets[0].report
    data = page_data(targets, time.time(), None if arguments.json else place.parent)
    if arguments.json:
        print(json.dumps(finite_or_null(data)))
        return EXIT_DONE
    if arguments.output is None and len(targets) > 1:
        raise ConfigError("a page of several runs belongs to none of them; say where: -o FILE")
    page = html_page(_title(targets), data)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open_as_folder(place.parent):
            write_atomically(place, page, is_synced=False)
    except OSError as error:
        words = f"{shown(place.absolute())}: cannot be written ({error.strerror})"
        raise ConfigError(f"{words}; write it elsewhere with --output FILE") from error
    print(f"{shown(place.absolute())}: {place.stat().st_size / 1e6:.2f} MB")
    for part in [*data["runs"], *filter(None, [data["sweep"]])]:
        print(f"{part['name']}: {part['verdict']['sentence']}")
    if arguments.open and not webbrowser.open(place.absolute().as_uri()):
        print("note: no browser was found here; copy the file to where one is")
    return EXIT_DONE


def _serve(targets: Sequence[Target], arguments: Namespace) -> int:
    """Serve the page until Ctrl-C, and return 0. Raises ConfigError as `page_data` does, before it begins."""
    if arguments.output is not None or arguments.json:
        raise ConfigError("--serve writes no file and prints no data; leave out -o and --json, or --serve")
    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"--port {arguments.port}: expected 0 to {(1 << 16) - 1}")

    def make() -> str:
        return html_page(_title(targets), page_data(targets, time.time()), refresh_s=_REFRESH_S)

    def announce(address: str) -> None:
        print(address, flush=True)
        print("Ctrl-C ends it; from another machine: ssh -L with this port", flush=True)
        if arguments.open:
            # A browser's command line is everybody's to read, and the address is a secret.
            way.write(f'<meta http-equiv="refresh" content="0; url={address}">')
            way.flush()
            webbrowser.open(Path(way.name).as_uri())

    make()
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as way:
        serve_page(make, arguments.port, announce)
    return EXIT_DONE


def page_data(targets: Sequence[Target], now: float, page_folder: Path | None = None) -> Record:
    """Return a page's data: runs side by side, or one sweep. Raises ConfigError for a mixture of both.

    `page_folder`: where the page will lie, for its links; None: it has none.
    """
    sweeps = [target for target in targets if isinstance(target, SweepDir)]
    runs = [target for target in targets if isinstance(target, RunDir)]
    if sweeps and len(targets) > 1:
        raise ConfigError(
            f"RUN {sweeps[0].name} is a sweep, which has a page of its own; name it alone, or its members "
            f"({sweeps[0].name}/000 …)"
        )
    if len(runs) > _MOST_RUNS:
        raise ConfigError(f"{len(runs)} runs: at most {_MOST_RUNS} stand side by side on one page")
    pages = [run_page(read_run(each, now), now, page_folder) for each in runs]
    configs = [page["config"] for page in pages]
    return {
        "version": _VERSION,
        "orchestra": __version__,
        "made": now,
        "runs": pages,
        "differences": differing(configs) if len(configs) > 1 else None,
        "sweep": sweep_page(read_sweep_state(sweeps[0], now)) if sweeps else None,
    }


def _title(targets: Sequence[Target]) -> str:
    return f"orchestra: {', '.join(target.name for target in targets)}"
