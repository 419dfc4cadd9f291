"""Every rule has a configuration that breaks it, and says what was found and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from checkpointing.options import PHASES
from conf.schema import Config, FaultPhase
from orchestra.config import not_yet, rules_values
from orchestra.config.rules import RULES, check, problems_of
from orchestra.config.situation import Situation, resolved
from orchestra.data.pack import pack, plan_pack
from orchestra.data.request import PackRequest
from orchestra.errors import ConfigError
from orchestra.frozen import writable_schema

CPU = Situation("run", num_gpus=0)
PLAN = Situation("plan", num_gpus=0)

Change = dict[str, Any]


def changed(changes: Change) -> Config:
    """The default configuration with some keys changed."""
    node = writable_schema()
    for name, value in changes.items():
        OmegaConf.update(node, name, value, force_add=True)
    return cast(Config, OmegaConf.to_object(node))


def broken(changes: Change, situation: Situation = PLAN) -> list[str]:
    return problems_of(resolved(changed(changes), situation), situation)


CASES: list[tuple[str, Change, Sequence[str]]] = [
    ("rule_sizes", {"train.steps": 0}, ["train.steps=0", "1 or more"]),
    ("rule_sizes", {"train.seq_len": 0}, ["train.seq_len=0"]),
    ("rule_sizes", {"train.log_every": 0}, ["train.log_every=0"]),
    ("rule_sizes", {"train.seed": -1}, ["train.seed=-1"]),
    (
        "rule_sizes",
        {"train.seed": 2**63},
        ["train.seed=9223372036854775808", "use at most 9223372036854775807"],
    ),
    ("rule_sizes", {"model.num_hidden_layers": 0}, ["model.num_hidden_layers=0"]),
    ("rule_sizes", {"model.num_attention_heads": 0}, ["model.num_attention_heads=0"]),
    ("rule_sizes", {"model.num_key_value_heads": 0}, ["model.num_key_value_heads=0"]),
    ("rule_sizes", {"model.hidden_size": -8}, ["model.hidden_size=-8"]),
    ("rule_sizes", {"data.prefetch_batches": 0}, ["data.prefetch_batches=0"]),
    ("rule_sizes", {"optim.warmup_steps": -1}, ["optim.warmup_steps=-1", "0 or more"]),
    ("rule_sizes", {"cluster.nodes": 0}, ["cluster.nodes=0"]),
    ("rule_sizes", {"cluster.threads_per_rank": 0}, ["cluster.threads_per_rank=0"]),
    ("rule_sizes", {"checkpoint.every_steps": 0}, ["checkpoint.every_steps=0"]),
    ("rule_sizes", {"model.vocab_size": 99999999999999}, ["model.vocab_size=99999999999999", "2147483647"]),
    ("rule_sizes", {"train.global_batch_size": 10**18}, ["train.global_batch_size=1000000000", "too large"]),
    ("rule_sizes", {"train.micro_batch_size": 10**18}, ["train.micro_batch_size=1000000000", "too large"]),
    ("rule_sizes", {"cluster.gpus_per_node": 100000}, ["cluster.gpus_per_node=100000", "at most 1024"]),
    ("rule_sizes", {"recovery.collective_timeout_s": 1e300}, ["collective_timeout_s=1e+300", "10000000"]),
    ("rule_sizes", {"recovery.heartbeat_timeout_s": 1e300}, ["heartbeat_timeout_s=1e+300", "10000000"]),
    ("rule_sizes", {"wandb.finish_timeout_s": 1e300}, ["wandb.finish_timeout_s=1e+300", "10000000"]),
    ("rule_numbers", {"optim.lr": 0.0}, ["optim.lr=0.0", "above 0"]),
    ("rule_numbers", {"optim.lr": float("nan")}, ["optim.lr=nan"]),
    ("rule_numbers", {"optim.lr": float("inf")}, ["optim.lr=inf"]),
    ("rule_numbers", {"optim.clip_norm": 0.0}, ["optim.clip_norm=0.0"]),
    ("rule_numbers", {"optim.eps": -1.0}, ["optim.eps=-1.0"]),
    ("rule_numbers", {"optim.weight_decay": -0.1}, ["optim.weight_decay=-0.1", "0 or more"]),
    ("rule_numbers", {"cluster.peak_tflops": 0.0}, ["cluster.peak_tflops=0.0"]),
    ("rule_numbers", {"recovery.collective_timeout_s": 0.0}, ["recovery.collective_timeout_s=0.0"]),
    ("rule_numbers", {"recovery.stop_timeout_s": -1.0}, ["recovery.stop_timeout_s=-1.0"]),
    ("rule_sizes", {"recovery.stop_timeout_s": 1e300}, ["stop_timeout_s=1e+300", "10000000"]),
    ("rule_texts", {"run.dir": " "}, ["run.dir is empty"]),
    ("rule_zero_stage", {"parallelism.zero": 4}, ["parallelism.zero=4", "0, 1, 2 or 3"]),
    ("rule_betas", {"optim.betas": [0.9]}, ["optim.betas=[0.9]", "[0.9,0.95]"]),
    ("rule_betas", {"optim.betas": [0.9, 1.0]}, ["optim.betas=[0.9,1.0]"]),
    ("rule_learning_rates", {"optim.min_lr": 1.0}, ["optim.min_lr=1.0", "optim.lr=0.0003"]),
    ("rule_schedule", {"optim.warmup_steps": 101}, ["optim.warmup_steps=101", "train.steps=100"]),
    ("rule_schedule", {"optim.wsd_decay_fraction": 0.0}, ["optim.wsd_decay_fraction=0.0"]),
    ("rule_profile", {"train.profile.steps": [3]}, ["train.profile.steps=[3]"]),
    (
        "rule_profile",
        {"train.profile.enabled": True, "train.steps": 3},
        ["train.profile.steps=[5,7]", "steps 1 to 3", "[3,3]"],
    ),
    (
        "rule_rope_scaling",
        {"model.rope_scaling.enabled": True, "model.rope_scaling.low_freq_factor": 4.0},
        ["low_freq_factor=4.0"],
    ),
    ("rule_hardware_name", {"cluster.hardware": "H100s"}, ["cluster.hardware=H100s", "did you mean h100?"]),
    ("rule_time_limit", {"cluster.time_limit": "4h"}, ["cluster.time_limit=4h", "D-HH:MM:SS"]),
    (
        "rule_time_for_warning",
        {"cluster.launcher": "slurm", "cluster.time_limit": "4"},
        ["cluster.time_limit=4", "150 s before its end", "use 5 minutes or more"],
    ),
    ("rule_slurm_extra", {"cluster.slurm_extra": {"nodes": 3}}, ["slurm_extra.nodes", "cluster.nodes"]),
    ("rule_slurm_extra", {"cluster.slurm_extra": {"array": "0-3"}}, ["slurm_extra.array", "sweep"]),
    ("rule_run_name", {"run.name": "../x"}, ["run.name=../x", "letters"]),
    ("rule_run_name", {"run.name": ""}, ["run.name is empty", "leave it out"]),
    ("rule_run_name", {"run.name": "x" * 101}, ["100 letters"]),
    ("rule_heads", {"model.num_attention_heads": 12}, ["num_attention_heads=12", "hidden_size=128"]),
    ("rule_heads", {"model.num_key_value_heads": 3}, ["num_key_value_heads=3", "use 1, 2, 4 or 8"]),
    ("rule_heads", {"model.head_dim": 15}, ["a head of 15", "rotary"]),
    ("rule_positions", {"model.family": "gpt", "train.seq_len": 4096}, ["train.seq_len=4096", "2048"]),
    (
        "rule_tensor_parallel",
        {"parallelism.tp": 3, "cluster.gpus_per_node": 3},
        ["parallelism.tp=3 does not divide model.num_attention_heads=8; use 1, 2, 4 or 8"],
    ),
    (
        "rule_tensor_parallel",
        {"parallelism.tp": 4, "model.intermediate_size": 350, "cluster.gpus_per_node": 4},
        ["parallelism.tp=4 does not divide model.intermediate_size=350", "1, 2, 5"],
    ),
    (
        "rule_tensor_parallel",
        {
            "parallelism.tp": 4,
            "model.num_attention_heads": 24,
            "model.head_dim": 8,
            "model.num_key_value_heads": 6,
            "cluster.gpus_per_node": 4,
        },
        ["parallelism.tp=4 and model.num_key_value_heads=6", "tp=1, 2, 3, 6, 12 or 24"],
    ),
    (
        "rule_sequence_parallel",
        {"parallelism.sequence_parallel": True},
        ["sequence_parallel=true", "2 or more"],
    ),
    (
        "rule_sequence_parallel",
        {"parallelism.sequence_parallel": True, "parallelism.tp": 2, "train.seq_len": 255},
        ["train.seq_len=255", "parallelism.tp=2", "254 or 256"],
    ),
    (
        "rule_context_parallel",
        {"parallelism.cp": 2, "train.seq_len": 255},
        ["train.seq_len=255", "parallelism.cp=2", "254 or 256"],
    ),
    ("rule_pipeline", {"parallelism.pp": 8, "cluster.gpus_per_node": 8}, ["parallelism.pp=8", "layers=4"]),
    ("rule_layout", {"parallelism.tp": 4}, ["does not divide the world size 2", "multiple of 4"]),
    ("rule_layout", {"parallelism.dp": 4}, ["parallelism.dp=4", "world size 2", "parallelism.dp=2 or auto"]),
    ("rule_layout", {"parallelism.dp": "all", "cluster.launcher": "slurm"}, ["parallelism.dp=all", "auto"]),
    (
        "rule_sharding",
        {"parallelism.zero": 1, "parallelism.shard_degree": 4},
        ["shard_degree=4 does not divide dp=2; use 1 or 2"],
    ),
    ("rule_sharding", {"parallelism.shard_degree": 2}, ["needs parallelism.zero=1, 2 or 3"]),
    (
        "rule_batch",
        {"train.global_batch_size": 6, "train.micro_batch_size": 2},
        ["train.global_batch_size=6", "micro_batch_size=2 × dp=2", "=4 or 8", "micro_batch_size=1"],
    ),
    ("rule_batch", {"train.global_batch_size": 7}, ["train.global_batch_size=7", "dp=2", "6 or 8"]),
    ("rule_batch", {"train.global_batch_size": 0}, ["train.global_batch_tokens"]),
    ("rule_batch", {"train.micro_batch_size": 0}, ["train.micro_batch_size=0"]),
    ("rule_batch", {"train.micro_batch_size": "big"}, ["train.micro_batch_size=big"]),
    (
        "rule_batch",
        {"train.global_batch_tokens": 1000},
        ["train.global_batch_tokens=1000", "train.seq_len=256", "768 or 1024"],
    ),
    (
        "rule_profiled_ranks",
        {"train.profile.enabled": True, "train.profile.ranks": [0, 2]},
        ["no rank 2", "0 to 1"],
    ),
    ("rule_profiled_ranks", {"train.profile.enabled": True, "train.profile.ranks": []}, ["nothing would be"]),
    ("rule_nodes", {"cluster.nodes": 2}, ["cluster.nodes=2", "yet", "use cluster.nodes=1"]),
    ("rule_nodes", {"recovery.min_nodes": 2}, ["recovery.min_nodes=2", "cluster.nodes=1"]),
    ("rule_ranks_per_node", {"cluster.gpus_per_node": "many"}, ["cluster.gpus_per_node=many", "auto"]),
    ("rule_ranks_per_node", {"cluster.gpus_per_node": 0}, ["cluster.gpus_per_node=0"]),
    (
        "rule_precision_on_cpu",
        {"precision.name": "fp8", "cluster.device": "cpu"},
        ["precision=fp8", "cluster.device=cuda"],
    ),
    ("rule_local_folders", {"run.dir": "s3://bucket/x"}, ["run.dir=s3://bucket/x", "is a URL"]),
    ("rule_local_folders", {"data.cache_dir": "gs://b"}, ["data.cache_dir=gs://b", "is a URL"]),
    ("rule_data_source", {"data.path": "corpus"}, ["data=tokens"]),
    ("rule_data_source", {"data.source": "tokens"}, ["data.path=PREFIX"]),
    (
        "rule_data_source",
        {"data.source": "tokens", "data.path": "s3://b/a", "data.blend": [{"path": "s3://b/c"}]},
        ["both given"],
    ),
    (
        "rule_data_source",
        {"data.source": "tokens", "data.blend": [{"path": "s3://b/c", "weight": 0.0}]},
        ["weight 0.0 of s3://b/c"],
    ),
    (
        "rule_data_files",
        {"data.source": "tokens", "data.path": "nowhere/corpus"},
        ["/nowhere/corpus.bin", "orchestra data pack"],
    ),
    ("rule_data_files", {"model.vocab_size": 256}, ["model.vocab_size=256", "257"]),
    ("rule_sizes", {"checkpoint.keep_every_steps": 0}, ["checkpoint.keep_every_steps=0", "1 or more"]),
    ("rule_sizes", {"checkpoint.keep_best": -1}, ["checkpoint.keep_best=-1", "0 or more"]),
    ("rule_numbers", {"checkpoint.timeout_s": 0.0}, ["checkpoint.timeout_s=0.0", "above 0"]),
    ("rule_texts", {"checkpoint.dir": " "}, ["checkpoint.dir is empty"]),
    (
        "rule_checkpoint_steps",
        {"checkpoint.every_steps": None, "checkpoint.keep_every_steps": 10},
        ["keep_every_steps=10", "every_steps=null saves nothing"],
    ),
    (
        "rule_checkpoint_steps",
        {"checkpoint.every_steps": 20, "checkpoint.keep_every_steps": 50},
        ["keep_every_steps=50 is no multiple of checkpoint.every_steps=20", "use e.g. 40"],
    ),
    ("rule_checkpoint_place", {"checkpoint.dir": "s4://b"}, ["checkpoint.dir=s4://b", "no protocol s4://"]),
    ("rule_checkpoint_place", {"checkpoint.dir": "simplecache::s5://b"}, ["no protocol s5://"]),
    ("rule_checkpoint_place", {"checkpoint.dir": "memory://b"}, ["memory://b", "each process's own memory"]),
    ("rule_checkpoint_place", {"checkpoint.dir": "https://b/c"}, ["https:// cannot hold", "s3://"]),
    ("rule_checkpoint_place", {"checkpoint.dir": "zip:///tmp/a.zip"}, ["zip:// cannot hold checkpoints"]),
    ("rule_checkpoint_place", {"checkpoint.dir": "zip://a.zip::s3://b/c"}, ["zip:// cannot hold"]),
    ("rule_injected_faults", {"recovery.inject": [{"at_step": 0, "rank": 0}]}, ["at_step=0", "1 to 100"]),
    (
        "rule_injected_faults",
        {
            "checkpoint.every_steps": 3,
            "recovery.inject": [{"at_step": 3, "rank": 1, "phase": "before_manifest"}],
        },
        ["inject[0]", "rank=1", "before_manifest is of rank 0 alone", "use rank: 0"],
    ),
    (
        "rule_injected_faults",
        {"checkpoint.every_steps": 10, "recovery.inject": [{"at_step": 24, "rank": 1, "phase": "mid_file"}]},
        ["at_step=24 is not saved", "checkpoint.every_steps=10", "use e.g. 20"],
    ),
    (
        "rule_injected_faults",
        {"checkpoint.every_steps": None, "recovery.inject": [{"at_step": 1, "rank": 0, "phase": "staging"}]},
        ["phase=staging is part of a save", "checkpoint.every_steps=null"],
    ),
    ("rule_injected_faults", {"recovery.inject": [{"rank": 0}]}, ["inject[0]", "at_step=null", "1 to 100"]),
    (
        "rule_injected_faults",
        {"recovery.inject": [{"at_step": 3, "rank": 0}, {"at_step": 3, "rank": 2}]},
        ["inject[1]", "rank=2", "0 to 1", "or all"],
    ),
    (
        "rule_injected_faults",
        {"recovery.inject": [{"at_step": 3, "rank": 0, "when": 1}]},
        ["no such key when", "attempt, at_step, rank, fault, phase"],
    ),
    (
        "rule_injected_faults",
        {"recovery.inject": [{"at_step": 3, "rank": "all", "fault": "sigfault"}]},
        ["fault=sigfault", "use sigkill"],
    ),
    (
        "rule_injected_faults",
        {"recovery.inject": [{"at_step": 3, "rank": "all", "phase": "midfile"}]},
        ["phase=midfile", "mid_file", "before_prune or restore"],
    ),
    (
        "rule_injected_faults",
        {"recovery.inject": [{"at_step": 3, "rank": 0, "attempt": -1}]},
        ["attempt=-1", "from 0 on"],
    ),
]

# Rules that only break where ranks start, or that have tests of their own.
ELSEWHERE = {
    "rule_gpus",
    "rule_cores",
    "rule_memory",
    "rule_checkpoint_space",
    "rule_checkpoint_memory",
    "rule_init_from",
    "rule_launcher",
    "not_yet",
}


@pytest.mark.parametrize(
    ("rule", "changes", "words"), CASES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_broken_rule_says_what_was_found_and_what_to_do(
    rule: str, changes: Change, words: Sequence[str]
) -> None:
    config = resolved(changed(changes), PLAN)
    function = next(function for function in RULES if function.__name__ == rule)
    sentences = list(function(config, PLAN))
    assert any(all(word in sentence for word in words) for sentence in sentences), sentences
    assert not any("\n" in sentence for sentence in broken(changes))


def test_every_rule_is_broken_by_some_case() -> None:
    tested = {rule for rule, _, _ in CASES} | ELSEWHERE
    assert tested == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("verb", "launcher", "advice"),
    [
        ("run", "slurm", "use `orchestra submit`"),
        ("resume", "slurm", "use cluster=local"),
        ("submit", "local", "use cluster=slurm"),
        ("submit", "slurm", None),
        ("plan", "slurm", None),
    ],
)
def test_each_command_says_where_it_trains(verb: str, launcher: str, advice: str | None) -> None:
    problems = [
        text for text in broken({"cluster.launcher": launcher}, Situation(verb)) if "launcher" in text
    ]
    assert len(problems) == (advice is not None)
    assert advice is None or advice in problems[0]


def test_the_default_configuration_breaks_no_rule() -> None:
    check(resolved(Config(), CPU), CPU)


@pytest.mark.parametrize(
    ("num_gpus", "changes", "words"),
    [
        (0, {"cluster.device": "cuda"}, "no NVIDIA GPU is visible"),
        (2, {"cluster.gpus_per_node": 4}, "use at most 2, or cluster.device=cpu"),
    ],
)
def test_gpus_that_are_not_there_are_missed(num_gpus: int, changes: Change, words: str) -> None:
    assert any(words in problem for problem in broken(changes, Situation("run", num_gpus)))
    on_cluster = {**changes, "cluster.launcher": "slurm"}
    assert not any(words in problem for problem in broken(on_cluster, Situation("run", num_gpus)))


def test_numbers_that_no_float_can_hold_are_refused_like_others() -> None:
    for name in rules_values._AT_LEAST:
        assert problems_of(resolved(changed({name: 10**400}), CPU), CPU), name


NOT_BUILT: dict[str, list[Any]] = {
    "parallelism.zero": [1, 2, 3],
    "parallelism.shard_degree": [2],
    "parallelism.tp": [2],
    "parallelism.sequence_parallel": [True],
    "parallelism.pp": [2],
    "parallelism.cp": [2],
    "parallelism.ep": [2],
    "precision.name": ["fp16", "fp8"],
    "precision.reduce_dtype": ["bf16"],
    "train.recompute": ["selective", "full"],
    "train.micro_batch_size": ["auto"],
    "cluster.spare_nodes": [1],
    "recovery.min_nodes": [1],
    "recovery.memory_copy_every_steps": [5],
}


@pytest.mark.parametrize("row", not_yet.TABLE, ids=lambda row: row.key)
def test_what_is_not_built_is_refused_by_run_and_known_to_plan(row: not_yet.NotYet) -> None:
    refused = 0
    for value in NOT_BUILT[row.key]:
        changes = {row.key: value}
        if row.is_asked_for(attrgetter(row.key)(changed(changes))):
            refused += 1
            assert any(f"does not have {row.feature} yet" in problem for problem in broken(changes, CPU))
            assert not any("does not have" in problem for problem in broken(changes, PLAN))
    assert refused
    assert not row.is_asked_for(attrgetter(row.key)(Config()))


def test_faults_can_strike_in_every_phase_that_the_library_has() -> None:
    assert set(FaultPhase.__members__) == {"step", *PHASES}
    for phase in FaultPhase:
        fault = {"attempt": 2, "at_step": 100, "rank": "all", "fault": "sigkill", "phase": phase.name}
        assert broken({"recovery.inject": [fault]}) == []


@pytest.mark.parametrize("phase", ["step", "restore"])
def test_faults_outside_of_saves_strike_at_any_step(phase: str) -> None:
    fault = {"at_step": 7, "rank": 1, "phase": phase}
    assert broken({"checkpoint.every_steps": 3, "recovery.inject": [fault]}) == []


def test_all_violations_come_in_one_error() -> None:
    config = resolved(changed({"train.steps": 0, "optim.lr": -1.0, "parallelism.tp": 3}), CPU)
    with pytest.raises(ConfigError) as caught:
        check(config, CPU)
    for word in ("train.steps=0", "optim.lr=-1.0", "num_attention_heads=8", "intermediate_size=352"):
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


def test_impossible_sizes_break_no_other_rule_by_accident() -> None:
    names = [
        *rules_values._AT_LEAST,
        "parallelism.tp",
        "parallelism.pp",
        "parallelism.cp",
        "parallelism.ep",
    ]
    for value in (0, -3):
        config = changed(dict.fromkeys(names, value))
        assert len(problems_of(config, CPU)) > len(names) / 2


def test_packed_files_are_found_by_prefix_or_name_and_their_vocabulary_is_checked(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    (tmp_path / "text.txt").write_text("some text " * 100)
    pack(plan_pack(PackRequest([str(tmp_path / "text.txt")], str(prefix))))
    for path in (str(prefix), f"{prefix}.bin", f"file://{prefix}"):
        changes = {"data.source": "tokens", "data.path": path}
        assert any("257 tokens" in problem for problem in broken({**changes, "model.vocab_size": 256})), path
        assert broken({**changes, "model.vocab_size": 257}) == []


def test_remote_files_are_not_looked_for() -> None:
    assert broken({"data.source": "tokens", "data.path": "s3://bucket/corpus"}) == []
