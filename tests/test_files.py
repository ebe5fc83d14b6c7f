"""Files as inputs: bounds on what is read, regular files alone, netCDF that is whole or refused."""

import gc
import gzip
import os
import random
import signal
from functools import cache

import numpy as np
import pytest
import xarray as xr

import prism

MIB = 1 << 20
FILE = "file"
PLACE = ("place", "pipeline-8x32", "--slow-nodes", "1", "--slowdown", "2", "--hosts", FILE)
READERS = {  # a command that reads such a file, its first bytes
    "steps": (("compare", FILE, FILE), b"step_s\n" + b"1\n" * 40_000),
    "profiler": (("fit", FILE), b'{"traceEvents":['),
    "chakra": (("fit", FILE), b'{"schema": "1.1.0-chakra.0.0.4", "nodes": ['),
    "hosts": (PLACE, b"node1\n" * 20_000),
    "nccl": (("show", FILE), b"# size count type redop root time algbw busbw\n" * 2000),
    "placement": (("estimate", "pipeline-8x32", "--set", f"cluster.hosts={FILE}"), b"slot,node\n"),
}


def refused(run, name, file):
    """Give what is said of a file that its command refuses."""
    words = (word.replace(FILE, str(file)) for word in READERS[name][0])
    status, out, said = run(*words)
    assert (status, out) == (2, "") and file.name in said and "Traceback" not in said
    return said


@pytest.mark.parametrize("name", READERS)
def test_a_sparse_file_is_refused_by_its_size(tmp_path, run, name):
    file = tmp_path / "sparse"
    file.write_bytes(READERS[name][1])
    os.truncate(file, 20 << 30)
    assert "MiB" in refused(run, name, file)


@cache
def blanks():
    """Members of 32 MiB of blanks each, 1 : 1000."""
    return 17 * gzip.compress(b" " * (32 * MIB))


@pytest.mark.parametrize("name", ["steps", "hosts", "nccl"])
def test_gzip_is_refused_by_what_it_unpacks_to(tmp_path, run, name):
    file = tmp_path / "bomb.gz"
    file.write_bytes(gzip.compress(READERS[name][1]) + blanks())
    assert file.stat().st_size < MIB
    assert "MiB" in refused(run, name, file)


def test_events_packed_as_no_profiler_packs_them_are_refused(tmp_path, run):
    """Gigabytes of sound events in a few megabytes would take three times that in memory."""
    event = (
        b'{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7},\n'
    )
    file = tmp_path / "trace.json.gz"
    file.write_bytes(17 * gzip.compress(event * (4 * MIB // len(event))))
    assert "64 MiB" in refused(run, "profiler", file)


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
    attrs = {"kind": kind, "call": "{}", "job_name": "a"} if kind else {"job": "{}"}
    size = {} if kind in ("sweep", "placement", "comparison") else {"job_world_size": 8}
    return xr.Dataset({"step_time": ("replicate", values), **size}, attrs=attrs)


@pytest.mark.parametrize("kind", ["", "simulation", "sweep", "placement"])
def test_every_flipped_bit_and_cut_is_told(tmp_path, kind):
    file = tmp_path / "whole.nc"
    prism.save(dataset(kind), file)
    prism.load(file)
    content, draw = file.read_bytes(), random.Random(1)
    end = len(content) - 80  # after which the hash of what is before may be
    for _ in range(40):
        broken, bit = bytearray(content), draw.randrange(8 * end)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        with pytest.raises(prism.PrismError, match=r"whole\.nc: .*read"):
            prism.load(file)
    for size in (0, 1, 96, end // 2, end - 1):
        file.write_bytes(content[:size])
        with pytest.raises(prism.PrismError, match=r"whole\.nc: .*read"):
            prism.load(file)


def test_flipped_bits_of_another_program_s_file_are_told_or_read(tmp_path):
    """It has no hash; nothing stays open."""
    file = tmp_path / "whole.nc"
    dataset("comparison").to_netcdf(file, engine="h5netcdf")
    content, draw = file.read_bytes(), random.Random(1)
    told = 0
    for _ in range(60):
        broken, bit = bytearray(content), draw.randrange(8 * len(content))
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        try:
            prism.load(file)
        except prism.PrismError:
            told += 1
    gc.collect()  # what is closed only now complains through pytest's filter
    assert 5 < told < 60


def test_a_file_that_another_program_wrote_needs_no_hash(tmp_path):
    prism.save(dataset("sweep"), tmp_path / "ours.nc")
    loaded = xr.load_dataset(tmp_path / "ours.nc", engine="h5netcdf")
    loaded.assign_attrs(note="kept").to_netcdf(tmp_path / "theirs.nc", engine="h5netcdf")
    assert prism.load(tmp_path / "theirs.nc").attrs["note"] == "kept"


def test_texts_of_a_fixed_length_are_read_as_the_others(tmp_path):
    """The netCDF C library writes attributes so, and may write variables of characters."""
    import h5py

    whole = dataset("simulation").assign(note=("letter", np.array(list("kept"), "S1")))
    prism.save(whole, tmp_path / "a.nc")
    expected = prism.load(tmp_path / "a.nc").to_xarray()
    with h5py.File(tmp_path / "a.nc", "a") as file:
        for held in (file, *(file[name] for name in file)):
            for key in [k for k, v in held.attrs.items() if isinstance(v, str)]:
                held.attrs[key] = np.bytes_(held.attrs[key].encode())
        assert isinstance(file.attrs["kind"], bytes)
    xr.testing.assert_identical(prism.load(tmp_path / "a.nc").to_xarray(), expected)
    assert expected.note.values.tobytes() == b"kept"


def test_declared_sizes_beyond_what_a_file_can_hold_are_refused(tmp_path):
    import h5netcdf

    with h5netcdf.File(tmp_path / "huge.nc", "w") as file:
        file.dimensions = {"x": 1 << 40}
        file.create_variable("step_time", ("x",), "f8", chunks=(1 << 20,))
        file.attrs["kind"] = "sweep"
    with pytest.raises(prism.PrismError, match=r"huge\.nc: .*declared"):
        prism.load(tmp_path / "huge.nc")


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e300])
def test_values_that_no_figure_can_be_made_of_are_refused(tmp_path, value):
    whole = dataset("simulation")
    for name, broken in (
        ("step_time", whole.assign(step_time=whole.step_time + value)),
        ("seconds", whole.assign_attrs(seconds=value)),
    ):
        prism.save(broken, tmp_path / "a.nc")
        with pytest.raises(prism.PrismError, match=f"a.nc: .*{name}"):
            prism.load(tmp_path / "a.nc")


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
    with pytest.raises(prism.PrismError, match=r"a\.nc: .*more"):
        prism.load(tmp_path / "a.nc")
    prism.load(tmp_path / "other.nc")


@pytest.mark.parametrize("content", [b"\x1c", b"\x1f\x1d\n\x1e", b"\x85\x85"])
def test_a_text_of_separators_alone_is_refused(tmp_path, run, content):
    (tmp_path / "a.log").write_bytes(content)
    for command in ("fit", "show"):
        status, out, said = run(command, tmp_path / "a.log")
        assert (status, out) == (2, "") and "internal" not in said
