"""Runs a notebook in a fresh kernel of this interpreter: `make notebooks` stores the outputs, the tests check them.

python tests/helpers/run_notebook.py notebooks/1_pipeline_in_five_minutes.ipynb ...
"""

import os
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

LOGGED = re.compile(r"^(WARNING: (All log messages|Logging) before|[IWE]\d{4} ).*\n?", re.MULTILINE)
"""What libraries log of this machine, such as that it has no GPU."""


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of its cells, which ran in a folder of their own.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import_module("matplotlib.font_manager")  # makes a list of fonts: a kernel would warn that it takes time
    notebook = nbformat.read(path, as_version=4)
    kernels = KernelSpecManager(kernel_dirs=[])  # none that are installed: what remains is this interpreter's
    with tempfile.TemporaryDirectory() as folder:
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
        manager.transport, manager.ip = "ipc", f"{folder}/kernel"
        where = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, km=manager, timeout=300, resources=where, record_timing=False)
        client.execute(cleanup_kc=True, env=os.environ | {"IPYTHONDIR": folder})
    for cell in [cell for cell in notebook.cells if cell.cell_type == "code"]:
        logs = [output for output in cell.outputs if output.get("name") == "stderr"]
        for output in logs:
            output["text"] = LOGGED.sub("", output["text"])
        cell["outputs"] = [one for one in cell.outputs if one not in logs or one["text"]]
    notebook.metadata["language_info"] = {"name": "python"}  # and not which version ran it
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(run(Path(name)), name)
