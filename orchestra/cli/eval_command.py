"""`orchestra eval RUN [STEP]`: the loss of a checkpoint on held-out data. Reads the run, starts nothing on a
cluster.
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import replace
from typing import Any

from conf.schema import Config
from orchestra.cli.checkpoint.checkpoint_ls_command import add_run_arguments, open_place
from orchestra.cli.checkpoint.checkpoint_process import ask
from orchestra.cli.text import figures
from orchestra.config.machine import Situation, absolute, data_parallel
from orchestra.config.rules.eval_rules import rule_eval_data
from orchestra.data.held_out import HELD_OUT, held_out_data
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.report.run_state import name_of

_EXPLAINED = """\
Without --data the sources are the run's (eval.data), and the numbers those of its training:

  orchestra eval RUN
  orchestra eval RUN 1000 --data wiki=packed/wiki --data code=packed/code

It runs on this machine in one process, on a GPU where there is one.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, step_help="default: the newest that is intact")
    parser.add_argument(
        "--data",
        action="append",
        metavar="NAME=PREFIX",
        help="token files in the place of the run's own held-out data; may be repeated",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="N",
        help="global batches of each source, or `all` (default: eval.steps)",
    )
    parser.add_argument("--json", action="store_true", help="print the losses as JSON")
    parser.epilog = _EXPLAINED


def _steps(text: str) -> int | str:
    if text == "all" or (text.isdecimal() and int(text) > 0):
        return text if text == "all" else int(text)
    raise ArgumentTypeError(f"{text!r}: give a number above 0, or all")


def run(arguments: Namespace) -> int:
    """Evaluate and return 0. Raises ConfigError where there is nothing to evaluate on."""
    place = open_place(arguments.run, arguments.dir)
    config = _with_data(place.config, arguments.data)
    steps = config.eval.steps if arguments.steps is None else arguments.steps
    request = {
        "eval_data": config.eval.data,
        "eval_steps": None if steps == "all" else steps,
        "dp": data_parallel(config) or 1,
    }
    step, found = ask(place, arguments.step, "eval", request)
    record = {"run": name_of(place.run), "step": step, **found}
    print(json.dumps(record) if arguments.json else "\n".join(_lines(record)))
    return EXIT_DONE


def _with_data(config: Config, given: list[str] | None) -> Config:
    """Return the configuration with what --data says, checked as a run's would be."""
    if given:
        pairs = [text.partition("=") if "=" in text else (HELD_OUT, "=", text) for text in given]
        named: dict[str, Any] = {name: {"path": absolute(path)} for name, _, path in pairs}
        if len(named) < len(pairs):
            names = [name for name, _, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"--data: two sources are called {twice}; name each: --data NAME=PREFIX")
        config = replace(config, eval=replace(config.eval, data=named))
    problems = list(rule_eval_data(config, Situation("run")))
    if not problems and not held_out_data(config):
        problems = ["the run has no held-out data; give --data NAME=PREFIX, what `orchestra data pack` wrote"]
    if problems:
        raise ConfigError(problems)
    return config


def _lines(record: dict[str, Any]) -> list[str]:
    rows = [
        (name, figures.loss(loss), f"{math.exp(min(loss, 700.0)):,.2f}", f"{record['tokens'][name]:,}")
        for name, loss in record["losses"].items()
    ]
    table = figures.fitting_table(("SOURCE", "LOSS", "PERPLEXITY", "TOKENS"), rows, None, ())
    return [f"step {record['step']} of {record['run']}, nats per token", *table.splitlines()]
