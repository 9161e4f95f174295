"""The load generator stands alone: of Paceline it knows the errors, and no engine library."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline.bench

ALLOWED = ("paceline.bench", "paceline.errors")
FORBIDDEN = {"torch", "numpy", "numba", "zmq", "tokenizers", "safetensors", "starlette"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            names.add(node.module or "")
    return names


def test_bench_imports_nothing_of_paceline_but_errors() -> None:
    files = sorted(Path(paceline.bench.__path__[0]).glob("*.py"))
    assert len(files) > 5
    for path in files:
        names = imported(path)
        assert not {name.partition(".")[0] for name in names} & FORBIDDEN, path
        own = {name for name in names if name.partition(".")[0] == "paceline"}
        assert all(name.startswith(ALLOWED) for name in own), path
