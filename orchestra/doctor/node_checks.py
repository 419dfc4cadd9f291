"""Checks the nodes themselves: srun starts a probe on each, and what they answer is compared.

It asks for nodes at once or not at all, and whatever happens gives them back within its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launchers import LauncherError
from launchers.slurm.cluster import node_states
from launchers.slurm.commands import output_of, scrubbed
from orchestra.doctor import node_probe
from orchestra.doctor.check import Check, Finding, Mark, Subject, graded
from orchestra.doctor.host_checks import nearest_folder

Answer = Mapping[str, Any]

_ALLOCATION_S = 60
_PROBE_S = 20
_LIMIT_S = _ALLOCATION_S + 2 * _PROBE_S + 20
_CLOCK_SLACK_S = 1.0
_SLOW_LOOKUP_S = 1.0
_SHOWN_LINES = 3
# Said in the shell before Python, which may be missing there.
_WRAPPER = '[ -x "$1" ] || { echo "$(hostname): no Python at $1" >&2; exit 127; }\nexec "$@"'


def check_nodes(num_nodes: int) -> Check:
    """Return the check of so many nodes, chosen by Slurm within the configuration's partition and limits."""
    return Check("nodes", lambda subject: _nodes(subject, num_nodes), limit_s=_LIMIT_S + 30.0)


