"""Where compiled code is kept: never where another may write, apart for other sources.

No public path leads there but an installation: the folder is chosen while prism is imported.
"""

import os
import stat
from pathlib import Path

import numba
import pytest

from prism import engine
from prism.common import compiled


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


def test_compiled_code_goes_to_the_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.choose_folder() == str(tmp_path / "prism")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiled.choose_folder() == str(tmp_path / ".cache" / "prism")


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
