"""Examples of docstrings run in a folder of their own, with the samples of the checkout."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def example_folder(request):
    """Let examples read `experiments/` and write where they like."""
    if isinstance(request.node, pytest.DoctestItem):
        folder = request.getfixturevalue("tmp_path")
        samples = Path(__file__).resolve().parent / "experiments"
        (folder / "experiments").symlink_to(samples, target_is_directory=True)
        request.getfixturevalue("monkeypatch").chdir(folder)
