"""Equal signatures for runs that compute the same, different ones for all others."""

from __future__ import annotations

import re
from dataclasses import replace

from conf.schema import Config, OptimConfig, RunConfig, WandbConfig, WandbMode
from orchestra.config.machine import signature


def test_a_signature_is_at_least_twelve_hexadecimal_digits() -> None:
    assert re.fullmatch(r"[0-9a-f]{12,}", signature(Config()))


def test_name_place_and_onlookers_do_not_change_it() -> None:
    run = RunConfig(name="other", dir="elsewhere")
    wandb = WandbConfig(mode=WandbMode.disabled)
    assert signature(replace(Config(), run=run, wandb=wandb)) == signature(Config())


def test_any_value_that_counts_changes_it() -> None:
    assert signature(replace(Config(), optim=OptimConfig(lr=1e-3))) != signature(Config())
    assert signature(replace(Config(), optim=OptimConfig(betas=[0.9, 0.96]))) != signature(Config())
