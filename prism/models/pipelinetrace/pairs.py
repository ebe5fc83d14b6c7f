"""Sends and receives of a pipeline trace: what their names say, and which belong together.

A name such as forward-send, recv_backward or send_forward_recv_backward says which way data goes.
The k-th send of a pass pairs with the k-th receive on the neighbour it goes to. Left out: whether
they block, and when they happened (`prism.models.pipelinetrace.build`).
"""

import re
from typing import NamedTuple

_WORDS = re.compile(
    r"i?send|i?recv|receive|forward|fwd|fw(?![a-z])|backward|bwd|bw(?![a-z])|next|prev"
    r"|(?<![a-z])[fb](?![a-z])"
)
_SIDES = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv", "receive": "recv"}


class Role(NamedTuple):
    """One side of a transfer."""

    side: str  # send or recv
    way: str  # forward or backward

    @property
    def step(self) -> int:
        """Where its other side is: stages further on."""
        return 1 if (self.side == "send") == (self.way == "forward") else -1


def transfer_roles(name: str) -> tuple[Role, ...]:
    """Sides of transfers that an op's name says it is; none where it says nothing.

    Examples
    --------
    >>> transfer_roles("forward-send")
    (Role(side='send', way='forward'),)
    >>> [tuple(r) for r in transfer_roles("send_forward_recv_backward")]
    [('send', 'forward'), ('recv', 'backward')]
    >>> [tuple(r) for r in transfer_roles("recv_prev")]
    [('recv', 'forward')]
    """
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    words = _WORDS.findall(plain)
    roles: list[Role] = []
    side_first = bool(words) and words[0] in _SIDES
    side, way = "", ""
    for word in words:
        if word in _SIDES:
            side = _SIDES[word]
        else:
            way = word
        if side and way and (word in _SIDES) != side_first:
            role = Role(side, _way(side, way))
            if role not in roles:
                roles.append(role)
    return tuple(roles)


def _way(side: str, word: str) -> str:
    """Which pass sends this way: activations go to the next stage, gradients back."""
    if word in ("next", "prev"):
        return "forward" if (side == "send") == (word == "next") else "backward"
    return "forward" if word.startswith("f") else "backward"
