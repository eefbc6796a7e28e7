"""A Ray of one's own for one run: it shares nothing with other Rays of the machine and leaves nothing behind.

Everything it starts belongs to the run's folder, and whatever is left of that at the end is ended (``processes``), also
when this process is killed.
"""

import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from nanoserve.serving import processes

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default, 15, puts every engine below whatever else the machine does
}


class PrivateRay:
    """Owns the run's folder. ``end`` is to be called whatever happens; the watchdog does it where this cannot."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="nanoserve-", dir=_short_temp_dir()))
        self._watchdog = processes.Watchdog(self.dir)

    def start(self, *, object_store_bytes: int, environment: Mapping[str, str] | None = None) -> None:
        """``environment`` is inherited by every process of the run."""
        os.environ.update(_ENVIRONMENT | processes.environment(self.dir) | dict(environment or {}))
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once in the life of a process
        if "ray" not in sys.modules:  # read on import; where that has happened, a new Ray asks for the token anyway
            os.environ["RAY_AUTH_MODE"] = "token"
        import ray

        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=object_store_bytes,
            _temp_dir=str(self.dir),
        )

    @property
    def logs(self) -> Path:
        return self.dir / "session_latest" / "logs"

    def end(self, *, keep_logs: bool = False) -> None:
        """Ends every process of the run."""
        _shut_ray_down()
        processes.end(self.dir)
        self._watchdog.dismiss()
        if not keep_logs:
            shutil.rmtree(self.dir, ignore_errors=True)


def _short_temp_dir() -> str:
    """Ray's sockets live under it, and a socket's path may not exceed 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 20 else "/tmp"


def _shut_ray_down() -> None:
    """Ray's own shutdown, given a few seconds: it may hang where it was interrupted half-started."""
    if (ray := sys.modules.get("ray")) is None:
        return
    worker = threading.Thread(target=ray.shutdown, daemon=True)
    worker.start()
    worker.join(6)
