"""Traces of kernels as graphs: steps, inferred waits, replay, distributions, and the fitted model.

What a profiler recorded of each rank's streams becomes a graph per step whose edges are learnt from
the other steps. Reading the files is `prism.traces`.
"""
