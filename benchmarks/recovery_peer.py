"""The peer of `benchmarks/recovery.py`: a training loop under plain torchrun that goes on from its own file.

`torchrun … benchmarks/recovery_peer.py FOLDER` trains a tiny model with DistributedDataParallel, saves all of
its state every ten steps by write and rename, and writes a row for each step. It has no failure handling of
its own: that is torchrun's and Slurm's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

EVERY_STEPS = 10
# About as long as a step of the model that orchestra trains beside it.
STEP_S = 0.02


def main() -> None:
    """Train for ever."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    newest = folder / "newest.pt"
    if newest.exists():
        state = torch.load(newest, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    is_first = dist.get_rank() == 0
    with (folder / "rows.jsonl").open("a", buffering=1) as rows:
        while True:
            step += 1
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            time.sleep(STEP_S)
            if not is_first:
                continue
            rows.write(json.dumps({"step": step, "time": time.time(), "pid": os.getpid()}) + "\n")
            if step % EVERY_STEPS == 0:
                draft = folder / "newest.tmp"
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, draft)
                draft.replace(newest)


if __name__ == "__main__":
    main()
