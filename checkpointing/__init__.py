"""Sharded, asynchronous, pickle-free checkpoints that restore on any other layout.

A training loop hands in its part of each tensor (name, global shape, offsets, local tensor) and a state that
is JSON. Usage, on every rank, in the same order:

    from checkpointing.checkpointer import Checkpointer
    from checkpointing.options import Options
    from checkpointing.peers import Peers
    from checkpointing.shards import Shard, whole

    peers = Peers(rank, world_size, store)             # store: torch.distributed's key-value store
    checkpointer = Checkpointer("s3://bucket/run", peers, Options(keep_last=3), group=group)  # or a folder
    checkpointer.prepare(shards)                       # raises where shards do not make up the tensors
    checkpointer.save(step, shards, {"step": step})    # copies and returns; threads write and commit
    checkpointer.wait()                                # until the save in flight is committed
    checkpointer.restore(lambda manifest: shards)      # fills the shards from the newest intact checkpoint

What users call:
    checkpointer        prepare, reserve, save, wait, restore, and what is there
    shards, peers       this rank's part of each tensor; how the ranks of a run exchange JSON
    options             what all ranks agree on, and the hooks for events and rehearsed failures
    checkpoint_errors   the exceptions, as a tree
    catalog, verify     which checkpoints there are and which may go; read all bytes and compare (offline)
    manifest            what a checkpoint holds, as read from its `manifest.json`
    storage/            a local folder or any fsspec URL

How it works:
    box                 the part of a tensor: offsets and shape
    plans               who writes and who reads what
    saving/             from tensors to files and the manifest, and what a save outdates
    restore             from the manifest to shards of another layout
    transfer            the bytes of a restore on their way between ranks
    integrity/          checksums of chunks and files; digests of whole tensors, however they are cut

<place>/step-00000100/
├── manifest.json                every tensor's shape, dtype and chunks, every file's size and checksum, the
│                                layout that wrote it, the generation, and the state that is no tensor
└── 00000-00.safetensors …       one or more per writing rank; any safetensors reader opens them

A checkpoint exists if and only if its manifest does. Words: a *shard* is the part of a tensor that one rank
holds, a *chunk* is the part of a shard that is written, checked and read as one piece of a file. Importing
the package loads no torch, nor do `catalog`, `verify`, `manifest`, `storage` and the plans.
"""
