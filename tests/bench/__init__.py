"""Benchmarks: figures of this machine, as medians and as ratios taken in one run.

Nothing here is a test: no figure is asserted. Bias: prompts are random token ids, all answers have
the same length, and on a shared machine whatever else runs is in the figures.
"""
