"""README and docs keep to what the program does: flags, links, Python examples."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from paceline.config import EngineConfig, ServerConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()


def test_readme_lists_every_serve_flag_and_no_other() -> None:
    table = [line for line in README.splitlines() if line.startswith("| `--")]
    listed = set(re.findall(r"`(--[a-z-]+)`", " ".join(line.split("|")[1] for line in table)))
    flags = {
        "--" + field.name.replace("_", "-")
        for config in (EngineConfig, ServerConfig)
        for field in dataclasses.fields(config)
        if not field.metadata.get("positional")
    }
    assert listed == flags


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_python_examples_parse_and_the_offline_one_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        ast.parse(example)
    exec(compile(examples[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_named_files_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`(?:python )?((?:benchmarks|tests)/[\w/.]+)`?", page.read_text()):
            assert (ROOT / name.rstrip(".")).exists(), f"{page.name}: {name}"
