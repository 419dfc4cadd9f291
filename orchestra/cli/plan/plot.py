"""`orchestra plan … --plot FILE`: memory by component on each pipeline stage and where a step's time goes.

A .png or .svg picture, or an .html page with the picture and its numbers in it. It predicts nothing.
"""

from __future__ import annotations

import html
import io
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cli.plan.output import check_target, named
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.sizes.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from conf.schema import Config
    from orchestra.plan.predict import Prediction

NAME = "plot"
OPTIONS: tuple[str, ...] = ()
EXPLAINED = """\
--plot writes a picture of one configuration: .png, .svg, or .html with the numbers beside it.
"""

_WIDTH_INCHES = 9.0
# Stages beyond these are all alike but for the ends, and would be too thin to read.
_MOST_STAGES = 16
_PAGE = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60rem; margin: 2rem auto; }}
svg {{ width: 100%; height: auto; }}
pre {{ overflow-x: auto; }}
</style>
<h1>{title}</h1>
{picture}
<pre>{numbers}</pre>
</html>
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --plot."""
    parser.add_argument("--plot", type=named, metavar="FILE", help="draw it: .png, .svg or .html")


def run(arguments: Namespace) -> int:
    """Write the picture and return 0. Raises ConfigError before anything is written."""
    from orchestra.cli.plan.one_layout import predicted

    target: Path = arguments.plot
    write = _WRITERS.get(target.suffix.lower())
    if write is None:
        raise ConfigError(f"--plot {target}: {target.suffix or 'no ending'}; use {', '.join(_WRITERS)}")
    if arguments.json:
        raise ConfigError("--plot draws and --json prints; ask for one of them")
    check_target("--plot", target)
    config, prediction = predicted(arguments)
    write(_figure(prediction), target, config, prediction)
    print(f"drawn to {target}", file=sys.stderr)
    return EXIT_DONE


def _figure(prediction: Prediction) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; `pip install 'orchestra-train[plots]'`"
        ) from error
    num_bars = min(len(prediction.stages), _MOST_STAGES)
    heights = [1.2 + 0.35 * num_bars, 1.6]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 1.6), layout="constrained")
    memory, time = figure.subplots(2, 1, height_ratios=heights)
    figure.suptitle(_title(prediction))
    _draw_memory(memory, prediction)
    _draw_time(time, prediction)
    return figure


def _draw_memory(axes: Axes, prediction: Prediction) -> None:
    from orchestra.cli.plan.one_layout import components

    stages = list(enumerate(prediction.stages, 1))
    shown = [*stages[: _MOST_STAGES - 1], stages[-1]] if len(stages) > _MOST_STAGES else stages
    names = [f"stage {number}" if len(stages) > 1 else "a rank" for number, _ in shown]
    rows = [components(memory) for _, memory in shown]
    _stack(axes, names, {part: [row[part] / GIB for row in rows] for part in rows[0]})
    limit = prediction.case.device.memory_bytes / GIB
    axes.axvline(limit, color="black", linestyle="--", linewidth=1)
    above = axes.get_xaxis_transform()
    axes.text(limit, 1.0, f"{limit:.1f} GiB", ha="right", va="bottom", fontsize="small", transform=above)
    axes.set_xlabel("GiB at the peak")


def _draw_time(axes: Axes, prediction: Prediction) -> None:
    from orchestra.cli.plan.one_layout import parts_of_time

    _stack(axes, ["a step"], {part: [seconds] for part, seconds in parts_of_time(prediction.time).items()})
    axes.set_xlabel("seconds")


def _stack(axes: Axes, names: list[str], parts: dict[str, list[float]]) -> None:
    """Draw a horizontal bar for each name, made of the parts that are not nothing."""
    reached = [0.0] * len(names)
    for part, values in parts.items():
        if max(values) > 0:
            axes.barh(names, values, left=reached, height=0.7, label=part)
            reached = [begin + value for begin, value in zip(reached, values, strict=True)]
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(prediction: Prediction) -> str:
    case = prediction.case
    words = f"{case.model.name} on {case.layout.world_size:,} × {case.device.name}"
    rate = f"{prediction.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {prediction.mfu:.0%}"
    return f"{words}: {rate}, {'fits' if prediction.fits else 'does not fit'}"


def _write_picture(figure: Figure, target: Path, *_: Any) -> None:
    figure.savefig(target, dpi=150)


def _write_page(figure: Figure, target: Path, config: Config, prediction: Prediction) -> None:
    from orchestra.cli.plan.one_layout import lines

    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    # Behind the XML head, which has no place inside a page.
    drawn = picture.getvalue()
    target.write_text(
        _PAGE.format(
            title=html.escape(_title(prediction)),
            picture=drawn[drawn.index("<svg") :],
            numbers=html.escape("\n".join(lines(config, prediction))),
        ),
        encoding="utf-8",
    )


_WRITERS: dict[str, Callable[[Figure, Path, Config, Prediction], None]] = {
    ".png": _write_picture,
    ".svg": _write_picture,
    ".html": _write_page,
}
