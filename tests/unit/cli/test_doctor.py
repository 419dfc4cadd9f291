"""`orchestra doctor` on a machine without Slurm, and its judgement of what nodes answered."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine

from launchers.slurm.cluster import NodeKind, Partition
from launchers.slurm.commands import parsed_settings
from orchestra.doctor import host_checks, node_probe, slurm_checks
from orchestra.doctor.check import Check, Finding, Mark, Subject, perform
from orchestra.doctor.node_checks import judged
from orchestra.doctor.node_probe import Probe

ROOT = Path(__file__).parents[3]


@pytest.fixture
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Slurm's commands out of sight, and torch unasked: importing it costs seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_checks, "SOFTWARE_CHECKS", host_checks.SOFTWARE_CHECKS[:-1])


def findings(orchestra: CommandLine, *words: str, code: int = 0) -> dict[str, dict[str, str]]:
    record = orchestra.json("doctor", *words, code=code)
    assert record["ok"] == (code == 0), record
    return {finding["name"]: finding for finding in record["findings"]}


@pytest.mark.usefixtures("_quick")
def test_healthy_machine_passes_and_nothing_is_left_behind(tmp_path: Path, orchestra: CommandLine) -> None:
    found = findings(orchestra)
    assert (found["slurm"]["mark"], found["run.dir"]["mark"]) == ("note", "ok"), found
    assert {"python", "orchestra", "imports", "libraries", "clock", "host name", "ports"} <= set(found)
    assert list(tmp_path.iterdir()) == []
    lines = orchestra("doctor").out.splitlines()
    assert all(len(line) <= 80 or "/" in line for line in lines)
    assert " ok, " in lines[-1]


@pytest.mark.usefixtures("_quick")
def test_a_fallback_on_the_file_system_of_the_runs_is_warned_of(
    tmp_path: Path, orchestra: CommandLine
) -> None:
    found = findings(orchestra, f"checkpoint.fallback_dir={tmp_path}/second")["fallback"]
    assert (found["mark"], "file system of run.dir" in found["found"]) == ("warning", True)
    assert list(tmp_path.iterdir()) == []
    words = (f"checkpoint.fallback_dir={tmp_path}/second", f"checkpoint.dir={tmp_path}/first")
    assert findings(orchestra, *words)["fallback"]["mark"] == "ok"


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("override", "name", "words"),
    [
        ("cluster=slurm", "slurm", "sbatch"),
        ("wandb.mode=online", "wandb", "WANDB_API_KEY"),
        ("cluster.network.interface=nowhere0", "ports", "no IPv4 address"),
        ("run.dir=/proc/nowhere", "run.dir", "cannot write"),
        ("checkpoint.fallback_dir=/proc/nowhere", "fallback", "cannot write"),
    ],
)
def test_what_is_missing_fails_with_advice(
    override: str, name: str, words: str, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    finding = findings(orchestra, override, code=1)[name]
    assert (finding["mark"], words in finding["found"]) == ("failed", True), finding
    assert finding["advice"]


class Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.usefixtures("_quick")
def test_wandbs_own_server_and_the_way_through_a_proxy_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        for own, is_proxy in ((host, False), ("wandb.invalid", True)):
            (tmp_path / "netrc").write_text(f"machine {own} login user password secret\n")
            (tmp_path / "wandb").mkdir(exist_ok=True)
            (tmp_path / "wandb/settings").write_text(f"[default]\nbase_url = http://{own}\n")
            if is_proxy:
                monkeypatch.setenv("http_proxy", f"http://{host}")
            found = findings(orchestra, "wandb.mode=online")["wandb"]
            assert (found["mark"], f"{own} is reached" in found["found"]) == ("ok", True), found
        server.shutdown()


@pytest.mark.usefixtures("_quick")
def test_the_cluster_of_the_home_is_checked_and_asks_for_no_slurm_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.setenv("ORCHESTRA_CONFIG_DIR", str(tmp_path / "home"))
    (tmp_path / "home" / "cluster").mkdir(parents=True)
    (tmp_path / "home" / "config.yaml").write_text(f"searchpath: [{tmp_path}/home]\ncluster: lab\n")
    preset = "launcher: slurm\nnetwork: {interface: nowhere0}\n"
    (tmp_path / "home" / "cluster" / "lab.yaml").write_text(preset)
    found = findings(orchestra)
    assert ("nowhere0" in found["ports"]["found"], found["slurm"]["mark"]) == (True, "note")
    assert "nowhere0" not in findings(orchestra, "cluster=local")["ports"]["found"]
    assert findings(orchestra, "cluster=lab", code=1)["slurm"]["mark"] == "failed"


@pytest.mark.usefixtures("_quick")
def test_wrong_override_ends_with_2(orchestra: CommandLine) -> None:
    orchestra("doctor", "cluster.nods=2", code=2)
    orchestra("doctor", "--nodes", "0", code=2)


def test_foreign_conf_in_the_working_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "__init__.py").touch()
    only = "from orchestra.doctor import host_checks as h; h.SOFTWARE_CHECKS = h.SOFTWARE_CHECKS[:-1]"
    code = f"{only}; from orchestra.cli import main; raise SystemExit(main(['doctor', '--json']))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(ROOT)]), "PATH": str(tmp_path)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert str(tmp_path / "conf") in found["imports"]["found"]
    assert found["configuration"]["mark"] == "failed"
    assert found["host name"]["mark"] != "failed"


def test_broken_and_hanging_checks_are_failures_of_their_own() -> None:
    gate = threading.Event()

    def breaks(_: Subject) -> list[Finding]:
        raise RuntimeError("no such luck")

    def hangs(_: Subject) -> list[Finding]:
        gate.wait()
        return []

    works = Check("works", lambda _: [Finding("works", Mark.ok, "fine")])
    first, *others = perform([Check("breaks", breaks), Check("hangs", hangs, limit_s=0.2), works], Subject())
    gate.set()
    assert (first.name, first.mark, "no such luck" in first.found) == ("breaks", Mark.failed, True)
    assert [(each.name, each.mark) for each in others] == [("hangs", Mark.failed), ("works", Mark.ok)]


def probed(*folders: Path) -> list[dict[str, Any]]:
    """Run one probe per folder at the same time, each a node with that run.dir; return their answers."""
    probes = [
        Probe({"folder": str(folder), "interface": "lo", "wait_s": 1.5}, node, len(folders))
        for node, folder in enumerate(folders)
    ]
    with ThreadPoolExecutor(len(probes)) as pool:
        answers = list(pool.map(Probe.look, probes))
    return [{**answer, "host": f"node{number}"} for number, answer in enumerate(answers, start=1)]


def marks(answers: list[dict[str, Any]], run_dir: Path) -> dict[str, Finding]:
    found = judged(answers, ROOT, Subject(run_dir=run_dir), Path(sys.executable))
    return {finding.name: finding for finding in found}


@pytest.mark.slow
def test_node_with_a_folder_of_its_own_is_named(tmp_path: Path) -> None:
    shared, own, nowhere = tmp_path / "shared", tmp_path / "own", tmp_path / "nowhere"
    shared.mkdir()
    own.mkdir()
    (shared / node_probe.LOGIN).touch()
    found = marks(probed(shared, own, nowhere), tmp_path)["shared run.dir"]
    assert found.mark is Mark.failed
    assert "node1 sees nothing of node2, node3" in found.found
    assert "node2 sees nothing of node1, node3, this machine" in found.found
    assert "node3 cannot write there (it is not there)" in found.found


def test_unreachable_late_and_different_nodes_are_named(tmp_path: Path) -> None:
    names = [node_probe.LOGIN, "node-0", "node-1"]
    usual = {"python": "3.11", "orchestra": "1", "root": str(ROOT), "torch": True, "saw": names, "gpus": 4}
    first = {**usual, "node": 0, "host": "a", "address": "10.0.0.1"}
    other = {**usual, "node": 1, "host": "b", "reached": False, "reach_problem": "10.0.0.1:1: refused"}
    other |= {"python": "3.12", "root": "/elsewhere", "gpus": 3}
    found = marks([first, other], tmp_path)
    failed = {name for name, finding in found.items() if finding.mark is Mark.failed}
    assert failed == {"nodes' python", "nodes' orchestra", "nodes' network"}
    assert found["nodes' gpus"].mark is Mark.note
    late = {**usual, "node": 1, "host": "b", "reached": True, "clock_offset_s": -7.2, "lookup_s": 4.0}
    found = marks([first, late], tmp_path)
    assert (found["nodes' clocks"].mark, "b -7.2 s" in found["nodes' clocks"].found) == (Mark.warning, True)
    assert found["nodes' look-ups"].mark is Mark.warning


def test_settings_of_a_cluster_that_matter_are_told() -> None:
    lines = ("ClusterName = big", "JobRequeue = 0", "KillWait = 2 sec", "MaxArraySize = 1", " not a setting")
    setup = parsed_settings("\n".join(lines))
    found = {finding.name: finding for finding in slurm_checks._rules(setup)}
    assert "cluster.requeue=chain" in found["requeueing"].advice
    assert [found[name].mark for name in ("requeueing", "kill wait", "arrays")] == [Mark.note] * 3
    assert "array of its own" in found["arrays"].advice
    none = {finding.name: finding for finding in slurm_checks._rules({**setup, "MaxArraySize": "0"})}[
        "arrays"
    ]
    assert (none.mark, "submit the runs one by one" in none.advice) == (Mark.note, True)
    assert slurm_checks._accounting(setup).mark is Mark.note


def test_partitions_without_usable_nodes_and_unknown_ones_are_named() -> None:
    nodes = (NodeKind(3, 8, 4, "down*"), NodeKind(1, 8, 4, "drained"))
    partitions = [Partition("main", True, True, "1:00:00", nodes), Partition("old", False, False, "1:00", ())]
    default, closed = slurm_checks._partitions(partitions, Subject())
    assert (default.mark, "0 of 4 nodes usable" in default.found) == (Mark.warning, True)
    assert closed.mark is Mark.note
    unknown, *_ = slurm_checks._partitions(partitions, Subject(partition="mian"))
    assert (unknown.mark, "main, old" in unknown.found) == (Mark.failed, True)


def test_gpus_that_torch_does_not_see_are_a_failure() -> None:
    facts = {"names": [], "cuda": None}
    assert host_checks._gpus(facts, ["GPU 0: A"], Subject()).mark is Mark.failed
    assert host_checks._gpus(facts, None, Subject()).mark is Mark.note
    assert host_checks._gpus(facts, None, Subject(device="cuda")).mark is Mark.failed
    assert host_checks._gpus({"names": ["A"], "cuda": "12"}, ["GPU 0: A"], Subject()).mark is Mark.ok


def test_slow_names_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> str:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    (found,) = host_checks._host_name(Subject())
    assert (found.mark, "/etc/hosts" in found.advice) == (Mark.warning, True)


def test_a_file_where_runs_are_to_lie_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for path in ("notes.txt", "notes.txt/runs", "gone"):
        (found,) = host_checks.CHECKS[0].look(Subject(run_dir=tmp_path / path))
        assert found.mark is Mark.failed, path
        assert "is no folder, and none can be made there" in found.found
    _, room, _ = host_checks.CHECKS[0].look(Subject(run_dir=tmp_path / "new/runs"))
    assert room.name == "room"
