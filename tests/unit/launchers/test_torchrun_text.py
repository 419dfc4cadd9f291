"""torchrun's command line, checked by torchrun's own parser, and its closing report."""

from __future__ import annotations

from pathlib import Path

from launchers import torchrun
from launchers.torchrun import LaunchPlace, LaunchSpec, RankFailure


def _spec(num_nodes: int = 1) -> LaunchSpec:
    logs = tuple(Path(f"node-{node}.log") for node in range(num_nodes))
    return LaunchSpec("some.worker", ("run", "--attempt", "3"), {}, ranks_per_node=4, node_logs=logs)


def test_torchruns_own_parser_reads_the_command_as_meant() -> None:
    from torch.distributed.run import get_args_parser

    place = LaunchPlace(1, "10.0.0.1", 20001, local_address="10.0.0.2", meeting_id="12.0-3")
    words = torchrun.command(_spec(num_nodes=2), place)
    arguments = get_args_parser().parse_args(list(words[3:]))
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("2", 1, "4")
    assert (arguments.rdzv_backend, arguments.rdzv_id, arguments.local_addr) == (
        "static",
        "12.0-3",
        "10.0.0.2",
    )
    assert (arguments.master_addr, arguments.master_port) == ("10.0.0.1", 20001)
    assert (arguments.max_restarts, arguments.signals_to_handle) == (0, "SIGQUIT")
    assert (arguments.module, arguments.training_script) == (True, "some.worker")
    assert arguments.training_script_args == ["run", "--attempt", "3"]


def test_a_single_node_is_not_looked_up_by_name() -> None:
    assert "--local-addr" in torchrun.command(_spec(), LaunchPlace(0, "127.0.0.1", 20001))
    assert "--local-addr" not in torchrun.command(_spec(2), LaunchPlace(0, "node-a", 20001))


_REPORT = """\
W1121 07:08:25 4677 api.py:1028] Sending process 4680 closing signal SIGTERM
E1121 07:08:30 4677 api.py:1002] failed (exitcode: 3) local_rank: 1 (pid: 4681) of binary: python
============================================================
worker FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_07:08:30
  host      : localhost
  rank      : 4 (local_rank: 0)
  exitcode  : -9 (pid: 4680)  (SIGKILL)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_07:08:25
  host      : localhost
  rank      : 5 (local_rank: 1)
  exitcode  : 3 (pid: 4681)
  error_file: <N/A>
============================================================
"""


def test_the_report_tells_what_torchrun_ended_itself() -> None:
    assert torchrun.failures(_REPORT) == (
        RankFailure(rank=4, local_rank=0, pid=4680, exit_code=-9, cleaned_up=True),
        RankFailure(rank=5, local_rank=1, pid=4681, exit_code=3),
    )


def test_what_torchrun_killed_is_told_apart_from_what_it_asked_to_end() -> None:
    asked = "W1121 api.py:1010] Sending process 4680 closing signal SIGTERM\n"
    forced = "W1121 api.py:1048] Unable to shutdown process 4680 via 15, forcefully exiting via 9\n"
    assert (torchrun.closing(asked), torchrun.killed(asked)) == (frozenset({4680}), frozenset())
    assert torchrun.killed(asked + forced) == frozenset({4680})


def test_a_report_that_was_cut_off_names_nobody() -> None:
    assert torchrun.failures(_REPORT[:300]) == ()
    assert torchrun.failures("") == ()
