"""Compiles the CPU kernels, when nanoserve is installed or by ``python -m nanoserve.model.kernels.native``.

One source, one shared object a level of the instruction set; at run time the best one that the CPU has is loaded.
``setup.py`` runs this file by path in an environment without torch or nanoserve, so it imports the standard library
alone.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "cpu.cpp"
# Hidden symbols: several levels in one process (the tests) would else share each other's statics, which differ in size.
_COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-math-errno",
    "-ffp-contract=fast", "-Wall",
)  # fmt: skip
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")


@dataclass(frozen=True, slots=True)
class Level:
    """A step of the instruction set: what /proc/cpuinfo must list, and what the compiler is told."""

    name: str
    cpu_flags: frozenset[str]
    options: tuple[str, ...]


def _level(name: str, below: Level | None, cpu_flags: str, options: str) -> Level:
    flags, before = (below.cpu_flags, below.options) if below else (frozenset[str](), ())
    return Level(name, flags | set(cpu_flags.split()), before + tuple(f"-m{option}" for option in options.split()))


_AVX2 = _level("avx2", None, "avx2 fma f16c bmi1 bmi2", "avx2 fma f16c bmi bmi2 lzcnt popcnt")
_AVX512 = _level(
    "avx512", _AVX2, "avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512f avx512bw avx512dq avx512vl avx512vnni"
)
_AVX512BF16 = _level("avx512bf16", _AVX512, "avx512_bf16", "avx512bf16")
_AMX = _level("amx", _AVX512BF16, "amx_tile amx_bf16 amx_int8", "amx-tile amx-bf16 amx-int8")
LEVELS = {level.name: level for level in (_AMX, _AVX512BF16, _AVX512, _AVX2)}  # best first


def object_path(level: str, folder: Path = FOLDER) -> Path:
    """Where the shared object of a level lies."""
    return folder / f"cpu_{level}.so"


def revision() -> int:
    """A number that the sources determine: an object that was compiled from others is not loaded."""
    sources = sorted(path for path in FOLDER.iterdir() if path.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).digest()
    return int.from_bytes(digest[:7], "big")


def command(level: str, target: Path, *, sanitize: bool = False) -> list[str]:
    """The compiler's command line; ``$CXX`` names another compiler than ``g++``."""
    compiler = os.environ.get("CXX", "g++").split()
    extra = _SANITIZERS if sanitize else ()
    defined = f"-DNS_REVISION={revision()}"
    speed = ["-O1"] if sanitize else []  # instrumented, -O3 takes minutes to compile
    return [*compiler, *_COMMON, *speed, defined, *LEVELS[level].options, *extra, "-o", str(target), str(SOURCE)]


def compile_level(level: str, target: Path, *, sanitize: bool = False) -> str | None:
    """Compiles one level to ``target``; returns why it could not, in one line."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run(command(level, unfinished, sanitize=sanitize), check=True, capture_output=True, text=True)
    except OSError as error:
        return f"no C++ compiler: {error.strerror} ({error.filename})"
    except subprocess.CalledProcessError as error:
        return next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[-300:])
    unfinished.replace(target)  # a process that has the old one mapped keeps it whole
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 when a level could not be compiled."""
    parser = argparse.ArgumentParser(prog="python -m nanoserve.model.kernels.native", description="Compile in place.")
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"of {', '.join(LEVELS)} (default: all)")
    levels = parser.parse_args(arguments).levels or list(LEVELS)
    if unknown := [level for level in levels if level not in LEVELS]:
        parser.error(f"no such level: {unknown[0]}")
    failures = {level: why for level in levels if (why := compile_level(level, object_path(level)))}
    for level, why in failures.items():
        print(f"{level}: {why}", file=sys.stderr)
    return 1 if failures else 0
