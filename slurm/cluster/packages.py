"""Which commands a cluster needs and which Debian packages bring them. It installs, and starts nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from slurm.cluster.commands import run
from slurm.cluster.errors import ClusterError, UsageError
from slurm.cluster.services import PATH

INSTALLER = Path(__file__).resolve().parents[2] / ".ci" / "system-packages"
# Where distributions and a plain build put Slurm's plugins, in a folder slurm or slurm-wlm.
PLUGIN_FOLDERS = (
    *Path("/usr/lib").glob("*-linux-gnu"),
    Path("/usr/lib64"),
    Path("/usr/local/lib"),
    Path("/usr/lib"),
)
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core"}


def missing_packages(accounting: bool) -> list[str]:
    """Return the Debian packages whose commands are not here."""
    needed = PACKAGES | (ACCOUNTING_PACKAGES if accounting else {})
    return [package for command, package in needed.items() if shutil.which(command, path=PATH) is None]


def install_missing(accounting: bool) -> None:
    """Install what is missing. *Root only.*

    Raises:
        ClusterError: something is still missing afterwards.
    """
    missing = missing_packages(accounting)
    if not missing:
        return
    print(f"installing {' '.join(missing)}", file=sys.stderr, flush=True)
    if INSTALLER.exists():
        subprocess.run([INSTALLER, *missing], stdout=sys.stderr, check=False)
    still_missing = missing_packages(accounting)
    if still_missing:
        raise ClusterError(
            f"these packages are missing and could not be installed: {' '.join(still_missing)}; "
            "on Debian and Ubuntu: apt-get update && apt-get install --no-install-recommends "
            f"{' '.join(still_missing)}"
        )


def require_namespaces() -> None:
    """Refuse to go on where root may not make namespaces and mount, as in most containers.

    Raises:
        ClusterError: it may not.
    """
    try:
        run(
            [
                "unshare",
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--pid",
                "--fork",
                "mount",
                "-t",
                "proc",
                "proc",
                "/proc",
            ]
        )
    except ClusterError as error:
        raise ClusterError(
            f"root may not make namespaces here ({error}); "
            "use a machine of its own, or a container started with --privileged"
        ) from error


def require_topology(name: str) -> None:
    """Refuse a topology whose plugin this Slurm has not: block came with 23.11.

    Raises:
        UsageError: it has not.
    """
    slurmctld = shutil.which("slurmctld", path=PATH)
    if name == "none" or slurmctld is None:
        return
    plugin = f"topology_{name}.so"
    if not any(any(folder.glob(f"slurm*/{plugin}")) for folder in PLUGIN_FOLDERS):
        version = run([slurmctld, "-V"]).strip()
        raise UsageError(f"--topology {name}: {version} has no {plugin} (block came with 23.11); use tree")
