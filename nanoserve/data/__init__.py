"""Ray Data: a dataset in, a dataset with answers out; and OpenAI batch files through the same engines.

``EngineConfig`` and ``build_processor`` have the shape that users of ``ray.data.llm`` know; they load on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.data.config import EngineConfig as EngineConfig
    from nanoserve.data.processor import Processor as Processor
    from nanoserve.data.processor import build_processor as build_processor

__all__ = ["EngineConfig", "Processor", "build_processor"]


def __getattr__(name: str) -> Any:
    if name == "EngineConfig":
        from nanoserve.data.config import EngineConfig

        return EngineConfig
    if name in ("Processor", "build_processor"):
        from nanoserve.data import processor

        return getattr(processor, name)
    raise AttributeError(f"module 'nanoserve.data' has no attribute {name!r}")
