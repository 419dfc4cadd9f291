"""What breaks the rules about going back and computing again, and words of the sentence that then appears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GOING_BACK: list[tuple[str, dict[str, Any], Sequence[str]]] = [
    ("rule_sizes", {"recovery.roll_back.skip_steps": 0}, ["recovery.roll_back.skip_steps=0", "1 or more"]),
    ("rule_sizes", {"recovery.roll_back.steps_before": 0}, ["recovery.roll_back.steps_before=0"]),
    ("rule_sizes", {"recovery.roll_back.max_in_a_row": 0}, ["recovery.roll_back.max_in_a_row=0"]),
    ("rule_sizes", {"recovery.replay_every_steps": 0}, ["recovery.replay_every_steps=0"]),
    (
        "rule_numbers",
        {"recovery.replay_every_steps": 5, "recovery.replay_tolerance": 0.0},
        ["recovery.replay_tolerance=0.0"],
    ),
    (
        "rule_roll_back",
        {"recovery.loss_spike.action": "roll_back", "checkpoint.every_steps": None},
        ["recovery.loss_spike.action=roll_back", "checkpoint.every_steps=null", "skip"],
    ),
    (
        "rule_roll_back",
        {"train.on_nonfinite": "roll_back", "recovery.max_restarts": 0},
        ["train.on_nonfinite=roll_back", "recovery.max_restarts=0"],
    ),
    ("rule_replay", {"recovery.replay_tolerance": 0.1}, ["replay_tolerance=0.1", "replay_every_steps"]),
    (
        "rule_replay",
        {"recovery.replay_every_steps": 5, "parallelism.zero": 3},
        ["replay_every_steps=5", "parallelism.zero=3", "parallelism.zero=2 or less"],
    ),
    (
        "rule_replay",
        {"recovery.replay_every_steps": 5, "cluster.gpus_per_node": 1},
        ["replay_every_steps=5", "one data-parallel rank"],
    ),
    (
        "rule_replay",
        {"recovery.replay_every_steps": 5, "cluster.gpus_per_node": 4, "parallelism.tp": 4},
        ["replay_every_steps=5", "one data-parallel rank"],
    ),
    (
        "rule_replay",
        {"recovery.replay_every_steps": 5, "cluster.device": "cuda"},
        ["replay_every_steps=5", "train.deterministic=true", "recovery.replay_tolerance"],
    ),
    (
        "rule_replay",
        {"recovery.replay_every_steps": 5, "recovery.max_restarts": 0},
        ["replay_every_steps=5", "recovery.max_restarts=0"],
    ),
]
