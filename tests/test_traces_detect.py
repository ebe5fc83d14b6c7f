"""Formats by content, and files that are no trace."""

import gzip
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from traces_made import pipeline_frame, write_csv

import prism.traces.readers as readers
from prism import PrismError
from prism.traces import Trace, find_recording, make_trace, read_step_times, read_trace

TIDY = "op_kind,start_s,duration_s\nforward,0,1\nbackward,1,2\n"


@pytest.mark.parametrize(
    "data",
    [
        TIDY.encode(),
        b"\xef\xbb\xbf" + TIDY.encode(),
        TIDY.replace(",", ";").encode(),
        TIDY.replace(",", "\t").encode(),
        TIDY.replace("\n", "\r\n").encode(),
        TIDY.replace(",", " , ").encode(),
        TIDY.strip().encode(),
        ("\n\n" + TIDY).encode(),
        gzip.compress(TIDY.encode(), mtime=0),
        gzip.compress(b"\xef\xbb\xbf" + TIDY.encode(), mtime=0),
    ],
    ids=["plain", "bom", "semicolon", "tab", "crlf", "spaces", "no end", "blank", "gzip", "gz bom"],
)
def test_ways_to_write_a_table(tmp_path, data):
    path = tmp_path / "trace.json"  # the name plays no part
    path.write_bytes(data)
    trace = read_trace(path)
    assert list(trace.ops["duration"]) == [1.0, 2.0]
    assert list(trace.ops["start"]) == [0.0, 1.0]
    assert trace.source == str(path)


def test_parquet_under_any_name(tmp_path):
    pytest.importorskip("pyarrow")
    pipeline_frame().to_parquet(tmp_path / "ops.csv", engine="pyarrow")
    assert read_trace([tmp_path / "ops.csv"]).format == "pipeline"


def write(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"\x00\x01\x02\x03", "binary.*CSV or parquet"),
        (b"op_kind,duration_s\nf\xff,1\n", "file:2: .*UTF-8"),
        (b"op_kind,duration_s\nf," + b"1" * 70_000 + b"\0\n", "file:2: .*NUL"),
        (b"\x1f\x8bnot gzip at all", "gzip .*damaged"),
        (gzip.compress(TIDY.encode(), mtime=0)[:-9], "gzip .*cut"),
        (b"PK\x03\x04rest", "zip.*unpack"),
        ("a,b".encode("utf-16"), "UTF-16.*UTF-8"),
        (b"\x89HDF\r\n\x1a\nrest", "HDF5 or netCDF"),
        (b"op_kind,duration_s\n", "op_kind, duration_s.* no rows"),
        (b"op_kind,duration_s\nf,1\nf,1,2\nf,1\n", "file:3: 3 cells.* 2 "),
        (b"op_kind,duration_s\nf,1,2\nf,1,2\n", "more cells than .*2 "),
        (b"PAR1 and no more", "parquet .*cut"),
        (b'op_kind,duration_s\n"f,1\n', "quote"),
        (b"just a line of text\nand another\n", "op_kind and name; .*just a line of text"),
    ],
)
def test_files_that_are_no_trace(tmp_path, data, message):
    with pytest.raises(PrismError, match=message) as raised:
        read_trace(write(tmp_path, data))
    assert "file" in str(raised.value)


def test_a_parquet_file_cut_short(tmp_path):
    pytest.importorskip("pyarrow")
    pipeline_frame().to_parquet(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for share in (0.3, 0.9, 0.999):
        with pytest.raises(PrismError, match="file: .*parquet .*cut"):
            read_trace(write(tmp_path, whole[: int(share * len(whole))]))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PrismError, match=r"pip install 'pyarrow"):
        read_trace(write(tmp_path, b"PAR1....PAR1"))


