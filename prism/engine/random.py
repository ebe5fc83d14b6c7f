"""Draws: Philox4x32-10 words of a counter, quantile tables looked up at them, pools of values."""

import numpy as np

from prism.engine.arrays import LANES, POOL
from prism.engine.cache import compiled, inlined, inner

POOL_BITS, TAIL_BITS = 11, 8
POOL_SIZE = 1 << POOL_BITS  # values of a quantile table that the residuals of a block are
POOL_ROW = POOL_SIZE + LANES  # and the first of them again, so that no lane is beyond the last
TAIL = np.uint32((1 << 32) - (1 << 32 - TAIL_BITS))  # from this word on they are drawn anew


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


@inlined
def redraw(word, lane):
    """Draw a word of the pool's tail for a lane of an op that took `word`."""
    x = np.uint32(np.uint32(word) + np.uint32(lane + 1) * np.uint32(0x9E3779B9))
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return TAIL | ((x ^ (x >> np.uint32(16))) >> np.uint32(TAIL_BITS))


@inner
def fill_pool(tables, lane0, keys, row, order, words, pool, slow):
    """Fill the pool that the residuals of a block are taken from, new for every block and key.

    Of every table of ops that run often: one value of each of POOL_SIZE equally likely parts, in
    random order. An op's lanes take neighbours from a random place on, so that the ops of a lane
    are independent; the slowest values are drawn anew whenever they are taken, since lanes would
    share what decides a maximum.
    """
    n_keys = keys.shape[0]
    n = (pool.shape[0] - LANES) // n_keys
    for k in range(n_keys if n > 0 else 0):
        for i in range(POOL_SIZE):
            of, lane = i // LANES % 2 * 2, i % LANES
            if of + lane == 0:
                philox_lanes(i, 0, lane0, POOL, keys[k], words)
            j = np.int64((np.uint64(words[of, lane]) * np.uint64(i + 1)) >> np.uint64(32))
            order[i] = order[j]
            part = np.uint32(i) << np.uint32(32 - POOL_BITS)
            order[j] = part | (words[of + 1, lane] >> np.uint32(POOL_BITS))
        for i in range(LANES):
            order[POOL_SIZE + i] = order[i]
        slow[k, POOL_ROW] = POOL_ROW
        for i in range(POOL_ROW - 1, -1, -1):
            slow[k, i] = i if order[i] >= TAIL else slow[k, i + 1]
        for t in range(tables.shape[0]):
            if row[t] >= 0:
                for i in range(POOL_ROW):
                    pool[k * n + row[t] + i] = lookup(tables, t, order[i])
