"""What a configuration meets: its rules, what the machine decides and can carry; and its signature."""

from __future__ import annotations

import math
import re
import shutil
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rule_cases import CASES, ELSEWHERE, Change, broken, changed

from checkpointing.options import PHASES
from conf.schema import Config, FaultPhase, OptimConfig, RunConfig, WandbConfig, WandbMode
from orchestra.config.keys import known_keys
from orchestra.config.machine import Situation, resolved, signature, this_machine, world_size
from orchestra.config.rules import value_rules
from orchestra.config.rules.all_rules import RULES, problems_of
from orchestra.config.rules.place_rules import trained_bytes
from orchestra.config.rules.plugin_rules import rule_tensorboard
from orchestra.sizes.flops import num_expert_parameters, num_parameters
from orchestra.sizes.training_shape import checkpoint_bytes

CPU = Situation("run", num_gpus=0)
PLAN = Situation("plan", num_gpus=0)
LAPTOP = Situation("run", num_gpus=0, num_cores=2, memory_bytes=16 * 2**30)
WITH_A_LEAST = [name for name, (least, _) in value_rules._BOUNDS.items() if least is not None]


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
    assert not any("\n" in sentence for sentence in broken(changes, PLAN))


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism.ep": 3, "model.num_experts": 6},
        {"parallelism.ep": 16, "model.num_experts": 6},
        {"parallelism.ep": 3, "model.num_experts": 32, "parallelism.zero": 1, "parallelism.shard_degree": 4},
        {"parallelism.ep": 3},
    ],
)
def test_the_expert_degrees_that_an_error_offers_are_accepted(changes: Change) -> None:
    changes = {"cluster.gpus_per_node": 16, "train.micro_batch_size": 1, **changes}
    problems = [problem for problem in broken(changes, PLAN) if problem.startswith("parallelism.ep=")]
    offered = [int(degree) for degree in re.findall(r"\d+", problems[0].split("use ")[-1])]
    is_accepted = {
        ep: not broken({**changes, "parallelism.ep": ep}, PLAN) for ep in range(1, 17) if 16 % ep == 0
    }
    assert offered == [ep for ep, accepted in is_accepted.items() if accepted]


def test_a_run_that_goes_on_keeps_keys_of_experts_that_do_nothing() -> None:
    changes: Change = {"model.moe_capacity_factor": 1.25}
    assert len(broken(changes, PLAN)) == 1
    for situation in (replace(PLAN, verb="resume"), replace(PLAN, from_step=3)):
        assert broken(changes, situation) == []


def test_every_rule_is_broken_by_some_case() -> None:
    tested = {rule for rule, _, _ in CASES} | ELSEWHERE
    assert tested == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("verb", "launcher", "advice"),
    [
        ("run", "slurm", "use `orchestra submit`"),
        ("submit", "local", "use cluster=slurm"),
        ("submit", "slurm", None),
        ("plan", "slurm", None),
        ("resume", "slurm", None),
        ("resume", "local", None),
    ],
)
def test_each_command_says_where_it_trains(verb: str, launcher: str, advice: str | None) -> None:
    problems = [
        text for text in broken({"cluster.launcher": launcher}, Situation(verb)) if "launcher" in text
    ]
    assert len(problems) == (advice is not None)
    assert advice is None or advice in problems[0]


def test_the_folder_for_state_on_disk_is_looked_at_where_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problems(folder: str, situation: Situation = LAPTOP, **model: int) -> list[str]:
        sizes = {f"model.{name}": value for name, value in model.items()}
        changes = {"parallelism.offload": "optimizer_disk", "parallelism.offload_dir": folder, **sizes}
        return [text for text in broken({**changes, "cluster.device": "cpu"}, situation) if "offload" in text]

    assert problems(str(tmp_path)) == []
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    assert problems("$NODE_DISK") == []
    gone = str(tmp_path / "gone")
    assert problems(gone) == [
        f"parallelism.offload_dir={gone} is no folder of this machine; make it, or give another one"
    ]
    # Other nodes have other disks.
    assert problems(gone, PLAN) == []
    (full,) = problems(str(tmp_path), num_hidden_layers=10_000_000)
    assert re.search(r"take [\d.]+ TiB, but .* are free there; .*parallelism.zero=1 or more", full)


