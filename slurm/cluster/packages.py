"""Which commands a cluster needs and which Debian packages bring them. It installs, and starts nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from slurm.cluster.commands import run
from slurm.cluster.errors import ClusterError
from slurm.cluster.services import PATH

INSTALLER = Path(__file__).resolve().parents[2] / ".ci" / "system-packages"
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
