"""Ray Serve: the router deployment (the door), the engine replicas, and the feed between them.

``build`` is what Serve config files name (``import_path: nanoserve.serving:build``); it loads Ray on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.serving.app import build as build

__all__ = ["build"]


def __getattr__(name: str) -> Any:
    if name == "build":
        from nanoserve.serving.app import build

        return build
    raise AttributeError(f"module 'nanoserve.serving' has no attribute {name!r}")
