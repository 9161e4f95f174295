"""The command line: `paceline serve | generate | bench | compare | tune | check-drafter | ...`.

Flags are made from the fields of frozen configuration values, so a field and its flag cannot drift
apart. Errors that the user can mend are one line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from paceline.errors import ConfigError, PacelineError

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for each field of a frozen dataclass: its name, type, default, help and choices."""
    hints = typing.get_type_hints(config)
    for each in dataclasses.fields(config):
        meta = dict(each.metadata)
        if meta.get("positional"):
            required = each.default is dataclasses.MISSING
            more: dict[str, Any] = {} if required else {"nargs": "?", "default": each.default}
            parser.add_argument(each.name, metavar=each.name.upper(), help=meta["help"], **more)
            continue
        options: dict[str, Any] = {"help": _help(meta["help"], each.default)}
        options |= {"default": each.default, "dest": each.name}
        options |= _kind(hints[each.name])
        if meta.get("choices"):
            options |= {"choices": meta["choices"], "metavar": None}
        parser.add_argument("--" + each.name.rstrip("_").replace("_", "-"), **options)


def _help(text: str, default: object) -> str:
    shown = default if not isinstance(default, tuple) else " ".join(map(str, default))
    hide = default is None or "default" in text or isinstance(default, bool)
    return (text if hide else f"{text} (default: {shown})").replace("%", "%%")


def _kind(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if isinstance(hint, types.UnionType):
        (hint,) = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "type": typing.get_args(hint)[0], "metavar": "N"}
    return {"type": hint, "metavar": "N" if hint in (int, float) else "TEXT"}


def make(config: type[T], arguments: argparse.Namespace) -> T:
    """The configuration value from parsed flags."""
    names = [each.name for each in dataclasses.fields(config)]  # type: ignore[arg-type]
    values = {name: getattr(arguments, name) for name in names}
    return config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _serve(arguments: argparse.Namespace) -> int:
    from paceline.config import EngineConfig, ServerConfig
    from paceline.serve.server import serve

    return serve(make(EngineConfig, arguments), make(ServerConfig, arguments))


def _generate(arguments: argparse.Namespace) -> int:
    from paceline.config import EngineConfig
    from paceline.generate import GenerateConfig, generate

    return generate(make(EngineConfig, arguments), make(GenerateConfig, arguments))


def _bench(arguments: argparse.Namespace) -> int:
    from paceline.bench.config import BenchConfig
    from paceline.bench.run import main as run_bench

    return run_bench(make(BenchConfig, arguments))


def _check_drafter(arguments: argparse.Namespace) -> int:
    from paceline.check_drafter import CheckConfig, check_drafter

    return check_drafter(make(CheckConfig, arguments))


def _simulate(arguments: argparse.Namespace) -> int:
    from paceline.simulate import SimulateConfig, run_simulation

    return run_simulation(make(SimulateConfig, arguments))


def _replay(arguments: argparse.Namespace) -> int:
    from paceline.replay import ReplayConfig, run_replay

    return run_replay(make(ReplayConfig, arguments))


def _compare(arguments: argparse.Namespace) -> int:
    from paceline.bench.compare import CompareConfig, compare

    return compare(make(CompareConfig, arguments))


def _tune(arguments: argparse.Namespace) -> int:
    from paceline.bench.tune import TuneConfig, tune

    return tune(make(TuneConfig, arguments))


def _parser() -> argparse.ArgumentParser:
    from paceline import __version__
    from paceline.bench.compare import CompareConfig
    from paceline.bench.config import BenchConfig
    from paceline.bench.tune import TuneConfig
    from paceline.check_drafter import CheckConfig
    from paceline.config import EngineConfig, ServerConfig
    from paceline.generate import GenerateConfig
    from paceline.replay import ReplayConfig
    from paceline.simulate import SimulateConfig

    parser = _Parser(
        prog="paceline",
        description="Serve large language models over the OpenAI API.",
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    table: list[tuple[str, str, Callable[[argparse.Namespace], int], list[type]]] = [
        ("serve", "serve a model over the OpenAI API", _serve, [EngineConfig, ServerConfig]),
        ("generate", "generate text without a server", _generate, [EngineConfig, GenerateConfig]),
        ("bench", "measure any OpenAI server under load", _bench, [BenchConfig]),
        (
            "compare",
            "measure several servers under the same load in turn, and what each loses to the best",
            _compare,
            [CompareConfig],
        ),
        (
            "tune",
            "turn the result of compare into a schedule of draft tokens, for several engines",
            _tune,
            [TuneConfig],
        ),
        (
            "check-drafter",
            "measure whether an EAGLE-3 drafter fits a model, and how its file is to be read",
            _check_drafter,
            [CheckConfig],
        ),
        (
            "simulate",
            "what speculation policies would do on a machine, from a table of its step times",
            _simulate,
            [SimulateConfig],
        ),
        ("replay", "run a server's recorded loads through another policy", _replay, [ReplayConfig]),
    ]
    for name, text, run, configs in table:
        command = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        for config in configs:
            add_flags(command, config)
        command.set_defaults(run=run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ConfigError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left: nothing more to say
        sys.stderr.close()
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
