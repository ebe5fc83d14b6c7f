"""Telling a Chakra execution trace from other bytes, without a protobuf library.

The format has no magic number: a file is messages, each behind its length, the first of metadata
and the others of nodes. What is looked at is whether the first few are such messages, tag by tag.
Left out: decoding them (chakra.py).
"""

from __future__ import annotations

_LOOKED_AT = 4  # messages
_WIRE = {"varint": 0, "fixed64": 1, "bytes": 2, "fixed32": 5}
_METADATA: dict[int, tuple[int, ...]] = {1: (2,), 2: (2,)}  # version, attributes
_NODE: dict[int, tuple[int, ...]] = {
    1: (0,), 2: (2,), 3: (0,), 4: (0, 2), 5: (0, 2), 6: (0,), 7: (0,), 8: (2,), 9: (2,), 10: (2,),
    11: (2,),
}  # fmt: skip
"""Wire types that the fields of a node may have: id, name, type, dependencies (packed or not),
start, duration, inputs, outputs, attributes, storage."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a variable-length integer; return it and where the next byte is.

    Examples
    --------
    >>> read_varint(bytes([0xAC, 0x02, 0x00]), 0)
    (300, 2)
    """
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than ten bytes")


def is_chakra(head: bytes) -> bool:
    """Tell whether a file that begins with these bytes is a Chakra execution trace."""
    at = n = 0
    while at < len(head) and n <= _LOOKED_AT:
        try:
            size, start = read_varint(head, at)
        except IndexError:  # the head ends inside a length
            break
        except ValueError:
            return False
        at = start + size
        known, least = (_NODE, 2) if n else (_METADATA, 0)
        whole = at <= len(head)
        if (n and not size) or not _has_fields(
            head[start:at], known, whole, least if whole or n < 2 else 0
        ):
            return False
        n += 1
    return n > 1


def _has_fields(message: bytes, known: dict[int, tuple[int, ...]], whole: bool, least: int) -> bool:
    """Tell whether a message, or the part of it that is there, has known fields alone."""
    at = n = 0
    try:
        while at < len(message):
            tag, at = read_varint(message, at)
            field, wire = tag >> 3, tag & 7
            if wire not in known.get(field, ()):
                return False
            if wire == _WIRE["varint"]:
                _, at = read_varint(message, at)
            else:
                size, at = read_varint(message, at)
                at += size
            n += 1
    except IndexError:
        return not whole and n >= least
    except ValueError:
        return False
    return n >= least and (at == len(message) or not whole)
