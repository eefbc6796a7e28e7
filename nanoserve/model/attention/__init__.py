"""Attention backends in order of preference, and the choice among them."""

from importlib import import_module

from nanoserve.core.errors import ConfigError
from nanoserve.model.attention.base import AttentionBackend, AttentionBackendClass, AttentionSpec

BACKENDS: dict[str, str] = {
    "native": "nanoserve.model.attention.native:NativeAttention",
    "cpu": "nanoserve.model.attention.cpu:CpuAttention",
    "flash_attn": "nanoserve.model.attention.flash_attn:FlashAttention",
    "triton": "nanoserve.model.attention.triton:TritonAttention",
    "reference": "nanoserve.model.attention.reference:ReferenceAttention",
}


def choose_backend(name: str, spec: AttentionSpec) -> tuple[AttentionBackend, tuple[tuple[str, str], ...]]:
    """The backend called ``name``, or the first that fits for "auto"; with (backend, reason) of those passed over.

    Raises:
        ConfigError: the named backend does not exist or does not fit; nothing is chosen silently instead.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(
            f"`attention_backend` must be auto or one of: {', '.join(BACKENDS)}. Given: {name!r}.",
            param="attention_backend",
        )
    rejected: list[tuple[str, str]] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        backend_class = _load(BACKENDS[candidate])
        reason = backend_class.reject(spec)
        if reason is None:
            return backend_class(spec), tuple(rejected)
        rejected.append((candidate, reason))
    reasons = "; ".join(f"{backend}: {reason}" for backend, reason in rejected)
    raise ConfigError(f"`attention_backend` {name!r} cannot be used here: {reasons}.", param="attention_backend")


def _load(path: str) -> AttentionBackendClass:
    module, name = path.split(":")
    backend_class: AttentionBackendClass = getattr(import_module(module), name)
    return backend_class
