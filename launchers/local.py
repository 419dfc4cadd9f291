"""Starts an attempt on this machine alone, in the foreground.

What an ending means is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Callable

from launchers.agent import Patience, start_agent, supervise
from launchers.errors import LauncherError
from launchers.ports import free_port
from launchers.spec import Ending, LaunchSpec, Place


def run_local(
    spec: LaunchSpec,
    *,
    verdict: Callable[[Ending], int],
    stops: Callable[[], int],
    tick: Callable[[], None],
    patience: Patience | None = None,
) -> int:
    """Run `spec` to its end on this machine and return what `verdict` makes of the ending: an exit code.

    `stops` counts stop requests (see `launchers.stops`), `tick` is called about ten times a second. Raises
    LauncherError when the spec wants more than one node or torchrun cannot be started.
    """
    if spec.num_nodes != 1:
        raise LauncherError(f"this machine is one node, but {spec.num_nodes} were asked for")
    place = Place(node=0, master_address="127.0.0.1", master_port=free_port())
    agent = start_agent(spec, place, patience)
    return verdict(supervise(agent, stops, tick))