@pytest.mark.parametrize(
    ("num_gpus", "changes", "words"),
    [
        (0, {"cluster.device": "cuda"}, "no NVIDIA GPU is visible"),
        (2, {"cluster.gpus_per_node": 4}, "use at most 2, or cluster.share_devices=true"),
    ],
)
def test_gpus_that_are_not_there_are_missed(num_gpus: int, changes: Change, words: str) -> None:
    assert any(words in problem for problem in broken(changes, Situation("run", num_gpus)))
    on_cluster = {**changes, "cluster.launcher": "slurm"}
    assert not any(words in problem for problem in broken(on_cluster, Situation("run", num_gpus)))


def test_set_up_lines_that_bash_reads_are_taken() -> None:
    lines = ["shopt -s extglob", "rm -f !(x)", "cat <<END", "a", "END", "f() {", "  exit 1", "}"]
    lines += ["if ! true; then", "  exit 1", "fi", "true ||", "  exit 2", "exec 2>&1", "exec 3<a"]
    changes: Change = {"cluster.launcher": "slurm", "cluster.setup": lines}
    assert not [text for text in broken(changes, Situation("submit")) if "setup" in text]


@pytest.mark.parametrize(
    "changes",
    [
        {"train.micro_batch_size": "auto"},
        # A member sees its share of the GPUs alone.
        {"cluster.device": "cuda", "cluster.gpus_per_node": 1},
    ],
)
def test_what_members_share_is_nothing_to_a_run_that_trains_alone(changes: Change) -> None:
    sweep = Situation("run", num_gpus=1)
    together: Change = {**changes, "cluster.members_at_once": 2}
    assert [text for text in broken(together, sweep) if "members_at_once=2" in text]
    assert broken(together, replace(sweep, is_alone=True)) == broken(changes, sweep)


@pytest.mark.parametrize(
    ("num_gpus", "changes"),
    [
        (2, {"cluster.gpus_per_node": 4}),
        (0, {"cluster.device": "cpu"}),
        (2, {"cluster.launcher": "slurm", "cluster.device": "cpu", "cluster.gpus_per_node": 4}),
    ],
)
def test_ranks_may_share_gpus_and_on_cpu_that_means_nothing(num_gpus: int, changes: Change) -> None:
    shared: Change = {**changes, "cluster.share_devices": True}
    verb = "submit" if "cluster.launcher" in changes else "run"
    assert broken(shared, Situation(verb, num_gpus)) == []


# Numbers that have a rule of their own.
OF_OTHER_RULES = {
    *(f"parallelism.{axis}" for axis in ("dp", "zero", "tp", "pp", "cp", "ep")),
    *("optim.betas", "optim.wsd_decay_fraction", "train.profile.steps", "train.profile.ranks"),
    *("train.global_batch_size", "train.micro_batch_size", "cluster.gpus_per_node", "cluster.array_throttle"),
    *("cluster.members_at_once", "cluster.members_per_node", "cluster.stop_exit_code"),
    "recovery.straggler_factor",
    # Counted, whatever is given.
    "model.block_parameters",
}


def test_every_number_of_the_schema_has_a_least_value() -> None:
    types = {name: typing.get_args(key.type) or (key.type,) for name, key in known_keys().items()}
    numbers = {name for name, kinds in types.items() if int in kinds or float in kinds}
    assert numbers - {*WITH_A_LEAST, *value_rules._POSITIVE, *value_rules._NOT_NEGATIVE} == OF_OTHER_RULES


@pytest.mark.parametrize("name", value_rules._BOUNDS)
def test_numbers_outside_their_bounds_are_refused_even_those_that_no_float_can_hold(name: str) -> None:
    least, most = value_rules._BOUNDS[name]
    too_large = (most or 2**63 - 1) + 1
    (problem,) = value_rules.rule_sizes(changed({name: too_large}), PLAN)
    assert problem.startswith(f"{name}={too_large}")
    assert "is too large" in problem
    if least is not None:
        (problem,) = value_rules.rule_sizes(changed({name: least - 1}), PLAN)
        assert problem.startswith(f"{name}={least - 1}")
        assert problem.endswith(f" is too small; use {least} or more")
    if least is not None and name not in value_rules._POSITIVE:
        # A key of whole numbers.
        assert problems_of(resolved(changed({name: 10**400}), CPU), CPU)


