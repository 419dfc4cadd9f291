"""The node health check as a person calls it: what it finds, what it tells Slurm, how it bears a hang."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.fake_slurm import FakeSlurm

from launchers import processes

PROGRAM = Path(__file__).resolve().parents[3] / "slurm" / "healthcheck"
NODE = "NodeName=n1 Gres=gpu:h100:2(S:0-1) State={state} Reason={reason} [root@2026-01-01T00:00:00]"


def put_scontrol(slurm: FakeSlurm, state: str, reason: str) -> None:
    """Let scontrol show a node."""
    slurm.says("scontrol", prints=NODE.format(state=state, reason=reason))


def told(slurm: FakeSlurm) -> list[str]:
    """Return what scontrol was told."""
    return [call.removeprefix("scontrol ") for call in slurm.calls("scontrol update")]


def check(slurm: FakeSlurm, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the health check of node n1, with nothing configured."""
    words = [sys.executable, str(PROGRAM), "--config", os.devnull, "--node", "n1", *options]
    variables = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60)


def test_old_pythons_of_compute_nodes_can_read_it() -> None:
    ast.parse(PROGRAM.read_text(), feature_version=(3, 6))


def test_healthy_node_is_told_so(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    options = ("--gpus=0", f"--shared={tmp_path}", f"--shared-write={tmp_path}", "--clock=5", "--memory=1M")
    done = check(fake_slurm, *options, "--free=/tmp=1K", "--interface=lo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "healthy\n", "")
    assert [file.name for file in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--shared=/nowhere", "shared /nowhere: is no folder here; is it mounted?"),
        ("--shared-write=/proc", "shared-write /proc: "),
        ("--free=/tmp=9000T", "GiB wanted"),
        ("--memory=9000T", "memory: "),
        ("--interface=eth99", "interface eth99: is not there"),
        ("--infiniband=99", "99 wanted"),
    ],
)
def test_each_thing_that_is_wrong_is_named(fake_slurm: FakeSlurm, option: str, words: str) -> None:
    done = check(fake_slurm, "--gpus=0", "--free=/tmp=1K", option)
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr


def test_gpus_are_counted_against_slurms_and_asked_for_memory_errors(fake_slurm: FakeSlurm) -> None:
    put_scontrol(fake_slurm, "IDLE", "none")
    fake_slurm.put("nvidia-smi", "echo '0, 0, No'; echo '1, [N/A], [N/A]'")
    assert check(fake_slurm, "--free=/tmp=1K").returncode == 0
    fake_slurm.put("nvidia-smi", "echo '0, 3, Yes'")
    wrong = check(fake_slurm, "--free=/tmp=1K").stderr
    assert "nvidia-smi shows 1, 2 wanted" in wrong
    assert "GPU 0: 3 uncorrected memory errors" in wrong
    assert "GPU 0: pages are to be retired" in wrong


@pytest.mark.parametrize(
    ("state", "reason", "is_full", "update"),
    [
        ("IDLE", "none", True, "update NodeName=n1 State=DRAIN Reason=orchestra: free /tmp: "),
        ("IDLE+DRAIN", "orchestra: gone", True, "update NodeName=n1 State=DRAIN Reason=orchestra: free"),
        ("IDLE+DRAIN", "a fan is broken", True, ""),
        ("IDLE+DRAIN", "a fan is broken", False, ""),
        ("IDLE+DRAIN", "orchestra: free /tmp", False, "update NodeName=n1 State=UNDRAIN"),
        ("ALLOCATED", "none", False, ""),
    ],
)
def test_only_drains_of_our_own_are_made_changed_and_taken_back(
    fake_slurm: FakeSlurm, state: str, reason: str, is_full: bool, update: str
) -> None:
    put_scontrol(fake_slurm, state, reason)
    room = "--free=/tmp=9000T" if is_full else "--free=/tmp=1K"
    dry = check(fake_slurm, "--gpus=0", room, "--drain", "--heal", "--dry-run")
    assert ("would run: scontrol update" in dry.stdout, told(fake_slurm)) == (bool(update), [])
    done = check(fake_slurm, "--gpus=0", room, "--drain", "--heal")
    assert done.returncode == int(is_full)
    assert [call.startswith(update) for call in told(fake_slurm)] == ([True] if update else [])


def test_silent_slurm_is_told_by_another_exit_code(fake_slurm: FakeSlurm) -> None:
    fake_slurm.says("scontrol", complains="Unable to contact slurm controller", code=1)
    done = check(fake_slurm, "--gpus=0", "--free=/tmp=1K", "--drain")
    assert (done.returncode, "Slurm could not be told" in done.stderr) == (3, True)


def test_prolog_fails_and_does_not_ask_the_controller(fake_slurm: FakeSlurm) -> None:
    put_scontrol(fake_slurm, "IDLE", "none")
    done = check(fake_slurm, "--gpus=0", "--free=/tmp=9000T", "--drain", SLURM_JOB_ID="7")
    assert (done.returncode, told(fake_slurm)) == (1, [])


def test_configuration_file_holds_the_same_options_and_the_command_line_is_stronger(
    fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    file = tmp_path / "healthcheck.conf"
    file.write_text("# thresholds\ngpus = 0\n\nfree = /tmp=1K  # small\nmemory = 9000T\n")
    assert "memory: " in check(fake_slurm, "--config", str(file)).stderr
    assert check(fake_slurm, "--config", str(file), "--memory=1M").returncode == 0
    file.write_text("fere = /tmp=1K\n")
    wrong = check(fake_slurm, "--config", str(file))
    assert (wrong.returncode, "--fere" in wrong.stderr) == (2, True)


def test_command_that_hangs_is_a_failure_within_its_time(fake_slurm: FakeSlurm) -> None:
    fake_slurm.put("nvidia-smi", "echo $$ > $0.pid; exec sleep 1000")
    done = check(fake_slurm, "--gpus=1", "--free=/tmp=1K", "--timeout=1")
    assert (done.returncode, "gpus: " in done.stderr) == (1, True)
    # A zombie, until somebody collects it, counts as gone.
    assert processes.find(int((fake_slurm.folder / "nvidia-smi.pid").read_text())) is None


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the program as a module that remembers what hangs in a folder of the test's."""
    loader = importlib.machinery.SourceFileLoader("healthcheck", str(PROGRAM))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    specification = importlib.util.spec_from_loader("healthcheck", loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    monkeypatch.setattr(module, "memory_of", lambda name: tmp_path / "memory" / name)
    return module


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Return the id of a process group that a check might have left behind."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def test_check_that_still_hangs_is_not_started_again(
    module: ModuleType, sleeper: int, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "disk").write_text(f"{sleeper} {module.start_of(sleeper)}")
    options = SimpleNamespace(timeout=5.0)
    problems, _ = module.outcome([("disk", begun.touch)], options)
    assert problems == [f"disk: process {sleeper} has hung there since an earlier check"]
    assert not begun.exists()
    (tmp_path / "memory" / "disk").write_text(f"{sleeper} 1")
    assert module.outcome([("disk", lambda: (begun.touch(), [], [])[1:])], options) == ([], [])
    assert begun.exists()
