"""What `prism.rank` is made of: the target, shares of its variance, interventions, interactions."""
