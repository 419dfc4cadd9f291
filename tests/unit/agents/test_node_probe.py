"""What a node finds when it looks at itself: real places, real processes that hang, nvidia-smi's answers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, Device
from launchers.memory_store.store import OWN, folders_of, open_copy_store
from orchestra.agents.node_check import probe
from orchestra.agents.node_check.own_check import ProbeFindings, ProbeProcess, copies_name, wishes_of
from orchestra.run.paths import RunDir

GENEROUS_S = 60.0
ROW = {
    "index": "0",
    "memory.total": "81559",
    "memory.used": "4",
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.pending": "[N/A]",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}


def found_by(check: ProbeProcess) -> ProbeFindings:
    check.begin()
    found = check.settle(GENEROUS_S)
    assert found is not None
    return found


def test_a_sound_node_is_fit_and_says_what_was_measured(tmp_path: Path) -> None:
    check = ProbeProcess({"folder": str(tmp_path), "rooms": [str(tmp_path)], "gpus": 0})
    found = found_by(check)
    assert found.unfit == ()
    assert found.facts["core_s"] > 0
    assert abs(found.facts["clock_ahead_s"]) < 60
    assert list(tmp_path.iterdir()) == []
    assert check.last is found
    facts = found.facts_of_member()
    assert facts["unfit"] is None
    assert json.loads(json.dumps(facts)) == facts


def test_a_place_that_is_missing_makes_a_node_unfit(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    found = found_by(ProbeProcess({"folder": str(missing), "rooms": [str(missing)], "gpus": 0}))
    assert sorted(it.partition(" ")[0].rstrip(":") for it in found.unfit) == [str(missing)] * 2
    assert any("is no folder here" in it for it in found.unfit)


@pytest.mark.mount
def test_a_full_place_makes_a_node_unfit(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    try:
        assert probe.room(str(place)) == {}
        (place / "file").write_bytes(bytes(1020 * 1024))
        assert "free" in probe.room(str(place))["unfit"]
        # Where all nodes write no single one is to blame.
        (place / "more").write_bytes(b"")
        with pytest.raises(OSError, match="No space left"):
            (place / "more").write_bytes(bytes(65536))
        found = probe.keeps_a_file(str(place))
        assert "unfit" not in found
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.mount
def test_the_runs_own_copies_in_memory_leave_a_place_as_free_as_it_was(tmp_path: Path) -> None:
    place, run = tmp_path / "small", RunDir(tmp_path / "runs" / "mine")
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    try:
        store = open_copy_store(copies_name(run), "here", place)
        (store.folder / OWN / "rank-00000.slot-0.bin").write_bytes(bytes(1000 * 1024))
        assert "free" in probe.room(str(place))["unfit"]
        own = str(folders_of(copies_name(run), place))
        assert probe.room(str(place), own) == {}
        others = str(folders_of(copies_name(RunDir(tmp_path / "elsewhere" / "mine")), place))
        assert "free" in probe.room(str(place), others)["unfit"]
        store.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_place_that_forbids_writing_makes_a_node_unfit() -> None:
    assert "unfit" in probe.keeps_a_file("/proc")


def test_what_hangs_is_found_out_and_does_not_hang_the_agent(tmp_path: Path) -> None:
    # Opening a pipe that nobody writes to waits for ever, as a dead file server does.
    program = tmp_path / "nvidia-smi"
    os.mkfifo(tmp_path / "pipe")
    program.write_text(f"#!/bin/sh\nread line < {tmp_path}/pipe\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    wishes = {"folder": str(tmp_path), "rooms": [], "gpus": 2}
    check = ProbeProcess(wishes, limit_s=2.0)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}{os.pathsep}{path}"
    try:
        found = found_by(check)
    finally:
        os.environ["PATH"] = path
    assert found.unfit == ("devices: no answer within 2 s",)
    assert "core_s" in found.facts
    assert not check.is_running
    # What it called is gone as well.
    deadline = time.monotonic() + GENEROUS_S
    while _named(program) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _named(program) == []


def _named(program: Path) -> list[str]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [line for line in lines if str(program) in line]


def test_looking_never_blocks_and_there_is_one_look_at_a_time(tmp_path: Path) -> None:
    check = ProbeProcess({"folder": str(tmp_path), "rooms": [], "gpus": 0})
    assert check.look() is None
    check.begin()
    first = check._process
    check.begin()
    assert check._process is first
    assert check.settle(0.0) is None
    check.close()
    assert not check.is_running
    assert first is not None
    assert first.returncode is not None


def test_a_look_that_was_killed_says_nothing_against_the_node(tmp_path: Path) -> None:
    check = ProbeProcess({"folder": str(tmp_path), "rooms": [], "gpus": 0})
    check.begin()
    assert check._process is not None
    check._process.kill()
    assert check.settle(GENEROUS_S) in (None, check.last)
    assert check.last is None or check.last.unfit == ()


def test_the_probe_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    place = tmp_path / "alone.py"
    place.write_text(Path(probe.__file__).read_text())
    wishes = json.dumps({"folder": str(tmp_path), "rooms": ["/tmp"], "gpus": 0})
    words = [sys.executable, "-I", "-S", str(place), wishes]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [name for name, _ in probe.checks(json.loads(wishes))]
    assert sorted(json.loads(line)["check"] for line in lines) == sorted(names)


@pytest.mark.parametrize(
    ("stamp", "ahead_s"),
    [(1000.5, 0.0), (1000.0, 0.0), (999.2, 0.0), (1001.5, -0.5), (990.0, 9.0), (1031.0, -30.0)],
)
def test_clocks_are_compared_as_finely_as_a_stamp_in_whole_seconds_allows(
    stamp: float, ahead_s: float
) -> None:
    assert probe.clock_ahead_s(1000.0, 1001.0, stamp) == ahead_s


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"ecc.errors.uncorrected.volatile.total": "2"}, "2 uncorrected memory errors"),
        ({"remapped_rows.pending": "Yes"}, "waits for a reset"),
        ({"remapped_rows.failure": "1"}, "waits for a reset"),
        ({"memory.used": "40000"}, "40000 of 81559 MiB in use"),
        ({"clocks_throttle_reasons.hw_slowdown": "Active"}, "slowed down"),
        ({"pcie.link.width.current": "4"}, "4 of 16 PCIe lanes"),
    ],
)
def test_each_sign_of_a_bad_device_is_a_doubt(changed: dict[str, str], word: str) -> None:
    found = probe.judged_devices([ROW, {**ROW, "index": "1", **changed}], 2)
    assert word in found["doubt"]
    assert "device 1" in found["doubt"]
    assert "unfit" not in found


def test_devices_without_answers_to_newer_questions_are_sound() -> None:
    bare = {**dict.fromkeys(ROW, "[N/A]"), "index": "0"}
    assert probe.judged_devices([ROW], 1) == {"facts": {"devices": 1}}
    assert "doubt" not in probe.judged_devices([bare], 1)
    assert "doubt" not in probe.judged_devices([{k: ROW[k] for k in probe._ALWAYS}], 1)


def test_too_few_devices_make_a_node_unfit() -> None:
    assert probe.judged_devices([ROW], 2)["unfit"] == "nvidia-smi shows 1 devices, 2 are needed"


def test_an_older_nvidia_smi_is_asked_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase \"$*\" in *remapped*) echo 'Field is not a valid field to query.'; exit 2;; esac\n"
        "echo '0, 81559, 4, 0'\necho '1, 81559, 4, 3'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert probe.devices(2)["doubt"] == "device 1 has 3 uncorrected memory errors"


def test_only_failures_of_devices_within_the_last_day_are_signs() -> None:
    day_us = 24 * 3600 * 10**6
    now = 10 * day_us
    lines = [
        f"3,1,{now - 5},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n",
        f"3,2,{now - 4},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n",
        # A program's own mistakes.
        f"3,3,{now - 3},-;NVRM: Xid (PCI:0000:86:00): 31, pid=2, MMU Fault\n",
        f"3,4,{now - 2 * day_us},-;NVRM: Xid (PCI:0000:af:00): 48, pid=3, DBE\n",
        "garbage",
        f"6,5,{now - 1},-;eth0: link up\n",
    ]
    assert probe.signs_of_failure(lines, now) == "Xid 79 of device PCI:0000:3b:00"


def test_devices_are_looked_at_where_the_run_wants_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    on_cuda = Config(cluster=ClusterConfig(device=Device.cuda, gpus_per_node=8))
    assert wishes_of(on_cuda, run)["gpus"] == 8
    assert wishes_of(on_cuda, run)["copies"] == str(folders_of(copies_name(run)))
    assert wishes_of(Config(cluster=ClusterConfig(device=Device.cpu, gpus_per_node=2)), run)["gpus"] == 0
