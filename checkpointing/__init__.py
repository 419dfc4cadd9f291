"""Sharded, asynchronous, pickle-free checkpoints that restore on any other layout.

It takes (name, global shape, offsets, local tensor) and JSON, and knows no model, configuration or trainer.
Importing the package needs no torch, nor does what holds no tensors: `format`, `storage`, `shelf`,
`planning`.

checkpointer      the front door: prepare, save, wait, restore
shards, peers     what a user hands in: its part of each tensor, and how its ranks talk
format            what a checkpoint is made of: boxes, bytes, checksums, the manifest
storage           where it lies: local folders, any fsspec URL
shelf             which checkpoints there are, which may go, whether they are intact
planning          who writes and who reads what
saving, restoring from tensors to files and back

<place>/step-00000100/
├── manifest.json                every tensor's shape, dtype and chunks, every file's size and checksum, the
│                                layout that wrote it, the generation, and the state that is no tensor
└── 00000-00.safetensors …       one or more per writing rank; any safetensors reader opens them

A checkpoint exists if and only if its manifest does. Words: a *shard* is the part of a tensor that one rank
holds, a *chunk* is the part of a shard that is written, checked and read as one piece of a file.
"""
