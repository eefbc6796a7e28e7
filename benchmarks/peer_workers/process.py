"""Workers and servers as processes of their own: started, asked, weighed and ended."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine import over_http
from benchmarks.http_overhead import service
from benchmarks.peer_workers.lines import Settings
from benchmarks.report import Trace
from benchmarks.workloads import Item
from nanoserve import __version__

_REPOSITORY = Path(__file__).parents[2]
_LOAD_TIMEOUT_S = 420.0


class WorkerFailed(Exception):
    """A worker or server ended or took too long; the text ends with the last lines it wrote."""


class Worker:
    """One engine in a process of its own, driven by ``python -m benchmarks.peer_workers.NAME_worker``."""

    def __init__(self, name: str, python: Path, settings: Settings) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        module = f"benchmarks.peer_workers.{name}_worker"
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=_REPOSITORY,
            start_new_session=True,
        )
        self.version: str = self._answer(_LOAD_TIMEOUT_S)["version"]

    def run(self, items: Sequence[Item], *, prefix_cache: bool, timeout_s: float) -> list[Trace]:
        """
        Raises:
            WorkerFailed: it ended, or ``timeout_s`` passed; the worker is ended then.
        """
        order = {"items": [[item.prompt_token_ids, item.num_output_tokens] for item in items]}
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(order | {"prefix_cache": prefix_cache}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._last_words("ended")) from None
        return [_trace(trace) for trace in self._answer(timeout_s)["traces"]]

    def peak_rss_mib(self) -> float:
        return peak_rss_mib(self._process.pid)

    def close(self) -> None:
        """End it and what it started."""
        _end(self._process)
        self._log.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout
        late = threading.Timer(timeout_s, _end, [self._process])
        late.start()
        line = self._process.stdout.readline()
        late.cancel()
        if not line:
            raise WorkerFailed(self._last_words(f"ended or took over {timeout_s:.0f} s"))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self, what: str) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{what}: {' / '.join(lines[-3:])[-600:]}"


def _trace(trace: dict[str, Any]) -> Trace:
    return Trace(sent_s=trace["sent_s"], token_times_s=tuple(trace["token_times_s"]))


class Served:
    """An engine behind its own HTTP server; ``run`` is 16 streaming clients of this process, or as many as items."""

    def __init__(self, url: str, pid: int, version: str) -> None:
        self._url, self._pid, self.version = url, pid, version

    def run(self, items: Sequence[Item], *, prefix_cache: bool, timeout_s: float) -> list[Trace]:
        async def clients() -> list[Trace]:
            async with asyncio.timeout(timeout_s):
                return await over_http(self._url, items)

        try:
            return asyncio.run(clients())
        except (TimeoutError, httpx.HTTPError, RuntimeError) as error:
            raise WorkerFailed(f"over HTTP: {error or type(error).__name__}") from None

    def peak_rss_mib(self) -> float:
        return peak_rss_mib(self._pid)


@contextmanager
def serve_nanoserve(python: Path, settings: Settings) -> Iterator[Served]:
    """``nanoserve serve`` with one replica."""
    flags = ["--quantization", settings.quantization, "--kv-cache-memory", str(settings.kv_bytes)]
    try:
        with service(settings.folder, *flags, "--max-model-len", str(settings.max_model_len)) as (url, pid):
            yield Served(url, pid, __version__)
    except SystemExit as error:
        raise WorkerFailed(str(error)) from None


@contextmanager
def serve_vllm(python: Path, settings: Settings) -> Iterator[Served]:
    """``vllm serve`` with the settings of its worker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--dtype", "bfloat16", "--max-model-len", str(settings.max_model_len), "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [python.with_name("vllm"), "serve", settings.folder, "--port", str(port), *flags],
        env=os.environ
        | {
            "VLLM_CPU_KVCACHE_SPACE": str(max(settings.kv_bytes >> 30, 1)),
            "OMP_NUM_THREADS": str(settings.num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.num_threads - 1}",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{url}/health", process)
        yield Served(url, process.pid, httpx.get(f"{url}/version").json()["version"])
    finally:
        _end(process)


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _LOAD_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise WorkerFailed("the server did not start")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process group of a process that leads one."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue


def peak_rss_mib(root: int) -> float:
    """Peak resident memory of a process and its living descendants, summed: memory that they share counts for each."""
    parents, peaks_kib = dict[int, int](), dict[int, int]()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        pid = int(status.parent.name)
        parents[pid], peaks_kib[pid] = int(fields["PPid"]), int(fields.get("VmHWM", "0 kB").split()[0])
    return sum(peaks_kib[pid] for pid in parents if _descends(pid, root, parents)) / 1024


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid not in (0, root):
        pid = parents.get(pid, 0)
    return pid == root
