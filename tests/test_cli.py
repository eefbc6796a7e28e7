"""The console script: immediate help, one sentence for a mistake, a conversation."""

import io
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoserve.cli import main
from nanoserve.cli.chat import Conversation
from nanoserve.cli.conversation import Message, Piece, _pieces
from nanoserve.core.errors import UnavailableError

HEAVY = ("torch", "ray", "transformers", "fastapi", "pydantic", "numpy", "httpx")


def test_help_is_immediate() -> None:
    code = (
        "import sys; from nanoserve.cli import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: print([name for name in {HEAVY} if name in sys.modules])"
    )
    best_s = 9.0
    for _ in range(3):
        began_s = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        best_s = min(best_s, time.monotonic() - began_s)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(word in done.stdout for word in ("serve", "chat", "generate", "batch"))
    assert best_s < 0.5


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "batch"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--max-model-len" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence with which a command line is refused."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    return lines[0]


def test_a_model_that_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["serve", "/no/such/folder"], ["chat", "/no/such/folder"], ["generate", "/no/such/folder", "hi"]):
        assert "/no/such/folder" in refusal(capsys, *command)


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refusal(capsys, "serve", str(tmp_path), "--port", str(port))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--port", "0"), "--port"),
        (("--port", "70000"), "--port"),
        (("--replicas", "0"), "num_replicas"),
        (("--min-replicas", "2"), "max_replicas"),
        (("--drain-seconds", "-1"), "--drain-seconds"),
        (("--kv-cache-memory", "5XB"), "4GiB"),
        (("--num-threads", "0"), "num_threads"),
        (("--max-model-len", "0"), "max_model_len"),
        (("--served-model-name", ""), "served_model_name"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
    ],
)
def test_a_flag_that_cannot_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert named in refusal(capsys, "serve", str(tmp_path), *words)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("applications: [", "YAML"),
        ("just words", "applications"),
        ("applications: []", "applications"),
        ("applications: [{args: {}}]", "import_path"),
        ("applications: [{import_path: 'nanoserve.serving:build', args: {modle: demo}}]", "modle"),
        ("applications: [{import_path: 'nanoserve.serving:build', deployments: []}]", "deployments"),
        ("applications: [{import_path: 'nanoserve.serving:build'}]\nhttp_options: {root_path: /x}", "root_path"),
    ],
)
def test_a_config_file_that_cannot_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, named: str
) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    assert named in refusal(capsys, "serve", "--config", str(tmp_path / "serve.yaml"))


def test_a_config_file_and_flags_do_not_mix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "num_replicas" in refusal(capsys, "serve", "--config", str(tmp_path / "x.yaml"), "--replicas", "2")
    assert "x.yaml" in refusal(capsys, "serve", "--config", str(tmp_path / "x.yaml"))


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[1].glob("deployments/*.yaml")), ids=lambda path: path.name
)
def test_every_deployment_file_is_valid(path: Path) -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from nanoserve.serving.config import ServingArgs

    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    for app in config.applications:
        assert app.import_path == "nanoserve.serving:build"
        ServingArgs.model_validate(app.args)


class Parrot:
    """Answers with what it was told, thinking first; remembers the messages."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []

    def stream(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Iterator[Piece]:
        self.asked.append(list(messages))
        if messages[-1]["content"] == "break":
            raise UnavailableError("The engine is gone.")
        yield Piece(reasoning="hm")
        yield Piece(content="you said ")
        yield Piece(content=messages[-1]["content"])


def talk(*lines: str, system: str | None = None) -> tuple[Parrot, str]:
    parrot, sink = Parrot(), io.StringIO()
    Conversation(parrot, {}, system, io.StringIO("".join(f"{line}\n" for line in lines)), sink).talk()
    return parrot, sink.getvalue()


def test_a_conversation_remembers_until_it_is_reset() -> None:
    parrot, printed = talk("one", "two", "/reset", "three", "/quit", "never")
    assert [len(messages) for messages in parrot.asked] == [1, 3, 1]
    assert parrot.asked[1][1] == {"role": "assistant", "content": "you said one"}
    assert printed == "hm\n\nyou said one\nhm\n\nyou said two\nhm\n\nyou said three\n"


def test_the_system_message_can_be_set_and_taken_back() -> None:
    parrot, _ = talk("one", "/system be brief", "two", "/system", "three", system="be kind")
    assert [messages[0].get("content") for messages in parrot.asked] == ["be kind", "be brief", "one"]


def test_an_error_is_told_and_the_question_forgotten() -> None:
    parrot, printed = talk("break", "again")
    assert "The engine is gone." in printed
    assert [len(messages) for messages in parrot.asked] == [1, 1]


def test_an_unknown_command_is_not_sent_to_the_model() -> None:
    parrot, printed = talk("/help")
    assert parrot.asked == []
    assert "/quit" in printed


def test_a_stream_that_just_ends_was_cut_off() -> None:
    lines = ['data: {"choices": [{"delta": {"content": "a"}}]}', "", ": ping"]
    pieces = _pieces(iter(lines))
    assert next(pieces).content == "a"
    with pytest.raises(UnavailableError, match="cut off"):
        next(pieces)
    assert list(_pieces(iter([*lines, "data: [DONE]"]))) == [Piece(content="a")]


def test_an_error_event_is_told() -> None:
    with pytest.raises(UnavailableError, match="no more"):
        list(_pieces(iter(['data: {"error": {"message": "no more"}}'])))
