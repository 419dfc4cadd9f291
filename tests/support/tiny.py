"""A model of 11,056 parameters, for runs whose time goes into starting their ranks."""

TINY_MODEL = (
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "train.seq_len=16",
    "wandb.mode=disabled",
    "cluster.device=cpu",
    "cluster.threads_per_rank=1",
    # Known, so that no attempt spends time measuring it.
    "cluster.peak_tflops=1",
)
