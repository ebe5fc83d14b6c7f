"""How layers are divided over model chunks."""


def auto_split(n_layers: int, n_chunks: int) -> tuple[int, ...] | None:
    """Divide layers over model chunks evenly, or with one fewer at both ends; None if neither goes.

    The embedding and the loss count as one layer each where that makes the chunks equal, as
    Llama 3 405B has one layer fewer on the first and on the last stage (arXiv:2407.21783,
    section 3.3.2).

    Examples
    --------
    >>> auto_split(126, 8)
    (15, 16, 16, 16, 16, 16, 16, 15)
    >>> auto_split(80, 3) is None
    True
    """
    if n_layers % n_chunks == 0:
        return (n_layers // n_chunks,) * n_chunks
    if n_chunks > 1 and (n_layers + 2) % n_chunks == 0:
        each = (n_layers + 2) // n_chunks
        return (each - 1, *(each,) * (n_chunks - 2), each - 1)
    return None


def valid_split(n_layers: int, n_chunks: int) -> list[int]:
    """Return the evenest division, the ends (embedding, loss) getting the smaller shares."""
    each, extra = divmod(n_layers, n_chunks)
    first = (n_chunks - extra) // 2
    return [each + (first <= i < first + extra) for i in range(n_chunks)]
