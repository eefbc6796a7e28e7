"""Every file of ``deployments/`` really runs: with ``nanoserve serve --config``, ``serve run`` and ``serve deploy``.

The model becomes the bundled one, and counts and sizes what two cores hold; every other setting stays as it is.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from nanoserve.serving import processes
from tests.serving.service import command, free_port

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(290)]

FILES = sorted(Path(__file__).parents[1].glob("deployments/*.yaml"))
SMALL = {"model": "demo", "device": "cpu", "num_cpus": 0.2, "kv_cache_memory": "32MiB"}
START_TIMEOUT_S = 150

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def scaled(path: Path, folder: Path) -> tuple[Path, int, list[str]]:
    """The file as this machine can run it; its port, and the models that it has to serve."""
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": free_port()}
    names = []
    for app in config["applications"]:
        for args in app["args"].get("models", [app["args"]]):
            names.append(args.setdefault("served_model_name", args["model"]))
            args.update({name: value for name, value in SMALL.items() if name in args})
            args["num_threads"] = 1
            args["max_num_seqs"] = min(args.get("max_num_seqs", 8), 8)
    target = folder / path.name
    target.write_text(yaml.safe_dump(config))
    return target, config["http_options"]["port"], names


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Marks every process that a test starts, and ends them all; its path is short, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ns-", dir="/tmp") as name:
        yield Path(name)
        processes.end(Path(name))


def environment(run_dir: Path) -> dict[str, str]:
    own = {
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(run_dir),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    return os.environ | processes.environment(run_dir) | own


def wait_for_answers(port: int, names: list[str], process: subprocess.Popen[bytes] | None = None) -> None:
    url, give_up_s = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
    while True:
        assert process is None or process.poll() is None, "it ended"
        assert time.monotonic() < give_up_s, "it does not answer"
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200 and served(url) == set(names):
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    for name in names:
        body = {"model": name, "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["message"]["content"] == "12 + 7 = 19"


def served(url: str) -> set[str]:
    return {model["id"] for model in httpx.get(f"{url}/v1/models", timeout=5).json()["data"]}


@every_file
def test_nanoserve_serve_runs_it(path: Path, run_dir: Path) -> None:
    config, port, names = scaled(path, run_dir)
    log = (run_dir / "log").open("wb")
    process = subprocess.Popen(
        command("serve", "--config", str(config)), env=os.environ | {"TMPDIR": "/tmp"}, stdout=log, stderr=log
    )
    try:
        wait_for_answers(port, names, process)
    finally:
        process.terminate()
        assert process.wait(90) == 0


def test_serve_run_runs_it(run_dir: Path) -> None:
    config, port, names = scaled(FILES[0], run_dir)
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.serve.scripts", "run", str(config)],
        env=environment(run_dir),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_answers(port, names, process)
    process.terminate()
    process.wait(60)


@every_file
def test_serve_deploy_runs_it(path: Path, run_dir: Path) -> None:
    config, port, names = scaled(path, run_dir)
    dashboard = free_port()
    start = ["start", "--head", "--port=0", f"--dashboard-port={dashboard}", f"--temp-dir={run_dir}", "--num-cpus=2",
             f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]  # fmt: skip
    words = {name: value for name, value in environment(run_dir).items() if name != "RAY_ADDRESS"}
    for module, arguments in (
        ("ray.scripts.scripts", start),
        ("ray.serve.scripts", ["deploy", "-a", f"http://127.0.0.1:{dashboard}", str(config)]),
    ):
        done = subprocess.run([sys.executable, "-m", module, *arguments], env=words, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
    wait_for_answers(port, names)
