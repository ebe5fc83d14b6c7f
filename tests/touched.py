"""Leaf switches that links touch, as sets."""


def touched(found, link, replica=0):
    """Entities that a link touches, of `congested_links` or a program's links."""
    ranges = range(found.begin[replica, link], found.end[replica, link])
    return {leaf for k in ranges for leaf in range(found.lo[k], found.hi[k])}
