"""Reads checkpoints of torch.distributed.checkpoint (DCP), and writes what they hold as one of ours.

`orchestra checkpoint import --from dcp` starts `dcp_import` as a process of its own. `dcp_folder` says what a
folder holds and reads it: the only module of the product that unpickles anything, with an allow-list.
`loop_state` tells which of that is the model, which the optimizer's state, and what the rest says.

Nothing else imports these modules: no run and no restore does.
"""
