"""The console script. Imports nothing heavy before a command has been chosen: ``nanoserve --help`` is immediate."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from nanoserve.core.errors import NanoserveError

_COMMANDS = {
    "serve": "the OpenAI-compatible service on Ray Serve",
    "chat": "talk to a model in the terminal",
    "generate": "one answer, without a service",
    "batch": "answer an OpenAI batch file, through Ray Data",
    "plan": "the memory and the speed to expect on a device, without it",
    "bench": "latency and throughput of a service or a model",
    "simulate": "a log of arrivals through scheduler and router in virtual time",
}
_USAGE_TYPES = ("config_error", "invalid_request_error")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2 for a user's mistake, 1 when something could not be done."""
    parser = _parser(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except NanoserveError as error:
        print(f"nanoserve: {error.message}", file=sys.stderr)
        return 2 if error.type in _USAGE_TYPES else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    from nanoserve import __version__

    parser = argparse.ArgumentParser(prog="nanoserve", description="A small, fast inference service for Qwen3.")
    parser.add_argument("--version", action="version", version=f"nanoserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        if name in argv:
            import_module(f"nanoserve.cli.{name}").add_arguments(command)
    return parser
