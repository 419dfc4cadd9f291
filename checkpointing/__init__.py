"""Sharded, asynchronous, pickle-free checkpoints that restore on any other layout.

It takes (name, global shape, offsets, local tensor) and JSON, and knows no model, configuration or trainer.
Importing the package needs no torch, nor do the modules that hold no tensors: what a checkpoint is
(`manifest`, `catalog`, `verify`, `retention`), where it lies (`storage`, `local`, `remote`), who writes and
reads what (`write_plan`, `read_plan`).

<place>/step-00000100/
├── manifest.json                every tensor's shape, dtype and chunks, every file's size and checksum, the
│                                layout that wrote it, the generation, and the state that is no tensor
└── 00000-00.safetensors …       one or more per writing rank; any safetensors reader opens them

A checkpoint exists if and only if its manifest does. Words: a *shard* is the part of a tensor that one rank
holds, a *chunk* is the part of a shard that is written, checked and read as one piece of a file.
"""
