"""`python -m orchestra.train.network FOLDER`: what torchrun starts on every rank to measure the network.

FOLDER is laid out like a run directory and its frozen configuration says device and interface; rank 0 leaves
the result there. It trains nothing and knows no cluster.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path

from orchestra.network import RESULT_NAME, Measurement, to_record
from orchestra.rundir import RunDir
from orchestra.train.__main__ import die_with_parent, ignore_scheduler_signals, redirect_output

# A peer that is silent for so long will not come.
_TIMEOUT_S = 120.0


def main(argv: list[str]) -> None:
    """Take part as this process's rank; ends the process at once when all is written."""
    die_with_parent()
    ignore_scheduler_signals()
    folder = RunDir(Path(argv[0]).resolve())
    redirect_output(folder.rank_log(0, int(os.environ.get("RANK", "0"))))
    measurement = _measurement(folder)
    if measurement is not None:
        draft = folder.path / f".{RESULT_NAME}"
        draft.write_text(json.dumps(to_record(measurement), indent=2) + "\n")
        draft.replace(folder.path / RESULT_NAME)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo's that outlive the interpreter could take the process along (see orchestra.train).
    os._exit(0)


def _measurement(folder: RunDir) -> Measurement | None:
    """Measure all that these ranks can. *Collective*. Return the result on rank 0, None on the others."""
    import torch
    import torch.distributed as dist

    from orchestra.frozen import read_config
    from orchestra.parallel.mesh import choose_device, rank_environment
    from orchestra.train.bandwidth import measure, scopes

    ranks = rank_environment()
    device = choose_device(read_config(folder.config).cluster.device, ranks.local_rank)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=_TIMEOUT_S),
        device_id=device if on_gpu else None,
    )
    hosts: list[str] = [""] * ranks.world_size
    dist.all_gather_object(hosts, platform.node())
    links = [
        measure(scope, device)
        for scope in scopes(ranks.world_size // ranks.local_world_size, ranks.local_world_size)
    ]
    dist.barrier()
    if ranks.rank:
        return None
    interface = os.environ.get("NCCL_SOCKET_IFNAME" if on_gpu else "GLOO_SOCKET_IFNAME")
    return Measurement(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        backend="nccl" if on_gpu else "gloo",
        interface=interface,
        hosts=tuple(dict.fromkeys(hosts)),
        ranks_per_node=ranks.local_world_size,
        time=time.time(),
        links=tuple(links),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
