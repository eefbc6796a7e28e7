"""What a model folder says about generation: sampling defaults and the ids that end an answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.core.errors import CheckpointError, InvalidRequestError
from nanoserve.core.sampling import SamplingParams

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for what a request leaves open; the request always wins.

    ``sampling``: SamplingParams fields from generation_config.json; without it OpenAI's defaults apply (temperature 1).
    ``do_sample: false`` there means greedy (temperature 0), and its other sampling values are not used then.
    ``max_new_tokens`` is the default of ``max_tokens`` in chats.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path, eos_token_id: int | None = None) -> "GenerationDefaults":
        """Read generation_config.json; EOS ids fall back to config.json, and ``eos_token_id``, the tokenizer's, is one.

        Raises:
            CheckpointError: a file is no JSON object or holds a value that cannot be used; the message names it.
        """
        config = _read(folder / "generation_config.json")
        eos = _ids(config.get("eos_token_id")) or _ids(_read(folder / "config.json").get("eos_token_id"))
        extra = () if eos_token_id is None or eos_token_id in eos else (eos_token_id,)
        defaults = cls(
            sampling=_sampling(config), max_new_tokens=config.get("max_new_tokens"), eos_token_ids=eos + extra
        )
        try:
            SamplingParams(**defaults.sampling, max_tokens=defaults.max_new_tokens)  # type: ignore[arg-type]
        except InvalidRequestError as error:
            raise CheckpointError(f"generation_config.json: {error.message}") from None
        return defaults


def _sampling(config: Mapping[str, Any]) -> dict[str, float]:
    given = {name: config[name] for name in _SAMPLING_FIELDS if config.get(name) is not None}
    if config.get("do_sample") is not False:
        return given
    kept = {name: value for name, value in given.items() if name == "repetition_penalty"}
    return kept | {"temperature": 0.0}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object.")
    return value


def _ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"`eos_token_id` must be a token id or a list of them. Given: {value!r:.100}.")
    return tuple(ids)
