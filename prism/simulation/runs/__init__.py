"""The whole run, from event to event: steps, drift, checkpoints, failures, evaluations.

`build` takes a job to the parts of its run, `model` runs them, `time_to_train` has the sums.
"""
