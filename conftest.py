"""Examples of docstrings run in a folder of their own; several processes find one compilation.

The examples have the samples of the checkout beside them.
"""

import subprocess
import sys
from pathlib import Path

import pytest

collect_ignore = ["prism/present/explore/warmed.py"]  # no examples, and seconds to import
COMPILE = """
from prism.common import compiled
compiled.start_compiling()
if compiled.is_compiling():
    import prism
    prism.simulate("pipeline-8x32", replicates=64, seed=1)
"""


def pytest_configure(config):
    """Compile the engine before there are processes that would each do it."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        subprocess.run([sys.executable, "-c", COMPILE], check=False, stdout=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def example_folder(request):
    """Let examples read `experiments/` and write where they like."""
    if isinstance(request.node, pytest.DoctestItem):
        folder = request.getfixturevalue("tmp_path")
        samples = Path(__file__).resolve().parent / "experiments"
        (folder / "experiments").symlink_to(samples, target_is_directory=True)
        request.getfixturevalue("monkeypatch").chdir(folder)
