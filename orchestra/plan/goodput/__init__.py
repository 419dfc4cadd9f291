"""Simulates a run under generated failures, with the recovery policy that decides on real ones.

`expected_goodput.study` is the way in; `simulator.simulate` is one run. Failures are drawn, time is counted,
records are written as a run's agents write them; what they mean is read by `orchestra.recovery.history`, and
what follows is decided by `orchestra.recovery.policy`. No process is started and no file is touched.
"""
