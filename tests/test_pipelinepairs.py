"""What names of transfers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.models.pipelinetrace.pairs import transfer_roles

FORWARD_SEND, FORWARD_RECV = ("send", "forward"), ("recv", "forward")
BACKWARD_SEND, BACKWARD_RECV = ("send", "backward"), ("recv", "backward")


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("forward-send", [FORWARD_SEND]),
        ("backward-recv", [BACKWARD_RECV]),
        ("send_forward", [FORWARD_SEND]),
        ("recv_backward", [BACKWARD_RECV]),
        ("fwd_send", [FORWARD_SEND]),
        ("bwd-recv", [BACKWARD_RECV]),
        ("SendForward", [FORWARD_SEND]),
        ("RECV_FWD", [FORWARD_RECV]),
        ("isend_f", [FORWARD_SEND]),
        ("f_send", [FORWARD_SEND]),
        ("b_irecv", [BACKWARD_RECV]),
        ("receive backward", [BACKWARD_RECV]),
        ("send_next", [FORWARD_SEND]),
        ("recv_prev", [FORWARD_RECV]),
        ("send_prev", [BACKWARD_SEND]),
        ("recv_next", [BACKWARD_RECV]),
        ("send_forward_recv_backward", [FORWARD_SEND, BACKWARD_RECV]),
        ("send_backward_recv_forward", [BACKWARD_SEND, FORWARD_RECV]),
        ("send_forward_recv_forward", [FORWARD_SEND, FORWARD_RECV]),
        ("send-forward-backward-recv-forward-backward",
         [FORWARD_SEND, BACKWARD_SEND, FORWARD_RECV, BACKWARD_RECV]),
        ("sendrecv", []),
        ("ncclDevKernel_SendRecv", []),
        ("p2p", []),
        ("forward", []),
        ("", []),
    ],
)  # fmt: skip
def test_roles(name, roles):
    assert [tuple(role) for role in transfer_roles(name)] == roles


def test_where_the_other_side_is():
    steps = [transfer_roles(n)[0].step for n in ("forward-send", "forward-recv", "backward-send")]
    assert steps == [1, -1, -1] and transfer_roles("backward-recv")[0].step == 1


@given(st.text())
def test_any_name_has_roles_or_none(name):
    assert all(r.side in ("send", "recv") for r in transfer_roles(name))
