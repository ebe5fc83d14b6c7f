"""Steps of a job without where their time goes."""

from unittest.mock import patch

import prism


def draw_steps(job, replicates, seed, **options):
    """Steps that `prism.simulate` gives, without their parts: `test_results.py` compares the two.

    Parts take four times as long where clusters are few: one group's communication after the other
    is made free.
    """
    with patch("prism.simulation.steps._find_parts", lambda *_: {"part": []}):
        return prism.simulate(job, replicates, seed, **options)
