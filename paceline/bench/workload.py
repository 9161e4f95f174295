"""Which prompts are sent, in which order. Reads the prompt file; knows no HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from paceline.bench.prompts import BUILT_IN
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, as text or as chat messages. `id` names it in the result ("code-3", "line 7").

    text: None when the file gave messages. messages: as the file gave them, or the text as one
    message of the user.
    """

    id: str
    kind: str
    text: str | None
    messages: tuple[dict[str, Any], ...]


def load_prompts(path: str | None, api: str) -> tuple[Prompt, ...]:
    """The prompts of the file at `path`, or the built-in ones.

    A file is read as JSON lines when its name ends in .jsonl or its first line that is not blank
    begins with "{"; else each line is a prompt. Blank lines are skipped. Raises ConfigError, with
    the line's number, for a line that is of no use to the endpoint `api`.
    """
    if path is None:
        return tuple(
            _from_text(text, kind=kind, id=f"{kind}-{number}")
            for kind, texts in BUILT_IN.items()
            for number, text in enumerate(texts, start=1)
        )
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--prompts {path}: {exc}") from None
    lines = [(n, line) for n, line in enumerate(content.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path}: no prompt in it")
    if path.endswith(".jsonl") or lines[0][1].lstrip().startswith("{"):
        return tuple(_from_json(line, api, where=f"{path}, line {n}", id=f"line {n}")
                     for n, line in lines)  # fmt: skip
    return tuple(_from_text(line.strip(), kind="file", id=f"line {n}") for n, line in lines)


def choose_prompts(prompts: Sequence[Prompt], count: int, *, seed: int) -> tuple[Prompt, ...]:
    """`count` prompts in an order fixed by `seed`, each kind in turn.

    None repeats before all have been used. A longer choice begins with a shorter one.
    """
    return tuple(islice(_decks(prompts, random.Random(seed)), count))


def choose_warmup(prompts: Sequence[Prompt], count: int, *, seed: int) -> tuple[Prompt, ...]:
    """Prompts that the levels use last, so that a prefix cache does not know the first ones."""
    deck = choose_prompts(prompts, len(prompts), seed=seed)
    return tuple(deck[-1 - i % len(deck)] for i in range(count))


def _decks(prompts: Sequence[Prompt], draw: random.Random) -> Iterator[Prompt]:
    """Shuffled decks without end; within one, the kinds alternate as long as they last."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    while True:
        piles = [draw.sample(pile, len(pile)) for pile in kinds.values()]
        draw.shuffle(piles)
        for turn in zip_longest(*piles):
            yield from (prompt for prompt in turn if prompt is not None)


def _from_text(text: str, *, kind: str, id: str) -> Prompt:
    return Prompt(id=id, kind=kind, text=text, messages=({"role": "user", "content": text},))


def _from_json(line: str, api: str, *, where: str, id: str) -> Prompt:
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()  # a lone surrogate cannot be sent
    except ValueError as exc:
        raise ConfigError(f"--prompts {where} is not JSON: {exc}") from None
    text = entry.get("prompt") if isinstance(entry, dict) else None
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not (isinstance(text, str) and text):
        text = None
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        if text is None and api == "completions":
            raise ConfigError(f'--prompts {where} has "messages": they need --api chat')
        return Prompt(id=id, kind="file", text=text, messages=tuple(messages))
    if text is None:
        raise ConfigError(
            f'--prompts {where} needs "prompt", a text, or "messages", a list of objects'
        )
    return _from_text(text, kind="file", id=id)
