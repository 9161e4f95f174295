"""README and docs keep to what the program does: flags, links, Python examples."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig, ServerConfig
from tests.exec.test_synthetic import DRAFTER, TINY

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
    assert len(examples) == 3
    for example in examples:
        ast.parse(example)
    exec(compile(examples[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_example_without_weights_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[2]
    for name, values in (("TARGET", TINY), ("DRAFTER", DRAFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), found)
    (done,) = found["llm"].generate([1, 2, 3])
    assert done.tokens and found["llm"].engine.stats.speculation.synthetic_acceptance == 0.7


def test_named_files_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`(?:python )?((?:benchmarks|tests)/[\w/.]+)`?", page.read_text()):
            assert (ROOT / name.rstrip(".")).exists(), f"{page.name}: {name}"
