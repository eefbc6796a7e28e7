"""``nanoserve serve``: a private Ray, the applications on it, until a signal; then drain and leave nothing behind.

The process is its own supervisor: nothing of the run outlives it (``private_ray``).
"""

import asyncio
import logging
import re
import shlex
import signal
import socket
import time
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any

import httpx

from nanoserve.core.errors import ConfigError, NanoserveError, UnavailableError
from nanoserve.model.folder import resolve_model
from nanoserve.serving.config import ServingArgs
from nanoserve.serving.link import HOST_VARIABLE
from nanoserve.serving.private_ray import PrivateRay
from nanoserve.serving.proxy import Proxy, ProxyWish, choose

logger = logging.getLogger(__name__)

BUILDER = "nanoserve.serving:build"
START_TIMEOUT_S = 1800.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OBJECT_STORE_BYTES = 96 * 2**20
_ERROR_LINE = re.compile(r"nanoserve\.core\.errors\.(\w+): (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """One application: a builder's import path and its arguments."""

    name: str
    import_path: str
    args: dict[str, Any]
    route_prefix: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that ``serve`` was asked for."""

    apps: tuple[App, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    proxy: ProxyWish = "auto"
    drain_s: float = 30.0


class StopRequested(BaseException):
    """Ctrl-C or SIGTERM."""


def serve(launch: Launch) -> int:
    """Runs until a signal; returns the exit status.

    Raises:
        ConfigError: the port is taken, a setting is wrong, or there is no such model.
        UnavailableError: it could not start.
    """
    for app in launch.apps:
        args = ServingArgs.model_validate(app.args)
        if app.import_path == BUILDER and not args.models:  # of several, one that is missing stops no other
            resolve_model(args.engine.model)
    _check_port(launch.host, launch.port)
    proxy = choose(launch.proxy)
    with _Signals() as signals:
        run = _Run(launch, proxy, signals)
        try:
            _serve_until_stopped(run)
        except (StopRequested, SystemExit):  # SystemExit: Ray's own SIGTERM handler, in force while Ray starts
            _say("Hurrying.")
        finally:
            run.end()
    return 0


def _serve_until_stopped(run: "_Run") -> None:
    try:
        run.start()
        run.announce()
        while True:
            time.sleep(3600)
    except (StopRequested, SystemExit):
        run.stop()


class _Signals:
    """SIGINT and SIGTERM raise ``StopRequested`` in the main thread, each time they come, until they are ignored."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Signals":
        self._kept = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        raise StopRequested


class _Run:
    """One run: its folder, its Ray, its end."""

    def __init__(self, launch: Launch, proxy: Proxy, signals: _Signals) -> None:
        self._launch = launch
        self._signals = signals
        self._proxy = proxy
        self._marks_s = [time.monotonic()]
        self._serving = False
        self._failed = False
        self._ray = PrivateRay()

    def start(self) -> None:
        try:
            for part in (self._start_ray, self._deploy, self._wait_until_running, self._wait_until_answering):
                part()
                self._marks_s.append(time.monotonic())
        except Exception as error:
            if self._signals.count:  # raised inside Ray's native code, it comes out as something else
                raise StopRequested from None
            self._failed = True
            if isinstance(error, NanoserveError):
                raise
            logger.debug("start failed", exc_info=True)
            raise UnavailableError(f"The service could not start: {_last_line(str(error))}") from error
        self._serving = True

    def _start_ray(self) -> None:
        _say(f"Starting Ray; HTTP through {self._proxy.name} ({self._proxy.why}).")
        environment = _ENVIRONMENT | self._proxy.environment(self._ray.dir)
        self._ray.start(object_store_bytes=_OBJECT_STORE_BYTES, environment=environment)
        self._signals.listen()  # Ray has put its own handlers there

    def _deploy(self) -> None:
        from ray import serve
        from ray.serve import RunTarget

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        targets = [RunTarget(_build(app), name=app.name, route_prefix=app.route_prefix) for app in self._launch.apps]
        _say(f"Loading {', '.join(name for app in self._launch.apps for name in _names(app))}.")
        serve.start(http_options={"host": self._launch.host, "port": self._launch.port})
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _wait_until_running(self) -> None:
        from ray import serve

        give_up_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_s:
            apps = serve.status().applications.values()
            running = [_runs(app) for app in apps]
            if running and all(running):
                for app in apps:
                    _tell_of_broken_models(app)
                return
            time.sleep(0.1)
        raise UnavailableError(f"The service did not start within {START_TIMEOUT_S:.0f} s.")

    def _wait_until_answering(self) -> None:
        """Serve says RUNNING before its proxy has loaded the routes: only a real answer counts."""
        reason = ""
        give_up_s = time.monotonic() + 60
        while time.monotonic() < give_up_s:
            try:
                reply = httpx.get(f"{self.url}{self._prefix}/health", timeout=10)
                reason = reply.text[:200]
                if reply.status_code == 200:
                    return
            except httpx.HTTPError as error:
                reason = type(error).__name__
            time.sleep(0.1)
        raise UnavailableError(f"The service runs but does not answer on {self.url}: {reason}")

    def announce(self) -> None:
        name = _names(self._launch.apps[0])[0]
        key = ' -H "Authorization: Bearer $NANOSERVE_API_KEY"' if self._launch.apps[0].args.get("api_keys") else ""
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is 12 + 7?"}}]}}'
        _say(f"Ready in {self._cold_start()} on {self.url}. Stop with Ctrl-C. Try:\n")
        _say(
            f"  curl {self.url}{self._prefix}/v1/chat/completions{key} \\\n"
            f"    -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
        )

    def _cold_start(self) -> str:
        """How long the start took, and its parts. The engines' own are those of the first."""
        ray_s, serve_s, engine_s, http_s = (b - a for a, b in pairwise(self._marks_s))
        model = httpx.get(f"{self.url}{self._prefix}/health", timeout=10).json().get("model") or {}
        own = f": imports {model['imports_s']:.1f}, model {model['load_s']:.1f}" if "load_s" in model else ""
        parts = f"Ray {ray_s:.1f}, Serve {serve_s:.1f}, engines {engine_s:.1f}{own}, HTTP {http_s:.1f}"
        return f"{self._marks_s[-1] - self._marks_s[0]:.1f} s ({parts})"

    @property
    def _prefix(self) -> str:
        return self._launch.apps[0].route_prefix.rstrip("/")

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._launch.host, self._launch.host)
        return f"http://{host}:{self._launch.port}"

    def stop(self) -> None:
        """Lets running answers finish; another signal hurries."""
        if not self._serving:
            _say("Stopping.")
            return
        _say(f"Stopping: running answers have {self._launch.drain_s:g} s to finish. Ctrl-C again to hurry.")
        asyncio.run(self._drain())

    async def _drain(self) -> None:
        from ray import serve

        async def drain(app: App) -> None:
            router = serve.get_deployment_handle("Router", app.name)
            await router.broadcast("drain", self._launch.drain_s).results_async()

        async with asyncio.timeout(self._launch.drain_s + 5):
            await asyncio.gather(*[drain(app) for app in self._launch.apps], return_exceptions=True)
        await asyncio.sleep(0.3)  # the last bytes are on their way through the proxy

    def end(self) -> None:
        """Ends every process of the run. From here on signals are ignored: there is nothing left to hurry."""
        self._signals.ignore()
        self._ray.end(keep_logs=self._failed)
        if self._failed:
            _say(f"Logs: {self._ray.logs}")


