"""`paceline check-drafter TARGET DRAFTER`: does this drafter fit, and how is its file to be read?

Two keys of EAGLE-3 checkpoints mean different things to different programs. A drafter read wrongly
runs without an error; only its drafts are hardly ever accepted. So a handful of prompts is
generated under each reading, greedy, with chains, and the acceptance tells.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.checkpoint import Checkpoint, open_checkpoint
from paceline.config import DEVICES, DTYPES, LOAD_FORMATS, EngineConfig, check_choices, flag
from paceline.drafter_checkpoint import open_readings
from paceline.errors import ConfigError
from paceline.types import AddRequest, Progress, SamplingParams, SpeculationStats

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a fisherman who finds a letter in a bottle.",
    "Explain how a bicycle stays upright.",
    "def fibonacci(n):\n",
    "List the planets of the solar system in order, with one fact each.",
    "Translate into French: The weather is nice today and we are going to the beach.",
    "If a train travels 60 miles in 45 minutes, what is its average speed?",
    "The main causes of the industrial revolution were",
)
DEPTH = 3
HARDLY = 1.1  # an acceptance length below this is worth nothing
ALIKE = 0.03  # relative difference of acceptance lengths within which two readings are the same


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to check, on what."""

    target: str = dataclasses.field(
        metadata={"positional": True, "help": "the model: a directory or a .gguf file"}
    )
    drafter: str = dataclasses.field(
        metadata={"positional": True, "help": "directory of the EAGLE-3 drafter's checkpoint"}
    )
    device: str = flag("auto", "where the model runs", choices=DEVICES)
    dtype: str = flag("auto", "number format of weights and K/V (auto: bfloat16)", choices=DTYPES)
    load_format: str = flag("auto", "how the model's weights are stored", choices=LOAD_FORMATS)
    max_tokens: int = flag(64, f"tokens to generate for each of {len(PROMPTS)} prompts")
    kv_tokens: int = flag(8192, "tokens the K/V cache holds over all prompts")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.max_tokens < 2 * DEPTH:
            raise ConfigError(
                f"--max-tokens must be at least {2 * DEPTH}, not {self.max_tokens}: shorter texts "
                "leave no room for drafts"
            )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a drafter fares under one pair of options.

    by_position: share of the drafts at each position that were accepted. failures: steps in which
    the drafter failed.
    """

    layer_ids: str
    norm_output: str
    by_position: tuple[float, ...]
    failures: int

    @property
    def length(self) -> float:
        """Tokens committed per step and request: 1, and the drafts that are accepted."""
        return 1 + sum(self.by_position)

    @property
    def flags(self) -> str:
        """The options of `paceline serve` that mean this reading."""
        named = (("layer-ids", self.layer_ids), ("norm-output", self.norm_output))
        return " ".join(
            f"--speculative-draft-{name} {value}" for name, value in named if value != "auto"
        )


def check_drafter(config: CheckConfig) -> int:
    """Measure, print the table and the verdict. Returns 0 if some reading works, else 1."""
    checkpoint = open_checkpoint(config.target, config.load_format)
    readings = measure(config, checkpoint, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(readings))
    good, text = verdict(readings)
    print(text)
    return 0 if good else 1


def measure(
    config: CheckConfig, checkpoint: Checkpoint, say: Callable[[str], None]
) -> list[Reading]:
    """Generate under every reading. Raises ConfigError and CheckpointError."""
    from paceline.exec.startup import load_target

    engine_config = EngineConfig(
        model=config.target,
        device=config.device,
        dtype=config.dtype,
        load_format=config.load_format,
        kv_tokens=config.kv_tokens,
        max_running_requests=len(PROMPTS),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=config.drafter,
        speculative_policy="static",
        speculative_num_steps=DEPTH,
    )
    pairs = open_readings(config.drafter, checkpoint.config)
    say(f"loading {checkpoint.name} ...")
    target = load_target(engine_config, checkpoint, _ignore)
    prompts = _prompts(checkpoint)
    results = []
    for number, (layer_ids, norm_output) in enumerate(pairs, start=1):
        say(f"reading {number} of {len(pairs)}: {_named(layer_ids, norm_output)} ...")
        reading = dataclasses.replace(
            engine_config,
            speculative_draft_layer_ids=layer_ids,
            speculative_draft_norm_output=norm_output,
        )
        results.append(_generate(reading, checkpoint, target, prompts, config.max_tokens))
    return results


def _prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Token ids, in the chat template if there is one: drafters are trained on conversations."""
    from paceline.serve.chat import ChatTemplate
    from paceline.serve.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
    texts = [template.render([{"role": "user", "content": text}]) for text in PROMPTS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _generate(
    config: EngineConfig,
    checkpoint: Checkpoint,
    target: object,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> Reading:
    from paceline.engine import make_scheduler
    from paceline.exec.drafters import recipe_of
    from paceline.exec.startup import Target, assemble
    from paceline.plan.policy import policy_of

    assert isinstance(target, Target)
    executor, resolved = assemble(config, target, recipe_of(config, checkpoint), _ignore)
    scheduler = make_scheduler(checkpoint, resolved, policy_of(config))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
    for number, prompt in enumerate(prompts):
        room = resolved.max_model_len - len(prompt)
        if room > 1:
            scheduler.add(AddRequest(id=str(number), prompt=tuple(prompt), params=params))
    while (plan := scheduler.plan_step()) is not None:
        scheduler.commit(executor.execute(plan))
    stats = scheduler.stats().speculation
    return Reading(
        layer_ids=config.speculative_draft_layer_ids,
        norm_output=config.speculative_draft_norm_output,
        by_position=_shares(stats),
        failures=executor.drafter_failures,
    )


def _shares(stats: SpeculationStats) -> tuple[float, ...]:
    pairs = zip(stats.accepted, stats.attempts, strict=True)
    return tuple(accepted / max(attempts, 1) for accepted, attempts in pairs)


def _named(layer_ids: str, norm_output: str) -> str:
    return f"layer ids {layer_ids}, norm_output {norm_output}"


def table(readings: Sequence[Reading]) -> str:
    """One line a reading: acceptance length and acceptance by draft position."""
    lines = ["acceptance  by position         reading"]
    for each in readings:
        shares = " ".join(f"{share:5.0%}" for share in each.by_position) or "no drafts"
        failed = f"  (the drafter failed {each.failures} times)" if each.failures else ""
        named = _named(each.layer_ids, each.norm_output)
        lines.append(f"{each.length:10.2f}  {shares:<18}  {named}{failed}")
    return "\n".join(lines)


def verdict(readings: Sequence[Reading]) -> tuple[bool, str]:
    """(does some reading work?, what to do)."""
    best = max(readings, key=lambda each: each.length)
    if not best.by_position:
        return False, (
            "Warning: no drafts were made. "
            + ("The drafter fails on this model's numbers: its weights are damaged, or of another "
               "model." if best.failures else "The prompts do not fit the model's context.")
        )  # fmt: skip
    if best.length < HARDLY:
        return False, (
            f"Warning: hardly a draft is accepted (at best {best.length:.2f} tokens a step; 1.00 "
            "is none). The drafter was trained for another model, chat template or vocabulary, or "
            "its config.json is not its own."
        )
    rivals = [each for each in readings if each.length > best.length * (1 - ALIKE)]
    first = rivals[0]  # what is read without options comes first
    flags = first.flags or "no option is needed"
    text = f"The right reading: {_named(first.layer_ids, first.norm_output)} ({flags})."
    if len(rivals) > 1:
        others = "; ".join(_named(each.layer_ids, each.norm_output) for each in rivals[1:])
        text += f" As good within {ALIKE:.0%}: {others}."
    return True, text


def _ignore(_progress: Progress) -> None:
    pass