@pytest.mark.parametrize("name", [*value_rules._POSITIVE, *value_rules._NOT_NEGATIVE])
def test_numbers_that_are_not_finite_or_negative_are_refused(name: str) -> None:
    for value in (-1.0, math.nan, math.inf, *([0.0] if name in value_rules._POSITIVE else [])):
        (problem,) = value_rules.rule_numbers(changed({name: value}), PLAN)
        assert problem.startswith(f"{name}={value} is not a ")


def test_faults_can_strike_in_every_phase_that_the_library_has() -> None:
    assert set(PHASES) < set(FaultPhase.__members__)
    for phase in FaultPhase:
        fault = {"attempt": 2, "rank": "all", "fault": "sigkill", "phase": phase.name}
        if phase is not FaultPhase.setup:
            fault["at_step"] = 100
        assert broken({"recovery.inject": [fault]}, PLAN) == []
    for phase_name in ("step", "forward", "reduce", "restore"):
        fault = {"at_step": 7, "rank": 1, "phase": phase_name}
        changes = {"checkpoint.every_steps": 3, "recovery.inject": [fault]}
        assert broken(changes, PLAN) == [], "outside of saves at any step"
    fault = {"at_step": 100, "rank": 0, "phase": "mid_file"}
    changes = {"checkpoint.every_steps": "auto", "recovery.inject": [fault]}
    assert broken(changes, PLAN) == [], "the last step is saved also where the ranks choose"


def test_impossible_sizes_break_no_other_rule_by_accident() -> None:
    names = [*WITH_A_LEAST, "parallelism.tp", "parallelism.pp", "parallelism.cp", "parallelism.ep"]
    for value in (0, -3):
        config = changed(dict.fromkeys(names, value))
        assert len(problems_of(config, CPU)) > len(names) / 2


# What makes rules divide by other sizes: each is refused by itself where a number in it is too small.
_DEGREES = ["parallelism.tp", "parallelism.pp", "parallelism.cp", "parallelism.ep"]
_MIXTURE: Change = {
    "model.num_experts": 4,
    "model.moe_intermediate_size": 64,
    "model.shared_expert_intermediate_size": 64,
    "parallelism.ep": 2,
    "parallelism.tp": 2,
}
_ON_CLUSTER = {"cluster.device": "cuda", "cluster.launcher": "slurm"}
_ON_DISK = {"parallelism.offload": "optimizer_disk", "parallelism.offload_dir": "/tmp"}
_OF_MANY_SIZES: list[Change] = [
    {
        "cluster.gpus_per_node": 4,
        **_MIXTURE,
        **_ON_CLUSTER,
        "train.global_batch_tokens": 4096,
        "precision.name": "fp8",
    },
    {"parallelism.zero": 3, "parallelism.shard_degree": 4, **_MIXTURE, **_ON_CLUSTER},
    {"train.recompute_budget_gib": 1.0, "parallelism.tp": 2, "cluster.device": "cpu", **_ON_DISK},
]


