"""Files as inputs: bounds on what is read, regular files alone, netCDF that is whole or refused."""

import gc
import gzip
import os
import random
import signal
import stat
import warnings
from functools import cache
from pathlib import Path

import numba
import numpy as np
import pytest
import xarray as xr

import prism
from prism import engine
from prism.cluster.nodes.hosts import read_host_list
from prism.common import compiled, files, netcdf
from prism.common.errors import PrismError
from prism.common.resultfiles import KINDS
from prism.jobs.hostfiles import read_hosts
from prism.traces import find_recording, read_step_times, read_trace

MIB = 1 << 20
FILE = "file"
READERS = {
    "steps": read_step_times,
    "profiler": read_trace,
    "chakra": read_trace,
    "hosts": lambda path: read_host_list(str(path), 4),
    "nccl": lambda path: find_recording(path).read(),
    "placement": read_hosts,
}
HEADS = {
    "steps": b"step_s\n" + b"1\n" * 40_000,
    "profiler": b'{"traceEvents":[',
    "chakra": b'{"schema": "1.1.0-chakra.0.0.4", "nodes": [',
    "hosts": b"node1\n" * 20_000,
    "nccl": b"# size count type redop root time algbw busbw\n" * 2000,
    "placement": b"slot,node\n",
}


@pytest.mark.parametrize("name", READERS)
def test_a_sparse_file_is_refused_by_its_size(tmp_path, name):
    file = tmp_path / "sparse"
    file.write_bytes(HEADS[name])
    os.truncate(file, 20 << 30)
    with pytest.raises(PrismError, match=r"sparse: .* [\d,]+ MiB"):
        READERS[name](file)


@cache
def blanks():
    """Members of 32 MiB of blanks each, 1 : 1000."""
    return 17 * gzip.compress(b" " * (32 * MIB))


@pytest.mark.parametrize("name", ["steps", "hosts", "nccl"])
def test_gzip_is_refused_by_what_it_unpacks_to(tmp_path, name):
    file = tmp_path / "bomb.gz"
    file.write_bytes(gzip.compress(HEADS[name]) + blanks())
    assert file.stat().st_size < MIB
    with pytest.raises(PrismError, match=r"bomb\.gz: unpacks .* [\d,]+ MiB"):
        READERS[name](file)