_ENVIRONMENT = {
    HOST_VARIABLE: "127.0.0.1",  # this Ray has one node: no door calls from elsewhere
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"Cannot listen on {host}:{port} ({error.strerror}); choose another --port.") from None


def _build(app: App) -> Any:
    from importlib import import_module

    from ray.serve import Application

    module, _, name = app.import_path.partition(":")
    try:
        builder = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`import_path` {app.import_path!r} cannot be imported: {error}.") from None
    built = builder(ServingArgs.model_validate(app.args))
    assert isinstance(built, Application), built
    return built


def _names(app: App) -> list[str]:
    return [model.name for model in ServingArgs.model_validate(app.args).served]


_BROKEN = ("DEPLOY_FAILED", "UNHEALTHY")


def _runs(app: Any) -> bool:
    """Whether all that can start has: of several models one may be broken.

    Raises:
        ConfigError, UnavailableError: what an engine said, where no model could be started.
    """
    deployments = app.deployments
    broken = {name for name, deployment in deployments.items() if deployment.status in _BROKEN}
    engines = {name for name in deployments if name.startswith("Engine:")}
    if not engines - broken or broken - engines:
        _raise_if_failed(app)
        return bool(app.status == "RUNNING")
    return all(deployments[name].status == "HEALTHY" for name in deployments.keys() - broken)


def _tell_of_broken_models(app: Any) -> None:
    for name, deployment in app.deployments.items():
        if deployment.status in _BROKEN:
            found = _ERROR_LINE.search(deployment.message or "")
            reason = found[2].strip() if found else _last_line(deployment.message or "")
            _say(f"{name.removeprefix('Engine:')} is not served: {reason}")


def _raise_if_failed(app: Any) -> None:
    """
    Raises:
        ConfigError, UnavailableError: what the engine said when it could not start.
    """
    messages = [app.message, *[deployment.message for deployment in app.deployments.values()]]
    for message in messages:
        if found := _ERROR_LINE.search(message or ""):
            raise (ConfigError if found[1] == "ConfigError" else UnavailableError)(found[2].strip())
    if app.status in _BROKEN:
        raise UnavailableError(f"The service could not start: {_last_line(app.message) or app.status}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _say(line: str) -> None:
    print(line, flush=True)
