"""Checks this host: its name, ports, limits, memory that ranks share, and the way to Weights & Biases."""

from __future__ import annotations

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
from collections.abc import Iterator
from pathlib import Path

from launchers.host_network import address_of_interface, free_port, interface_of
from launchers.launch_errors import LauncherError
from orchestra import __version__
from orchestra.doctor.check import Check, Finding, Mark, Subject, bounded
from orchestra.sizes.units import GIB, binary

# Each of torch's look-ups of a peer waits as long.
_SLOW_LOOKUP_S = 1.0
_LOOKUP_LIMIT_S = 15.0
_FEW_FILES = 4096
_SMALL_SHARED_MEMORY_BYTES = GIB
_SHARED_MEMORY = Path("/dev/shm")
_WANDB_HOST = "api.wandb.ai"


def _host_name(_: Subject) -> Iterator[Finding]:
    name = socket.gethostname()
    advice = "put the host's address and name into /etc/hosts, or repair the name server in resolv.conf"
    try:
        answer = bounded(lambda: socket.gethostbyname(name), _LOOKUP_LIMIT_S)
    except OSError as error:
        yield Finding("host name", Mark.warning, f"{name} means no address: {error.strerror}", advice)
        return
    if answer is None:
        silent = f"{name}: no answer from the name server within {_LOOKUP_LIMIT_S:g} s"
        yield Finding("host name", Mark.failed, silent, advice)
        return
    address, seconds = str(answer[0]), answer[1]
    backwards_s = _backwards_s(address)
    interface = interface_of(address)
    found = f"{name} is {address}" + (f" on {interface}" if interface else ", no interface of this host")
    if max(seconds, backwards_s) >= _SLOW_LOOKUP_S:
        slow = f"{found}; looked up in {seconds:.1f} s, backwards in {backwards_s:.1f} s"
        yield Finding("host name", Mark.warning, slow, f"ranks wait as long for each peer: {advice}")
    elif interface is None:
        yield Finding("host name", Mark.warning, found, advice)
    else:
        yield Finding("host name", Mark.ok, f"{found}, looked up in {1000 * seconds:.0f} ms")


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
            advice = "set cluster.network.interface to one that has; nodes may have others than this machine"
            found = f"interface {subject.interface} has no IPv4 address here; there are {names}"
            yield Finding("ports", Mark.failed if subject.launcher == "local" else Mark.note, found, advice)
            return
        address = configured
    try:
        port = free_port()
        with socket.socket() as listener:
            listener.bind((address, port))
            listener.listen()
            with socket.create_connection((address, port), timeout=5):
                yield Finding("ports", Mark.ok, f"{address}:{port} can be listened on and reached")
    except (OSError, LauncherError) as error:
        yield Finding(
            "ports", Mark.failed, f"{address}: {error}", "a firewall or a limit forbids it: ask the site"
        )


