"""Variance components of crossed tables of durations, with intervals.

`prism.models.variance.components` is the entrance; the other modules are its parts: sums of squares
(`strata`), one-factor splits (`factors`), effects and their limits (`effects`, `intervals`).
"""
