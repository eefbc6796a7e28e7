"""What the way over HTTP costs: time to the first token at one client, and CPU time a token at many streams.

python -m benchmarks.http_overhead --model demo --streams 64

Starts ``nanoserve serve`` on a free port, measures the same prompts in this process first (no HTTP, no Ray), then over
HTTP on one kept connection, one request after the other (``--pause-s`` between them lets both sides grow cold). CPU
time is read from /proc for the doors (Router replicas) and the proxy; the engine's own is shown beside it.
"""

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.engine import Offline, over_http, stream
from benchmarks.report import Trace, percentile, summary, table, write
from benchmarks.workloads import Item, Workload
from nanoserve.core.config import EngineArgs


def main() -> None:
    """Measure, print a table, write ``results/http_overhead.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each stream")
    parser.add_argument("--singles", type=int, default=100, help="requests of the single client")
    parser.add_argument("--pause-s", type=float, default=0.0, help="before each of them")
    args = parser.parse_args()
    single = Workload(num_requests=args.singles, input_tokens=(24, 24), output_tokens=(8, 8), seed=1).items()
    many = Workload(
        num_requests=args.streams, input_tokens=(16, 64), output_tokens=(args.tokens, args.tokens), seed=2
    ).items()
    offline = Offline(EngineArgs(model=args.model))
    offline.run(single[:4])
    direct_ms = [_paused_ttft_ms(offline, item, args.pause_s) for item in single]
    del offline
    with service(args.model) as (url, root):
        asyncio.run(over_http(url, many[:4]))
        http_ms = asyncio.run(_one_client(url, single, args.pause_s))
        before = _cpu_seconds(root)
        traces = asyncio.run(over_http(url, many))
        after = _cpu_seconds(root)
    num_tokens = sum(len(trace.token_times_s) for trace in traces)
    cpu_us = {part: 1e6 * (after[part] - before.get(part, 0.0)) / num_tokens for part in after}
    figures = {
        "ttft_direct_p50_ms": statistics.median(direct_ms),
        "ttft_http_p50_ms": statistics.median(http_ms),
        "ttft_http_p90_ms": percentile(http_ms, 0.9),
        "ttft_added_p50_ms": statistics.median(http_ms) - statistics.median(direct_ms),
        "cpu_us_per_token_door_and_proxy": cpu_us["door"] + cpu_us["proxy"],
        **{f"cpu_us_per_token_{part}": value for part, value in cpu_us.items()},
    }
    print(table({"HTTP path": figures}))
    print(table({f"{args.streams} streams": summary(traces)}))
    print(f"written: {write('http_overhead', figures | {'streams': summary(traces)}).name}")


def _ttft_ms(trace: Trace) -> float:
    return 1e3 * (trace.token_times_s[0] - trace.sent_s)


def _paused_ttft_ms(offline: Offline, item: Item, pause_s: float) -> float:
    time.sleep(pause_s)
    return _ttft_ms(offline.run([item])[0])


async def _one_client(url: str, items: Sequence[Item], pause_s: float) -> list[float]:
    """TTFT of one request after the other, in ms."""
    times_ms = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        for item in items:
            await asyncio.sleep(pause_s)
            times_ms.append(_ttft_ms(await stream(client, model, item)))
    return times_ms


@contextmanager
def service(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """A service of its own on a free port: (url, pid of the command line). Ends with it, by SIGINT as a user would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from nanoserve.cli import main; sys.exit(main())"]
    process = subprocess.Popen([*command, "serve", model, "--port", str(port), *flags])
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the service ended while starting")
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("the service did not get ready in five minutes")


def _cpu_seconds(root: int) -> dict[str, float]:
    """User and system seconds so far of the service's processes, by part."""
    seconds = dict.fromkeys(("door", "proxy", "engine", "rest of Ray"), 0.0)
    for pid, name in _session(root):
        part = "rest of Ray"
        if ":Router" in name:
            part = "door"
        elif ":Engine" in name:
            part = "engine"
        elif "haproxy" in name.lower() or "ProxyActor" in name:
            part = "proxy"
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        seconds[part] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _session(root: int) -> Iterator[tuple[int, str]]:
    """(pid, command line) of the service's processes: what was started after ``root`` by it or for it by Ray."""
    parents, names = dict[int, int](), dict[int, str]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat[1])
    for pid, name in names.items():
        ancestor = pid
        while ancestor not in (0, root):
            ancestor = parents.get(ancestor, 0)
        if ancestor == root and pid != root:
            yield pid, name


if __name__ == "__main__":
    main()
