"""The one exception a user can cause."""


class PrismError(Exception):
    """Bad input, with a message that says where, what was expected, and a way out."""
