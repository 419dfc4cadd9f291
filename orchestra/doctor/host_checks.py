"""Checks this host: its name, ports, limits, memory that ranks share, and the way to Weights & Biases."""

from __future__ import annotations

import configparser
import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import netrc
import os
import platform
import resource
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from launchers import LauncherError
from launchers.host_network import address_of_interface, interface_of, listener
from orchestra import __version__
from orchestra.doctor.check import Check, Finding, Mark, Subject, bounded, graded
from orchestra.run.permissions import loose_folders
from orchestra.sizes.units import GIB, binary

# Each of torch's look-ups of a peer waits as long.
_SLOW_LOOKUP_S = 1.0
_LOOKUP_LIMIT_S = 15.0
_FEW_FILES = 4096
_SMALL_SHARED_MEMORY_BYTES = GIB
_SHARED_MEMORY = Path("/dev/shm")


def _host_name(_: Subject) -> Iterator[Finding]:
    name = socket.gethostname()
    advice = "put the host's address and name into /etc/hosts, or repair the name server in resolv.conf"
    try:
        answer = bounded(lambda: socket.gethostbyname(name), _LOOKUP_LIMIT_S)
    except OSError as error:
        yield Finding("host name", Mark.warning, f"{name} has no address: {error.strerror}", advice)
        return
    if answer is None:
        silent = f"{name}: no answer from the name server within {_LOOKUP_LIMIT_S:g} s"
        yield Finding("host name", Mark.failed, silent, advice)
        return
    address, seconds = str(answer[0]), answer[1]
    backwards_s = _backwards_s(address)
    interface = interface_of(address)
    place = f"{name} is {address}" + (f" on {interface}" if interface else ", no interface of this host")
    if max(seconds, backwards_s) >= _SLOW_LOOKUP_S:
        slow = f"{place}; looked up in {seconds:.1f} s, backwards in {backwards_s:.1f} s"
        yield Finding("host name", Mark.warning, slow, f"ranks wait as long for each peer: {advice}")
    else:
        quick = f"{place}, looked up in {1000 * seconds:.0f} ms"
        yield graded("host name", quick, is_bad=interface is None, advice=advice)


def _backwards_s(address: str) -> float:
    """Return how long it takes to ask for the name of an address; whether it has one does not matter."""
    try:
        answer = bounded(lambda: socket.gethostbyaddr(address), _LOOKUP_LIMIT_S)
    except OSError:
        # Refused at once is quick.
        return 0.0
    return _LOOKUP_LIMIT_S if answer is None else answer[1]


def _ports(subject: Subject) -> Iterator[Finding]:
    address = "127.0.0.1"
    if subject.interface is not None:
        configured = address_of_interface(subject.interface)
        if configured is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            missing = f"interface {subject.interface} has no IPv4 address here; there are {names}"
            advice = "set cluster.network.interface to one that has; nodes may have others than this machine"
            yield Finding("ports", Mark.failed if subject.launcher == "local" else Mark.note, missing, advice)
            return
        address = configured
    try:
        with listener(address) as listening:
            port = listening.getsockname()[1]
            with socket.create_connection((address, port), timeout=5):
                yield Finding("ports", Mark.ok, f"{address}:{port} can be listened on and reached")
    except (OSError, LauncherError) as error:
        advice = "a firewall or a limit forbids it: ask the site"
        yield Finding("ports", Mark.failed, f"{address}: {error}", advice)


def _limits(_: Subject) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory = _shown(locked, binary)
    limits = f"{_shown(soft)} open files (at most {_shown(hard)}), {memory} locked memory"
    advice = f"many ranks and data files need more: `ulimit -n {_FEW_FILES}`"
    yield graded("limits", limits, is_bad=0 <= soft < _FEW_FILES, advice=advice)
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").exists():
        advice = (
            "InfiniBand needs unlimited locked memory: ask the site (limits.conf, PropagateResourceLimits)"
        )
        yield Finding("limits", Mark.warning, f"{memory} locked memory", advice)


def _shown(limit: int, shape: Callable[[int], str] = "{:,}".format) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else shape(limit)


def _shared_memory(_: Subject) -> Iterator[Finding]:
    if not _SHARED_MEMORY.is_dir():
        yield Finding("/dev/shm", Mark.warning, "not there", "NCCL needs it: mount a tmpfs there")
        return
    status = os.statvfs(_SHARED_MEMORY)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    advice = "ranks of one node exchange data in it: start the container with --shm-size=8g or --ipc=host"
    is_small = size < _SMALL_SHARED_MEMORY_BYTES
    yield graded("/dev/shm", f"{binary(size)}, {binary(free)} free", is_bad=is_small, advice=advice)


