"""What users of Hydra, submitit and wandb type first: it works, or the answer says what to type instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.command_line import CommandLine

from orchestra.cli import INSTEAD, VERBS
from orchestra.config import other_tools
from orchestra.config.descriptions import described_presets
from orchestra.config.keys import find_key
from orchestra.errors import EXIT_DONE, EXIT_USAGE

CFG = "--cfg job"
LONG = "long" * 70
# What is typed -> the exit code, and words of what is printed or, where it is refused, of the error.
TABLE = f"""
run --cfg job -> 0 hidden_size: 128
run -c job --resolve train.steps=7 -> 0 steps: 7
run --cfg job --package optim.lr -> 0 0.0003
run --cfg hydra -> 2 choose from 'job'
run --resolve -> 2 --cfg job
submit -p gpu -> 2 a partition is cluster.partition=gpu
submit -N4 -> 2 write cluster.nodes=4
submit -t 10 -> 2 write cluster.time_limit=VALUE
status -N 4 -> 2 unrecognized arguments
run -train.steps=5 -> 2 write train.steps=5
run eval.at_start=2 -> 2 expected true or false
run cluster.partition=gpu cluster.setup=[ls] --dry-run -> 0 .partition, cluster.setup: for jobs on Slurm
run --info -> 0 model=debug
run -m {CFG} train.steps=7,8 -> 0 # 001 train.steps=8
run -m {CFG} train.steps=7,8 -p train.steps -> 0 8
submit -m {CFG} train.steps=7,8 -p cluster.launcher -> 0 slurm
run -m {CFG} hydra/sweeper=optuna -> 2 leave hydra/sweeper out
run -m --info train.steps=7,8 -> 2 leave -m out and give one value of each key
submit --cfg job -p cluster.launcher -> 0 slurm
plan --cfg job -p cluster.hardware -> 0 h100
run --config-dir PRESETS model=mine {CFG} -p model.hidden_size -> 0 64
plan --config-dir PRESETS model=mine {CFG} -p model.hidden_size -> 0 64
run --config-dir nowhere {CFG} -> 2 is not a folder
run --config-dir= {CFG} -> 2 it is empty; give a path
status --dir= -> 2 it is empty; give a path
run --config-dir /{LONG} {CFG} -> 2 is not a folder
run data=tokens data.path=/{LONG} --dry-run -> 2 data: /
run checkpoint.dir=s3:// --dry-run -> 2 checkpoint.dir=s3:// names no bucket
data pack nowhere.txt --output out -> 2 nowhere.txt: no such file
data pack /{LONG} --output out -> 2 : cannot be read: File name too long
data pack /dev/null --output out -> 2 /dev/null: is no file of bytes
status /{LONG} -> 2 cannot be read: File name too long; give
run --config-name train -> 2 experiment=NAME
run --config-path x -> 2 --config-dir
run --hydra-help -> 2 orchestra config
run --install-completion -> 2 orchestra completion bash
run --shell-completion install=bash -> 2 orchestra completion bash
config train.steps -> 0 train.steps=100
checkpoint --help -> 0 checkpoint verify
data --help -> 0 data pack
bench -h -> 0 bench network
help status -> 0 orchestra status
run train.steps=1e6 {CFG} -p train.steps -> 0 1000000
run train.seq_len=8k {CFG} -p train.seq_len -> 0 8000
run train.global_batch_tokens=4M {CFG} -> 2 train.global_batch_tokens=4Mi
run train.global_batch_tokens=4Mi {CFG} -p train.global_batch_tokens -> 0 4194304
run train.tokens=1e9 {CFG} -p train.steps -> 0 244141
run cluster.time_limit=4h {CFG} -p cluster.time_limit -> 0 4:00:00
run checkpoint.every_steps=1h {CFG} -> 2 checkpoint.every_s=1h
run checkpoint.every_s=1h {CFG} -p checkpoint.every_s -> 0 3600
submit cluster.nodes=4..2 {CFG} -> 2 ends below its begin; use cluster.nodes=2..4
generate RUN text --top-p 0 -> 2 above 0, at most 1
generate RUN text --seed 99999999999999999999 -> 2 give a number, at most 4611686018427387904
submit -m run.name=a,b --dry-run -> 2 members of a sweep share one name
run -m train.seed=1,2 cluster.members_at_once=1,2 -> 2 says how the sweep runs
run hydra/launcher=submitit_slurm -> 2 Hydra's own settings
run hydra.run.dir=x -> 2 Hydra's own settings
run hydra.verbose=true -> 2 Hydra's own settings
run hydra.mode=MULTIRUN -> 2 Hydra's own settings
run +train.foo=1 -> 2 train.foo: no such key
run +train.steps=3 -> 2 write train.steps=3
run ++train.steps=3 {CFG} -p train.steps -> 0 3
run ~wandb {CFG} -p wandb.mode -> 0 disabled
run ~wandb.tags -> 2 cannot be deleted
run wandb=null {CFG} -p wandb.mode -> 0 disabled
run wandb=off {CFG} -p wandb.mode -> 0 disabled
run experiment=null {CFG} -p train.steps -> 0 100
run ~train -> 2 ~train: a section cannot be left out; take a preset of it (train=default,
run ~model=debug -> 2 a section cannot be left out
run optim=null -> 2 optim=null: a section cannot be left out; take a preset of it (optim=adamw,
run ~eval -> 2 ~eval: a section cannot be left out; set one of eval.every_steps,
run parallelism=fsdp -> 2 did you mean parallelism=zero3?
run optim=sgd -> 2 optim.target=torch.optim:SGD
run checkpoint.dir=~/states {CFG} -p checkpoint.dir -> 0 HOME/states
run data=tokens data.blend=[{{path:~/a}},{{path:~/b}}] --dry-run -> 2 no file HOME/b.bin
run lr=3e-4 -> 2 did you mean optim.lr?
run trainer.max_steps=10 -> 2 did you mean train.steps?
run optim.learning_rate=1 -> 2 did you mean optim.lr?
run cluster.num_nodes=3 -> 2 did you mean cluster.nodes?
run tensor_model_parallel_size=2 -> 2 did you mean parallelism.tp?
run training.local_batch_size=4 -> 2 did you mean train.micro_batch_size?
run trainer.bf16=true -> 2 did you mean precision=bf16?
run --nproc_per_node=2 -> 2 write cluster.gpus_per_node=2; see
run --cp=2 -> 2 write parallelism.cp=2; see
run --gradient_accumulation_steps=8 -> 2 write train.micro_batch_size=VALUE; see
submit --nodes 4 -> 2 write cluster.nodes=VALUE; see
run --train.steps=3 -> 2 write train.steps=3; see
run --dryrun -> 2 did you mean --dry-run?
status --nodes=3 -> 2 unrecognized arguments: --nodes=3; see `orchestra status
resume -> 2 the following arguments are required: RUN; see
run optim.betas=[0.9,0.95 -> 2 (a bracket is not closed)
run optim.betas=(0.9,0.95) -> 2 (a list is written [a,b])
run -m train.steps=1,,2 -> 2 (',' cannot stand there)
run -m train.steps=1,2, -> 2 (something is missing at its end)
run run.name=${{oc.env:NOT_SET,given}} {CFG} -p run.name -> 0 given
run run.name=x${{train.steps}} {CFG} -p run.name -> 0 x100
run run.name=${{now:%Y}} {CFG} -p run.name -> 0 20
run wandb.notes=why wandb.job_type=train {CFG} -p wandb -> 0 notes: why
run wandb.name=x -> 2 wandb.name: no such key
run wandb.id=x -> 2 wandb.id: no such key
run wandb.resume=allow -> 2 wandb.resume: no such key
run wandb.tags=[a,b] wandb.group=g wandb.entity=e wandb.project=p {CFG} -p wandb -> 0 entity: e
run experiment=mine --config-dir PRESETS {CFG} -p train.seq_len -> 0 32
run -m optim.lr=1e-3,3e-3 train.seed=1,2 --dry-run -> 0 4 members
run -m optim.lr=choice(1e-3,3e-3) --dry-run -> 0 2 members
run -m train.seed=range(0,3) --dry-run -> 0 3 members
run -m train.seed=shuffle(1,2,3) --dry-run -> 0 3 members
run -m model=glob(llama_*) cluster.gpus_per_node=8 train.micro_batch_size=1 --dry-run -> 0 members
submit -m cluster.nodes=1,2 cluster.gpus_per_node=8 --dry-run -> 0 #SBATCH --nodes=2
submit -m cluster.partition=a,b cluster.gpus_per_node=8 --dry-run -> 0 #SBATCH --partition=b
run --dry-run --json -> 0 "hidden_size": 128
run --dry-run cluster.gpus_per_node=4 parallelism.tp=2 -> 0 links   tp 2: inside a node
show -> 2 orchestra status RUN
list -> 2 orchestra status
ls -> 2 orchestra status
compare a b -> 2 orchestra status RUN
train -> 2 orchestra run
sweep -> 2 orchestra run -m
agent -> 2 orchestra run -m
evaluate first -> 2 orchestra eval RUN
export first -> 2 orchestra checkpoint export
sample first -> 2 orchestra generate RUN
"""
ROWS = [tuple(re.split(" -> ", line)) for line in TABLE.strip().splitlines()]


@pytest.mark.parametrize(("typed", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_what_is_typed_by_habit_works_or_is_answered_with_what_to_type(
    typed: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.setenv("ORCHESTRA_CONFIG_DIR", str(tmp_path / "no home"))
    monkeypatch.chdir(tmp_path)
    presets = tmp_path / "presets"
    (presets / "model").mkdir(parents=True)
    (presets / "model" / "mine.yaml").write_text("hidden_size: 64\n")
    (presets / "experiment").mkdir()
    (presets / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  seq_len: 32\n")
    code, _, words = expected.partition(" ")
    said = orchestra(*typed.replace("PRESETS", str(presets)).split(), code=int(code))
    words = words.replace("HOME", str(Path.home()))
    assert words in (said.out if int(code) == EXIT_DONE else said.err)
    assert int(code) in (EXIT_DONE, EXIT_USAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["presets"]


def test_words_of_other_tools_stand_for_keys_that_there_are() -> None:
    for key in other_tools.WORDS:
        group, _, preset = key.partition("=")
        assert find_key(group) is not None, key
        assert not preset or preset in described_presets(group), key


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_no_wider_than_a_terminal(
    verb: str, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = orchestra(*verb.split(), "--help").out.splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_every_verb_of_another_tool_names_a_verb_that_there_is() -> None:
    for verb, advice in INSTEAD.items():
        named = re.findall(r"`orchestra ([a-z ]+?)(?: [A-Z-].*?)?`", advice)
        assert named, verb
        assert set(named) <= set(VERBS), verb
