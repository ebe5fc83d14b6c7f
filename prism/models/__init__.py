"""From recordings to a model of a job: traces, step times, calibrations, variances."""
