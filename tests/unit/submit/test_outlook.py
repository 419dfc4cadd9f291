"""What `submit` says of cost and account: on scripts, in the words of Slurm 22.05, and where none come."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import FakeSlurm

from conf.schema import ClusterConfig, Config, Device, LauncherName
from launchers.slurm import fair_share
from launchers.slurm.batch_script import rendered
from launchers.slurm.cluster import parsed
from launchers.slurm.fair_share import Counted, counted, parsed_standings, parsed_terms
from orchestra.cli.run.outlook_text import outlook_lines
from orchestra.run.paths import RunDir
from orchestra.submit.fair.outlook import JobCost, Outlook, cost_of, outlook
from orchestra.submit.job import Share, batch_job
from orchestra.submit.site import Site
from orchestra.submit.sweeps.arrays import Numbering, job_of_run

HEADER = "Account|User|RawShares|NormShares|RawUsage|EffectvUsage|FairShare\n"
MULTIFACTOR = (
    HEADER + "lab|nobody|2|0.750000|48132|0.401000|0.333333\nart|nobody|1|0.25|0|0.000000|1.000000\n"
)
# Of priority/basic, and without accounting, where sshare ends with 0 all the same.
BASIC, WITHOUT = HEADER + "lab|nobody|2||0|0.000000|0.000000\n", HEADER
PARTITION = (
    "PartitionName=main AllowGroups=ALL DefaultTime=01:00:00 DisableRootJobs=NO MaxTime=UNLIMITED MinNodes=0 "
    "TRES=cpu=48,mem=72315M,node=3,billing=209,gres/gpu=12 TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=12\n"
)


def script(**cluster: Any) -> str:
    base = ClusterConfig(launcher=LauncherName.slurm, device=Device.cuda, gpus_per_node=4, nodes=2)
    config = replace(Config(), cluster=replace(base, **cluster))
    return rendered(batch_job(config, RunDir(Path("/runs/mine")), "orchestra:1", Share(6)))


def test_standings_are_those_of_a_site_that_schedules_by_them() -> None:
    lab, art = parsed_standings(MULTIFACTOR)
    assert (lab.account, lab.shares, lab.used, lab.factor) == ("lab", 0.75, 0.401, 0.333333)
    assert art.factor == 1.0
    assert parsed_standings(BASIC) == parsed_standings(WITHOUT) == parsed_standings("") == []


def test_terms_are_the_default_limit_and_the_weights_by_unit() -> None:
    terms = parsed_terms(PARTITION)
    assert (terms.time_limit, terms.words) == ("01:00:00", "CPU=1.0,Mem=0.25G,GRES/gpu=12")
    assert terms.weights == {"cpu": 1.0, "mem": 0.25 / 1024, "gres/gpu": 12.0}
    open_end = parsed_terms("PartitionName=main DefaultTime=NONE MaxTime=2-00:00:00 MaxNodes=UNLIMITED")
    assert (open_end.time_limit, dict(open_end.weights), open_end.words) == ("2-00:00:00", {}, "")


def test_weights_without_a_digit_before_the_point_count_and_what_is_no_number_does_not() -> None:
    weights = parsed_terms("PartitionName=a TRESBillingWeights=CPU=.5,Mem=.25G,GRES/gpu=2.").weights
    assert weights == {"cpu": 0.5, "mem": 0.25 / 1024, "gres/gpu": 2.0}
    assert parsed_standings(HEADER + "lab|me|1|nan|0|0.5|inf\nart|me|1|0.5|0|0.5|nan\n") == []


def test_a_job_costs_nodes_times_gpus_times_its_limit_spares_included() -> None:
    cost = cost_of(script(time_limit="4:00:00", spare_nodes=1))
    assert (cost.most_nodes, cost.gpus_per_node, cost.limit_s, cost.gpu_hours) == (3, 4, 14400, 48.0)
    range_ = cost_of(script(time_limit="1:00:00", min_nodes=2, nodes=8))
    assert (range_.fewest_nodes, range_.most_nodes, range_.gpu_hours) == (2, 8, 32.0)
    named = cost_of(script(time_limit="1:00:00", slurm_extra={"gres": "gpu:h100:3,tmp:10G"}))
    assert named.gpu_hours == 6.0
    per_node = {
        "gpu": 1,
        "gpu:a100": 1,
        "gpu:a100:2,gpu:h100": 3,
        "gres:gpu:4": 4,
        "gpu:a100:2(S:0-1)": 2,
        # No GPUs: those of the ranks come beside it.
        "gpumem:4G": 4,
    }
    for gres, count in per_node.items():
        assert cost_of(script(slurm_extra={"gres": gres})).gpus_per_node == count, gres
    cpu_only = {"device": Device.cpu, "time_limit": "1:00:00"}
    for tres in ("gres/gpu:4", "gres/gpu=4", "cpu=2,gres/gpu:a100=4"):
        assert cost_of(script(**cpu_only, slurm_extra={"tres_per_node": tres})).gpus_per_node == 4, tres
    assert cost_of(script(slurm_extra={"gpus_per_node": "a100:4,h100:2"})).gpus_per_node == 6
    # How many that are of a node's is Slurm's to say.
    assert cost_of(script(time_limit="1:00:00", slurm_extra={"gpus": 8})).gpu_hours is None
    cpu = cost_of(script(time_limit="1:00:00", device=Device.cpu))
    assert (cpu.gpus_per_node, cpu.cores_per_node, cpu.hours(1), cpu.gpu_hours) == (0, 4, 2.0, 0.0)
    assert cost_of(script()).gpu_hours is None


def test_a_site_bills_by_its_weights_the_sum_or_the_most() -> None:
    terms = parsed_terms(PARTITION)
    text = script(slurm_extra={"mem": "64G"})
    # 2 nodes × (6 cores × 1 + 64 GiB × 0.25 + 4 GPUs × 12)
    assert cost_of(text, 1, terms).billing == 2 * (6 + 16 + 48)
    assert cost_of(text, 1, terms, Counted.most).billing == 2 * 48
    assert cost_of(text, 1, terms, Counted.most_and_gres).billing == 2 * (16 + 48)
    flags = {"(null)": Counted.all, "DEPTH_OBLIVIOUS,MAX_TRES": Counted.most}
    for said, way in {**flags, "MAX_TRES_GRES,DEPTH_OBLIVIOUS": Counted.most_and_gres}.items():
        assert counted(said) is way
    alone = cost_of(script(slurm_extra={"exclusive": True, "mem": "64G"}), 1, terms)
    assert (alone.billing, alone.not_billed) == (2 * (16 + 48), ("cpu",))
    whole = cost_of(script(slurm_extra={"mem": 0}), 1, terms)
    assert (whole.billing, whole.not_billed, whole.limit_s) == (2 * (6 + 48), ("mem",), 3600)


def test_no_limit_is_the_partitions_longest() -> None:
    terms = parsed_terms(PARTITION.replace("MaxTime=UNLIMITED", "MaxTime=2:00:00"))
    limits = {None: 3600, "30": 1800, "0": 7200, "UNLIMITED": 7200}
    assert {given: cost_of(script(time_limit=given), 1, terms).limit_s for given in limits} == limits
    assert cost_of(script(time_limit="0"), 1, parsed_terms(PARTITION)).limit_s is None


def told(costs: list[JobCost], **facts: Any) -> str:
    given = {"are_alternatives": False, "goes_on": True, "price_per_gpu_hour": None, "currency": None}
    known = {"weights": "", "standings": (), "no_standing": "nobody says"}
    return "\n".join(outlook_lines(Outlook(tuple(costs), **{**given, **known, **facts})))


def test_words_for_a_job_a_range_a_sweep_and_alternatives() -> None:
    cost = cost_of(script(time_limit="4:00:00"))
    assert "cost    32 GPU-hours for 2 nodes × 4 GPUs × 4:00:00, 48.00 EUR\n" in told(
        [cost], price_per_gpu_hour=1.5, currency="EUR"
    )
    assert "as much again each time that a run goes on" in told([cost])
    assert "as much again" not in told([cost], goes_on=False)
    range_ = told([cost_of(script(time_limit="1:00:00", min_nodes=1, nodes=3))])
    assert "cost    4 to 12 GPU-hours for 1 to 3 nodes × 4 GPUs × 1:00:00" in range_
    sweep = told([replace(cost, num_jobs=3)])
    assert "32 GPU-hours each for 3 jobs of 2 nodes × 4 GPUs × 4:00:00, 96 GPU-hours in all" in sweep
    slow = cost_of(script(time_limit="4:00:00", nodes=4, constraint="a100"))
    either = told([replace(cost, constraint="h100"), slow], are_alternatives=True, price_per_gpu_hour=1.0)
    assert "one of: 32 GPU-hours for 2 nodes × 4 GPUs × 4:00:00 (h100); 64 GPU-hours" in either
    # The dearer one, at most.
    assert either.splitlines()[0].endswith("(a100), 64.00")
    assert "8 GPU-hours for each hour of 2 nodes × 4 GPUs: no time limit is given" in told(
        [cost_of(script())]
    )
    assert "cost    1 GPU-hour for 1 node × 4 GPUs × 0:15:00" in told(
        [cost_of(script(time_limit="15", nodes=1))]
    )
    assert "an unknown number of GPU-hours" in told([cost_of(script(slurm_extra={"gpus": 8}))])


@pytest.fixture
def site(fake_slurm: FakeSlurm) -> Site:
    fake_slurm.says("scontrol", prints=PARTITION)
    fake_slurm.says("sshare", prints=MULTIFACTOR)
    return Site(parsed("main*|up|infinite|3|16|idle|gpu:4\n"))


def looked(site: Site, **cluster: Any) -> list[str]:
    base = ClusterConfig(launcher=LauncherName.slurm, device=Device.cuda, gpus_per_node=4, nodes=2)
    config = replace(Config(), cluster=replace(base, **cluster))
    job = job_of_run(config, RunDir(Path("/runs/mine")), Share(6), Numbering("mine", "me", 0.0))
    return list(outlook_lines(outlook([job], config.cluster, site)))


def test_slurm_is_asked_for_weights_the_default_limit_and_the_account(site: Site) -> None:
    lines = looked(site, account="lab")
    assert lines[0] == "cost    8 GPU-hours for 2 nodes × 4 GPUs × 1:00:00"
    assert "bills   108 an hour, 108 at most without mem (CPU=1.0,Mem=0.25G,GRES/gpu=12)" in lines
    assert lines[-1] == (
        "share   account lab: fair-share factor 0.33 of 1; it used 40.1%, its shares are 75.0%"
    )
    assert "account lab: " in looked(site)[-1]
    assert "account art: " in looked(site)[-1]
    assert looked(site, account="other")[-1] == "share   not known: sshare lists no account other of yours"


def test_what_hangs_or_is_missing_is_said_and_holds_nobody_up(
    site: Site, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.put("sshare", "exec sleep 30")
    fake_slurm.put("scontrol", "exec sleep 30")
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(fair_share, "_TIMEOUT_S", 0.3)
        lines = looked(site, time_limit="1:00:00")
    assert time.monotonic() - began < 10
    assert lines[0].startswith("cost    8 GPU-hours for")
    assert "bills   not known: scontrol got no answer from Slurm's controller within 0.3 s" in lines
    assert lines[-1] == "share   not known: sshare got no answer from Slurm's controller within 0.3 s"
    fake_slurm.says("sshare", prints=WITHOUT)
    assert "this cluster keeps no accounts of users" in looked(site)[-1]
    (fake_slurm.folder / "sshare").unlink()
    monkeypatch.setenv("PATH", str(fake_slurm.folder))
    assert "sshare is not on this machine" in looked(site)[-1]
    assert looked(Site(None, is_dry=True))[-1] == "share   not known: Slurm was not asked"


def test_of_several_partitions_only_what_they_share_is_known(site: Site, fake_slurm: FakeSlurm) -> None:
    other = PARTITION.replace("01:00:00", "02:00:00")
    fake_slurm.put("scontrol", f"case \"$*\" in *main) echo '{PARTITION}';; *) echo '{other}';; esac")
    lines = looked(site, partition="main,long")
    assert "8 GPU-hours for each hour of" in lines[0]
    assert any(line.startswith("bills   108 an hour without mem") for line in lines)
    cheap = other.replace("gpu=12", "gpu=1")
    fake_slurm.put("scontrol", f"case \"$*\" in *main) echo '{PARTITION}';; *) echo '{cheap}';; esac")
    assert "bills   not known: partitions main, long differ" in "\n".join(looked(site, partition="main,long"))
