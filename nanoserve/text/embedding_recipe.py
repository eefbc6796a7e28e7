"""What a sentence-transformers export says beside the weights: named prompts, and how hidden states become a vector.

Without these files (a plain checkpoint) the recipe is Qwen3-Embedding's: the last token's state, scaled to length 1.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.core.errors import CheckpointError

_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRecipe:
    """``prompts``: name -> text that goes before an input; ``default_prompt_name`` is used when none is asked for.

    ``obstacle``: why this checkpoint's vectors cannot be made here, None when they can.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    obstacle: str | None = None

    @classmethod
    def load(cls, folder: Path) -> "EmbeddingRecipe":
        """Read modules.json, the pooling module's config.json and config_sentence_transformers.json.

        Raises:
            CheckpointError: one of them is not readable JSON of the right kind.
        """
        settings = _read(folder / "config_sentence_transformers.json", dict) or {}
        prompts = settings.get("prompts") or {}
        default = settings.get("default_prompt_name")
        texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
        if not texts or (default is not None and default not in prompts):
            raise CheckpointError("config_sentence_transformers.json: `prompts` must map names to texts.")
        return cls(prompts=prompts, default_prompt_name=default, obstacle=_obstacle(folder))


def _obstacle(folder: Path) -> str | None:
    for module in _read(folder / "modules.json", list) or ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _KNOWN_MODULES:
            return f"its modules.json asks for a {kind or 'nameless'} layer"
        if kind == "Pooling":
            modes = _pooling_modes(_read(folder / str(module.get("path", "")) / "config.json", dict) or {})
            if modes != ["lasttoken"]:
                return f"it pools by {' and '.join(modes) or 'an unnamed mode'}, and only the last token is served"
    return None


def _pooling_modes(config: Mapping[str, Any]) -> list[str]:
    """sentence-transformers' old form has a flag for each mode, its new one names the mode."""
    if isinstance(config.get("pooling_mode"), str):
        return [config["pooling_mode"]]
    flags = {name.removeprefix("pooling_mode_"): value for name, value in config.items() if "pooling_mode_" in name}
    return sorted(name for name, value in flags.items() if value is True)


def _read(path: Path, kind: type) -> Any:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{path.name} must hold a JSON {'object' if kind is dict else 'array'}.")
    return value
