"""A Ray cluster of one's own on this machine, with applications deployed as an operator does it, to hurt it.

``ray start`` for the head and more nodes, and Serve's REST API for every deploy, as ``serve deploy`` and KubeRay do.
Everything it starts belongs to one folder and ends with it.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from nanoserve.serving import processes, proxy

_START_TIMEOUT_S = 200.0


class Cluster:
    """One head, perhaps more nodes, one application behind HAProxy where that is found."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._http_port, self._dashboard_port, self._gcs_port = proxy._free_ports(3)
        self._environment = os.environ | {
            "RAY_TMPDIR": str(run_dir),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 64,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            **processes.environment(run_dir),
            **proxy.choose("auto").environment(run_dir),
        }
        self._environment.pop("RAY_ADDRESS", None)
        self._args: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    def start(self) -> None:
        """The head: it runs the doors, Serve's own actors and whatever engines fit."""
        self._ray("--head", f"--port={self._gcs_port}", f"--dashboard-port={self._dashboard_port}", "--num-cpus=3")

    def add_node(self) -> list[int]:
        """Another node, of two CPUs; the process ids that are new with it."""
        before = set(processes.of_run(self._run_dir))
        self._ray(f"--address=127.0.0.1:{self._gcs_port}", "--num-cpus=2")
        return sorted(set(processes.of_run(self._run_dir)) - before)

    def _ray(self, *words: str) -> None:
        agent, client = proxy._free_ports(2)
        ports = (f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}")
        place = (f"--temp-dir={self._run_dir}",) if "--head" in words else ()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *ports, *place]
        done = subprocess.run(command, env=self._environment, capture_output=True, timeout=_START_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"ray start: {done.stderr.decode()[-2000:]}")

    def deploy(self, **args: Any) -> None:
        """Puts the application as ``args`` say, which are the builder's; the first time or instead of what runs."""
        self._args = args
        app = {"name": "app", "route_prefix": "/", "import_path": "nanoserve.serving:build", "args": args}
        config = {"http_options": {"host": "127.0.0.1", "port": self._http_port}, "applications": [app]}
        url = f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/"
        give_up_s = time.monotonic() + 60
        while (reply := httpx.put(url, json=config, headers=self._authorization, timeout=60)).status_code >= 500:
            if time.monotonic() > give_up_s:  # the head answers before all of it is up
                break
            time.sleep(1)
        reply.raise_for_status()

    def wait(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Until Serve says that every deployment is as it should be, and the service answers."""
        give_up_s = time.monotonic() + timeout_s
        while not (self._is_healthy() and self._answers()):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the application is not healthy: {self.status()}")
            time.sleep(0.25)

    def status(self) -> Mapping[str, Any]:
        url = f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/"
        found: Mapping[str, Any] = httpx.get(url, headers=self._authorization, timeout=30).json()
        return found.get("applications", {}).get("app", {})

    def _is_healthy(self) -> bool:
        try:
            status = self.status()
        except (httpx.HTTPError, ValueError):  # the controller is away
            return False
        deployments = status.get("deployments", {}).values()
        return status.get("status") == "RUNNING" and all(each["status"] == "HEALTHY" for each in deployments)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._environment['RAY_AUTH_TOKEN']}"}

    def pids(self, text: str) -> list[int]:
        """Living processes of the cluster whose command line holds ``text``, oldest first."""
        found = []
        for pid in processes.of_run(self._run_dir):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if text.encode() in words and state[0] != "Z":
                found.append((int(state[19]), pid))
        return [pid for _, pid in sorted(found)]

    def engines(self) -> list[int]:
        return self.pids("ServeReplica:app:Engine")

    def routers(self) -> list[int]:
        return self.pids("ServeReplica:app:Router")

    def rss_bytes(self) -> int:
        """Resident memory of all engines and routers."""
        pids = [*self.engines(), *self.routers()]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)

    def gauges(self) -> dict[str, float]:
        """The service's metrics by name, summed over replicas."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.split("{")[0]] = found.get(name.split("{")[0], 0.0) + float(value)
        return found


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A started cluster; all of its processes are ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="ns-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        try:
            made.start()
            yield made
        finally:
            processes.end(Path(folder))
