"""Variance components of crossed tables of durations, with intervals.

`prism.models.variance.components` is the entrance; the other modules are its parts: lemons, sums of
squares (`strata`), one-factor splits (`factors`), memory over steps, scores (`effects`), intervals
(`draws`).
"""
