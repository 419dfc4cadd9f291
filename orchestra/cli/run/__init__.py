"""The verbs that change runs: start, go on, stop and rehearse; and what they say of sweeps."""
