"""``nanoserve generate``: one answer, in this process, without Ray."""

import argparse
import sys

from nanoserve.cli.chat import add_sampling_flags, sampling_settings
from nanoserve.cli.conversation import LocalTalker
from nanoserve.cli.engine_flags import add_engine_flags, engine_settings
from nanoserve.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help='a folder, a hub id or "demo"')
    parser.add_argument("prompt", help='the question; "-" reads it from standard input')
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The answer goes to standard output, thinking to standard error, so that a pipe gets the answer alone."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise ConfigError("The prompt is empty.")
    settings = {name: value for name, value in engine_settings(options).items() if name != "seed"}
    talker = LocalTalker(**settings)
    for piece in talker.stream([{"role": "user", "content": prompt}], sampling_settings(options)):
        for text, sink in ((piece.reasoning, sys.stderr), (piece.content, sys.stdout)):
            sink.write(text)
            sink.flush()
    print()
    return 0
