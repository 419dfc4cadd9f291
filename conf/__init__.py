"""The configuration tree: Hydra's YAML groups and their typed schema. Standard library only; it composes
nothing.
"""
