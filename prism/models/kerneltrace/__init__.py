"""Traces of kernels: steps, their graphs with inferred waits, distributions, and the fitted model.

What a profiler recorded of each rank's streams becomes a graph per step whose edges are learnt from
the other steps. Reading the files is `prism.traces`.
"""
