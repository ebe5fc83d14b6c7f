"""Chakra execution traces in protobuf (``.et``), decoded as far as prism reads them.

A file is messages, each behind its length: the first of metadata, the others of nodes. The format
has no magic number; what tells it from other bytes is that the first two are such messages, field
by field. Left out: tensors, storage operations, and what a node means (chakra.py).

References
----------
.. [1] MLCommons Chakra, schema/protobuf/et_def.proto, https://github.com/mlcommons/chakra
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prism.common.errors import PrismError
from prism.traces.protobuf import fields, read_varint

NODE_TYPES = {4: "COMP", 5: "COMM_SEND", 6: "COMM_RECV", 7: "COMM_COLL"}
"""Types of node that a device executes."""

COLLECTIVES = {
    0: "all_reduce", 1: "all_reduce", 2: "all_gather", 3: "all_gather", 4: "broadcast",
    5: "broadcast", 6: "all_to_all", 7: "reduce_scatter", 8: "reduce_scatter", 9: "all_reduce",
}  # fmt: skip
"""Op kind by Chakra's CollectiveCommType; reductions and gathers as `kernelnames` has them."""

_NODE = {
    1: (0,), 2: (2,), 3: (0,), 4: (0, 2), 5: (0, 2), 6: (0,), 7: (0,), 8: (2,), 9: (2,), 10: (2,),
    11: (2,),
}  # fmt: skip
"""Wire types that the fields of a node may have: id, name, type, dependencies (packed or not),
start, duration, inputs, outputs, attributes, storage."""
_NUMBERS = {3: "type", 6: "start", 7: "duration"}
_ATTRIBUTES = 10
_SIGNED, _UNSIGNED, _ZIGZAG, _BOOL, _STRING = (7, 9), (11, 13), (15, 17), 27, 29
_WANTED = {
    name.encode(): name
    for name in (
        "is_cpu_op", "comm_type", "comm_size", "pg_name", "stream", "tid", "rank", "world_size",
    )
}  # fmt: skip


def _messages(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Split a file into its messages, each with its length before it, and say which is whole."""
    at = 0
    while at < len(data):
        try:
            size, start = read_varint(data, at)
        except (IndexError, ValueError):
            yield b"", False
            return
        at = start + size
        yield data[start:at], at <= len(data)


def is_proto(head: bytes) -> bool:
    """Tell whether a file that begins with these bytes is a Chakra execution trace."""
    messages = _messages(head)
    meta, whole = next(messages, (b"", False))
    node, node_whole = next(messages, (b"", False))
    n = 0
    try:
        if not whole or any(field not in (1, 2) or wire != 2 for field, wire, _ in fields(meta)):
            return False
        for field, wire, _ in fields(node):
            if wire not in _NODE.get(field, ()):
                return False
            n += 1
    except ValueError:
        return n >= 2 and not node_whole
    return n >= 2


def decode(data: bytes, source: str) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """Attributes of a file, its nodes, and whether its end lacks."""
    about: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = []
    cut = False
    for message, whole in _messages(data):
        if not whole:
            cut = True
            break
        try:
            if about is None:
                about = dict(_attributes(v for field, _, v in fields(message) if field == 2))
            else:
                nodes.append(_node(message))
        except (ValueError, TypeError, AttributeError) as error:
            raise PrismError(
                f"{source}: a message of the Chakra execution trace cannot be decoded ({error}); "
                "expected mlcommons/chakra's et_def.proto; write it again by chakra_converter"
            ) from error
    if about is None or not nodes:
        raise PrismError(
            f"{source}: a Chakra execution trace that ends before its first node; copy it again"
        )
    return about, nodes, cut


def _node(message: bytes) -> dict[str, Any]:
    """Fields of a node that prism reads."""
    node: dict[str, Any] = {"name": "", "type": 0, "start": 0, "duration": 0}
    attributes = []
    for field, wire, value in fields(message):
        if field == _ATTRIBUTES:
            attributes.append(value)
        elif field == 2:
            node["name"] = value.decode("utf-8")
        elif field in _NUMBERS and wire == 0:
            node[_NUMBERS[field]] = value
    return node | dict(_attributes(attributes))


def _attributes(messages: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of the attributes that prism reads."""
    for message in messages:
        # the name comes first, and most are not wanted
        if message[:1] == b"\x0a" and message[2 : 2 + message[1]] not in _WANTED:
            continue
        name, found = "", None
        for field, _, value in fields(message):
            if field == 1:
                name = _WANTED.get(value, "")
            elif field in _SIGNED:
                found = value - (1 << 64) * (value >> 63)
            elif field in _UNSIGNED:
                found = value
            elif field in _ZIGZAG:
                found = value >> 1 ^ -(value & 1)
            elif field == _BOOL:
                found = bool(value)
            elif field == _STRING:
                found = value.decode("utf-8")
        if name and found is not None:
            yield name, found
