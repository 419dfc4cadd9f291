"""What breaks each rule, and words of the sentence that then appears. A new rule gets its lines here."""

from __future__ import annotations

import re
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from conf.schema import Config
from orchestra.config.machine import Situation, resolved
from orchestra.config.rules.all_rules import problems_of
from orchestra.run.config_file import writable_schema

# Keys and their values, on top of the defaults.
Change = dict[str, Any]


def changed(changes: Change) -> Config:
    """Return the default configuration with some keys changed."""
    node = writable_schema()
    for name, value in changes.items():
        OmegaConf.update(node, name, value, force_add=True)
    return cast(Config, OmegaConf.to_object(node))


def broken(changes: Change, situation: Situation) -> list[str]:
    """Return what the rules say of it where it is resolved."""
    return problems_of(resolved(changed(changes), situation), situation)


# The rule; below it `key=value  key=value -> words | more words`, a value as YAML has it.
_TABLE = """
rule_compile
    train.compile=maybe -> train.compile='maybe' | auto, true or false
    train.compile='true' -> train.compile='true' | without quotes
rule_sizes
    train.steps=0 -> train.steps=0 | 1 or more
    optim.lr=1.0e+20 -> optim.lr=1e+20 | use at most 100
    model.norm_eps=1.0e+20 -> model.norm_eps=1e+20 | use at most 1
    model.init_std=1.0e+20 -> model.init_std=1e+20 | use at most 100
    train.seed=9223372036854775808 -> train.seed=9223372036854775808 | use at most 9223372036854775807
    model.vocab_size=2147483648 -> model.vocab_size=2147483648 | use at most 2147483647
    recovery.exclude_hours=87601 -> recovery.exclude_hours=87601 | use at most 87600
    recovery.collective_timeout_s=10000001 -> recovery.collective_timeout_s=10000001 | use at most 10000000
    train.global_batch_size=1000000000000000000 -> train.global_batch_size=1000000000 | too large
rule_numbers
    recovery.replay_every_steps=5  recovery.replay_tolerance=0.0 -> recovery.replay_tolerance=0.0
    optim.lr=0.0 -> optim.lr=0.0 | above 0
    optim.weight_decay=-0.1 -> optim.weight_decay=-0.1 | 0 or more
rule_plugins
    optim.target=torch.optim.SGD -> names no plug-in | package.module:name
rule_loss
    train.loss_options.size=1 -> without train.loss
    train.loss=mine  parallelism.tp=2 -> parallelism.tp=2 | use parallelism.tp=1
    train.loss=mine  precision.fp8_output=true -> use precision.fp8_output=false
rule_block
    model.block_options.width=3 -> without model.block
    model.block=mine  parallelism.tp=2 -> parallelism.tp=2 | use parallelism.tp=1
    model.block=mine  parallelism.cp=2 -> parallelism.cp=2 | use parallelism.cp=1
    model.block=mine  precision.name=fp8 -> precision=fp8 | use precision=bf16
    model.block=mine  train.recompute_budget_gib=1.0 -> use train.recompute
    model.block=mine  model.init_from=x -> use model.init_from=null
rule_source
    data.source_options.path=x -> without a plug-in as data.source
    data.source='mine:'  data.document_masks=true -> use data.document_masks=false
rule_callbacks
    train.callbacks=['a:Hook', 'b:Hook'] -> has Hook twice
    train.callbacks_options.Hook.every=3 -> callbacks_options.Hook | name callbacks
    train.callbacks=['a Hook:Hook']  train.callbacks_options.Hook=3 -> are no options
rule_optimizer
    optim.options.momentum=0.9 -> without optim.target
    optim.target=sgd  optim.betas=[0.8,0.9] -> optim.betas=[0.8,0.9] | optim.options.betas
    optim.target=sgd  parallelism.offload=optimizer_disk -> use parallelism.offload=none
    optim.target=orchestra.optim.muon:Muon  parallelism.tp=2 -> parallelism.tp=2 | whole matrices
    optim.target=torch.optim:Adafactor  model.num_experts=4  parallelism.ep=2
        -> parallelism.ep=2 | needs whole parameters | ep=1
rule_roll_back
    recovery.loss_spike.action=roll_back  checkpoint.every_steps=null -> checkpoint.every_steps=null | skip
    train.on_nonfinite=roll_back  recovery.max_restarts=0 -> roll_back | max_restarts=0
rule_replay
    recovery.replay_tolerance=0.1 -> replay_tolerance=0.1 | replay_every_steps
    recovery.replay_every_steps=5  parallelism.zero=3 -> parallelism.zero=3 | parallelism.zero=2 or less
    recovery.replay_every_steps=5  cluster.gpus_per_node=1 -> replay_every_steps=5 | one data-parallel rank
    recovery.replay_every_steps=5  cluster.gpus_per_node=4  parallelism.tp=4 -> one data-parallel rank
    recovery.replay_every_steps=5  cluster.device=cuda -> deterministic=true | replay_tolerance
    recovery.replay_every_steps=5  model.num_experts=4  parallelism.ep=2 -> replay_every_steps=5 | use ep=1
    recovery.replay_every_steps=5  model.num_experts=4  model.moe_aux_scope=batch -> moe_aux_scope=sequence
    recovery.replay_every_steps=5  recovery.max_restarts=0 -> replay_every_steps=5 | recovery.max_restarts=0
rule_stragglers
    recovery.straggler_factor=1.0 -> recovery.straggler_factor=1.0 | e.g. 1.3
rule_texts
    run.dir=' ' -> run.dir is empty
    checkpoint.dir=' ' -> checkpoint.dir is empty
rule_control_characters
    cluster.account="mine\\n#SBATCH --uid=0" -> cluster.account='mine\\n#SBATCH | a line break
    cluster.slurm_extra={"mem\\n": 1} -> cluster.slurm_extra='mem\\n'
    cluster.slurm_extra={reservation: "a\\rb"} -> cluster.slurm_extra.reservation='a\\rb'
    cluster.container.mounts=["/a:/a", "/b\\x1b"] -> cluster.container.mounts[1]=
    cluster.setup=["a\\tb\\nc", "d\\0"] -> cluster.setup[1]=
    run.dir="runs\\nhere" -> run.dir='runs\\nhere'
rule_zero_stage
    parallelism.zero=4 -> parallelism.zero=4 | 0, 1, 2 or 3
rule_betas
    optim.betas=[0.9] -> optim.betas=[0.9] | [0.9,0.95]
    optim.betas=[0.9, 1.0] -> optim.betas=[0.9,1.0]
rule_learning_rates
    optim.min_lr=1.0 -> optim.min_lr=1.0 | optim.lr=0.0003
rule_schedule
    optim.warmup_steps=101 -> optim.warmup_steps=101 | train.steps=100
    optim.wsd_decay_fraction=0.0 -> optim.wsd_decay_fraction=0.0
rule_tokens
    train.tokens=5000  cluster.launcher=slurm -> train.tokens=5000 | train.global_batch_tokens
rule_profile
    train.profile.steps=[3] -> train.profile.steps=[3]
    train.profile.enabled=true  train.steps=3 -> train.profile.steps=[5,7] | steps 1 to 3 | [3,3]
rule_rope_scaling
    model.rope_scaling.enabled=true  model.rope_scaling.low_freq_factor=4.0 -> low_freq_factor=4.0
rule_hardware_name
    cluster.hardware=H100s -> cluster.hardware=H100s | did you mean h100?
rule_time_limit
    cluster.time_limit=4x -> cluster.time_limit=4x | D-HH:MM:SS
rule_time_for_warning
    cluster.launcher=slurm  cluster.time_limit='4' -> 150 s before its end | use 5 minutes or more
rule_switches
    cluster.max_switches_wait=2h -> cluster.max_switches_wait=2h | cluster.max_switches
    cluster.max_switches=1  cluster.max_switches_wait=soon -> max_switches_wait=soon | D-HH:MM:SS
    cluster.launcher=slurm  cluster.nodes=6  cluster.segment=4 -> cluster.segment=4 | use 2, 3 or 6
rule_slurm_extra
    cluster.slurm_extra={switches: 1} -> slurm_extra.switches | cluster.max_switches
    cluster.slurm_extra={nodes: 3} -> slurm_extra.nodes | cluster.nodes
    cluster.slurm_extra={exclude: node1} -> slurm_extra.exclude | cluster.exclude
    cluster.slurm_extra={qos: long}  cluster.qos=short -> cluster.qos=short says that too
    cluster.slurm_extra={array: 0-3} -> slurm_extra.array | sweep
    cluster.slurm_extra={clusters: other} -> slurm_extra.clusters | export SLURM_CLUSTERS
    cluster.slurm_extra={ntasks-per-gpu: 1} -> slurm_extra.ntasks-per-gpu | one task per node
    cluster.slurm_extra={wait: true} -> slurm_extra.wait | --wait
    cluster.slurm_extra={test-only: true} -> slurm_extra.test-only | --dry-run
rule_gpus_of_extra
    cluster.device=cuda  cluster.slurm_extra={gres: gpu:h100:1}  cluster.gpus_per_node=2
        -> gives a node 1 GPU, and its 2 ranks
    cluster.device=cuda  cluster.slurm_extra={gres: "gpu,shard:4"}  cluster.gpus_per_node=2
        -> gives a node 1 GPU
    cluster.device=cuda  cluster.slurm_extra={gres: gres/gpu=1}  cluster.gpus_per_node=2
        -> gives a node 1 GPU
    cluster.device=cuda  cluster.slurm_extra={gpus: 3}  cluster.gpus_per_node=2  cluster.nodes=2
        -> gives the job 3 GPUs | 4 ranks
rule_setup_lines
    cluster.launcher=slurm  cluster.setup=['module load', 'echo "a'] -> cannot read it (line 2: | matching `"'
    cluster.launcher=slurm  cluster.setup=['module load','exec sh -l'] -> line 2 `exec sh -l` leaves the
    cluster.launcher=slurm  cluster.setup=['if true; then'] -> (line 2: syntax error
    cluster.launcher=slurm  cluster.setup=['cat <<END', x] -> here-document | END
rule_container_mounts
    cluster.container.mounts=['/a:/b'] -> cluster.container.mounts=['/a:/b'] | name an image
    cluster.container={mounts: ['/a:/b'], prefix: podman run x} -> mount them in cluster.container.prefix
rule_srun_extra
    cluster.srun_extra={kill-on-bad-exit: 1} -> srun_extra.kill-on-bad-exit | outlives
    cluster.srun_extra={container_image: x} -> srun_extra.container_image | cluster.container.image
rule_run_name
    run.name=../x -> run.name=../x | letters
    run.name='' -> run.name is empty | leave it out
    run.name=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
        -> 100 letters
rule_heads
    model.num_attention_heads=12 -> num_attention_heads=12 | hidden_size=128
    model.num_key_value_heads=3 -> num_key_value_heads=3 | use 1, 2, 4 or 8
    model.head_dim=15 -> a head of 15 | rotary
rule_positions
    model.family=gpt  train.seq_len=4096 -> train.seq_len=4096 | 2048
rule_experts
    model.moe_capacity_factor=1.25  model.moe_balance=aux
        -> model.moe_balance=aux model.moe_capacity_factor=1.25 with model.num_experts=0 | _factor=null
    parallelism.ep=2 -> parallelism.ep=2 shares out experts and model.num_experts=0 | model=mixtral_8x7b
    cluster.gpus_per_node=4  model.num_experts=2  parallelism.ep=4 -> ep=4 is more than | use 1 or 2
    cluster.gpus_per_node=8  model.num_experts=7  parallelism.ep=8 -> ep=8 is more than | use 1, 2 or 4
    cluster.launcher=slurm  model.num_experts=2  parallelism.ep=4 -> ep=4 is more than | use at most 2
    model.num_experts=4  model.num_experts_per_tok=5 -> per_tok=5 is more than | use at most 4
    model.num_experts=4  model.first_k_dense_replace=4 -> first_k_dense_replace=4 leaves no mixture
    model.num_experts=4  model.block=mine -> model.num_experts=4 with model.block=mine | own feed-forward
rule_expert_placement
    parallelism.expert_placement=auto -> parallelism.ep=1 | use expert_placement=fixed
    parallelism.expert_placement=auto  model.num_experts=4 -> parallelism.ep=1 | ep=2 or more
    parallelism.expert_placement=auto  model.num_experts=4  parallelism.ep=2  checkpoint.every_steps=null
        -> every_steps=null: experts move at saves | give checkpoint.every_steps
rule_expert_groups
    model.num_experts=6  model.n_group=4 -> n_group=4 does not divide model.num_experts=6; use 1, 2, 3 or 6
    model.num_experts=8  model.n_group=2  model.topk_group=3 -> topk_group=3 is more than model.n_group=2
    model.num_experts=8  model.n_group=8 -> groups have 1 experts | num_experts_per_tok=2; use a larger one
rule_expert_balance
    model.moe_balance=none  model.router_aux_loss_coef=0.1 -> has no loss of balance | model.moe_balance=aux
    model.moe_balance=aux  model.router_aux_loss_coef=0.0 -> nothing would balance | model.moe_balance=none
rule_latent_attention
    model.kv_lora_rank=8  model.num_key_value_heads=8  parallelism.cp=2  parallelism.cp_method=ulysses
        -> cp_method=ulysses with model.kv_lora_rank=8 | cp_method=all_gather
    model.q_lora_rank=8 -> q_lora_rank=8 without model.kv_lora_rank | use model.q_lora_rank=null
    model.kv_lora_rank=8 -> kv_lora_rank=8 | use model.num_key_value_heads=8
    model.kv_lora_rank=8  model.num_key_value_heads=8  model.head_dim=16 -> use model.head_dim=null
    model.kv_lora_rank=8  model.num_key_value_heads=8  model.qk_rope_head_dim=5 -> is odd | an even number
rule_head_norms
    model.qk_norm=true  model.family=gpt -> use model.qk_norm=false
rule_tensor_parallel
    parallelism.tp=3  cluster.gpus_per_node=3 -> attention_heads=8; use 1, 2, 4 or 8
    parallelism.tp=4  model.intermediate_size=350  cluster.gpus_per_node=4 -> 1, 2, 5
    parallelism.tp=4  model.num_attention_heads=24  model.head_dim=8  model.num_key_value_heads=6
        -> parallelism.tp=4 and model.num_key_value_heads=6 | tp=1, 2, 3, 6, 12 or 24
rule_sequence_parallel
    parallelism.sequence_parallel=true -> sequence_parallel=true | 2 or more
    parallelism.sequence_parallel=true  parallelism.tp=2  train.seq_len=255 -> tp=2 | 254 or 256
rule_context_parallel
    parallelism.cp=2  train.seq_len=254 -> train.seq_len=254 | 2·cp pieces (parallelism.cp=2) | 252 or 256
    parallelism={cp: 2, tp: 4, sequence_parallel: true}  cluster.gpus_per_node=8  train.seq_len=252
        -> each rank's two by parallelism.tp=4 again | 248 or 256
rule_context_method
    parallelism.cp=2  parallelism.cp_method=ulysses  model.num_key_value_heads=1
        -> tp·cp = 1·2 ranks | model.num_key_value_heads=1 | parallelism.cp_method=all_gather
rule_pipeline
    parallelism.pp=8  cluster.gpus_per_node=8 -> parallelism.pp=8 | layers=4
    parallelism.virtual_stages=2 -> virtual_stages=2 | parallelism.pp=1
    parallelism.pp=2  parallelism.virtual_stages=2 -> schedule=1f1b | one stage on each rank | interleaved
    parallelism.pp=2  parallelism.schedule=interleaved -> virtual_stages=1 interleaves nothing | 2 or more
    parallelism.pp=2  parallelism.schedule=zbv  parallelism.virtual_stages=3 -> a V has 2 stages
    parallelism.pp=2  parallelism.schedule=interleaved  parallelism.virtual_stages=3 -> 6 stages | layers=4
    parallelism.pp=2  parallelism.stages=[1,1,2] -> [1,1,2] has 3 stages | parallelism.pp=2 × 1
    parallelism.pp=2  parallelism.stages=[4,0] -> [4,0]: stage 1 has no layer | 1 or more
    parallelism.pp=2  parallelism.stages=[2,3] -> [2,3] has 5 layers | num_hidden_layers=4
rule_in_pipeline
    parallelism.pp=2  recovery.replay_every_steps=5 -> recovery.replay_every_steps=5 | parallelism.pp=2 | null
    parallelism.pp=2  precision.name=fp8  precision.fp8_delayed_scaling=true -> history of sizes | use false
    parallelism.pp=2  train.recompute_budget_gib=1.0 -> budget_gib=1 with parallelism.pp=2 | recompute_every
rule_layout
    parallelism.tp=4 -> does not divide the world size 2 | multiple of 4
    parallelism.dp=4 -> parallelism.dp=4 | world size 2 | parallelism.dp=2 or auto
    parallelism.dp=all  cluster.launcher=slurm -> parallelism.dp=all | auto
    parallelism.zero=1  parallelism.shard_degree=4 -> shard_degree=4 does not divide dp=2; use 1 or 2
    parallelism={zero: 1, shard_degree: 4, cp: 2} -> does not divide dp·cp = 1·2; use 1 or 2
    parallelism={zero: 1, shard_degree: 1, ep: 2}  model.num_experts=4 -> =1 is not a multiple of | use 2
    cluster.gpus_per_node=32  model.num_experts=8  parallelism.ep=3 -> not divide dp=32; use 1, 2, 4 or 8
rule_sharding
    parallelism.shard_degree=2 -> needs parallelism.zero=1, 2 or 3
    parallelism={zero: 1, shard_degree: 1, ep: 2}  cluster.launcher=slurm -> =1 is not a multiple of | use 2
rule_reduce_dtype
    precision.reduce_dtype=fp16 -> precision.reduce_dtype=fp16 | precision=fp32 | bf16, fp32 or null
rule_recompute
    train.recompute_every=2 -> train.recompute=none | use train.recompute=selective or full
    train.recompute_budget_gib=1.0  train.recompute=full -> so does train.recompute=full; leave out
    train.recompute_budget_gib=0.001 -> is below the 0.0 | 8 × 256 tokens
rule_batch
    train.global_batch_size=6  train.micro_batch_size=2 -> =4 or 8 | micro_batch_size=1
    train.global_batch_size=7 -> train.global_batch_size=7 | dp=2 | 6 or 8
    train.global_batch_size=0 -> train.global_batch_tokens
    train.global_batch_size=3  train.micro_batch_size=auto -> not a multiple of dp=2 | =2 or 4
    train.micro_batch_size=0 -> train.micro_batch_size=0
    train.micro_batch_size=big -> train.micro_batch_size=big | 1 or more, or auto
    train.global_batch_tokens=1000 -> train.global_batch_tokens=1000 | train.seq_len=256 | 768 or 1024
    train.batch_ramp=[{tokens: 0, global_batch_tokens: 256}, {tokens: 9, global_batch_tokens: 1000}]
        -> train.batch_ramp[1].global_batch_tokens=1000 | train.seq_len=256 | 768 or 1024
    train.batch_ramp=[{tokens: 0, global_batch_tokens: 768}, {tokens: 9, global_batch_tokens: 1024}]
        -> train.batch_ramp[0].global_batch_tokens=768 (3 sequences) | dp=2 | =512 or 1024
rule_batch_ramp
    optim.batch_ramp_lr=sqrt -> without train.batch_ramp | optim.batch_ramp_lr=none
    train.batch_ramp=[{tokens: 9, global_batch_tokens: 512}] -> train.batch_ramp[0].tokens=9 | use tokens: 0
    train.batch_ramp=[{tokens: 0, global_batch_tokens: 512}, {tokens: 0, global_batch_tokens: 1024}]
        -> train.batch_ramp[1].tokens=0 | not above the 0
    train.batch_ramp=[{tokens: 0, global_batch_tokens: 512}, {tokens: 9, global_batch_tokens: 512}]
        -> train.batch_ramp[1].global_batch_tokens=512 | leave that batch out
    train.batch_ramp=[{tokens: 0, global_batch_tokens: 0}]
        -> train.batch_ramp[0].global_batch_tokens=0 | 1 or more
rule_parametrization
    optim.mup.base_hidden=64 -> optim.mup.base_hidden without optim.parametrization=mup | leave it out
    optim.parametrization=mup  model.tie_word_embeddings=true -> use model.tie_word_embeddings=false
    optim.parametrization=mup  optim.target=sgd -> optim.target=sgd | use optim.target=null
    optim.parametrization=mup  model.block=mine -> model.block=mine | use model.block=null
rule_noise_scale
    train.noise_scale_every=5  parallelism.cp=2 -> parallelism.cp=2 | use parallelism.cp=1
    train.noise_scale_every=5  parallelism.pp=2  model.tie_word_embeddings=true
        -> use parallelism.schedule=1f1b
    train.noise_scale_every=5  cluster.gpus_per_node=1  train.global_batch_size=4  train.micro_batch_size=4
        -> one micro-batch of 4 | a smaller train.micro_batch_size
rule_profiled_ranks
    train.profile.enabled=true  train.profile.ranks=[0, 2] -> no rank 2 | 0 to 1
    train.profile.enabled=true  train.profile.ranks=[] -> nothing would be
rule_nodes
    cluster.nodes=2 -> cluster.nodes=2 | orchestra submit | use cluster.nodes=1
rule_min_nodes
    recovery.min_nodes=2 -> recovery.min_nodes=2 | cluster.nodes=1
    cluster.nodes=4  cluster.gpus_per_node=2  recovery.min_nodes=2  parallelism.dp=8 -> 2 to 3 nodes
    cluster.nodes=4  cluster.gpus_per_node=2  recovery.min_nodes=3  train.global_batch_size=8 -> 3 nodes
    cluster={nodes: 4, gpus_per_node: 2}  recovery.min_nodes=3  parallelism={zero: 2, shard_degree: 4} -> dp=6
rule_range_of_nodes
    cluster.min_nodes=2 -> cluster.min_nodes=2 | cluster.nodes=1
    cluster.nodes=2  cluster.min_nodes=1 -> recovery.min_nodes=null | use recovery.min_nodes=1
    cluster.nodes=4  cluster.min_nodes=1  recovery.min_nodes=2 -> use recovery.min_nodes=1
    cluster={nodes: 4, gpus_per_node: 2, min_nodes: 3}  recovery.min_nodes=1  train.global_batch_size=8
        -> cluster.nodes=3..4: a job of 3 nodes could not begin | use cluster.nodes=4
    cluster={nodes: 8, gpus_per_node: 1, min_nodes: 3}  recovery.min_nodes=1  train.global_batch_size=8
        -> a job of 3 nodes could not begin | use cluster.nodes=4..8
    cluster={nodes: 7, gpus_per_node: 1, min_nodes: 3}  recovery.min_nodes=1  train.global_batch_size=20
        -> cluster.nodes=3..7: a job of 3 nodes could not begin | use cluster.nodes=4..5
    cluster={nodes: 7, gpus_per_node: 1, min_nodes: 4}  recovery.min_nodes=1  train.global_batch_size=20
        -> cluster.nodes=4..7: a job of 7 nodes could not train | dp=7 | use cluster.nodes=4..5
rule_spare_nodes
    cluster.spare_nodes=1 -> cluster.spare_nodes=1 | launcher=local
rule_agent_timeout
    recovery.agent_timeout_s=2.0 -> agent_timeout_s=2 | 5 or more
rule_ranks_per_node
    cluster.gpus_per_node=many -> cluster.gpus_per_node=many | auto
    cluster.gpus_per_node=0 -> cluster.gpus_per_node=0
rule_share_devices
    cluster.share_devices=true  cluster.launcher=slurm -> leave it out | cluster=local
rule_precision_on_cpu
    precision.name=fp8  cluster.device=cpu -> precision=fp8 | cluster.device=cuda
rule_offload_on_cpu
    parallelism.offload=optimizer  cluster.device=cpu -> use parallelism.offload=none | optimizer_disk
rule_offload_disk
    parallelism.offload=optimizer_disk -> parallelism.offload_dir=null | absolute path
    parallelism.offload=optimizer_disk  parallelism.offload_dir=scratch -> offload_dir=scratch | absolute path
    parallelism.offload=optimizer_disk  parallelism.offload_dir=/tmp  recovery.memory_copy_every_steps=1
        -> memory_copy_every_steps=1 | use null
rule_offload
    parallelism.offload=all  parallelism.zero=2 -> parallelism.offload=all | parallelism.zero=3
    parallelism.offload=all  parallelism.zero=3  cluster.gpus_per_node=1 -> parallelism.offload=optimizer
rule_loss_scale
    precision.loss_scale.initial=1000 -> precision.loss_scale.initial=1000 | 512 or 1024
rule_fp8
    precision.name=fp8  precision.fp8_bf16_blocks=2 -> precision.fp8_bf16_blocks=2 | num_hidden_layers=4
    precision.name=fp8  model.intermediate_size=344 -> parallelism.tp = 344 | 336 or 352
    precision.name=fp8  model.num_experts=4  model.moe_intermediate_size=24 -> moe_intermediate_size / | 32
    precision.name=fp8  model.kv_lora_rank=24  model.num_key_value_heads=8 -> model.kv_lora_rank = 24 | 16 or
    precision.name=fp8  train.seq_len=100  train.micro_batch_size=1 -> micro_batch_size × train.seq_len = 100
    precision.name=fp8  train.seq_len=100  train.micro_batch_size=auto  train.global_batch_size=4
        -> 16 divides train.micro_batch_size × train.seq_len for none | a rank's 2 sequence(s)
    precision.name=fp8  train={seq_len: 40, micro_batch_size: auto, global_batch_size: 2}  parallelism.cp=2
        -> divides train.micro_batch_size × train.seq_len / parallelism.cp for none | larger global batch
    precision.name=fp8  precision.fp8_output=true  model.vocab_size=8190 -> = 8190 | 8176 or 8192
    precision.name=fp8  precision.fp8_output=true  train.loss_chunk_tokens=100 -> tokens = 100 | 96 or 112
rule_fp8_choices
    precision.fp8_delayed_scaling=true -> precision.fp8_delayed_scaling=true | precision=fp8
    precision.fp8_output=true -> precision.fp8_output=true | precision=fp8
    precision.name=fp8  precision.fp8_scaling=row  precision.fp8_delayed_scaling=true -> fp8_scaling=tensor
rule_local_folders
    run.dir=s3://bucket/x -> run.dir=s3://bucket/x | is a URL
    data.cache_dir=gs://b -> data.cache_dir=gs://b | is a URL
    run.dir=/dev/null/runs -> run.dir=/dev/null/runs: /dev/null is not a folder
rule_slurm_folders
    cluster.launcher=slurm  run.dir=/runs/100%j -> run.dir=/runs/100%j holds %, | Slurm
    cluster.launcher=slurm  run.dir='/runs/a\\b%%' -> holds % and \\
rule_data_source
    data.path=corpus -> data=tokens
    data.source=tokens -> data.path=PREFIX
    data.source=jsonl -> expected stdlib, tokens or a plug-in
    data.source='mine:'  data.path=s3://b/a -> leave them out for data.source=mine:
    data.source=tokens  data.path=s3://b/a  data.blend=[{path: 's3://b/c'}] -> both given
    data.source=tokens  data.blend=[{path: 's3://b/c', weight: 0.0}] -> weight 0.0 of s3://b/c
    data.source=tokens  data.blend=[{path: 's3://b/c', name: a/b}] -> name a/b of s3://b/c: a name has
    data.source=tokens  data.blend=[{path: 's3://b/c'}, {path: 's3://b/d', name: c}] -> 2 parts are called c
rule_data_files
    data.source=tokens  data.path=nowhere/corpus -> /nowhere/corpus.bin | orchestra data pack
    model.vocab_size=256 -> model.vocab_size=256 | 257
    train.seq_len=99999999  model.max_position_embeddings=99999999 -> data.source=stdlib holds 1 | here
rule_checkpoint_steps
    checkpoint.every_steps=null  checkpoint.keep_every_steps=10 -> every_steps=null saves nothing
    checkpoint.every_steps=20  checkpoint.keep_every_steps=50 -> no multiple | use e.g. 40
    checkpoint.every_steps=often -> checkpoint.every_steps=often | auto or null
    checkpoint.every_steps=auto  checkpoint.keep_every_steps=50 -> multiple | use e.g. 50
rule_checkpoint_place
    checkpoint.dir=s4://b -> checkpoint.dir=s4://b | no protocol s4://
    checkpoint.dir=simplecache::s5://b -> no protocol s5://
    checkpoint.dir=/dev/null/saves -> checkpoint.dir=/dev/null/saves: /dev/null is not a folder
    checkpoint.dir=memory://b -> memory://b | each process's own memory
    checkpoint.dir=https://b/c -> https:// cannot hold | s3://
    checkpoint.dir=zip:///tmp/a.zip -> zip:// cannot hold checkpoints
    checkpoint.dir=zip://a.zip::s3://b/c -> zip:// cannot hold
    cluster.launcher=slurm  run.dir=/shared  checkpoint.dir=/dev/shm/x -> each node's own | all nodes
rule_fallback_place
    checkpoint.fallback_dir=s4://b -> checkpoint.fallback_dir=s4://b | no protocol s4://
    checkpoint.dir=/a/b  checkpoint.fallback_dir=/a/b/c -> checkpoint.dir=/a/b itself | another storage
    cluster.launcher=slurm  run.dir=/shared  checkpoint.fallback_dir=/tmp/x -> each node's own | all nodes
rule_injected_faults
    recovery.inject=[{at_step: 0, rank: 0}] -> at_step=0 | 1 to 100
    checkpoint.every_steps=3  recovery.inject=[{at_step: 3, rank: 1, phase: before_manifest}]
        -> inject[0] | rank=1 | before_manifest is of rank 0 alone | use rank: 0
    checkpoint.every_steps=10  recovery.inject=[{at_step: 24, rank: 1, phase: mid_file}] -> use e.g. 20
    checkpoint.every_steps=null  recovery.inject=[{at_step: 1, rank: 0, phase: staging}]
        -> phase=staging is part of a save | checkpoint.every_steps=null
    recovery.inject=[{rank: 0}] -> inject[0] | at_step=null | 1 to 100
    recovery.inject=[{at_step: 3, rank: 0}, {at_step: 3, rank: 2}] -> inject[1] | rank=2 | 0 to 1 | or all
    recovery.inject=[{at_step: 3, rank: 0, when: 1}] -> no such key when | attempt, at_step, rank
    recovery.inject=[{at_step: 3, rank: all, fault: sigfault}] -> fault=sigfault | use sigkill, sigstop, exit
    recovery.inject=[{at_step: 3, rank: all, phase: midfile}] -> mid_file | before_prune or restore
    recovery.inject=[{at_step: 3, rank: 0, attempt: -1}] -> attempt=-1 | from 0 on, or all
    recovery.inject=[{at_step: 3, rank: 0, phase: setup}] -> comes before all steps | leave at_step out
    recovery.inject=[{at_step: 3, rank: 0, fault: slow}] -> fault=slow needs seconds
    recovery.inject=[{at_step: 3, rank: 0, fault: sigkill, seconds: 3}] -> fault=sigkill | hang, gil or slow
    recovery.inject=[{at_step: 3, rank: 0, fault: hang, seconds: -1}] -> seconds=-1 is no duration
    recovery.inject=[{at_step: 3, rank: 0, fault: slow, seconds: 1, steps: 0}] -> steps=0 is no number
    recovery.inject=[{at_step: 3, rank: 0, fault: exit, exit_code: 256}] -> exit_code=256 | 0 to 255
    recovery.inject=[{at_step: 3, rank: 0, fault: nan, phase: reduce}] -> step or forward
    recovery.inject=[{at_step: 3, rank: 0, fault: [hang], phase: {at: 1}}] -> fault=[hang]: no such fault
    checkpoint.every_steps=auto  recovery.inject=[{at_step: 10, rank: 0, phase: mid_file}]
        -> at_step=10 | give a number of steps
rule_metric
    run.metric=los -> run.metric=los | did you mean loss?
rule_eval_data
    eval.data={wiki: {pth: x}} -> eval.data.wiki.pth: no such key | source, path
rule_best_by_eval
    eval.every_steps=5  run.metric=eval/held_out/loss  checkpoint.keep_best=1  checkpoint.every_steps=12
        -> keep_best=1 by run.metric | make it one
    eval.every_steps=5  run.metric=eval/held_out/loss  checkpoint.keep_best=1  checkpoint.every_s=60.0
        -> keep_best=1 by run.metric | with checkpoint.every_s=60 nobody knows | give checkpoint.every_steps
rule_array_throttle
    cluster.array_throttle=0 -> cluster.array_throttle=0 | 1 or more
    cluster.array_throttle=2 -> orchestra submit -m | cluster.members_at_once=2
rule_stop_exit_code
    cluster.stop_exit_code=1 -> cluster.stop_exit_code=1 | 75
rule_members_at_once
    cluster.members_at_once=0 -> cluster.members_at_once=0 | 1 or more
    cluster.launcher=slurm  cluster.members_at_once=2 -> orchestra run -m | cluster.array_throttle=2
    cluster.members_at_once=3  train.micro_batch_size=auto
        -> cluster.members_at_once=3: 3 members share the memory of this machine | auto; give a number
    cluster.members_at_once=2  cluster.share_devices=true  cluster.device=cuda  train.micro_batch_size=auto
        -> 2 members share the memory of this machine
rule_alternatives
    cluster.alternatives=[{constraint: h100}, {nodes: 2}] -> of a Slurm cluster | leave them out
rule_members_per_node
    cluster.members_per_node=0 -> cluster.members_per_node=0 | 1 or more, or auto
    cluster.members_per_node=few -> cluster.members_per_node=few | 1 or more, or auto
    cluster.members_per_node=2 -> orchestra submit -m | cluster.members_at_once
    cluster.launcher=slurm  cluster.members_per_node=2  cluster.nodes=2
        -> cluster.nodes=2 | use one node, or cluster.members_per_node=1
    cluster.launcher=slurm  cluster.members_per_node=2  cluster.requeue=chain
        -> queued again by Slurm itself | cluster.requeue=requeue
    cluster.launcher=slurm  cluster.members_per_node=auto  cluster.device=cpu -> on CPU | give a number
    cluster.launcher=slurm  cluster.members_per_node=2  cluster.device=cpu  train.micro_batch_size=auto
        -> cluster.members_per_node=2: 2 members share the memory of a node | auto; give a number
"""


def _cases() -> list[tuple[str, Change, list[str]]]:
    cases = []
    rule = ""
    for line in re.sub(r"\n +->", " ->", _TABLE).strip().splitlines():
        changes, arrow, words = line.partition(" -> ")
        if not arrow:
            rule = line
            continue
        pairs = (change.partition("=") for change in changes.strip().split("  "))
        cases.append((rule, {key: yaml.safe_load(value) for key, _, value in pairs}, words.split(" | ")))
    return cases


CASES = _cases()

# Rules that only break where ranks start, or that have tests of their own.
ELSEWHERE = {
    "rule_gpus",
    "rule_cores",
    "rule_memory",
    "rule_compile_tools",
    "rule_tensorboard",
    "rule_checkpoint_space",
    "rule_checkpoint_memory",
    "rule_init_from",
    # It asks a plug-in: test_eval_rules.
    "rule_eval_documents",
    # Groups of this machine: test_permissions.
    "rule_run_group",
    "rule_launcher",
    # The cluster's own problems: test_site.
    "rule_cluster",
}
