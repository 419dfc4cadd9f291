"""Measures what copies in memory cost a training step: none, one each step, one every five.

    python benchmarks/memory_copies.py            two ranks, each a node of its own; copies are sent over TCP
    python benchmarks/memory_copies.py --no-push  the same, and nothing is sent
    python benchmarks/memory_copies.py --zero 1   half of the state on each rank

The ranks train in blocks of steps, the variants in turn, so that all meet the same machine; the agents' part
(server and sender) runs in this process. Printed are medians over the blocks: of the mean step time, of its
difference from the block without copies beside it, and of the processor time that a rank took for a step,
which says most where others use the machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

RANKS = 2
VARIANTS = (0, 1, 5)
SECRET = "of the benchmark"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-push", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # set in the processes this one starts
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    if arguments.rank is not None:
        print(json.dumps(train(arguments)))
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        found = measured(arguments, Path(place))
    report(found)
    return 0


def measured(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Start the ranks and, unless told otherwise, agents' parts that send their copies to each other."""
    from launchers.memory_store.exchange import CopyPusher, CopyServer
    from launchers.memory_store.store import open_copy_store

    stores = [open_copy_store("benchmark", f"node{rank}", place) for rank in range(RANKS)]
    servers = [CopyServer(store, "127.0.0.1", SECRET) for store in stores]
    pushers = []
    for rank in range(RANKS if not arguments.no_push else 0):
        neighbour = servers[1 - rank]
        neighbour.expect(0)
        pushers.append(CopyPusher(stores[rank], range(rank, rank + 1), 0, neighbour.address, SECRET))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = time.process_time()
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--rank", str(rank)],
            env={**os.environ, **places, "RANK": str(rank), "OMP_NUM_THREADS": "1", **store.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, store in enumerate(stores)
    ]
    outputs = [process.communicate()[0] for process in processes]
    found: dict[str, Any] = json.loads(outputs[0])
    found["agents_s"] = time.process_time() - before
    found["push_s"] = [pusher.push_s for pusher in pushers]
    for closed in (*pushers, *servers, *stores):
        closed.close()
    return found


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train as one rank; return the mean step seconds of each block, by variant."""
    import torch
    import torch.distributed as dist

    from orchestra.parallel.mesh import open_mesh, open_peers, rank_environment
    from orchestra.run.events import EventWriter, rank_writer
    from orchestra.run.paths import RunDir
    from orchestra.train.build import build_model_and_optimizer, build_step
    from orchestra.train.copy_files import FOLDER_VARIABLE
    from orchestra.train.hooks import StepHooks
    from orchestra.train.memory_copies import MemoryCopies
    from orchestra.train.state import TensorState
    from orchestra.train.trainer import RankAttempt, checkpoint_context

    torch.set_num_threads(1)
    config = config_of(arguments)
    ranks = rank_environment()
    with open_mesh(config, ranks) as mesh:
        built = build_model_and_optimizer(config, mesh)
        folder = Path(os.environ[FOLDER_VARIABLE])
        run = RunDir(folder / "run")
        events = EventWriter(run, rank_writer(0, mesh.rank), 0, rank=mesh.rank)
        attempt = RankAttempt(run, 0, events)
        peers = open_peers(mesh, ranks, 0, 60.0)
        context = checkpoint_context(config, mesh, replace(ranks, local_world_size=1), peers, attempt)
        state = TensorState(built.parallelized, built.optimizer, mesh)
        copies = MemoryCopies(context, state, every_steps=1, folder=folder)
        copies.prepare(0)
        training_step = build_step(config, mesh, built, StepHooks([copies]))
        tokens = torch.randint(0, arguments.vocab, (1, arguments.micro_batch, arguments.sequence + 1))
        times: dict[int, list[float]] = {every: [] for every in VARIANTS}
        processor: dict[int, list[float]] = {every: [] for every in VARIANTS}
        step = 0
        for number in range(arguments.rounds + 1):
            for every in VARIANTS:
                dist.barrier()
                began, began_processor = time.perf_counter(), time.process_time()
                for _ in range(arguments.steps):
                    step += 1
                    training_step.run(step, tokens)
                    if every and step % every == 0:
                        copies.take(step, {"step": step})
                if number:  # the first round touches the memory
                    times[every].append((time.perf_counter() - began) / arguments.steps)
                time.sleep(0.2)  # what is still being sent is not the next block's
                if number:
                    processor[every].append((time.process_time() - began_processor) / arguments.steps)
        copies.close()
        held = TensorState(built.parallelized, built.optimizer, mesh).held()
        state = sum(shard.tensor.nbytes for shard in held)
    return {"times": times, "processor": processor, "state_bytes": state, "steps": arguments.steps}


def config_of(arguments: argparse.Namespace) -> Any:
    from conf.schema import Config, ModelConfig, ParallelismConfig, TrainConfig

    return Config(
        model=ModelConfig(
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 3,
            num_hidden_layers=arguments.layers,
            vocab_size=arguments.vocab,
        ),
        parallelism=ParallelismConfig(zero=arguments.zero),
        train=TrainConfig(
            steps=1 << 30,
            seq_len=arguments.sequence,
            global_batch_size=arguments.micro_batch * RANKS,
            micro_batch_size=arguments.micro_batch,
        ),
    )


def report(found: dict[str, Any]) -> None:
    times = {int(every): values for every, values in found["times"].items()}
    print(f"{found['state_bytes'] / 1e6:.1f} MB of state on a rank")
    for every, values in times.items():
        extra = [(value - none) / none for value, none in zip(values, times[0], strict=True)]
        name = f"every {every} steps" if every else "no copies"
        processor = statistics.median(found["processor"][str(every)]) * 1e3
        step = f"{statistics.median(values) * 1e3:8.2f} ms {statistics.median(extra):+7.2%}"
        print(f"{name:16} {step}   processor {processor:8.2f} ms")
    pushes = [f"{seconds * 1e3:.1f}" for seconds in found["push_s"] if seconds is not None]
    if pushes:
        num_copies = RANKS * sum(len(times[every]) * found["steps"] / every for every in VARIANTS if every)
        agents = found["agents_s"] / num_copies * 1e3
        print(f"the last push of each node took {', '.join(pushes)} ms; the agents took {agents:.2f} ms of")
        print("processor time for each copy, sent and received, the idle time between copies included")


if __name__ == "__main__":
    sys.exit(main())
