"""Networks, one file a model: the network and its checkpoint names side by side. Imported when one is asked for."""

from importlib import import_module
from typing import Any

ARCHITECTURES: dict[str, str] = {
    "Qwen3ForCausalLM": "nanoserve.model.architectures.qwen3",
    "Qwen3MoeForCausalLM": "nanoserve.model.architectures.qwen3_moe",
}


def network_class(architecture: str) -> Any:
    """The class that builds ``architecture``, a key of :data:`ARCHITECTURES`."""
    return getattr(import_module(ARCHITECTURES[architecture]), architecture)
