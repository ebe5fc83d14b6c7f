"""How a check of a job says what it found: `prism.jobs.jobspec.messages` adds file and line."""

Problem = tuple[str, ...]  # an error: the words, then the keys that cause it, the most likely first


def unmodelled(what: str, nearest: str, *keys: str) -> Problem:
    """Say that a legal setting is not modelled yet, and which one comes nearest."""
    return f"{what} is not modelled yet; the nearest supported setting: {nearest}", *keys


def undivided(n: int, name: str, whole: int, *keys: str) -> Problem:
    """Say that `n` does not divide a number, and what does."""
    divisors = ", ".join(str(k) for k in range(1, whole + 1) if whole % k == 0)
    return f"{n} does not divide {name} = {whole}; take one of {divisors}", *keys
