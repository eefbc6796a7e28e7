"""``nanoserve serve``: flags or a Serve config file in, a ``Launch`` out."""

import argparse
import os
from pathlib import Path
from typing import Any

from nanoserve.cli.engine_flags import add_engine_flags, engine_settings
from nanoserve.core.errors import ConfigError

_OWN_SETTINGS = (
    "num_replicas",
    "min_replicas",
    "max_replicas",
    "num_routers",
    "served_model_name",
    "api_keys",
    "cors_origins",
    "drain_s",
    "max_request_s",
    "otlp_endpoint",
)
_KEY_SETTINGS = {
    "tenant": "tenant",
    "weight": "weight",
    "class": "service_class",
    "rpm": "requests_per_minute",
    "tpm": "tokens_per_minute",
    "concurrent": "max_concurrent_requests",
}
_TOP_KEYS = {"http_options", "applications", "proxy_location"}
_APP_KEYS = {"name", "route_prefix", "import_path", "args"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help='a folder, a hub id or "demo" (default: demo)')
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="a Serve config file instead of the flags")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="(default: 8000)")
    parser.add_argument("--proxy", choices=("auto", "haproxy", "python"), default="auto", help="what stands in front")
    parser.add_argument("--replicas", dest="num_replicas", type=int, metavar="N", help="engines (default: 1)")
    parser.add_argument("--min-replicas", type=int, metavar="N", help="with --max-replicas: engines by load")
    parser.add_argument("--max-replicas", type=int, metavar="N")
    parser.add_argument("--routers", dest="num_routers", type=int, metavar="N", help="HTTP doors (default: 1)")
    parser.add_argument("--served-model-name", metavar="NAME", help="the name that requests use")
    parser.add_argument(
        "--api-key", action="append", dest="api_keys", type=api_key, metavar="KEY[,NAME=VALUE...]",
        help=f"may be repeated; names: {', '.join(_KEY_SETTINGS)}; or NANOSERVE_API_KEY",
    )  # fmt: skip
    parser.add_argument("--max-request-seconds", dest="max_request_s", type=float, metavar="S", help="then it ends")
    parser.add_argument("--cors-origin", action="append", dest="cors_origins", metavar="ORIGIN", help='or "*"')
    parser.add_argument("--seed", type=int, metavar="N", help="requests without a seed repeat from start to start")
    parser.add_argument("--max-queued-requests", type=int, metavar="N", help="waiting requests per engine before 429")
    parser.add_argument("--max-queued-tokens", type=int, metavar="N", help="their prompt tokens before 429")
    parser.add_argument("--otlp-endpoint", metavar="URL", help="send OpenTelemetry traces to this collector")
    parser.add_argument("--drain-seconds", dest="drain_s", type=float, metavar="S", help="(default: 30)")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def api_key(text: str) -> str | dict[str, str]:
    """``KEY``, or ``KEY,tenant=acme,weight=2``: what a config file writes as a mapping. Messages never show the key."""
    key, *settings = text.split(",")
    if not settings:
        return key
    known = {"key": key}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in _KEY_SETTINGS or not value:
            raise argparse.ArgumentTypeError(f"after the key come NAME=VALUE with {', '.join(_KEY_SETTINGS)}.")
        known[_KEY_SETTINGS[name]] = value
    return known


def run(options: argparse.Namespace) -> int:
    from nanoserve.serving.launch import App, Launch, serve

    apps, http = _from_file(options) if options.config else ([_from_flags(options)], {})
    host = options.host or http.get("host", "127.0.0.1")
    port = http.get("port", 8000) if options.port is None else options.port
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"--port must be in 1..65535. Given: {port}.")
    drain_s = options.drain_s if options.drain_s is not None else apps[0]["args"].get("drain_s", 30.0)
    if drain_s < 0:
        raise ConfigError(f"--drain-seconds must be >= 0. Given: {drain_s:g}.")
    launch = Launch(apps=tuple(App(**app) for app in apps), host=host, port=port, proxy=options.proxy, drain_s=drain_s)
    return serve(launch)


def _from_flags(options: argparse.Namespace) -> dict[str, Any]:
    args = _given(options)
    from nanoserve.serving.launch import BUILDER

    return {"name": "nanoserve", "import_path": BUILDER, "args": _with_key({"model": "demo"} | args)}


def _given(options: argparse.Namespace) -> dict[str, Any]:
    own = {name: value for name in _OWN_SETTINGS if (value := getattr(options, name)) is not None}
    return own | engine_settings(options)


def _with_key(args: dict[str, Any]) -> dict[str, Any]:
    key = os.environ.get("NANOSERVE_API_KEY")
    return args | {"api_keys": [key]} if key and not args.get("api_keys") else args


def _from_file(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """
    Raises:
        ConfigError: the file is unreadable, no Serve config, or uses what only ``serve deploy`` can do.
    """
    if given := _given(options):
        raise ConfigError(f"--config takes the place of the flags; put `{next(iter(given))}` into the file.")
    config = _read(options.config)
    apps = config.get("applications")
    if not isinstance(apps, list) or not apps:
        raise ConfigError(f"{options.config}: `applications` must be a list with at least one application.")
    _refuse_others(options.config, config, _TOP_KEYS)
    for app in apps:
        if not isinstance(app, dict) or not isinstance(app.get("args", {}), dict) or "import_path" not in app:
            raise ConfigError(f"{options.config}: each application needs `import_path`, and `args` as a mapping.")
        _refuse_others(options.config, app, _APP_KEYS)
    named = [{"name": f"nanoserve-{i}" if i else "nanoserve"} | app for i, app in enumerate(apps)]
    http = config.get("http_options") or {}
    _refuse_others(options.config, http, {"host", "port"})
    return [app | {"args": _with_key(app.get("args", {}))} for app in named], http


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a Serve config file: it must be a mapping with `applications`.")
    return config


def _refuse_others(path: Path, given: dict[str, Any], known: set[str]) -> None:
    if others := sorted(set(given) - known):
        raise ConfigError(f"{path}: `{others[0]}` is not for `nanoserve serve`; use `serve deploy`, or leave it out.")
