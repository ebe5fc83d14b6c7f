"""Draws: Philox4x32-10 words of a counter, and quantile tables looked up at them."""

import numpy as np

from prism.engine.arrays import LANES
from prism.engine.cache import compiled, inlined, inner


@inlined
def _multiply(a, b):
    p = np.uint64(a) * np.uint64(b)
    return np.uint32(p >> np.uint64(32)), np.uint32(p & np.uint64(0xFFFFFFFF))


@compiled("void(int64, int64, int64, int64, uint32[::1], uint32[:, ::1])")  # once for all ints
def philox_lanes(c0, c1, lane0, stream, key, out):
    """Fill out[4, lane] with the words of counter (c0, c1, lane0 + lane, stream); key[2]."""
    for lane in range(out.shape[1]):
        x0, x1 = np.uint32(c0), np.uint32(c1)
        x2, x3 = np.uint32(np.uint32(lane0) + np.uint32(lane)), np.uint32(stream)
        a, b = np.uint32(key[0]), np.uint32(key[1])
        for _ in range(10):
            h0, l0 = _multiply(np.uint32(0xD2511F53), x0)
            h1, l1 = _multiply(np.uint32(0xCD9E8D57), x2)
            x0, x1, x2, x3 = h1 ^ x1 ^ a, l1, h0 ^ x3 ^ b, l0
            a = np.uint32(a + np.uint32(0x9E3779B9))
            b = np.uint32(b + np.uint32(0xBB67AE85))
        out[0, lane] = x0
        out[1, lane] = x1
        out[2, lane] = x2
        out[3, lane] = x3


@inlined
def lookup(tables, table, u):
    """Relative deviation at a 32-bit uniform; cells refine twice towards the upper tail."""
    i = u >> np.uint32(22)
    f = u & np.uint32(0x3FFFFF)
    if i == np.uint32(1023):
        i = np.uint32(1024) + ((u >> np.uint32(12)) & np.uint32(0x3FF))
        f = u & np.uint32(0xFFF)
        if i == np.uint32(2047):
            i = np.uint32(2048) + ((u >> np.uint32(2)) & np.uint32(0x3FF))
            f = u & np.uint32(3)
    return tables[table, i, 0] + tables[table, i, 1] * np.float32(np.int32(f))


@inner
def multiply_lanes(tables, table, words, out):
    """Multiply out[lane] by the factors drawn at words[lane]."""
    for lane in range(LANES):
        out[lane] *= np.float32(1.0) + lookup(tables, table, words[lane])
