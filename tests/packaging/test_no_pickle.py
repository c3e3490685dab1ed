"""No pickle anywhere, in any form: a file that can run code when it is read is not a model."""

from __future__ import annotations

import ast

import pytest

from tests.packaging.project import ROOT, sources

FORBIDDEN_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
}  # fmt: skip
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter",
    "np.save", "numpy.save", "pandas.read_pickle",
}  # fmt: skip


def unsafe_lines(source: str) -> list[str]:
    """Line and name of everything in `source` that reads or writes pickles."""
    return [
        f"{node.lineno}: {reason}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
        for reason in _reasons(node)
    ]


def _reasons(node: ast.Import | ast.ImportFrom | ast.Call) -> list[str]:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        pickles_allowed = any(
            word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
            for word in node.keywords
        )
        return [called] if called in FORBIDDEN_CALLS or pickles_allowed else []
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [
            name
            for name in names
            if name in FORBIDDEN_CALLS or name.partition(".")[0] in FORBIDDEN_MODULES
        ]
    return [alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]


def test_no_source_reads_or_writes_pickles() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if (lines := unsafe_lines(path.read_text()))
    }
    assert found == {}
    assert len(sources()) > 10


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "from torch import load",
        "import torch\ntorch.load('x', weights_only=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert unsafe_lines(source)


def test_the_scan_lets_plain_arrays_pass() -> None:
    assert unsafe_lines("import numpy as np\nnp.load('x', allow_pickle=False)") == []
