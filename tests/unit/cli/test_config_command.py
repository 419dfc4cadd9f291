"""What `orchestra config` says of keys and presets, and that the manual's reference says the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from support.command_line import CommandLine

from conf.schema import Config
from orchestra.config.descriptions import described_keys, described_presets, group_names
from orchestra.config.preset_files import GROUPS
from orchestra.errors import EXIT_USAGE

_ROOT = Path(__file__).resolve().parents[3]


def test_a_key_is_explained_by_the_schemas_own_comment(orchestra: CommandLine) -> None:
    assert orchestra("config", "checkpoint.timeout_s").out.splitlines() == [
        "checkpoint.timeout_s=600.0",
        "  accepts  number (seconds)",
        "  Longest wait of a save or a restore for other ranks or for the storage.",
    ]
    found = orchestra.json("config", "checkpoint.when_busy")["keys"]["checkpoint.when_busy"]
    assert (found["accepts"], found["default"]) == ("skip, wait", "skip")
    assert "still being written" in found["meaning"]


def test_a_group_lists_its_presets_and_its_keys_and_a_prefix_what_begins_so(orchestra: CommandLine) -> None:
    group = orchestra("config", "optim").out
    assert all(word in group for word in ("optim=adamw_wsd:", "optim.lr=0.0003", "optim.betas=[0.9,0.95]"))
    assert list(orchestra.json("config", "recovery.loss_sp")["keys"]) == [
        f"recovery.loss_spike.{name}" for name in ("action", "factor", "window")
    ]
    assert "experiment=demo:" in orchestra("config", "experiment").out
    everything = orchestra("config").out
    assert all(f"  {name} " in everything for name in described_keys())


def test_a_key_that_does_not_exist_is_refused_with_the_nearest(orchestra: CommandLine) -> None:
    error = orchestra("config", "train.stepz", code=EXIT_USAGE).err
    assert "did you mean train.steps?" in error


def test_the_reference_of_the_manual_has_the_same_keys_texts_and_presets() -> None:
    file = _ROOT / "docs" / "hooks" / "configuration_reference.py"
    spec = importlib.util.spec_from_file_location("configuration_reference", file)
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    rows = [line for line in hook.reference().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == sorted(described_keys(), key=_in_page_order)
    # Sections without presets have a place too.
    assert {*group_names()} == {*GROUPS, "eval"}
    assert all(f"`model={name}`" in hook.reference() for name in described_presets("model"))
    assert any(key.meaning in row for key in described_keys().values() for row in rows if key.meaning)


def _in_page_order(name: str) -> tuple[int, bool, int]:
    """A section's own keys come before those of the sections inside it."""
    sections = list(Config.__dataclass_fields__)
    names = list(described_keys())
    return sections.index(name.split(".")[0]), name.count(".") > 1, names.index(name)
