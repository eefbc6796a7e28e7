"""nanoserve: a small, fast inference service for Qwen3 on Ray Serve.

``LLM`` is the offline engine and ``SamplingParams`` its settings; both load on first use, so importing this package
costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.core.sampling import SamplingParams as SamplingParams
    from nanoserve.core.sampling import StructuredOutputs as StructuredOutputs
    from nanoserve.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nanoserve.llm import LLM

        return LLM
    if name in ("SamplingParams", "StructuredOutputs"):
        from nanoserve.core import sampling

        return getattr(sampling, name)
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
