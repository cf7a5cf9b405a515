"""The parser of all commands, and the exit status of their errors: 1 for a negative answer, 2 for bad input."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress

import minialpa
from minialpa.cli import machine, planning, saved
from minialpa.cli.arguments import Parser
from minialpa.errors import InfeasibleError, MinialpaError


def run(argv: Sequence[str] | None, is_interrupted: Callable[[], bool]) -> int:
    """Errors of the input, of minialpa and of files are printed without a traceback."""
    try:
        return _run(argv)
    except BaseException as error:
        if is_interrupted():  # which may be the reason of any error
            raise KeyboardInterrupt from None
        return _status_of(error)


def _status_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):  # of the parser, which has printed the error
        return error.code if isinstance(error.code, int) else 0
    if isinstance(error, OSError):
        _drop_output()
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has ended
        return 1
    if isinstance(error, ModuleNotFoundError) and error.name in ("flax", "optax"):
        return _print_error("The models need flax and optax. Install them with `pip install 'minialpa[models]'`.")
    if isinstance(error, MinialpaError | OSError):
        _print_error(str(error))
        return 1 if isinstance(error, InfeasibleError) else 2
    if isinstance(error, Exception):
        traceback.print_exception(error)
        _print_error("This is a bug in minialpa. Report it with the lines above.")
        return 3
    raise error


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the possible next words
        import argcomplete

        argcomplete.autocomplete(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)

    args.output = sys.stdout
    if isinstance(sys.stdout, io.TextIOWrapper):  # the terminal's locale may lack letters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    with redirect_stdout(sys.stderr):  # prints of the user's step are no result
        status: int = args.run(args)
    if sys.stdout is not None:
        sys.stdout.flush()  # here, so that a full disk or a closed pipe is an error of this command
    return status


def _parser() -> Parser:
    parser = Parser(prog="minialpa", description="Plan training steps for many devices, read the plans, and run them.")
    parser.add_argument("--version", action="version", version=f"minialpa {minialpa.__version__}")
    parser.add_argument("--models", action=_ListModels, nargs=0, help="list the models with names, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (planning, saved, machine):
        group.add_commands(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


class _ListModels(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from minialpa import models

        sizes = [f"{name:14} {size.n_parameters / 1e9:.3g} billion parameters" for name, size in models.SIZES.items()]
        print("\n".join([*(f"{name:14} small, for tests" for name in models.MODELS), *sizes]))
        parser.exit()


def _print_error(message: str) -> int:
    """Returns the exit status of bad input."""
    print(f"minialpa: {message}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    """At its end, Python would fail to write the rest."""
    with suppress(AttributeError, OSError, ValueError):  # there is no output, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
