"""Processor time of a call on a machine that others use too."""

import time


def least_seconds(call, times=3):
    """Least processor time of `times` calls: what disturbs a call only ever makes it longer."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)