def _wandb(subject: Subject) -> Iterator[Finding]:
    if subject.wandb_mode != "online":
        yield Finding("wandb", Mark.ok, f"mode {subject.wandb_mode}: nothing is sent")
        return
    server = _wandb_server()
    host = urlsplit(server).netloc
    if not _has_key(host):
        missing = f"online, but no WANDB_API_KEY and no key for {host} in ~/.netrc"
        yield Finding("wandb", Mark.failed, missing, "type `wandb login`, or use wandb.mode=offline")
        return
    try:
        answer = bounded(lambda: _answers(server), 12)
        problem = None if answer is not None else "no answer"
    except (OSError, ValueError, http.client.HTTPException) as error:
        problem = str(getattr(error, "reason", error))
    reached = f"not reached from here: {problem}" if problem else "reached"
    advice = "if the nodes cannot reach it either, use wandb.mode=offline and `wandb sync` later"
    yield graded("wandb", f"online, a key is there, {host} is {reached}", is_bad=bool(problem), advice=advice)


def _wandb_server() -> str:
    """Return the address of the server that wandb sends to: the site's own where one is set."""
    settings = configparser.ConfigParser(interpolation=None)
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        # Where `wandb login --host` writes it.
        settings.read_string((folder / "settings").read_text())
    chosen = os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback="")
    return chosen or "https://api.wandb.ai"


