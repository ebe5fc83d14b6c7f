"""A ranking's target, shares of its variance, and interventions."""
