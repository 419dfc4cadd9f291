"""Hydra's launcher `orchestra`: hands a sweeper's trials to the `orchestra submit -m` that is running it.

Hydra executes this file once more whenever it looks for plugins, and before Python knows the module: it holds
no state, no logic and no dataclass.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

ConfigStore.instance().store(
    group="hydra/launcher",
    name="orchestra",
    node={"_target_": "hydra_plugins.orchestra_launcher.OrchestraLauncher"},
    provider="orchestra",
)


class OrchestraLauncher(Launcher):
    """Submits each batch of trials as one sweep and waits for it."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take nothing: what a run needs is in its overrides."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Return how each trial ended, with its metric. Raises ConfigError outside `orchestra submit -m`."""
        from orchestra.submit.sweeps.sweeper import launch_trials

        return launch_trials(job_overrides, initial_job_idx)
