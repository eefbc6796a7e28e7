"""Ray Data: a dataset in, a dataset with answers out; and OpenAI batch files through the same engines.

``EngineConfig`` and ``build_processor`` have the shape that users of ``ray.data.llm`` know.
"""

from nanoserve.data.config import EngineConfig
from nanoserve.data.processor import Processor, build_processor

__all__ = ["EngineConfig", "Processor", "build_processor"]
