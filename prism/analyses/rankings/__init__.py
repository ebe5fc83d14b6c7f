"""A ranking's target, shares of its variance, interventions and interactions."""
