"""Networks, one file a model: the network and its checkpoint names side by side. Imported when one is asked for."""

from collections.abc import Collection
from importlib import import_module
from typing import Any

ARCHITECTURES: dict[str, str] = {
    "Qwen3ForCausalLM": "nanoserve.model.architectures.qwen3",
    "Qwen3ForSequenceClassification": "nanoserve.model.architectures.qwen3_pooling",
    "Qwen3Model": "nanoserve.model.architectures.qwen3_pooling",
    "Qwen3MoeForCausalLM": "nanoserve.model.architectures.qwen3_moe",
}
_ALL_TASKS = ("generate", "embed", "score")
_FEWER_TASKS: dict[str, tuple[str, ...]] = {"Qwen3ForSequenceClassification": ("score",), "Qwen3Model": ("embed",)}


def network_class(architecture: str) -> Any:
    """The class that builds ``architecture``, a key of :data:`ARCHITECTURES`."""
    return getattr(import_module(ARCHITECTURES[architecture]), architecture)


def tasks_of(architecture: str) -> tuple[str, ...]:
    """What such a network can be asked for: "generate", "embed", "score"."""
    return _FEWER_TASKS.get(architecture, _ALL_TASKS)


def as_stored(architecture: str, tensor_names: Collection[str]) -> str:
    """The architecture of the weights: Qwen3-Embedding's config.json names a causal model, but its files hold none."""
    is_bare = architecture == "Qwen3ForCausalLM" and "embed_tokens.weight" in tensor_names
    return "Qwen3Model" if is_bare else architecture
