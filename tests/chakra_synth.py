"""Chakra execution traces of the job that `kineto_synth` makes up, encoded by hand.

Messages are written tag by tag from the published schema (mlcommons/chakra, et_def.proto), so that
the reader's own description of it is tested against another. Durations are whole microseconds, as
in the format.
"""

from __future__ import annotations

import numpy as np

COMP, SEND, RECV, COLL = 4, 5, 6, 7


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field, value):
    return varint(field << 3) + varint(value)


def data(field, value):
    return varint(field << 3 | 2) + varint(len(value)) + value


def attribute(name, value):
    text = data(1, name.encode())
    if isinstance(value, bool):
        return text + number(27, int(value))
    return text + (data(29, value.encode()) if isinstance(value, str) else number(9, value))


def node(idx, name, kind, duration, start=None, **attributes):
    out = number(1, idx) + data(2, name.encode()) + number(3, kind)
    if idx:
        out += data(4, varint(idx - 1))  # control dependencies, packed
    if start is not None:
        out += number(6, int(start))
    out += number(7, int(duration)) + data(8, data(1, b"[]") + data(2, b"[[4, 4]]"))
    return out + b"".join(data(10, attribute(k, v)) for k, v in attributes.items())


def encode(nodes, version="0.0.4"):
    messages = [data(1, version.encode()) + data(2, attribute("schema", "1.1.1-chakra.0.0.4"))]
    return b"".join(varint(len(m)) + m for m in [*messages, *nodes])


def rank_nodes(program, times, rank, timed=True, origin_us=1_000):
    """Nodes of one rank; with start times and step marks, or with durations alone."""
    found, idx = [node(0, "[pytorch|profiler|execution_trace|thread]", 1, 0, is_cpu_op=True)], 1
    for step in range(times.call.shape[0]):
        if timed:
            begin = times.step_start[step, rank]
            until = np.nanmax(times.call_end[step, rank]) + 2.0
            found.append(node(idx, f"ProfilerStep#{step + 10}", 1, until - begin,
                              begin + origin_us, is_cpu_op=True))  # fmt: skip
            idx += 1
        for i, call in enumerate(program):
            first, last = times.start[step, rank, i], times.end[step, rank, i]
            if not np.isfinite(first):
                continue
            found.append(node(idx, "aten::op", COMP, 3, None, is_cpu_op=True))
            start = first + origin_us if timed else None
            extra = {"is_cpu_op": False, "stream": call.stream}
            kind = COMP
            if call.do == "collective":
                kind = COLL
                extra |= {"comm_type": 0, "comm_size": 4_000 + i, "pg_name": "0"}
            found.append(node(idx + 1, call.name, kind, int(last - first), start, **extra))
            idx += 2
    return found


def write(folder, program, times, **options):
    """Write one file a rank; returns the paths."""
    paths = []
    for rank in range(times.call.shape[1]):
        path = folder / f"job.{rank}.et"
        path.write_bytes(encode(rank_nodes(program, times, rank, **options)))
        paths.append(path)
    return paths
