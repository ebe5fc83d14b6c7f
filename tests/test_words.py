"""Words of texts that readers meet, see `experiments/checks/words.py`."""

import importlib.util
import re
from pathlib import Path

import prism

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "experiments" / "checks" / "words.py"
spec = importlib.util.spec_from_file_location("words", SCRIPT)
words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(words)


def test_readers_meet_one_word_per_idea(capsys):
    """Nothing that has a better word is left in the files that are held to it."""
    assert words.main([]) == 0, capsys.readouterr().out


def test_shares_and_changes_are_written_by_one_module():
    """No format of a percentage stands elsewhere than in `prism.common.text`."""
    own = re.compile(r":[-+]?(\.\d)?%\}|:[-+]?\.\d[fg]?\} ?%")
    assert own.search("f'{x:.1%}'") and own.search("f'{100 * x:+.1f} %'")
    files = Path(prism.__file__).parent.rglob("*.py")
    found = {f.name for f in files if own.search(f.read_text("utf-8"))}
    assert found == {"text.py"}


def test_words_are_found_where_readers_meet_them(tmp_path, monkeypatch):
    """Docstrings, comments, texts, prose and cells are read; names and code blocks are not."""
    monkeypatch.setattr(words, "ROOT", tmp_path)
    python = '"""The law\nof it."""\nlaw = "law"  # a law\nx = f"{law} under way"\n'
    page = "A law.\n\n```console\n$ law\n```\n`law`, Amdahl's law; so\nmany\n"
    (tmp_path / "a.py").write_text(python, encoding="utf-8")
    (tmp_path / "a.md").write_text(page, encoding="utf-8")
    (tmp_path / "a.yaml").write_text("law: 1  # told\n", encoding="utf-8")
    found = {
        name: sorted((line, word) for line, word, _ in words.check(tmp_path / name))
        for name in ("a.py", "a.md", "a.yaml")
    }
    assert found == {
        "a.py": [(1, "law"), (3, "law"), (4, "under way")],
        "a.md": [(1, "law"), (6, "so many")],
        "a.yaml": [(1, "told")],
    }
