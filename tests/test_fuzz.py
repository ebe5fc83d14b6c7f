"""A seeded sample of the broken inputs of ``experiments/checks/fuzz.py``."""

import pytest
from fuzz_inputs import count_controls, find_faults, make_input, make_originals
from job_invariants import BUDGETS

N, SEED = 72, 2


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return make_originals(tmp_path_factory.mktemp("whole"), None, netcdf=False)


@pytest.fixture
def quick(monkeypatch):
    for place, value in BUDGETS.items():
        monkeypatch.setattr(place, value)


def test_broken_inputs_are_refused_in_words(run, tmp_path, originals, quick):
    broken = {}
    for index in range(N):
        folder = tmp_path / str(index)
        folder.mkdir()
        _, words = make_input(originals, SEED, index, folder)
        found = find_faults(words, *run(*words))
        if found:
            broken[index] = found, words
    assert not broken


def test_whole_inputs_are_read(run, tmp_path, originals, quick):
    """Negative control: what is refused is refused for what was broken."""
    shown = 0
    for index in range(-count_controls(originals), 0):
        folder = tmp_path / str(index)
        folder.mkdir()
        _, words = make_input(originals, SEED, index, folder)
        if words[0] == "show":
            assert run(*words)[0] == 0, words
            shown += 1
    assert shown > 10


def test_the_checks_find_faults():
    words = ["show", "x", "--json"]
    assert find_faults(words, 0, '{"a": 1}', "") == []
    assert find_faults(words, 0, '{"a": NaN}', "") == ["nonfinite figure"]
    assert find_faults(words, 0, '{"a": 1e999}', "") == ["nonfinite figure"]
    assert find_faults(words, 0, "a", "") == ["no JSON"]
    assert "internal error" in find_faults(words, 1, "", "prism: internal error: X")
    assert "warning of Python" in find_faults(words, 0, "{}", "/a/b.py:3: RuntimeWarning: x")
    assert "refused without a word" in find_faults(words, 2, "", "x")
