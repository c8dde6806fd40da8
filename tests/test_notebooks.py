"""Every notebook runs from top to bottom, as strictly as the tests do, in the interpreter that runs them."""

import os
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IN_BOXES = ("03_reward_against_success",)
every_notebook = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.real("bwrap")] * (path.stem in IN_BOXES), id=path.stem) for path in NOTEBOOKS]
)

# The settings of tests/conftest.py, and the rule of setup.cfg about warnings; but ipykernel has a pending one of its own for its end.
STRICT = """
from tests import conftest
import warnings
warnings.simplefilter("error")
warnings.simplefilter("ignore", PendingDeprecationWarning)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_notebook
def test_every_cell_runs(path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    # Without folders to look in, "python3" is the ipykernel of this interpreter, whatever the user has registered under that name.
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(notebook, km=kernel, startup_timeout=240, timeout=240, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)}, cleanup_kc=True)


@every_notebook
def test_is_committed_as_it_ran(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", cell.source
