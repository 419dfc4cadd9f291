"""Trees as sysfs shows them on the machines that people train on."""

from __future__ import annotations

from pathlib import Path

from launchers.numa import parsed_cores

# GPUs of a DGX H100 as `nvidia-smi` lists them, each with the mlx5 beside it below the same switch.
DGX_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
DGX_ADAPTERS = ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc")
ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in DGX_GPUS)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def processor(root: Path, cores_of_numa: list[str], threads_apart: int) -> None:
    """Write NUMA nodes; cores c and c + threads_apart are threads of one physical core (0: no threads)."""
    for node, text in enumerate(cores_of_numa):
        write(root / f"devices/system/node/node{node}/cpulist", text)
        for core in parsed_cores(text):
            first = core % threads_apart if threads_apart else core
            siblings = f"{first},{first + threads_apart}" if threads_apart else str(core)
            write(root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", siblings)


def device(root: Path, place: str, numa: int, *, adapter: str | None = None) -> None:
    """Write a device at `place`, such as pci0000:15/0000:15:01.0/0000:1b:00.0, with sysfs's links to it."""
    folder = root / "devices" / place
    write(folder / "numa_node", str(numa))
    link = root / "bus/pci/devices" / folder.name
    if adapter is not None:
        link = root / "class/infiniband" / adapter / "device"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


def write_dgx(root: Path) -> None:
    """Write a DGX H100: two sockets with 56 physical cores, four GPUs and four adapters each."""
    processor(root, ["0-55,112-167", "56-111,168-223"], threads_apart=112)
    for place, (gpu, adapter) in enumerate(zip(DGX_GPUS, DGX_ADAPTERS, strict=True)):
        bridge = f"pci0000:{place:02x}/0000:{place:02x}:01.0"
        device(root, f"{bridge}/0000:{gpu}:00.0", place // 4)
        device(root, f"{bridge}/0000:{adapter}:00.0", place // 4, adapter=f"mlx5_{place}")
    # One for storage, on a root complex of its own.
    device(root, "pci0000:80/0000:80:00.0", 1, adapter="mlx5_10")
