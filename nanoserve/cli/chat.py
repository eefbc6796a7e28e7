"""``nanoserve chat``: a conversation in the terminal, streamed; thinking is dim."""

import argparse
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from nanoserve.cli.conversation import HttpTalker, LocalTalker, Talker
from nanoserve.cli.engine_flags import add_engine_flags, engine_settings
from nanoserve.core.errors import NanoserveError

_HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit leaves; Ctrl-C stops an answer."
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help='a folder, a hub id or "demo"; with --url, its name there')
    parser.add_argument("--url", help="a running service instead of a model in this process")
    parser.add_argument("--api-key", help="for --url (or NANOSERVE_API_KEY)")
    parser.add_argument("--system", help="the system message")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's own)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--no-thinking", action="store_true", help="ask the model to answer without thinking first")


def sampling_settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "seed")
    settings = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return settings | ({"chat_template_kwargs": {"enable_thinking": False}} if options.no_thinking else {})


def run(options: argparse.Namespace) -> int:
    if options.url:
        key = options.api_key or os.environ.get("NANOSERVE_API_KEY")
        talker: Talker = HttpTalker(options.url, options.model, key)
    else:
        settings = {name: value for name, value in engine_settings(options).items() if name != "seed"}
        talker = LocalTalker(**settings)
    Conversation(talker, sampling_settings(options), options.system).talk()
    return 0


class Conversation:
    """Owns the messages so far; reads lines from ``source`` and writes to ``sink``."""

    def __init__(
        self,
        talker: Talker,
        settings: dict[str, Any],
        system: str | None = None,
        source: TextIO = sys.stdin,
        sink: TextIO = sys.stdout,
    ) -> None:
        self._talker = talker
        self._settings = settings
        self._source = source
        self._sink = sink
        self._fancy = sink.isatty()
        self._messages: list[dict[str, str]] = []
        self._system = system

    def talk(self) -> None:
        if self._source is sys.stdin and sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())
            self._write(f"{_HELP}\n")
        while (line := self._read()) is not None:
            if line == "/quit":
                return
            if line:
                self._obey(line) if line.startswith("/") else self._ask(line)

    def _read(self) -> str | None:
        if self._source is sys.stdin and sys.stdin.isatty():
            try:
                return input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._write("\n")
                return None
        line = self._source.readline()
        return line.strip() if line else None

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self._messages = []
        elif command == "/system":
            self._system = rest.strip() or None
        else:
            self._write(f"{_HELP}\n")

    def _ask(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        head = [{"role": "system", "content": self._system}] if self._system else []
        try:
            answer = self._stream([*head, *messages])
        except NanoserveError as error:
            self._write(f"\n{error.message}\n")
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> str:
        content, thinking = "", False
        pieces = self._talker.stream(messages, self._settings)
        try:
            for piece in pieces:
                if piece.reasoning:
                    self._style(_DIM, wanted=not thinking)
                    thinking = True
                    self._write(piece.reasoning)
                if piece.content:
                    if thinking:
                        self._style(_PLAIN, wanted=True)
                        self._write("\n\n")
                    thinking = False
                    self._write(piece.content)
                    content += piece.content
        except KeyboardInterrupt:
            self._write(" [stopped]")
        finally:
            self._style(_PLAIN, wanted=True)
            with suppress(AttributeError):
                pieces.close()  # type: ignore[attr-defined]
        self._write("\n")
        return content

    def _style(self, code: str, *, wanted: bool) -> None:
        if self._fancy and wanted:
            self._write(code)

    def _write(self, text: str) -> None:
        self._sink.write(text)
        self._sink.flush()
