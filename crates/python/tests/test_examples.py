"""Runs the examples. The notebook is skipped without nbclient."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_program() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "generate.py"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(", there was a little girl named Lily.") and done.stdout.endswith("next: time\n")


def test_the_notebook(tmp_path: Path) -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "strip the outputs"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(str(output) for cell in cells for output in cell.outputs)
    assert "there was a little girl" in printed and "tempreature" in printed
