"""Which layouts there are, the best of them, and why: a space, its search, and the turns of single knobs.

Each is judged by `orchestra.plan.prediction`.
"""
