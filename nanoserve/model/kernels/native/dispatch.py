"""Finds, chooses and loads the compiled kernels: the best level that the CPU has, once a process.

``$NANOSERVE_CPU_ISA`` overrides the choice: ``off`` computes with torch alone, a level's name forces that level.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.core.errors import ConfigError
from nanoserve.model.kernels.native.build import LEVELS, object_path, revision
from nanoserve.model.threads import default_threads

logger = logging.getLogger(__name__)

VARIABLE = "NANOSERVE_CPU_ISA"
_COMMAND = "python -m nanoserve.model.kernels.native"
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float}


class Library:
    """The kernels of one level. Loaded once a process; its threads are shared by everything in it."""

    def __init__(self, level: str, path: Path) -> None:
        self.level = level
        self._handle = ctypes.CDLL(str(path))
        if self.bind("ns_revision", "")() != revision():
            raise OSError(f"it was compiled from other sources; compile again ({_COMMAND})")
        if self.bind("ns_start", "")():
            raise OSError("the system does not let this process use the level's registers")
        self.bind("ns_set_threads", "l")(default_threads())

    def bind(self, name: str, arguments: str) -> Callable[..., Any]:
        """The exported function ``name``; ``arguments`` has one letter each: p pointer, l int64, f float.

        It returns an int64 if its declaration does, else nothing that means anything. Runs without the GIL.
        """
        function = getattr(self._handle, name)
        function.argtypes = [_TYPES[letter] for letter in arguments]
        function.restype = ctypes.c_int64
        return function

    def set_threads(self, count: int) -> None:
        """Threads of every later call, the caller's own included."""
        self.bind("ns_set_threads", "l")(count)


@dataclass(frozen=True, slots=True)
class Choice:
    """The library that was chosen, or None and why."""

    library: Library | None
    reason: str


def library() -> Library | None:
    """The kernels of this process; None where torch must do, and :func:`why_not` says why.

    Raises:
        ConfigError: ``$NANOSERVE_CPU_ISA`` names a level that does not exist or cannot run here.
    """
    return _choose(os.environ.get(VARIABLE, "auto")).library


def why_not() -> str:
    """One sentence: why there are no native kernels here, or which level is used."""
    return _choose(os.environ.get(VARIABLE, "auto")).reason


@functools.cache
def _choose(wanted: str) -> Choice:
    if wanted == "off":
        choice = Choice(None, f"{VARIABLE} is off")
    elif wanted == "auto":
        choice = _best()
    elif wanted in LEVELS:
        choice = _load(wanted)
        if choice.library is None:
            raise ConfigError(f"`{VARIABLE}` {wanted} cannot be used: {choice.reason}.")
    else:
        raise ConfigError(f"`{VARIABLE}` must be auto, off or one of: {', '.join(LEVELS)}. Given: {wanted!r}.")
    log = logger.info if choice.library or wanted == "off" else logger.warning
    log("native kernels %s: %s", "on" if choice.library else "off", choice.reason)
    return choice


def _best() -> Choice:
    reasons = []
    for level in LEVELS:
        choice = _load(level)
        if choice.library is not None:
            return choice
        reasons.append(f"{level}: {choice.reason}")
    return Choice(None, "; ".join(reasons))


@functools.cache
def _load(level: str) -> Choice:
    missing = LEVELS[level].cpu_flags - _cpu_flags()
    if missing:
        return Choice(None, f"the CPU has no {sorted(missing)[0]}")
    path = object_path(level)
    if not path.is_file():
        return Choice(None, f"not compiled ({_COMMAND})")
    try:
        return Choice(Library(level, path), f"level {level}")
    except (OSError, AttributeError) as error:
        return Choice(None, f"{path.name} cannot be loaded: {error}")


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
