"""Checks what is installed: Python, our own packages and who shadows them, torch, the libraries of commands.

It never imports torch: another process is asked, and given up when it takes too long.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from orchestra import __version__
from orchestra.doctor.check import Check, Finding, Mark, Subject

_OWN = ("conf", "launchers", "checkpointing")
_OLDEST_PYTHON = (3, 11)
_LIBRARIES = ("hydra-core", "omegaconf", "submitit", "fsspec", "safetensors", "wandb")
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


CHECKS = (
    Check("python", _python),
    Check("orchestra", _packages),
    Check("hydra plugins", _plugins),
    Check("libraries", _libraries),
    Check("torch", _torch, limit_s=_TORCH_LIMIT_S + 25),
)