def _limits(_: Subject) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"{_shown(soft)} open files (at most {_shown(hard)}), {_locked(locked)} locked memory"
    if 0 <= soft < _FEW_FILES:
        advice = f"many ranks and data files need more: `ulimit -n {_FEW_FILES}`"
        yield Finding("limits", Mark.warning, found, advice)
    else:
        yield Finding("limits", Mark.ok, found)
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").exists():
        advice = (
            "InfiniBand needs unlimited locked memory: ask the site (limits.conf, PropagateResourceLimits)"
        )
        yield Finding("limits", Mark.warning, f"{_locked(locked)} locked memory", advice)


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _locked(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else binary(limit)


def _shared_memory(_: Subject) -> Iterator[Finding]:
    if not _SHARED_MEMORY.is_dir():
        yield Finding("/dev/shm", Mark.warning, "not there", "NCCL needs it: mount a tmpfs there")
        return
    status = os.statvfs(_SHARED_MEMORY)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{binary(size)}, {binary(free)} free"
    if size < _SMALL_SHARED_MEMORY_BYTES:
        advice = "ranks of one node talk through it: start the container with --shm-size=8g or --ipc=host"
        yield Finding("/dev/shm", Mark.warning, found, advice)
    else:
        yield Finding("/dev/shm", Mark.ok, found)


def _wandb(subject: Subject) -> Iterator[Finding]:
    if subject.wandb_mode != "online":
        yield Finding("wandb", Mark.ok, f"mode {subject.wandb_mode}: nothing is sent")
        return
    if not _has_key():
        advice = "type `wandb login`, or use wandb.mode=offline"
        found = f"online, but no WANDB_API_KEY and no key for {_WANDB_HOST} in ~/.netrc"
        yield Finding("wandb", Mark.failed, found, advice)
        return
    try:
        answer = bounded(lambda: socket.create_connection((_WANDB_HOST, 443), 10).close(), 12)
        problem = None if answer is not None else "no answer"
    except OSError as error:
        problem = str(error)
    if problem:
        found = f"a key is there, but {_WANDB_HOST} is not reached from here: {problem}"
        advice = "where the nodes reach it no better use wandb.mode=offline and `wandb sync` later"
        yield Finding("wandb", Mark.warning, found, advice)
    else:
        yield Finding("wandb", Mark.ok, f"online, a key is there, {_WANDB_HOST} is reached")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


CHECKS = (
    Check("host name", _host_name, limit_s=2 * _LOOKUP_LIMIT_S + 5),
    Check("ports", _ports),
    Check("limits", _limits),
    Check("/dev/shm", _shared_memory),
    Check("wandb", _wandb),
)


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
    found = f"{platform.python_version()}, {sys.executable}"
    is_new = sys.version_info >= _OLDEST_PYTHON
    yield Finding("python", Mark.ok if is_new else Mark.failed, found, "" if is_new else "use 3.11 or newer")


def _packages(_: Subject) -> Iterator[Finding]:
    """Look whether the packages that are imported here are those beside `orchestra`."""
    root = Path(__file__).resolve().parents[2]
    yield Finding("orchestra", Mark.ok, f"{__version__} from {root}")
    shadows = {name: where for name in _OWN if (where := _imported_from(name)) != root / name}
    for name, where in shadows.items():
        yield _shadowed(name, where, root)
    if not shadows:
        yield Finding("imports", Mark.ok, f"{', '.join(_OWN)}: those beside orchestra come first")


def _shadowed(name: str, where: Path | None, root: Path) -> Finding:
    if where is None:
        return Finding("imports", Mark.failed, f"no package {name} beside {root}", "install orchestra again")
    return Finding(
        "imports",
        Mark.failed,
        f"a foreign package {name} is imported first: {where}",
        "work in another folder, take its folder out of PYTHONPATH, or set PYTHONSAFEPATH=1",
    )


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
    elif local:
        found = f"{listed}; those in {local[0]} are imported because you are in that folder"
        yield Finding("hydra plugins", Mark.warning, found, "work in another folder if you do not mean them")
    else:
        yield Finding("hydra plugins", Mark.ok, listed)


def _libraries(_: Subject) -> Iterator[Finding]:
    versions = {name: _version(name) for name in _LIBRARIES}
    missing = [name for name, version in versions.items() if version is None]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        yield Finding(
            "libraries", Mark.failed, f"{', '.join(missing)} not installed", "install orchestra again"
        )
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
        yield Finding(
            "torch", Mark.failed, slow, "its file system is slow, or a driver hangs: try nvidia-smi"
        )
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
        return Finding("torch", Mark.failed, f"{', '.join(parts)}, no gloo", "install a build with gloo")
    return Finding("torch", Mark.ok, ", ".join(parts))


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
        found = f"nvidia-smi lists {shown}, torch sees {seen}"
        return Finding("gpus", Mark.failed, found, f"{why}; the driver may be older than torch's CUDA")
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


def _run_dir(subject: Subject) -> Iterator[Finding]:
    place = subject.run_dir.expanduser().absolute()
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
    slow = seconds >= _SLOW_WRITE_S
    found = f"{named}: can be written" + (f", slowly: {seconds:.1f} s for 5 bytes" if slow else "")
    advice = "its server is busy or far away: another run.dir may serve better" if slow else ""
    yield Finding("run.dir", Mark.warning if slow else Mark.ok, found, advice)
    yield from _of_one_host(place, kind, subject)
    yield from _room(folder)
    yield _clock(begin, begin + seconds, written)


def _kind(folder: Path) -> str | None:
    from orchestra.submit.site import file_system_of

    return file_system_of(folder, _MOUNTS.read_text()) if _MOUNTS.exists() else None


def _of_one_host(place: Path, kind: str | None, subject: Subject) -> Iterator[Finding]:
    if subject.launcher == "slurm" and kind in ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"):
        advice = "use a folder on a file system that all nodes mount, such as your home"
        yield Finding(
            "run.dir", Mark.failed, f"{place} is in this machine's memory, the nodes have no part", advice
        )


def _room(folder: Path) -> Iterator[Finding]:
    status = os.statvfs(folder)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    # Some file systems make inodes as they need them and say 0.
    inodes = status.f_favail if status.f_files else None
    found = f"{binary(free)} of {binary(size)} free"
    found += "" if inodes is None else f", {inodes:,} inodes free"
    little = free < _LITTLE_BYTES or (inodes is not None and inodes < _FEW_INODES)
    advice = "checkpoints may not fit: free some, keep fewer (checkpoint.keep_last), or use another run.dir"
    yield Finding("room", Mark.warning if little else Mark.ok, found, advice if little else "")


def _clock(begin: float, end: float, written: float) -> Finding:
    """Compare this host's clock with the one that stamped a file in between; stamps may be whole seconds."""
    off = written - end if written > end else min(0.0, written + 1.0 - begin)
    if abs(off) > _CLOCK_SLACK_S:
        found = (
            f"the file system's clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this host's"
        )
        return Finding(
            "clock", Mark.warning, found, "heartbeats and ages will be wrong: ask for NTP (chronyd)"
        )
    return Finding("clock", Mark.ok, f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, the file system's agrees")


STORAGE_CHECKS = (Check("run.dir", _run_dir),)