def test_events_packed_as_no_profiler_packs_them_are_refused(tmp_path):
    """Gigabytes of sound events in a few megabytes would take three times that in memory."""
    event = (
        b'{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7},\n'
    )
    file = tmp_path / "trace.json.gz"
    file.write_bytes(17 * gzip.compress(event * (4 * MIB // len(event))))
    with pytest.raises(PrismError, match=r"trace\.json\.gz: unpacks .* 64 MiB"):
        read_trace(file)


def test_unpacking_stops_at_its_bound():
    packed = gzip.compress(b" " * (8 * MIB))
    assert files.unpack(packed, "x", 8 * MIB) == (b" " * (8 * MIB), "")
    with pytest.raises(PrismError, match="7 MiB"):
        files.unpack(packed, "x", 7 * MIB)
    both, damage = files.unpack(gzip.compress(b"a") + gzip.compress(b"b") + b"\0" * 9, "x")
    assert (both, damage) == (b"ab", "")
    cut, damage = files.unpack(packed[:-3000], "x")
    assert 0 < len(cut) < 8 * MIB and damage


@pytest.mark.parametrize(
    "command",
    [
        ("show",), ("estimate",), ("fit",), ("timeline",), ("report",),
        ("validate", "pipeline-8x32", "--measured"), ("compare", FILE),
        ("place", "pipeline-8x32", "--slow-nodes", "1", "--slowdown", "2", "--hosts"),
        ("place", "pipeline-8x32", "--measured-nodes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["pipe", "pipe.nc", "pipe.yaml", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_and_never_opened(tmp_path, run, command, name):
    file = tmp_path / name
    if not file.exists():
        os.mkfifo(file)

    def hangs(*_):
        raise TimeoutError(str(file))

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    try:
        status, _, said = run(*(file if x == FILE else x for x in command), file)
    finally:
        signal.alarm(0)
    assert status == 2, said
    assert str(file) in said


def dataset(kind):
    values = np.linspace(0.0, 1.0, 500)
    attrs = {"kind": kind, "summary": "{}", "job_name": "a"} if kind else {"job": "{}"}
    return xr.Dataset({"step_time": ("replicate", values)}, attrs=attrs)


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_every_flipped_bit_and_cut_is_told(tmp_path, kind):
    file = tmp_path / "whole.nc"
    prism.save(dataset(kind), file)
    prism.load(file)
    content, draw = file.read_bytes(), random.Random(1)
    end = content.rindex(netcdf.SEAL)
    for _ in range(40):
        broken, bit = bytearray(content), draw.randrange(8 * end)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        with pytest.raises(PrismError, match=r"whole\.nc: .*read"):
            prism.load(file)
    for size in (0, 1, 96, end // 2, end - 1):
        file.write_bytes(content[:size])
        with pytest.raises(PrismError, match=r"whole\.nc: .*read"):
            prism.load(file)


def test_flipped_bits_without_a_hash_are_told_or_read_and_leave_nothing_open(tmp_path):
    file = tmp_path / "whole.nc"
    prism.save(dataset("validation"), file)
    content, draw = file.read_bytes().partition(netcdf.SEAL)[0], random.Random(1)
    told = 0
    for _ in range(60):
        broken, bit = bytearray(content), draw.randrange(8 * len(content))
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        try:
            prism.load(file)
        except PrismError:
            told += 1
    gc.collect()  # what is closed only now complains through pytest's filter
    assert 5 < told < 60


def test_a_file_that_another_program_wrote_needs_no_hash(tmp_path):
    prism.save(dataset("sweep"), tmp_path / "ours.nc")
    loaded = xr.load_dataset(tmp_path / "ours.nc", engine="h5netcdf")
    loaded.assign_attrs(note="kept").to_netcdf(tmp_path / "theirs.nc", engine="h5netcdf")
    assert netcdf.SEAL not in (tmp_path / "theirs.nc").read_bytes()
    assert prism.load(tmp_path / "theirs.nc").attrs["note"] == "kept"


def test_texts_of_a_fixed_length_are_read_as_the_others(tmp_path):
    """The netCDF C library writes attributes so, and may write variables of characters."""
    import h5py

    whole = dataset("simulation").assign(note=("letter", np.array(list("kept"), "S1")))
    prism.save(whole, tmp_path / "a.nc")
    expected = prism.load(tmp_path / "a.nc")
    with h5py.File(tmp_path / "a.nc", "a") as file:
        for held in (file, *(file[name] for name in file)):
            for key in [k for k, v in held.attrs.items() if isinstance(v, str)]:
                held.attrs[key] = np.bytes_(held.attrs[key].encode())
        assert isinstance(file.attrs["kind"], bytes)
    xr.testing.assert_identical(prism.load(tmp_path / "a.nc"), expected)
    assert expected.note.values.tobytes() == b"kept"


def test_declared_sizes_beyond_what_a_file_can_hold_are_refused(tmp_path):
    import h5netcdf

    with h5netcdf.File(tmp_path / "huge.nc", "w") as file:
        file.dimensions = {"x": 1 << 40}
        file.create_variable("step_time", ("x",), "f8", chunks=(1 << 20,))
        file.attrs["kind"] = "sweep"
    with pytest.raises(PrismError, match=r"huge\.nc: .*declared"):
        prism.load(tmp_path / "huge.nc")


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e300])
def test_values_that_no_figure_can_be_made_of_are_refused(tmp_path, value):
    whole = dataset("simulation")
    for name, broken in (
        ("step_time", whole.assign(step_time=whole.step_time + value)),
        ("seconds", whole.assign_attrs(seconds=value)),
    ):
        prism.save(broken, tmp_path / "a.nc")
        with pytest.raises(PrismError, match=f"a.nc: .*{name}"):
            prism.load(tmp_path / "a.nc")


def test_what_is_warned_of_while_a_file_is_understood_is_its_fault(tmp_path):
    with (
        warnings.catch_warnings(),
        pytest.raises(PrismError, match=r"a\.nc: .*divide by zero"),
    ):
        warnings.simplefilter("default")
        with netcdf.told_broken("a.nc", "a result"):
            np.ones(2) / np.zeros(2)


def test_writing_leaves_the_umask_of_the_process_alone(tmp_path, monkeypatch):
    mask = os.umask(0o027)
    try:

        def touched(_):
            raise AssertionError("the umask belongs to all threads")

        monkeypatch.setattr(os, "umask", touched)
        with files.atomic_write(tmp_path / "a.txt") as temporary:
            temporary.write_text("x")
    finally:
        monkeypatch.undo()
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


@pytest.fixture
def temp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"prism-{os.getuid()}"


def test_compiled_code_in_temp_is_kept_in_a_folder_that_is_ours_alone(temp):
    assert compiled.folder_in_temp() == str(temp) == compiled.folder_in_temp()
    assert stat.S_IMODE(temp.stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["open to others", "another's", "a link", "a file"])
def test_compiled_code_never_goes_where_another_may_write(temp, what, monkeypatch):
    if what == "a link":
        (temp.parent / "elsewhere").mkdir(mode=0o700)
        temp.symlink_to(temp.parent / "elsewhere")
    elif what == "a file":
        temp.touch(0o700)
    else:
        temp.mkdir(0o700)
    if what == "open to others":
        temp.chmod(0o770)
    if what == "another's":
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        temp.rename(temp.parent / f"prism-{uid + 1}")
    private = compiled.folder_in_temp()
    assert private != str(temp) and stat.S_IMODE(os.stat(private).st_mode) == 0o700
    assert os.path.dirname(private) == str(temp.parent)
    assert os.path.basename(private) != f"prism-{os.getuid()}"


def test_a_cache_folder_that_cannot_be_written_is_told_and_replaced(temp, monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none")
    monkeypatch.setattr(compiled, "can_write", lambda path: False)
    assert compiled.choose_folder() == str(temp)
    assert "/proc/none" in capsys.readouterr().err
    monkeypatch.setattr(compiled, "can_write", lambda path: path == "/proc/none")
    assert compiled.choose_folder() == "/proc/none"
    assert capsys.readouterr().err == ""


def test_a_folder_can_be_written_where_it_or_what_is_above_can(tmp_path):
    assert compiled.can_write(str(tmp_path / "a" / "b"))
    (tmp_path / "file").touch()
    assert not compiled.can_write(str(tmp_path / "file"))
    assert not compiled.can_write(str(tmp_path / "file" / "below"))


def test_compiled_code_is_kept_apart_from_that_of_other_sources(tmp_path):
    """A change of any file of the engine, or of its name, is another folder."""
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("y = 1")
    found = [compiled.hash_sources(tmp_path)]
    (tmp_path / "b.py").write_text("y = 2")
    found.append(compiled.hash_sources(tmp_path))
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    found.append(compiled.hash_sources(tmp_path))
    (tmp_path / "notes.txt").touch()
    assert compiled.hash_sources(tmp_path) == found[-1]
    assert len(set(found)) == 3


def test_all_of_the_engine_is_kept_in_one_folder():
    folder = Path(engine.run_given._cache._cache_path)
    assert Path(engine.philox_lanes._cache._cache_path) == folder
    assert folder.parent.name == f"engine-{compiled.hash_sources(Path(engine.__file__).parent)}"
    assert numba.config.CACHE_DIR == os.environ.get("NUMBA_CACHE_DIR", "")


@pytest.mark.parametrize("how", ["external storage", "external link", "virtual"])
def test_values_kept_in_other_files_are_refused(tmp_path, how):
    """HDF5 would read whatever file the name inside says."""
    import h5py

    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4000))
    prism.save(dataset("simulation"), tmp_path / "other.nc")
    prism.save(dataset("simulation"), tmp_path / "a.nc")
    with h5py.File(tmp_path / "a.nc", "a") as file:
        if how == "external storage":
            file.create_dataset("more", (500,), "f8", external=[(str(secret), 0, 4000)])
        elif how == "external link":
            file["more"] = h5py.ExternalLink("other.nc", "step_time")
        else:
            layout = h5py.VirtualLayout((500,), "f8")
            layout[:] = h5py.VirtualSource("other.nc", "step_time", (500,))
            file.create_virtual_dataset("more", layout)
    with pytest.raises(PrismError, match=r"a\.nc: .*more"):
        prism.load(tmp_path / "a.nc")
    prism.load(tmp_path / "other.nc")