def _answers(server: str) -> None:
    """Ask a server for anything, by the proxy that the environment names, as wandb does."""
    try:
        request = urllib.request.Request(server, method="HEAD")
        urllib.request.build_opener().open(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        # Whatever it says of this page.
        error.close()


def _has_key(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# Checks what is installed: Python, our own packages and who shadows them, torch, the libraries of commands.
#
# It never imports torch: another process is asked, and given up when it takes too long.


_OWN = ("conf", "launchers", "checkpointing")
_OLDEST_PYTHON = (3, 11)
_LIBRARIES = ("hydra-core", "omegaconf", "fsspec", "safetensors", "wandb")
_TORCH_LIMIT_S = 60.0
_ASK_TORCH = """
import json, torch, torch.distributed as dist
nccl = None
if torch.cuda.is_available():
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
    "gloo": dist.is_available() and dist.is_gloo_available(), "nccl": nccl,
    "nccl_built": dist.is_available() and dist.is_nccl_available(),
    "names": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
}))
"""


def _python(_: Subject) -> Iterator[Finding]:
    version = f"{platform.python_version()}, {sys.executable}"
    is_old = sys.version_info < _OLDEST_PYTHON
    yield graded("python", version, is_bad=is_old, advice="use 3.11 or newer", mark=Mark.failed)


def _packages(_: Subject) -> Iterator[Finding]:
    """Look whether the packages that are imported here are those beside `orchestra`."""
    root = Path(__file__).resolve().parents[2]
    yield Finding("orchestra", Mark.ok, f"{__version__} from {root}")
    places = {name: _imported_from(name) for name in _OWN}
    if all(where == root / name for name, where in places.items()):
        yield Finding("imports", Mark.ok, f"{', '.join(_OWN)}: those beside orchestra come first")
    for name, where in places.items():
        if where is None:
            missing = f"no package {name} beside {root}"
            yield Finding("imports", Mark.failed, missing, "install orchestra again")
        elif where != root / name:
            foreign = f"a foreign package {name} is imported first: {where}"
            advice = "work in another folder, take its folder out of PYTHONPATH, or set PYTHONSAFEPATH=1"
            yield Finding("imports", Mark.failed, foreign, advice)


def _imported_from(name: str) -> Path | None:
    """Return the folder of the package that `import name` gives here."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [spec.origin or ""])
    return Path(places[0]).resolve()


def _plugins(_: Subject) -> Iterator[Finding]:
    """Name what Hydra will load: it imports every module in every folder `hydra_plugins` of the path."""
    spec = importlib.util.find_spec("hydra_plugins")
    if spec is None:
        yield Finding("hydra plugins", Mark.ok, "none")
        return
    here = Path.cwd().resolve()
    folders = [Path(place).resolve() for place in spec.submodule_search_locations or []]
    own = Path(__file__).resolve().parents[2]
    known = (own / "hydra_plugins", own / "launchers" / "plugin" / "hydra_plugins")
    names = sorted({file.stem for folder in folders for file in folder.iterdir() if file.suffix == ".py"})
    listed = ", ".join(names) or "none"
    local = [folder for folder in folders if folder.parent == here and folder not in known]
    if spec.origin is not None:
        hidden = f"{spec.origin} hides all other plugins of Hydra's"
        yield Finding("hydra plugins", Mark.warning, hidden, "remove that __init__.py")
    else:
        why = f"; those in {local[0]} are imported because you are in that folder" if local else ""
        advice = "work in another folder if you do not mean them"
        yield graded("hydra plugins", f"{listed}{why}", is_bad=bool(local), advice=advice)


def _libraries(_: Subject) -> Iterator[Finding]:
    versions = {name: _version(name) for name in _LIBRARIES}
    missing = [name for name, version in versions.items() if version is None]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        absent = f"{', '.join(missing)} not installed"
        yield Finding("libraries", Mark.failed, absent, "install orchestra again")
    if listed:
        yield Finding("libraries", Mark.ok, listed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(subject: Subject) -> Iterator[Finding]:
    version = _version("torch")
    if version is None:
        yield Finding("torch", Mark.failed, "not installed", "install torch 2.11 or newer for your CUDA")
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=_TORCH_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        slow = f"{version}: importing it took more than {_TORCH_LIMIT_S:g} s"
        advice = "its file system is slow, or a driver hangs: try nvidia-smi"
        yield Finding("torch", Mark.failed, slow, advice)
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding("torch", Mark.failed, f"{version} cannot be imported: {last}", "install it again")
        return
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    yield _torch_itself(facts)
    yield _gpus(facts, _listed_gpus(), subject)


def _torch_itself(facts: dict[str, object]) -> Finding:
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "no CUDA in this build"
    parts = [str(facts["version"]), cuda, *(["gloo"] if facts["gloo"] else [])]
    if facts["nccl_built"]:
        parts.append(f"NCCL {facts['nccl']}" if facts["nccl"] else "NCCL")
    if not facts["gloo"]:
        parts.append("no gloo")
    build = ", ".join(parts)
    advice = "install a build with gloo"
    return graded("torch", build, is_bad=not facts["gloo"], advice=advice, mark=Mark.failed)


def _listed_gpus() -> list[str] | None:
    """Return the GPUs that nvidia-smi lists; None where there is no nvidia-smi or it does not work."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]


def _gpus(facts: dict[str, object], listed: list[str] | None, subject: Subject) -> Finding:
    names = facts["names"] if isinstance(facts["names"], list) else []
    seen, shown = len(names), 0 if listed is None else len(listed)
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    is_limited = "CUDA_VISIBLE_DEVICES" in os.environ
    if seen == shown and seen:
        return Finding("gpus", Mark.ok, f"{kinds}; nvidia-smi lists as many")
    if seen < shown and not (is_limited and seen):
        why = "this build of torch has no CUDA" if not facts["cuda"] else "look at CUDA_VISIBLE_DEVICES"
        differs = f"nvidia-smi lists {shown}, torch sees {seen}"
        return Finding("gpus", Mark.failed, differs, f"{why}; the driver may be older than torch's CUDA")
    if seen:
        by = " (CUDA_VISIBLE_DEVICES)" if is_limited else ""
        return Finding("gpus", Mark.ok, f"{kinds}; nvidia-smi lists {shown}{by}")
    if subject.launcher == "local" and subject.device == "cuda":
        advice = "use cluster.device=cpu, or a machine with GPUs"
        return Finding("gpus", Mark.failed, "none, but cluster.device=cuda", advice)
    return Finding("gpus", Mark.note, "none on this machine: ranks here compute on the CPU")


SOFTWARE_CHECKS = (
    Check("python", _python),
    Check("orchestra", _packages),
    Check("hydra plugins", _plugins),
    Check("libraries", _libraries),
    Check("torch", _torch, limit_s=_TORCH_LIMIT_S + 25),
)


# Checks the folder of the runs: whether it can be written, its file system, its room and its clock.


_LITTLE_BYTES = 20 * GIB
_FEW_INODES = 100_000
_CLOCK_SLACK_S = 2.0
_SLOW_WRITE_S = 1.0
_MOUNTS = Path("/proc/self/mountinfo")


def nearest_folder(path: Path) -> Path:
    """Return the folder itself or, where it does not exist yet, the nearest above it that does."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _no_folder(path: Path) -> Path | None:
    """Return what is in the way of a folder: a file, or a link to nothing; None where nothing is."""
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    return None if there.is_dir() else there


def _run_dir(subject: Subject) -> Iterator[Finding]:
    place = subject.run_dir.expanduser().absolute()
    if (obstacle := _no_folder(place)) is not None:
        problem = f"{place}: {obstacle} is no folder, and none can be made there"
        yield Finding("run.dir", Mark.failed, problem, "choose another run.dir")
        return
    folder = nearest_folder(place)
    kind = _kind(folder)
    new = "" if folder == place else f" (to be made in {folder})"
    named = f"{place}{new}, {kind}" if kind else f"{place}{new}"
    probe = folder / f".orchestra-doctor-{secrets.token_hex(4)}"
    begin = time.time()
    try:
        with probe.open("w") as file:
            file.write("probe")
            file.flush()
            os.fsync(file.fileno())
        seconds = time.time() - begin
        written = probe.stat().st_mtime
    except OSError as error:
        advice = "choose another run.dir, or make room for it there"
        yield Finding("run.dir", Mark.failed, f"{named}: cannot write: {error.strerror}", advice)
        return
    finally:
        probe.unlink(missing_ok=True)
    is_slow = seconds >= _SLOW_WRITE_S
    speed = f", slowly: {seconds:.1f} s for 5 bytes" if is_slow else ""
    advice = "its server is busy or far away: another run.dir may be faster"
    yield graded("run.dir", f"{named}: can be written{speed}", is_bad=is_slow, advice=advice)
    for sentence in loose_folders(place, subject.group):
        found, _, advice = sentence.partition("; ")
        yield Finding("run.dir", Mark.warning, found, advice)
    if subject.launcher == "slurm" and kind in ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"):
        advice = "use a folder on a file system that all nodes mount, such as your home"
        yield Finding("run.dir", Mark.failed, f"{place} is in this machine's memory: no node sees it", advice)
    yield _room(folder)
    yield _clock(begin, begin + seconds, written)


def _fallback(subject: Subject) -> Iterator[Finding]:
    from checkpointing.checkpoint_errors import CheckpointError
    from checkpointing.storage import open_storage

    place = subject.fallback_dir
    if place is None:
        return
    try:
        storage, probe = open_storage(place), f".orchestra-doctor-{secrets.token_hex(4)}"
        is_new = not storage.names()
        storage.put(probe, b"probe")
        storage.remove(probe)
        if is_new and "://" not in place:
            Path(place).rmdir()
    except (CheckpointError, OSError) as error:
        advice = "choose another checkpoint.fallback_dir, or make it writable"
        yield Finding("fallback", Mark.failed, f"{place}: cannot write: {error}", advice)
        return
    folders = [nearest_folder(path) for path in (Path(place), subject.run_dir)] if "://" not in place else []
    is_same = len(folders) == 2 and folders[0].stat().st_dev == folders[1].stat().st_dev
    same = ", but it is on the file system of run.dir" if is_same and not subject.own_checkpoints else ""
    advice = "what fills up or goes away there does so here: give a folder on another storage"
    yield graded("fallback", f"{place}: can be written{same}", is_bad=bool(same), advice=advice)


def _kind(folder: Path) -> str | None:
    from orchestra.submit.site import file_system_of

    return file_system_of(folder, _MOUNTS.read_text()) if _MOUNTS.exists() else None


def _room(folder: Path) -> Finding:
    status = os.statvfs(folder)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    # Some file systems make inodes as they need them and say 0.
    inodes = status.f_favail if status.f_files else None
    room = f"{binary(free)} of {binary(size)} free"
    room += "" if inodes is None else f", {inodes:,} inodes free"
    is_little = free < _LITTLE_BYTES or (inodes is not None and inodes < _FEW_INODES)
    advice = "checkpoints may not fit: free some, keep fewer (checkpoint.keep_last), or use another run.dir"
    return graded("room", room, is_bad=is_little, advice=advice)


def _clock(begin: float, end: float, written: float) -> Finding:
    """Compare this host's clock with the one that stamped a file in between; stamps may be whole seconds."""
    off = written - end if written > end else min(0.0, written + 1.0 - begin)
    if abs(off) <= _CLOCK_SLACK_S:
        return Finding("clock", Mark.ok, f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, the file system's agrees")
    side = "ahead of" if off > 0 else "behind"
    wrong = f"the file system's clock is {abs(off):.1f} s {side} this host's"
    return Finding("clock", Mark.warning, wrong, "heartbeats and ages will be wrong: ask for NTP (chronyd)")


CHECKS = (
    Check("run.dir", _run_dir),
    Check("fallback", _fallback),
    Check("host name", _host_name, limit_s=2 * _LOOKUP_LIMIT_S + 5),
    Check("ports", _ports),
    Check("limits", _limits),
    Check("/dev/shm", _shared_memory),
    Check("wandb", _wandb),
)