def _nodes(subject: Subject, num_nodes: int) -> Iterator[Finding]:
    if (too_many := _too_many(subject, num_nodes)) is not None:
        yield too_many
        return
    root = Path(__file__).resolve().parents[2]
    folder = nearest_folder(subject.run_dir) / f".orchestra-doctor-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        (folder / node_probe.LOGIN).touch()
        words, said = _asked(subject, num_nodes, folder, root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    answers = _answers(words)
    if len(answers) < num_nodes:
        yield _silent(answers, num_nodes, said)
    if answers:
        yield from judged(answers, root, subject, Path(sys.executable))


def _too_many(subject: Subject, num_nodes: int) -> Finding | None:
    """Return that there are fewer nodes at all; None where Slurm does not say, which srun then will."""
    try:
        known = len(node_states(subject.partition or None))
    except LauncherError:
        return None
    if not 0 < known < num_nodes:
        return None
    where = f"partition {subject.partition}" if subject.partition else "the default partition"
    found = f"{where} has {known} node{'s' if known > 1 else ''}, {num_nodes} were asked for"
    return Finding("nodes", Mark.failed, found, f"ask for at most {known}")


def _asked(subject: Subject, num_nodes: int, folder: Path, root: Path) -> tuple[str, str]:
    """Run the probe on the nodes; return what they printed and what srun said. No job remains."""
    name = folder.name.removeprefix(".")
    wishes = {"folder": str(folder), "interface": subject.interface, "wait_s": _PROBE_S}
    source = Path(node_probe.__file__).read_text()
    setup = "\n".join([*subject.setup, _WRAPPER])
    command = (*_srun(subject, num_nodes, name), "/bin/bash", "-c", setup, "bash", sys.executable)
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [*command, "-c", source, json.dumps(wishes)],
        env={**scrubbed(os.environ), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        return process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        words, said = process.communicate()
        return words, f"{said}\nsrun had not ended after {_LIMIT_S} s"
    finally:
        process.kill()
        if process.returncode:
            # Where that fails the job's own time limit ends it.
            with contextlib.suppress(LauncherError):
                output_of(("scancel", f"--name={name}"))


def _srun(subject: Subject, num_nodes: int, name: str) -> Iterator[str]:
    yield from ("srun", "--mpi=none", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1")
    yield from (f"--job-name={name}", f"--immediate={_ALLOCATION_S}", "--time=2", "--chdir=/", "--export=ALL")
    if subject.device == "cuda" and subject.ranks_per_node:
        yield f"--gpus-per-node={subject.ranks_per_node}"
    for option, value in subject.slurm_options:
        dashed = option.removeprefix("--").replace("_", "-")
        if value is True:
            yield f"--{dashed}"
        elif value not in (None, False, ""):
            listed = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            yield f"--{dashed}={listed}"


def _answers(words: str) -> list[Answer]:
    lines = (line for line in words.splitlines() if line.startswith(node_probe.PREFIX))
    answers = [json.loads(line.removeprefix(node_probe.PREFIX)) for line in lines]
    return sorted(answers, key=lambda answer: int(answer["node"]))


def _silent(answers: Sequence[Answer], num_nodes: int, said: str) -> Finding:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    words = "; ".join(lines[-_SHOWN_LINES:]) or "srun said nothing"
    advice = "look at the nodes that are missing"
    if not answers:
        advice = "try again when nodes are free, or with fewer; see cluster.partition, cluster.slurm_extra"
    count = f"{len(answers)} of {num_nodes} nodes answered"
    heard = f" ({_hosts(answers)})" if answers else ""
    return Finding("nodes", Mark.failed, f"{count}{heard}: {words}", advice)


def judged(answers: Sequence[Answer], root: Path, subject: Subject, python: Path) -> Iterator[Finding]:
    """Yield what the nodes' answers say, each node by its name. Pure."""
    yield Finding("nodes", Mark.ok, f"{len(answers)} answered: {_hosts(answers)}")
    if subject.in_container:
        yield Finding("nodes' python", Mark.note, "ranks run in a container, which was not looked into")
    else:
        yield from _software(answers, root, python)
    yield _shared(answers, subject.run_dir)
    yield from _reached(answers)
    yield from _gpus(answers, subject)


def _hosts(answers: Iterable[Answer]) -> str:
    return ", ".join(str(answer["host"]) for answer in answers)


def _software(answers: Sequence[Answer], root: Path, python: Path) -> Iterator[Finding]:
    versions = {str(answer["python"]) for answer in answers}
    differ = len(versions) > 1
    each = ", ".join(f"{answer['host']} {answer['python']}" for answer in answers)
    listed = each if differ else f"{versions.pop()} at {python} on all"
    advice = "use the same environment on all nodes"
    yield graded("nodes' python", listed, is_bad=differ, advice=advice, mark=Mark.failed)
    problems = [
        f"{answer['host']}: {answer.get('packages_problem') or _elsewhere(answer, root)}"
        for answer in answers
        if answer.get("packages_problem") or answer.get("root") != str(root) or not answer.get("torch")
    ]
    listed = "; ".join(problems) or f"from {root} on all, and torch is installed"
    advice = "put the tree and the environment on a file system that all nodes mount (see cluster.setup)"
    yield graded("nodes' orchestra", listed, is_bad=bool(problems), advice=advice, mark=Mark.failed)


def _elsewhere(answer: Answer, root: Path) -> str:
    if not answer.get("torch"):
        return "torch is not installed"
    return f"orchestra comes from {answer.get('root')}, not {root}"


def _shared(answers: Sequence[Answer], run_dir: Path) -> Finding:
    """Every node is to see the file of each other one, and the login node's."""
    names = {f"node-{answer['node']}": str(answer["host"]) for answer in answers}
    names[node_probe.LOGIN] = "this machine"
    problems = []
    for answer in answers:
        if answer.get("folder_problem"):
            problems.append(f"{answer['host']} cannot write there ({answer['folder_problem']})")
            continue
        missing = [name for name in names if name not in answer.get("saw", [])]
        if missing:
            problems.append(f"{answer['host']} sees nothing of {', '.join(names[name] for name in missing)}")
    if problems:
        advice = "use a run.dir on a file system that all nodes and this machine mount"
        unshared = f"{run_dir} is not shared: {'; '.join(problems)}"
        return Finding("shared run.dir", Mark.failed, unshared, advice)
    slowest = max(float(answer.get("saw_after_s", 0)) for answer in answers)
    return Finding("shared run.dir", Mark.ok, f"all see each other's files, the last after {slowest:.1f} s")


def _reached(answers: Sequence[Answer]) -> Iterator[Finding]:
    first = answers[0]
    others = [answer for answer in answers if answer["node"] != 0]
    if first.get("address_problem"):
        problem = f"{first['host']}: {first['address_problem']}"
        yield Finding("nodes' network", Mark.failed, problem, "set cluster.network.interface")
        return
    lost = [answer for answer in others if answer.get("reached") is False]
    silent = [answer for answer in others if "reached" not in answer]
    if lost:
        listed = "; ".join(f"{answer['host']}: {answer['reach_problem']}" for answer in lost)
        advice = "a firewall between the nodes, or the wrong network: set cluster.network.interface"
        yield Finding("nodes' network", Mark.failed, listed, advice)
    elif silent:
        unchecked = f"{_hosts(silent)} did not learn where {first['host']} listens: not checked"
        yield Finding("nodes' network", Mark.note, unchecked, "share run.dir first")
    elif others:
        yield Finding("nodes' network", Mark.ok, f"all reach {first['host']} at {first.get('address')}")
    yield from _clocks([answer for answer in others if "clock_offset_s" in answer], first)
    yield from _lookups(others)


def _clocks(others: Sequence[Answer], first: Answer) -> Iterator[Finding]:
    wrong = [answer for answer in others if abs(answer["clock_offset_s"]) > _CLOCK_SLACK_S]
    if wrong:
        listed = ", ".join(f"{answer['host']} {answer['clock_offset_s']:+.1f} s" for answer in wrong)
        off = f"against {first['host']}: {listed}"
        yield Finding("nodes' clocks", Mark.warning, off, "ask the site for NTP (chronyd) on these nodes")
    elif others:
        most = max(abs(answer["clock_offset_s"]) for answer in others)
        yield Finding("nodes' clocks", Mark.ok, f"at most {1000 * most:.1f} ms from {first['host']}'s")


def _lookups(others: Sequence[Answer]) -> Iterator[Finding]:
    slow = [answer for answer in others if answer.get("lookup_s", 0.0) >= _SLOW_LOOKUP_S]
    if slow:
        listed = ", ".join(f"{answer['host']} {answer['lookup_s']:.1f} s" for answer in slow)
        advice = "every start waits as long for each peer: put the nodes into /etc/hosts"
        yield Finding("nodes' look-ups", Mark.warning, f"slow name look-ups: {listed}", advice)


def _gpus(answers: Sequence[Answer], subject: Subject) -> Iterator[Finding]:
    counts = {str(answer["host"]): int(answer["gpus"]) for answer in answers if "gpus" in answer}
    wanted = subject.ranks_per_node if subject.device == "cuda" else None
    short = [f"{host} {count}" for host, count in counts.items() if wanted and count < wanted]
    if short:
        fewer = f"fewer GPUs than cluster.gpus_per_node={wanted}: {', '.join(short)}"
        yield Finding("nodes' gpus", Mark.failed, fewer, "exclude these nodes, or lower it")
    elif len(set(counts.values())) > 1:
        listed = ", ".join(f"{host} {count}" for host, count in counts.items())
        advice = "choose alike ones: cluster.constraint"
        yield Finding("nodes' gpus", Mark.note, f"not alike: {listed}", advice)
    elif counts:
        count = next(iter(counts.values()))
        none = "none seen; cluster.device=cuda cluster.gpus_per_node=N asks for N on each"
        yield Finding("nodes' gpus", Mark.ok, f"{count} on each" if count else none)
