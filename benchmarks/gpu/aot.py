"""Compiles every Triton kernel ahead of time, without a GPU, and judges the machine code.

    python -m benchmarks.gpu.aot [--arch 80 90 100] [--only decode]

Prints registers, spilled bytes, shared memory and tensor-core instructions of each variant. The exit status is 1 when
one does not compile, spills, needs more shared memory than the architecture has, or lacks instructions that it needs.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.variants import Variant

_SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
_TENSOR_CORES = re.compile(r"\b(?:HGMMA|HMMA|UTCHMMA|UTCQMMA|UTCOMMA)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What became of one variant for one architecture. ``error``: why it could not be compiled."""

    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    tensor_core_instructions: int = 0
    error: str = ""

    def shortcomings(self, arch: int, needs_tensor_cores: bool) -> list[str]:
        """What is wrong with it, in words; nothing when all is well."""
        found = [self.error] if self.error else []
        if self.spilled_bytes:
            found.append(f"{self.spilled_bytes} bytes spilled")
        if self.shared_bytes > _SHARED_KIB[arch] << 10:
            found.append(f"more than {_SHARED_KIB[arch]} KiB of shared memory")
        if needs_tensor_cores and not self.tensor_core_instructions and not self.error:
            found.append("no tensor-core instruction")
        return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=_SHARED_KIB, default=[80, 90, 100])
    parser.add_argument("--only", default="", help="variants whose name contains this")
    args = parser.parse_args()
    from benchmarks.gpu.variants import variants

    jobs = [(variant, arch) for arch in args.arch for variant in variants(arch) if args.only in variant.name]
    with ThreadPoolExecutor() as pool:
        codes = list(pool.map(lambda job: compiled(*job), jobs))
    failures = 0
    print("| variant | sm | registers | spilled | shared KiB | tensor-core instructions | |")
    print("|---|---|---|---|---|---|---|")
    for (variant, arch), code in zip(jobs, codes, strict=True):
        wrong = "; ".join(code.shortcomings(arch, variant.uses_tensor_cores))
        failures += bool(wrong)
        figures = (code.registers, code.spilled_bytes, code.shared_bytes >> 10, code.tensor_core_instructions)
        print(f"| {variant.name} | {arch} | {' | '.join(map(str, figures))} | {wrong} |")
    print(f"{len(jobs)} compiled, {failures} fall short")
    sys.exit(1 if failures else 0)


def compiled(variant: "Variant", arch: int) -> Code:
    """Compiles and inspects; any failure of the compiler becomes the result's ``error``."""
    import triton

    try:
        kernel = triton.compile(_source(variant), target=_target(arch), options=dict(variant.options))
        return _inspect(kernel.asm, kernel.metadata.shared, arch)
    except Exception as error:
        return Code(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")


def _target(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32)


def _source(variant: "Variant") -> Any:
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name], constants[(index,)] = "constexpr", variant.constants[name]
        else:
            signature[name] = variant.types[name]
            if signature[name].startswith("*") or name in variant.aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]  # as a launch would find; else loads come out narrow
    return ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _inspect(asm: Mapping[str, Any], shared_bytes: int, arch: int) -> Code:
    """By the tools that Triton's wheel brings along."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(asm["ptx"])
        cubin.write_bytes(asm["cubin"])
        version = re.search(r"\.target (sm_\w+)", asm["ptx"])
        target = version[1] if version else f"sm_{arch}"
        notes = _tool("ptxas", "-v", f"--gpu-name={target}", str(ptx), "-o", str(Path(folder, "again.cubin")))
        sass = _tool("cuobjdump", "-sass", str(cubin))
    registers = re.search(r"Used (\d+) registers", notes)
    return Code(
        registers=int(registers[1]) if registers else 0,
        spilled_bytes=sum(int(count) for count in re.findall(r"(\d+) bytes spill", notes)),
        shared_bytes=shared_bytes,
        tensor_core_instructions=len(_TENSOR_CORES.findall(sass)),
    )


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia

    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    path = folder / name
    if name == "ptxas" and "sm_100" in " ".join(arguments) and (folder / "ptxas-blackwell").is_file():
        path = folder / "ptxas-blackwell"
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