@pytest.mark.parametrize("base", _OF_MANY_SIZES)
def test_a_number_that_is_too_small_is_refused_in_words_by_all_rules(base: Change) -> None:
    """Also where other keys make rules divide by it, and where nobody knows the ranks."""
    config = changed(base)
    for name in [*WITH_A_LEAST, *_DEGREES]:
        least, _ = value_rules._BOUNDS.get(name, (1, None))
        section, *inner, key = name.split(".")
        if inner or least is None:
            continue
        wrong = replace(getattr(config, section), **{key: least - 1})
        problems = problems_of(replace(config, **{section: wrong}), LAPTOP)
        assert any(f"{name}={least - 1} is " in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("verb", "starts", "is_refused"),
    [("run", True, True), ("resume", True, True), ("run", False, False), ("plan", False, False)],
)
def test_compiling_without_a_compiler_is_refused_where_it_would_start(
    verb: str, starts: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    situation = replace(LAPTOP if starts else CPU, verb=verb)
    found = broken({"train.compile": True}, situation)
    assert [problem.startswith("train.compile=true: a C++ compiler not") for problem in found] == (
        [True] if is_refused else []
    )
    assert broken({"train.compile": "auto"}, situation) == []


@pytest.mark.parametrize(("is_there", "image", "problems"), [(0, None, 1), (1, None, 0), (0, "an.sqsh", 0)])
def test_tensorboard_is_missed_before_anything_starts(
    is_there: int, image: str | None, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"name": object() if is_there else None}
    monkeypatch.setattr("orchestra.config.rules.plugin_rules.find_spec", lambda _: found["name"])
    config = changed({"train.tensorboard": True, "cluster.container.image": image})
    said = [*rule_tensorboard(config, CPU)]
    assert len(said) == problems
    assert all("pip install 'orchestra-train[tensorboard]'" in problem for problem in said)


def met(changes: Change, situation: Situation) -> Config:
    """The default configuration with some keys changed, where it is resolved."""
    return resolved(changed(changes), situation)


@pytest.mark.parametrize(
    ("num_gpus", "changes", "device", "ranks"),
    [
        (0, {}, "cpu", 2),
        (4, {}, "cuda", 4),
        (4, {"cluster.device": "cpu"}, "cpu", 2),
        (4, {"cluster.gpus_per_node": 1}, "cuda", 1),
        (0, {"cluster.gpus_per_node": 5}, "cpu", 5),
        (0, {"cluster.device": "cuda"}, "cuda", None),
        (4, {"cluster.launcher": "slurm"}, "auto", None),
    ],
)
def test_auto_becomes_what_this_machine_has(
    num_gpus: int, changes: Change, device: str, ranks: int | None
) -> None:
    config = met(changes, Situation("run", num_gpus))
    assert config.cluster.device.value == device
    assert world_size(config) == ranks


def test_what_cannot_run_on_this_machine_is_refused_where_it_would_start() -> None:
    assert broken({}, LAPTOP) == []
    for changes, words in (
        ({"cluster.gpus_per_node": 17}, ["gpus_per_node=17", "2 usable core(s)", "use at most 16"]),
        ({"model.vocab_size": 10**7}, ["2,560,738,432 parameters × 16 bytes", "78,147 MiB", "16,384 MiB"]),
    ):
        problems = broken(changes, LAPTOP)
        assert any(all(word in problem for word in words) for problem in problems), problems
        assert broken(changes, CPU) == []


def test_a_machine_on_which_ranks_start_says_its_cores_and_memory() -> None:
    machine = this_machine(starts=True)
    assert (machine.num_cores or 0) >= 1
    assert (machine.memory_bytes or 0) > 2**27
    assert this_machine() == Situation("run", machine.num_gpus)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 16),
        ({"cluster.gpus_per_node": 3}, 18),
        ({"cluster.gpus_per_node": 6, "parallelism.tp": 2}, 18),
        ({"train.micro_batch_size": 5}, 20),
        ({"train.global_batch_size": 6}, 6),
        ({"train.global_batch_tokens": 1024}, None),
        ({"cluster.launcher": "slurm"}, None),
        ({"parallelism.tp": 3}, None),
    ],
)
def test_a_batch_size_that_nobody_gave_is_written_down(changes: Change, size: int | None) -> None:
    assert met(changes, PLAN).train.global_batch_size == size


def test_a_checkpoint_must_fit_the_disk_it_goes_to(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    # So many tokens that 12 bytes for each of their parameters are twice what is free, which others change.
    changes: Change = {"model.vocab_size": 2 * free // (12 * 256), "model.tie_word_embeddings": False}
    huge = Situation("run", num_gpus=0, num_cores=2, memory_bytes=2**60)
    on_disk: Change = {**changes, "run.dir": str(tmp_path)}
    for of in (on_disk, {**changes, "checkpoint.dir": f"file://{tmp_path}/new"}):
        (problem,) = (text for text in broken(of, huge) if "one checkpoint needs" in text)
        name = "checkpoint.dir" if "checkpoint.dir" in of else "run.dir"
        for word in (f"{name}=", "parameters × 12 bytes", "are free", "checkpoint.every_steps=null"):
            assert word in problem
    assert broken({**changes, "checkpoint.dir": "s3://bucket/x"}, huge) == []
    assert broken({**on_disk, "checkpoint.every_steps": None}, huge) == []
    assert broken(on_disk, CPU) == []


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 16),
        ({"parallelism.zero": 1}, 8 + 8 / 4),
        ({"parallelism.zero": 2}, 4 + 12 / 4),
        ({"parallelism.zero": 3}, 16 / 4),
        ({"parallelism.zero": 3, "parallelism.shard_degree": 2}, 16 / 2),
        ({"parallelism.tp": 2}, 16 / 2),
        ({"parallelism.tp": 2, "parallelism.zero": 3}, 16 / 4),
        ({"precision.name": "bf16", "parallelism.zero": 1}, 4 + 12 / 4),
        ({"optim.state_dtype": "bf16"}, 12),
    ],
    ids=str,
)
def test_training_on_cpu_must_fit_host_memory_as_its_layout_shares_it_out(
    changes: Change, each: float
) -> None:
    on_cpu = {"cluster.device": "cpu", "cluster.gpus_per_node": 4, "checkpoint.every_steps": None, **changes}
    needed = round(808_064 * 4 * each)
    assert broken(on_cpu, replace(LAPTOP, memory_bytes=needed)) == []
    (problem,) = broken(on_cpu, replace(LAPTOP, memory_bytes=needed - 1))
    assert f"808,064 parameters × {each:g} bytes" in problem
    assert ("or parallelism=zero3" in problem) is (changes.get("parallelism.zero") != 3)


