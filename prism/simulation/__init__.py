"""From a job or a model to replicates: effects, lowering, programs, runs, execution."""
