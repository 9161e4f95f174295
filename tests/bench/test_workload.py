from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.workload import choose_prompts, choose_warmup, load_prompts
from paceline.errors import ConfigError


def test_built_in_prompts_are_many_different_and_of_several_kinds() -> None:
    prompts = load_prompts(None, "chat")
    assert len(prompts) == 40
    assert len({p.text for p in prompts}) == len({p.id for p in prompts}) == 40
    assert len({p.kind for p in prompts}) == 8
    assert prompts[0].messages == ({"role": "user", "content": prompts[0].text},)


def test_a_choice_is_fixed_by_its_seed_and_alternates_kinds() -> None:
    prompts = load_prompts(None, "chat")
    chosen = choose_prompts(prompts, 16, seed=5)
    assert chosen == choose_prompts(prompts, 40, seed=5)[:16]
    assert chosen != choose_prompts(prompts, 16, seed=6)
    assert len({p.kind for p in chosen[:8]}) == len({p.kind for p in chosen[8:]}) == 8


def test_nothing_repeats_before_all_were_used() -> None:
    prompts = load_prompts(None, "chat")
    chosen = choose_prompts(prompts, 100, seed=0)
    assert {p.id for p in chosen[:40]} == {p.id for p in chosen[40:80]} == {p.id for p in prompts}


def test_warmup_takes_what_the_levels_take_last() -> None:
    prompts = load_prompts(None, "chat")
    deck = choose_prompts(prompts, 40, seed=2)
    assert choose_warmup(prompts, 5, seed=2) == deck[:-6:-1]
    assert len(choose_warmup(prompts[:3], 7, seed=2)) == 7


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first\r\n\n  second one \n", encoding="utf-8")
    prompts = load_prompts(str(path), "completions")
    assert [(p.id, p.text) for p in prompts] == [("line 1", "first"), ("line 3", "second one")]


def test_json_lines_have_prompts_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"  # known by its content
    path.write_text(
        '{"prompt": "a"}\n\n{"messages": [{"role": "system", "content": "s"}], "other": 1}\n'
    )
    first, second = load_prompts(str(path), "chat")
    assert first.text == "a"
    assert first.messages == ({"role": "user", "content": "a"},)
    assert second.text is None
    assert second.messages == ({"role": "system", "content": "s"},)
    assert second.id == "line 3"


@pytest.mark.parametrize(
    ("content", "api", "reason"),
    [
        ("", "chat", "no prompt"),
        ('{"prompt": "a"}\nplain', "chat", "line 2 is not JSON"),
        ('{"prompt": 3}', "chat", "line 1 needs"),
        ('{"messages": []}', "chat", "line 1 needs"),
        ('{"messages": ["a"]}', "chat", "line 1 needs"),
        ("[1]", "chat", "line 1 needs"),
        ('{"prompt": "\\ud800"}', "chat", "line 1 is not JSON"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "completions", "need --api chat"),
    ],
)
def test_a_useless_file_is_one_clear_line(
    tmp_path: Path, content: str, api: str, reason: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_prompts(str(path), api)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_prompts(str(tmp_path / "none"), "chat")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="--prompts"):
        load_prompts(str(tmp_path / "binary"), "chat")
