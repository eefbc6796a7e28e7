"""From what a user types after ``serve`` to a folder on disk. Imports no torch, so that every door may use it."""

from pathlib import Path

from nanoserve.core.errors import ConfigError

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).parents[1] / "demo_model"
_WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]


def resolve_model(model: str) -> Path:
    """The folder of "demo", of a path, or of a Hugging Face hub id, which is downloaded when it is not cached.

    Raises:
        ConfigError: there is no such model, or it has no config.json.
    """
    return _resolve(model, _WANTED_FILES)


def resolve_config(model: str) -> Path:
    """As :func:`resolve_model`, but of a hub id only ``config.json`` is sure to be there."""
    return _resolve(model, ["config.json"])


def _resolve(model: str, wanted_files: list[str]) -> Path:
    folder = _DEMO_FOLDER if model == DEMO else Path(model).expanduser()
    if model != DEMO and not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"`model` must be a folder or a hub id; {model!r} is a file.", param="model")
        folder = _download(model, wanted_files)
    if not (folder / "config.json").is_file():
        hint = " Make it with `make demo-model`." if model == DEMO else ""
        raise ConfigError(f"The model {model!r} has no config.json.{hint}", param="model")
    return folder


def _download(model: str, wanted_files: list[str]) -> Path:
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ConfigError(
            f'`model` must be a folder, a hub id such as Qwen/Qwen3-0.6B, or "{DEMO}". Given: {model!r}.', param="model"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=wanted_files))
    except Exception as error:  # the hub client raises a dozen unrelated types for "no such model" and "no network"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"The model {model!r} is neither a folder nor could it be fetched from the hub: {reason}", param="model"
        ) from error
