"""From overrides to a checked, typed configuration: composition with Hydra, and the rules that span fields.

It starts and writes nothing and never loads torch. Hydra is loaded only inside `compose`.
"""
