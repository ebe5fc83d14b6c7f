"""What is kept of compiled code: a file that is not whole, or not of the key, is not there."""

import errno
import os
import pickle
import resource

import numba
import pytest

from prism import __main__ as entry
from prism.engine import cache

SIGNATURE = "int64(int64)"
DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"\x80garbage" * 9,
    "another's pickle": lambda data: pickle.dumps(("1", {})),
    "first bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]
    ),
    "last bit": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
}


def twice(x):
    return 2 * x


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Compile `twice` as the engine's functions are, or load it: the dispatcher."""
    monkeypatch.setattr(cache, "choose_folder", lambda: str(tmp_path))

    def made(signature=SIGNATURE):
        with cache.kept_together():
            return numba.njit(signature, cache=True)(twice)

    return made


def hits(function):
    return sum(function.stats.cache_hits.values())


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_written_anew(make, tmp_path, suffix, damage):
    assert hits(make()) == 0 and hits(make()) == 1
    [file] = tmp_path.rglob(f"*.{suffix}")
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    again = make()
    assert hits(again) == 0 and again(21) == 42
    assert hits(make()) == 1


def test_every_flipped_bit_is_seen(make, tmp_path):
    make()
    for file in [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]:
        data = bytearray(file.read_bytes())
        for place in range(0, 8 * len(data), 97):
            data[place // 8] ^= 1 << place % 8
            file.write_bytes(data)
            assert not cache.is_intact(str(file))
            data[place // 8] ^= 1 << place % 8
        file.write_bytes(data)
        assert cache.is_intact(str(file))


def test_what_was_compiled_for_another_key_is_a_miss(make, tmp_path):
    """Two processes that write one index at once can leave it so."""
    make()
    make("float64(float64)")
    first, second = sorted(tmp_path.rglob("*.nbc"))
    first.write_bytes(second.read_bytes())
    again = make()
    assert hits(again) == 0 and again(21) == 42
    assert hits(make("float64(float64)")) == 1


def test_a_disk_without_room_is_no_failure(make, tmp_path, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # EFBIG, as ENOSPC
    try:
        assert make()(21) == 42
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.rglob("*.nb?")] and not [*tmp_path.rglob("*.tmp.*")]

    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.caching.UserProvidedCacheLocator, "ensure_cache_path", full)
    function = make()
    assert function(21) == 42 and isinstance(function._cache, numba.core.caching.NullCache)


def test_the_cache_of_others_functions_stays_numbas(make):
    make()
    assert numba.core.dispatcher.FunctionCache is numba.core.caching.FunctionCache


def test_an_end_of_file_inside_is_not_an_interrupt(monkeypatch, capsys):
    from prism.cli import app

    def broken(*arguments, **names):
        raise EOFError("Ran out of input")

    monkeypatch.setattr(app.prism, "invoke", broken)
    assert entry.main(["show", "--jobs"]) == 1
    assert "EOFError" in capsys.readouterr().err
