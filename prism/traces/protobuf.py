"""Messages of Protocol Buffers, walked field by field; what a field means is the reader's.

References
----------
.. [1] Protocol Buffers, "Encoding", https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a variable-length integer; return it and where the next byte is."""
    value = shift = 0
    while shift <= 63:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a varint of more than ten bytes")


def last_fields(data: bytes) -> dict[int, Any]:
    """Read the fields of a message by their number, of a repeated one the last."""
    return {number: value for number, _, value in fields(data)}


def fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Walk the fields of a message: number, wire type, value; ValueError where it is none."""
    at = 0
    while at < len(data):
        try:
            tag, at = read_varint(data, at)
            wire = tag & 7
            if wire == 0:
                value, at = read_varint(data, at)
                yield tag >> 3, wire, value
                continue
            size, at = read_varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        except (IndexError, KeyError) as error:
            raise ValueError("the message is cut, or of another format") from error
        if at + size > len(data):
            raise ValueError("the message is cut")
        yield tag >> 3, wire, data[at : at + size]
        at += size
