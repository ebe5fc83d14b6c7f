"""What docs/own-trace.md shows is what its commands print."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from prism import __main__ as entry

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own-trace.md"
BLOCKS = re.findall(r"```console\n\$ prism ([^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_commands_print_what_the_page_shows(tmp_path, monkeypatch):
    pytest.importorskip("google.protobuf")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert len(BLOCKS) >= 6
    for command, shown in BLOCKS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            assert entry.main(command.split()) == 0, command
        printed = [line.rstrip() for line in out.getvalue().splitlines()]
        lines = shown.rstrip("\n").split("\n")
        if lines[-1] == "...":
            lines, printed = lines[:-1], printed[: len(lines) - 1]
        assert printed == lines, command
