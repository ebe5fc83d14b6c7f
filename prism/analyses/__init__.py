"""What is asked of a job, a model or recordings: how long, why, where, which, is it right.

Each has a module with its name, and the package that it is made of beside it.
"""
