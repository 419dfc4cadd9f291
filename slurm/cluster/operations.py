"""What one can do to a cluster: up, down, fail a node, heal it. Each is safe to repeat, and *root only*."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slurm.cluster import configuration, network
from slurm.cluster.commands import run
from slurm.cluster.errors import ClusterError, UsageError
from slurm.cluster.health import is_well, node_states, problems
from slurm.cluster.hosts import (
    NAMESPACES,
    HostState,
    StartingHost,
    claim_names,
    give_name,
    host_state,
    kill_host,
    tail,
)
from slurm.cluster.layout import (
    CONTROLLER,
    MAX_STATE_LENGTH,
    ClusterLayout,
    Settings,
    load_layout,
    record_file,
    this_boot,
)
from slurm.cluster.packages import install_missing, require_namespaces, require_topology

WELL_WITHIN_S = 60.0
POLL_S = 0.1
SYSTEM_TABLES = ("mariadb_system_tables.sql", "mysql_system_tables.sql")


def up(state: Path, settings: Settings) -> tuple[ClusterLayout, bool]:
    """Bring a cluster up, or what is missing of it; returns it, and whether anything had to be done.

    Raises:
        UsageError: a cluster with other settings is up there, or the folder holds something else.
        ClusterError: it could not be brought up; nothing of it is left then.
    """
    settings.check()
    _check_state_folder(state)
    require_namespaces()
    install_missing(settings.accounting)
    require_topology(settings.topology)
    with _locked(state):
        layout = load_layout(state)
        if layout and _is_up(layout, CONTROLLER):
            if layout.settings != settings:
                raise UsageError(
                    f"a cluster with other settings is up in {state}: {layout.settings}; `down` it first"
                )
            return layout, _bring_up_missing(layout)
        if layout:
            _remove(layout)
            state.mkdir()
        return _new_cluster(state, settings), True


def down(state: Path) -> bool:
    """Remove a cluster with everything that runs on it; returns whether there was one."""
    if not record_file(state).exists():
        return False
    with _locked(state):
        layout = load_layout(state)
        if layout:
            _remove(layout)
    return layout is not None


def fail_node(layout: ClusterLayout, node: str) -> None:
    """Let a node fail like one that loses its power: first its link goes, then all its processes."""
    with _locked(layout.state):
        controller = host_state(layout, CONTROLLER)
        if controller and controller.is_alive:
            network.cut_node(controller.pid, node)
        kill_host(layout, node)


def heal_node(layout: ClusterLayout, node: str) -> None:
    """Start a failed node again and wait until Slurm gives it jobs.

    Raises:
        ClusterError: the controller is down, or the node does not come back within 60 s.
    """
    with _locked(layout.state):
        if not _is_alive(layout, CONTROLLER):
            raise ClusterError("the controller is down; bring the cluster up again: `down`, then `up`")
        if not _is_whole(layout, node):
            kill_host(layout, node)
            _start_nodes(layout, [node])
        _wait_until_well(layout, [node])


def _check_state_folder(state: Path) -> None:
    if len(str(state)) > MAX_STATE_LENGTH:
        raise UsageError(
            f"--state {state} has {len(str(state))} characters; sockets lie there: {MAX_STATE_LENGTH} at most"
        )
    if any(character.isspace() or character in "%#\"'," for character in str(state)):
        raise UsageError(f"--state {state}: Slurm's files take no spaces, quotes, commas, # or % in a path")
    for folder in (state, *state.parents):
        if folder.is_dir() and not folder.stat().st_mode & stat.S_IXOTH:
            raise UsageError(
                f"--state {state}: {folder} is closed to other users, whose jobs and daemons need it"
            )
    if state.exists() and not record_file(state).exists() and any(state.iterdir()):
        raise UsageError(f"--state {state} is not empty and holds no cluster; name a new folder")


@contextmanager
def _others_choose_no_slot() -> Iterator[None]:
    """Keep other commands of this machine from choosing a slot. The kernel drops the lock with its holder."""
    folder = os.open(NAMESPACES.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Keep other commands off this cluster. The lock is on the folder itself, which `down` removes."""
    while True:
        state.mkdir(parents=True, exist_ok=True)
        folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if state.exists() and os.path.samestat(os.fstat(folder), state.stat()):
                yield
                return
        finally:
            os.close(folder)


def _new_cluster(state: Path, settings: Settings) -> ClusterLayout:
    """Bring a cluster up in an empty folder, or remove the folder."""
    with _others_choose_no_slot():
        try:
            layout = network.free_slot(ClusterLayout(state, 0, settings, this_boot()))
        except BaseException:
            state.rmdir()
            raise
        with _removed_where_it_fails(layout):
            layout.save()
            claim_names(layout)
    with _removed_where_it_fails(layout):
        _bring_up(layout)
    return layout


@contextmanager
def _removed_where_it_fails(layout: ClusterLayout) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _remove(layout)
        raise


def _bring_up(layout: ClusterLayout) -> None:
    _write_files(layout)
    controller = StartingHost(layout, CONTROLLER)
    pid = controller.wait_for_namespaces()
    give_name(layout, CONTROLLER, pid)
    network.connect_controller(layout, pid)
    controller.start_daemons()
    controller.wait_until_up()
    _start_nodes(layout, layout.nodes)
    _wait_until_well(layout, layout.nodes)
    seen = problems(layout)
    if seen:
        raise ClusterError("the cluster came up, but is not well: " + "; ".join(seen))


