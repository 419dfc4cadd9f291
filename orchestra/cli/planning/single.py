"""`orchestra plan [overrides]` without more: one configuration, predicted and printed."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from orchestra.errors import EXIT_DONE

if TYPE_CHECKING:
    from conf.schema import Config
    from orchestra.plan.prediction import Prediction


def run(arguments: Namespace) -> int:
    """Print the prediction and return 0. Raises ConfigError for what cannot be predicted."""
    from orchestra.cli.planning import view

    config, prediction = predicted(arguments)
    if arguments.json:
        print(json.dumps(view.facts(config, prediction), indent=2))
        return EXIT_DONE
    for line in view.lines(config, prediction):
        print(line)
    if not prediction.fits:
        _note_what_would_help(config, prediction)
    _note_what_was_assumed(arguments.overrides, prediction)
    return EXIT_DONE


def predicted(arguments: Namespace) -> tuple[Config, Prediction]:
    """Return the configuration that the command line gives, and what is predicted of it."""
    from orchestra.cli.planning.cpu import measure_if_needed
    from orchestra.config.compose import compose
    from orchestra.config.situation import Situation
    from orchestra.plan.cases.assemble import case_of, for_planning
    from orchestra.plan.prediction import predict

    config = compose(for_planning(arguments.overrides), Situation("plan")).config
    measure_if_needed(config)
    return config, predict(case_of(config, arguments.framework or "orchestra"))


def _note_what_would_help(config: Config, prediction: Prediction) -> None:
    """Say what saves enough memory; where a stage is idle, no memory helps."""
    from orchestra.config.situation import Situation
    from orchestra.plan.cases.stages import has_idle_stage
    from orchestra.submit.fitting import advice

    case = prediction.case
    found = None if has_idle_stage(case.stages) else advice(config, Situation("plan"), case.framework.name)
    if found is not None:
        print(f"note: {found}", file=sys.stderr)


def _note_what_was_assumed(typed: list[str], prediction: Prediction) -> None:
    if any(each.startswith(("cluster", "+cluster", "experiment=")) for each in typed):
        return
    case = prediction.case
    words = f"one node of {case.devices_per_node} {case.device.name}"
    print(f"note: {words} assumed (cluster.nodes, cluster.hardware)", file=sys.stderr)
