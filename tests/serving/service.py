"""The real service as a user starts it, over the fake model: the console script, Ray, Serve and a proxy."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from nanoserve.serving import processes
from tests.serving import fakes

START_TIMEOUT_S = 120.0
_RUN_NANOSERVE = "import sys; from nanoserve.cli import main; sys.exit(main())"


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", _RUN_NANOSERVE, *words]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """One running ``nanoserve serve``. ``lines``: what it printed so far."""

    def __init__(
        self,
        folder: Path,
        *,
        proxy: str,
        step_s: float = 0.02,
        import_path: str = "tests.serving.fakes:build",
        **args: Any,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        app = {"name": "fake", "import_path": import_path, "args": args}
        config = folder / "serve.yaml"
        config.write_text(yaml.safe_dump({"http_options": {"port": self.port}, "applications": [app]}))
        environment = os.environ | {"NANOSERVE_TEST_STEP_S": str(step_s), "TMPDIR": "/tmp"}
        self.process = subprocess.Popen(
            command("serve", "--config", str(config), "--proxy", proxy),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()

    def wait_for(self, text: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The first line that holds ``text``."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: any(text in line for line in self.lines) or self.process.poll() is not None, timeout_s
            )
        assert found, self.lines
        hits = [line for line in self.lines if text in line]
        assert hits, self.lines
        return hits[0]

    def run_dir(self) -> Path:
        """The private folder, read from a process of the run."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())[1])  # type: ignore[index]
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and b"nanoserve.serving.processes" in words:
                return Path(os.fsdecode(words[-2]))
        raise AssertionError("no watchdog")

    def pids(self) -> dict[str, Any]:
        """``router`` and ``engines`` by process id, as ``/health`` of the fake app tells them."""
        body = httpx.get(f"{self.url}/health", timeout=10).json()
        return {
            "router": body["pid"],
            "engines": [engine["pid"] for engine in body["engines"]],
            "reason": body["reason"],
        }

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        return sum(self._samples(name))

    def count(self, name: str) -> int:
        """How many series there are."""
        return len(self._samples(name))

    def _samples(self, name: str) -> list[float]:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return [float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        return self.process.wait(timeout_s)

    def make_sure_it_is_gone(self) -> None:
        """For the end of a test that may have failed: nothing of it may outlive the test."""
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()


@asynccontextmanager
async def asking(
    url: str, prompt: list[int], max_tokens: int, seed: int
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """A stream's events; leaving the context closes the connection."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": seed}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/generate", json=body) as reply,
    ):
        if reply.status_code != 200:
            raise RefusedError(reply.status_code, dict(reply.headers))
        lines = reply.aiter_lines()
        yield (json.loads(line.removeprefix("data: ")) async for line in lines if line)


class RefusedError(Exception):
    def __init__(self, status: int, headers: dict[str, str]) -> None:
        super().__init__(status)
        self.status = status
        self.headers = headers


async def answer(url: str, seed: int, max_tokens: int, progress: list[int] | None = None) -> list[int]:
    """All tokens of a stream that has to end well and exactly."""
    prompt, token_ids, last = [seed, 1, 2], [], {}
    async with asking(url, prompt, max_tokens, seed) as events:
        async for last in events:
            token_ids += last["ids"]
            if progress is not None:
                progress.append(seed)
    assert last.get("finish") == "length", last
    assert token_ids == fakes.expected(prompt, seed, max_tokens)
    return token_ids


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Polls a blocking condition without blocking the streams of the test."""
    give_up_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < give_up_s, "it did not happen in time"
        await asyncio.sleep(0.05)


def left_over(run_dir: Path) -> list[int]:
    """Processes of the run that still live; zombies have ended and only wait to be collected by someone else."""
    return [pid for pid in processes.of_run(run_dir) if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()]


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of the TCP sockets that a process listens on."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                name = "127.0.0.1" if address == "0100007F" else "any" if int(address, 16) == 0 else address
                assert len(address) == size
                found.add((name, int(port, 16)))
    return found
