"""Weights in and out of Hugging Face's folders: config.json beside safetensors files.

It maps shapes and names and moves bytes; it builds no model and needs no torch, so the command and the rules
use it too. Pickled weights (*.bin) are never opened.
"""