def test_places_that_are_no_file(tmp_path):
    with pytest.raises(PrismError, match="/nothing: "):
        read_trace(tmp_path / "nothing")
    with pytest.raises(PrismError, match=f"{tmp_path}: .*no files"):
        read_trace(tmp_path)
    with pytest.raises(PrismError, match="no trace"):
        read_trace([])


def test_several_tables_are_not_one_trace(tmp_path):
    one, two = (write_csv(tmp_path / name, pipeline_frame()) for name in ("a.csv", "b.csv"))
    with pytest.raises(PrismError, match=r"2 .*\(a\.csv, b\.csv\)"):
        read_trace([one, two])
    with pytest.raises(PrismError, match=f"{tmp_path}: 2 "):
        read_trace(tmp_path)


def test_a_folder_with_one_table_is_that_table(tmp_path):
    write_csv(tmp_path / "a.csv", pipeline_frame())
    (tmp_path / ".hidden").write_text("x")
    assert read_trace(tmp_path).format == "pipeline"


def test_a_log_of_step_times_is_pointed_elsewhere(tmp_path):
    line = b" iteration 1/ 9 | elapsed time per iteration (ms): 5.0 |\n"
    with pytest.raises(PrismError, match="log of step times"):
        read_trace(write(tmp_path, line))
    with pytest.raises(PrismError, match="step_ms; .*step times"):
        read_trace(write(tmp_path, b"step,step_ms\n1,2\n"))


@pytest.fixture
def ranks(monkeypatch):
    """Files that the profiler reader was given, in its place."""
    seen = []

    def read(files):
        seen.extend(file.path.name for file in files)
        return make_trace({"duration": [1.0]}, "made", "kineto")

    made = [replace(r, read=read) if r.name == "kineto" else r for r in readers.READERS]
    monkeypatch.setattr(readers, "READERS", tuple(made))
    return seen


@pytest.mark.parametrize(
    "data", [b"{}", b'\xef\xbb\xbf [{"ph": 1', gzip.compress(b"\n {" * 99, mtime=0)[:-8]]
)
def test_json_goes_to_the_profiler_reader(tmp_path, ranks, data):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "trace.csv").write_bytes(data)
    read_trace(folder / "trace.csv")
    assert ranks == ["trace.csv"]


def test_a_folder_of_json_is_one_trace_of_several_ranks(tmp_path, ranks):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("rank1", "rank0"):
        (folder / name).write_text("{}")
    (folder / "README").write_text("words")
    (folder / "rank2").write_text("")
    notes = read_trace(folder).notes
    assert ranks == ["rank0", "rank1"]
    assert any("README: " in note for note in notes)
    assert any("rank2: " in note for note in notes)
    with pytest.raises(PrismError, match="README: .*JSON"):
        read_trace([folder / "rank0", folder / "README"])


BYTES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(gzip.compress),
    st.binary(max_size=60).map(lambda data: b"PAR1" + data + b"PAR1"),
    st.text(st.sampled_from('abs_01.,;\t\n\r "|-'), max_size=80).map(str.encode),
    st.text(st.sampled_from('01.,\n "-'), max_size=60).map(
        lambda t: f"name,duration_s\n{t}".encode()
    ),
    st.text(st.sampled_from('01.,\n "-'), max_size=60).map(
        lambda t: f"step_s,run,step\n{t}".encode()
    ),
)


@given(BYTES)
@example(b'name,duration_s\n"\n')
@example(b"\r")
def test_any_bytes_give_a_result_or_an_error(tmp_path_factory, data):
    if data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return  # the profiler reader's
    path = write(tmp_path_factory.mktemp("bytes"), data)
    for read in (read_trace, read_step_times):
        try:
            result = read(path)
        except PrismError as error:
            assert str(path) in str(error)
        else:
            values = result.ops["duration"] if isinstance(result, Trace) else result.seconds
            assert np.isfinite(values).all() and len(values) > 0


def test_zip_magic_is_that_of_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(PrismError, match=r"a\.zip.*unpack"):
        find_recording(tmp_path / "a.zip")
