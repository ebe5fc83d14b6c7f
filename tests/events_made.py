"""TensorBoard's event files, with values of our own.

The format from TensorFlow (Apache-2.0): core/lib/io/record_writer.cc, core/util/event.proto,
core/framework/summary.proto, tensor.proto.
"""

import struct

from chakra_synth import varint


def _crc(data):
    """Masked CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(message):
    size = struct.pack("<Q", len(message))
    return size + _crc(size) + message + _crc(message)


def block(field, data):
    return varint(field << 3 | 2) + varint(len(data)) + data


def event(clock, step, rest):
    return record(b"\x09" + struct.pack("<d", clock) + b"\x10" + varint(step) + rest)


def scalar(tag, value, kind="simple"):
    if kind == "simple":
        number = b"\x15" + struct.pack("<f", value)
    elif kind == "tensor":  # a float in a list of them
        number = block(8, b"\x08\x01" + block(2, b"") + block(5, struct.pack("<f", value)))
    else:
        number = block(8, b"\x08\x02" + block(2, b"") + block(4, struct.pack("<d", value)))
    return block(5, block(1, block(1, tag.encode()) + number))


def events(rows, begin=1.7e9):
    """Bytes of a file of (step, clock since the begin, tag, value[, kind])."""
    out = event(begin, 0, block(3, b"brain.Event:2"))
    for step, clock, tag, value, *kind in rows:
        out += event(begin + clock, step, scalar(tag, value, *kind))
    return out


def run(tag, values, every=1, first=0, unit=1.0, noise=("lm loss", "iteration-time vs samples")):
    """Rows of a run, other scalars among them."""
    rows, clock = [], 10.0 * first
    for i, seconds in enumerate(values):
        clock += every * seconds
        step = first + every * (i + 1)
        rows += [(step, clock, name, 1.0) for name in noise]
        rows.append((step, clock, tag, unit * seconds))
    return rows
