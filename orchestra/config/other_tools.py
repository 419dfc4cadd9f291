"""Words of other trainers and launchers, and the key here that says the same, for who types them by habit.

The table serves suggestions alone: nothing in it is accepted as a key.
"""

from __future__ import annotations

from functools import cache

# By key (or preset), the words of Megatron-LM, torchtitan, nanotron, DeepSpeed, Lightning, Hugging Face's
# Trainer, torchrun and sbatch: the last part of a dotted name, with _ for -. What is alike enough to be found
# by its letters is not here.
WORDS = {
    "train.steps": "steps max_steps train_iters train_steps num_steps total_steps max_iters iterations",
    "train.tokens": "train_samples num_train_epochs max_epochs epochs",
    "train.seq_len": (
        "seq_length sequence_length max_seq_len max_seq_length max_length block_size context_length"
    ),
    "train.global_batch_size": "train_batch_size global_batch",
    "train.micro_batch_size": (
        "per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu batch_size mbs "
        "gradient_accumulation_steps accumulate_grad_batches batch_accumulation_per_replica"
    ),
    "train.log_every": "log_interval logging_steps log_freq log_every_n_steps",
    "train.recompute": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_activations "
        "recompute_granularity selective_ac_option"
    ),
    "optim.lr": "learning_rate",
    "optim.warmup_steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_iters warmup",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler decay_type",
    "optim.clip_norm": "max_norm max_grad_norm clip_grad grad_clip gradient_clip_val gradient_clipping",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "adam_eps adam_epsilon epsilon",
    "parallelism.tp": (
        "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp_size tensor_parallel"
    ),
    "parallelism.pp": (
        "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size pp_size "
        "pipeline_parallel"
    ),
    "parallelism.cp": "context_parallel_size context_parallel_degree cp_size context_parallel",
    "parallelism.ep": "expert_model_parallel_size expert_parallel_degree ep_size expert_parallel",
    "parallelism.dp": "data_parallel_size data_parallel_degree dp_size data_parallel",
    "parallelism.shard_degree": "data_parallel_shard_degree dp_shard hybrid_shard_size",
    "parallelism.zero": "zero_stage sharding_strategy use_distributed_optimizer fsdp",
    "model.num_hidden_layers": "num_layers n_layers n_layer",
    "model.num_attention_heads": "n_heads n_head num_heads",
    "model.num_key_value_heads": "num_query_groups n_kv_heads",
    "model.hidden_size": "d_model n_embd",
    "model.intermediate_size": "ffn_hidden_size d_ff",
    "model.num_experts_per_tok": "moe_router_topk",
    "precision": "mixed_precision dtype param_dtype",
    "precision=bf16": "bf16",
    "precision=fp16": "fp16",
    "precision=fp8": "fp8",
    "data.path": "data_path dataset dataset_path train_data_path",
    "checkpoint.every_steps": "save_interval save_steps checkpoint_interval ckpt_interval save_every",
    "checkpoint.keep_last": "save_total_limit keep_latest_k save_top_k",
    "eval.every_steps": "eval_interval eval_every val_check_interval",
    "eval.steps": "eval_iters limit_val_batches",
    "cluster.nodes": "nnodes num_nodes n_nodes",
    "cluster.gpus_per_node": (
        "nproc_per_node ntasks_per_node n_gpus_per_node num_gpus ngpus ngpu gpus devices gres num_processes"
    ),
    "cluster.time_limit": "time walltime timeout_min",
    "run.name": "run_name experiment_name exp_name job_name",
    "run.dir": "output_dir default_root_dir save_dir dump_folder checkpoints_path",
    "wandb.project": "wandb_project project_name",
}

# Of these the key here has another unit, or other values.
_OTHERWISE = (
    "train_samples num_train_epochs max_epochs epochs adam_beta1 adam_beta2 beta1 beta2 "
    "gradient_accumulation_steps accumulate_grad_batches batch_accumulation_per_replica "
    "sharding_strategy use_distributed_optimizer fsdp gradient_checkpointing activation_checkpointing "
    "activation_checkpoint recompute_activations selective_ac_option gres timeout_min"
)


@cache
def _keys() -> dict[str, str]:
    return {word: key for key, words in WORDS.items() for word in words.split()}


def key_of(name: str) -> str | None:
    """Return the key, group or preset that says here what `name` says elsewhere; None where none is known."""
    return _keys().get(_word(name))


def says_the_same(name: str) -> bool:
    """Tell whether what is typed for `name` elsewhere would be typed for its key here."""
    return _word(name) not in _OTHERWISE.split()


def _word(name: str) -> str:
    return name.rpartition(".")[2].replace("-", "_").lower()


# sbatch's options of one letter.
_LETTERS = {
    "A": "cluster.account",
    "C": "cluster.constraint",
    "G": "cluster.gpus_per_node",
    "J": "run.name",
    "N": "cluster.nodes",
    "p": "cluster.partition",
    "q": "cluster.qos",
    "t": "cluster.time_limit",
    "w": "cluster.slurm_extra.nodelist",
    "x": "cluster.exclude",
}


def key_of_letter(option: str) -> str | None:
    """Return the key that says what an option of sbatch does, such as -N or -N4; None for other words."""
    # -train.steps=5 is none: what follows a letter is its value.
    is_letter = option[:1] == "-" and option[1:2].isalpha() and "=" not in option[3:]
    return _LETTERS.get(option[1:2]) if is_letter else None