def _bring_up_missing(layout: ClusterLayout) -> bool:
    """Start the nodes of a running cluster that are down, or without their daemon; returns whether there were
    any.

    Raises:
        ClusterError: a daemon of the controller has ended.
    """
    controller = host_state(layout, CONTROLLER)
    if controller is not None and (ended := _ended(controller)):
        said = ", ".join(f"{name} {how}" for name, how in ended.items())
        raise ClusterError(f"on the controller: {said}; bring the cluster up again: `down`, then `up`")
    missing = [node for node in layout.nodes if not _is_whole(layout, node)]
    for node in missing:
        kill_host(layout, node)
    _start_nodes(layout, missing)
    _wait_until_well(layout, layout.nodes)
    return bool(missing)


def _is_alive(layout: ClusterLayout, host: str) -> bool:
    state = host_state(layout, host)
    return state is not None and state.is_alive


def _is_up(layout: ClusterLayout, host: str) -> bool:
    """Whether a host runs and all its daemons were started, as after an `up` that was not interrupted."""
    state = host_state(layout, host)
    return state is not None and state.is_alive and state.is_up


def _is_whole(layout: ClusterLayout, host: str) -> bool:
    """Whether a host is up and all its daemons still run."""
    state = host_state(layout, host)
    return state is not None and state.is_alive and state.is_up and not _ended(state)


def _ended(state: HostState) -> dict[str, str]:
    """Return how daemons of a host fare that was up, of those that do not run."""
    return {name: how for name, how in state.services.items() if how not in ("running", "done")}


def _start_nodes(layout: ClusterLayout, nodes: Sequence[str]) -> None:
    """Start nodes beside each other and wait until their daemons are ready."""
    controller = host_state(layout, CONTROLLER)
    if controller is None:
        raise ClusterError("the controller is down")
    starting = [StartingHost(layout, node) for node in nodes]
    pids = {host.host: host.wait_for_namespaces() for host in starting}
    for node, pid in pids.items():
        give_name(layout, node, pid)
    network.connect_nodes(layout, controller.pid, pids)
    for host in starting:
        host.start_daemons()
    for host in starting:
        host.wait_until_up()


def _wait_until_well(layout: ClusterLayout, nodes: Sequence[str]) -> None:
    """Wait until Slurm gives jobs to all these nodes; one that Slurm took for lost is set free."""
    deadline = time.monotonic() + WELL_WITHIN_S
    while True:
        # On a busy machine slurmctld may answer late once; that alone is no failure.
        try:
            states, silence = node_states(layout), ""
        except ClusterError as error:
            states, silence = {}, str(error)
        unwell = {
            node: states.get(node, "unknown") for node in nodes if not is_well(states.get(node, "unknown"))
        }
        if not unwell:
            return
        if time.monotonic() > deadline:
            said = silence or f"Slurm still says {unwell}"
            log = layout.log / "slurmctld.log"
            raise ClusterError(f"after {WELL_WITHIN_S:g} s {said}; the end of {log}:\n{tail(log)}")
        for node, state in unwell.items():
            if state.startswith(("down", "drain")):
                # Slurm refuses where the node has come back by itself meanwhile.
                with suppress(ClusterError):
                    command = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
                    run(command, environment=layout.environment)
        time.sleep(POLL_S)


def _write_files(layout: ClusterLayout) -> None:
    settings = layout.settings
    for folder in (layout.etc, layout.log, layout.munge, layout.devices, layout.memory):
        folder.mkdir(parents=True, exist_ok=True)
    for node in layout.nodes:
        (layout.host_folder(node) / "spool").mkdir(parents=True)
    for number in range(settings.gpus):
        # slurmd takes nothing but device files; these are further names of /dev/null.
        device = layout.devices / f"gpu{number}"
        os.mknod(device, stat.S_IFCHR, os.makedev(1, 3))
        device.chmod(0o666)
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    texts = {
        "slurm.conf": configuration.slurm_conf(layout, memory_mib),
        "gres.conf": configuration.gres_conf(layout),
        "cgroup.conf": configuration.cgroup_conf(),
        "hosts": configuration.hosts_file(layout, socket.gethostname()),
        "resolv.conf": configuration.resolver_file(),
    }
    if settings.topology != "none":
        texts["topology.conf"] = configuration.topology_conf(layout)
    if settings.accounting:
        texts["slurmdbd.conf"] = configuration.slurmdbd_conf(layout)
        texts["accounting.sql"] = configuration.database_sql(_system_tables())
    for name, text in texts.items():
        (layout.etc / name).write_text(text)
    key = layout.munge / "key"
    key.write_bytes(secrets.token_bytes(128))
    for path in (layout.munge, key, layout.log, *layout.etc.glob("slurmdbd.conf")):
        shutil.chown(path, configuration.DAEMON_USER, configuration.DAEMON_USER)
    for secret in (key, *layout.etc.glob("slurmdbd.conf")):
        secret.chmod(0o600)


def _system_tables() -> str:
    for name in SYSTEM_TABLES:
        path = Path("/usr/share/mysql") / name
        if path.exists():
            return path.read_text()
    raise ClusterError(
        f"MariaDB's {' or '.join(SYSTEM_TABLES)} is not in /usr/share/mysql; use --no-accounting"
    )


def _remove(layout: ClusterLayout) -> None:
    """End a cluster's processes and remove its folder; one from before a restart is a folder only."""
    # A second Ctrl-C must not leave half of it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        if layout.boot == this_boot():
            for host in reversed(layout.hosts):
                kill_host(layout, host)
            network.remove_login_link(layout)
            # Where it is not empty, or `ip netns` has mounted it, it is somebody else's too.
            with suppress(OSError):
                NAMESPACES.rmdir()
        shutil.rmtree(layout.state)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
