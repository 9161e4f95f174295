"""Imports tell who may know whom (docs/architecture.md). Read from source, nothing is imported."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"

# What each package may import of the others; its own modules and the top-level values always.
MAY_IMPORT = {
    "cache": set[str](),
    "plan": {"cache"},
    "sched": {"plan", "cache"},
    "model": {"attention"},
    "attention": {"model"},
    "exec": {"plan", "cache", "model", "attention"},
    "serve": set[str](),
    "bench": set[str](),
}
VALUES = {"errors", "types", "config"}  # pure values, free for all
WITHOUT_TORCH = ("cache", "plan", "sched", "serve", "bench")
ENGINE_MAIN = "paceline.serve.engine_process"  # the one module of serve that reaches the engine


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Modules that importing this one imports at once: not those inside functions or for types."""
    found = set()
    stack: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: absolute imports only"
                found |= {_target(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                stack += node.orelse
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                stack.append(node)
    return frozenset(found)


def _target(module: str, name: str) -> str:
    return f"{module}.{name}" if f"{module}.{name}" in MODULES else module


@functools.cache
def reached(module: str) -> frozenset[str]:
    """Everything that importing this module imports, its parent packages included."""
    seen: set[str] = set()
    stack = [module]
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        parents = each.split(".")
        stack += [".".join(parents[:i]) for i in range(1, len(parents))]
        if each in MODULES:
            stack += imports(each)
    return frozenset(seen)


def _of(package: str) -> list[str]:
    return [name for name in MODULES if name.startswith(f"paceline.{package}")]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_they_may(package: str) -> None:
    allowed = MAY_IMPORT[package] | VALUES | {package}
    for module in _of(package):
        if module == ENGINE_MAIN:
            continue
        for target in imports(module):
            if not target.startswith("paceline."):
                continue
            owner = target.split(".")[1]
            assert owner in allowed or (package, owner) in EXCEPTIONS, f"{module} -> {target}"


# Reading a checkpoint's header (no torch) is open to model and serve.
EXCEPTIONS = {
    ("serve", "checkpoint"),
    ("serve", "model"),
    ("model", "checkpoint"),
    ("exec", "checkpoint"),
    ("model", "drafter_checkpoint"),
    ("exec", "drafter_checkpoint"),
}


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_the_pure_packages_never_reach_torch(package: str) -> None:
    for module in _of(package):
        if module != ENGINE_MAIN:
            assert "torch" not in reached(module), f"{module} reaches torch"


def test_the_search_sees_torch_where_it_is() -> None:
    assert "torch" in reached(ENGINE_MAIN)
    assert "torch" in reached("paceline.llm")


def test_bench_knows_http_only() -> None:
    for module in _of("bench"):
        assert {t for t in imports(module) if t.startswith("paceline.")} <= {
            "paceline.errors",
            *_of("bench"),
        }


def test_files_and_functions_stay_small() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        assert len(text.splitlines()) <= 450, f"{name} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 60, f"{name}.{node.name} has {length} lines"


def test_no_branch_on_speculation() -> None:
    """Plain decode is depth 0 of the one path: only choosing a policy asks what was asked for."""
    for name, path in MODULES.items():
        if name in ("paceline.plan.policy", "paceline.config"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                assert "specul" not in ast.unparse(node.test).lower(), f"{name}:{node.lineno}"


def test_every_source_file_says_what_it_knows() -> None:
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), f"{name} has no docstring"


def test_the_public_names_are_what_imports() -> None:
    import paceline

    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
