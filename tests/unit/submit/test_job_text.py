"""The batch script as a site's administrator sees it: the annotated example, set-up lines, containers."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import CommandLine

EXAMPLE = Path(__file__).resolve().parents[3] / "slurm" / "example.sbatch"
# What the example says in place of the two things that differ from one submission to the next.
PYTHON = "/shared/ada/venv/bin/python"
TOKEN = "orchestra:0123456789abcdef"
NODES = ("cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.nodes=2")
SMALL = ("submit", *NODES, "run.name=mine", "--dry-run")


@pytest.fixture(autouse=True)
def _no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


def meant(script: str) -> list[str]:
    """Return the lines of a script that do something: Slurm's options and the shell's commands."""
    lines = [line.strip() for line in script.splitlines()]
    return [line for line in lines if line.startswith(("#!", "#SBATCH")) or (line and line[0] != "#")]


def command_of(example: str) -> list[str]:
    """Return the words of the command that the example's head says it was printed by."""
    shown = re.search(r"^#   (orchestra submit .*?--dry-run)$", example, flags=re.MULTILINE | re.DOTALL)
    assert shown is not None
    return shlex.split(shown[1].replace("\n#", " "))[1:-1]


def srun_words(script: str) -> list[str]:
    """Return the words of the script's one line that starts srun."""
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    return shlex.split(line)


def test_annotated_example_is_what_its_command_prints(orchestra: CommandLine) -> None:
    example = EXAMPLE.read_text()
    script = orchestra(*command_of(example), "--dry-run").out.replace(sys.executable, PYTHON)
    assert meant(re.sub(r"orchestra:[0-9a-f]{16}", TOKEN, script)) == meant(example)


def test_set_up_lines_are_the_shells_own_and_run_before_everything_of_ours(
    orchestra: CommandLine, tmp_path: Path
) -> None:
    """With quotes, dollars and pipes, as a site writes them; the script is run with an srun that tells."""
    lines = [
        'source "$HOME/my env/activate"',
        "export NCCL_SOCKET_IFNAME=$(echo ib0 | tr a-z A-Z)",
        "export PYTHONPATH=/site/packages",
    ]
    quoted = ", ".join("'{}'".format(line.replace("'", "''")) for line in lines)
    script = orchestra(*SMALL, f"cluster.setup=[{quoted}]").out
    (tmp_path / "my env").mkdir()
    (tmp_path / "my env" / "activate").write_text("export FROM_ENV=yes\n")
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$FROM_ENV $NCCL_SOCKET_IFNAME $PYTHONPATH $PYTHONSAFEPATH"\n')
    srun.chmod(0o755)
    bash = shutil.which("bash", path="/bin:/usr/bin")
    assert bash is not None
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run([bash], input=script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"yes IB0 {tmp_path}/runs/mine/code:/site/packages 1\n"


def test_options_of_srun_and_variables_in_a_prefix_reach_srun_as_they_are(
    orchestra: CommandLine, tmp_path: Path
) -> None:
    extra = "cluster.srun_extra={cpu-bind: none, no_container_mount_home: true, mpi: null, network: [a, b]}"
    prefix = "cluster.container.prefix='run --name \"a `b` $(c)\" $SITE_IMAGE'"
    setup = 'cluster.setup=["export SITE_IMAGE=\\"/images/of the site.sif\\""]'
    script = orchestra(*SMALL, extra, prefix, setup).out
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert {"--cpu-bind=none", "--no-container-mount-home", "--network=a,b"} <= set(words)
    assert not any(word.startswith("--mpi") for word in words)
    begin = words.index("run")
    assert words[begin : begin + 4] == ["run", "--name", "a `b` $(c)", "/images/of the site.sif"]


def test_where_the_nodes_are_to_lie_is_told_to_sbatch(orchestra: CommandLine) -> None:
    asked = ("cluster.max_switches=2", "cluster.max_switches_wait=90m", "cluster.segment=2")
    script = orchestra(*SMALL, "cluster.nodes=4", *asked).out.splitlines()
    assert {"#SBATCH --switches=2@1:30:00", "#SBATCH --segment=2"} <= set(script)
    assert not any("--switches" in line or "--segment" in line for line in orchestra(*SMALL).out.splitlines())


def test_apptainer_prefix_stands_before_the_command_and_keeps_its_quotes(
    orchestra: CommandLine, tmp_path: Path
) -> None:
    prefix = "cluster.container.prefix='apptainer exec --nv --bind \"/data sets\" image.sif'"
    words = srun_words(orchestra(*SMALL, prefix).out)
    inside = ["env", f"PYTHONPATH={tmp_path}/runs/mine/code", "PYTHONSAFEPATH=1"]
    expected = ["apptainer", "exec", "--nv", "--bind", "/data sets", "image.sif", *inside]
    assert words[words.index("apptainer") :][: len(expected)] == expected