@pytest.mark.parametrize(
    ("state_dtype", "moments", "image", "training"),
    [("fp32", 8, "12 bytes = 9.25 MiB", "24.7 MiB"), ("bf16", 4, "8 bytes = 6.17 MiB", "18.5 MiB")],
)
def test_a_checkpoint_must_fit_host_memory_beside_the_training(
    state_dtype: str, moments: int, image: str, training: str
) -> None:
    # 808,064 parameters: 2 ranks with parameter, gradient and moments; masters and moments in a staged copy.
    just_enough = 808_064 * (2 * (8 + moments) + 4 + moments)
    on_cpu: Change = {"cluster.device": "cpu", "cluster.gpus_per_node": 2, "optim.state_dtype": state_dtype}
    assert broken(on_cpu, replace(LAPTOP, memory_bytes=just_enough)) == []
    too_small = replace(LAPTOP, memory_bytes=just_enough - 1)
    (problem,) = broken(on_cpu, too_small)
    staged = f"808,064 parameters × {image} of host memory"
    for word in (staged, f"beside the {training}", "every_steps=null"):
        assert word in problem
    assert broken({**on_cpu, "checkpoint.every_steps": None}, too_small) == []


@pytest.mark.parametrize("changes", [{}, {"parallelism.zero": 2}, {"parallelism.zero": 3}], ids=str)
def test_ranks_that_share_out_experts_have_their_part_of_them(changes: Change) -> None:
    model: Change = {"model.num_experts": 4, "model.first_k_dense_replace": 1, **changes}
    alone, shared = (trained_bytes(changed({**model, "parallelism.ep": ep}), 4) for ep in (1, 2))
    experts = 3 * num_expert_parameters(changed(model).model)
    # Of bytes that ZeRO shards each rank has its part already.
    whole = {0: 16, 2: 4, 3: 0}[changes.get("parallelism.zero", 0)]
    assert alone - shared == 4 * whole * experts // 2


def test_training_takes_what_another_optimizer_keeps() -> None:
    adagrad = OptimConfig(target="torch.optim:Adagrad", state_bytes_per_parameter=4.0)
    assert trained_bytes(Config(optim=adagrad), 1) == 12 * num_parameters(Config().model)


def test_what_is_saved_of_another_optimizer_is_what_it_keeps() -> None:
    for bytes_kept, saved in ((4.0, 8), (None, 12)):
        optim = OptimConfig(target="torch.optim:Adagrad", state_bytes_per_parameter=bytes_kept)
        assert checkpoint_bytes(Config(optim=optim)) == saved * num_parameters(Config().model)


def test_a_folder_for_checkpoints_means_the_same_from_anywhere_and_must_be_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert met({"checkpoint.dir": "saved"}, PLAN).checkpoint.dir == str(tmp_path / "saved")
    assert met({"checkpoint.dir": "s3://bucket/saved"}, PLAN).checkpoint.dir == "s3://bucket/saved"
    Path("file").write_text("")
    (problem,) = broken({"checkpoint.dir": "file/checkpoints"}, LAPTOP)
    assert f"{tmp_path}/file is not a folder" in problem


def test_a_signature_is_of_the_values_that_count() -> None:
    mine = signature(Config())
    assert re.fullmatch(r"[0-9a-f]{12,}", mine)
    run, wandb = RunConfig(name="other", dir="elsewhere"), WandbConfig(mode=WandbMode.disabled)
    assert signature(replace(Config(), run=run, wandb=wandb)) == mine
    assert signature(replace(Config(), optim=OptimConfig(lr=1e-3))) != mine
    assert signature(replace(Config(), optim=OptimConfig(betas=[0.9, 0.96]))) != mine
