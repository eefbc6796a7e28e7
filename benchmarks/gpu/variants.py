"""Every Triton kernel in the forms that Qwen3 models launch, with what the compiled code must be."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoserve.model.kernels.triton import blocks, choose, decode, experts, prefill, rows, store

_TYPES = {"bf16": 2, "fp32": 4}
_FLOATS = ("scale", "eps")
_STRIDES = ("stride", "size", "vocab_size", "num_chunks", "features", "words")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compilation: argument types (Triton's names) and constants of ``kernel``, its options, and what it needs.

    ``aligned``: integer arguments that are multiples of 16, which lets loads be wide. ``uses_tensor_cores`` says that
    the machine code must multiply matrices in hardware.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str] = frozenset()
    options: Mapping[str, int] = field(default_factory=dict)
    uses_tensor_cores: bool = False


def variants(arch: int) -> Iterator[Variant]:
    """All that a GPU of architecture ``arch`` (90 for Hopper) launches."""
    yield from _rows()
    yield from _stores()
    for head_dim, group in ((128, 2), (128, 8), (64, 2)):
        for block_size in (16, 256):
            yield from _attention("bf16", head_dim, group, block_size, arch)
    yield from _attention("fp32", 128, 2, 16, arch)
    yield from _experts()
    yield from _choices()
    yield _variant("copy_blocks", blocks.copy_kernel, "i32", {"CHUNK": blocks._CHUNK}, num_warps=8)


def _variant(name: str, kernel: Any, dtype: str, constants: Mapping[str, Any], **settings: Any) -> Variant:
    """Argument types follow from the names that the kernels use."""
    uses = settings.pop("uses_tensor_cores", False)
    odd = settings.pop("types", {})
    types = {arg: _type(arg, dtype) for arg in kernel.arg_names if arg not in constants} | odd
    aligned = frozenset(arg for arg in types if arg.endswith(_STRIDES) and arg not in ("vocab_size", "num_chunks"))
    return Variant(
        name=f"{name} {dtype}", kernel=kernel, types=types, constants=dict(constants), aligned=aligned,
        options=settings, uses_tensor_cores=uses,
    )  # fmt: skip


def _type(argument: str, dtype: str) -> str:
    if not argument.endswith("_ptr"):
        return "fp32" if argument in _FLOATS else "i32"
    integers = ("slots", "rows", "tables", "lens", "tiles", "starts", "ends", "pairs", "places", "ids")
    stem = argument.removesuffix("_ptr")
    return "*i32" if stem.endswith(integers) else f"*{dtype}"


def _rows() -> Iterator[Variant]:
    for size in (1024, 4096):
        warps = rows._warps(size)
        for adds in (False, True):
            name = f"{'add + ' if adds else ''}norm {size}"
            yield _variant(name, rows.norm_kernel, "bf16", {"ADDS": adds, "WIDTH": size}, num_warps=warps)
    yield _variant("silu_and_mul", rows.silu_and_mul_kernel, "bf16", {"WIDTH": 1024}, num_warps=4)
    types = {"rows_ptr": "*bf16", "places_ptr": "*i64", "weights_ptr": "*fp32"}
    constants = {"COUNT": 8, "WIDTH": 1024}
    yield _variant("weighted_sum", rows.weighted_sum_kernel, "bf16", constants, num_warps=4, types=types)


def _stores() -> Iterator[Variant]:
    sizes = {"SIZE": 1024, "BLOCK_SIZE": 16, "WIDTH": 1024}
    yield _variant("store_kv", store.store_kernel, "bf16", sizes, num_warps=4)
    heads = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "HEADS": store._HEADS_AT_ONCE}
    yield _variant("prepare_heads", store.prepare_heads_kernel, "bf16", heads, num_warps=1)


def _attention(dtype: str, head_dim: int, group: int, block_size: int, arch: int) -> Iterator[Variant]:
    name = f"D{head_dim} group {group} block {block_size}"
    shape = {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    uses = dtype != "fp32"
    step = decode.decode_config(head_dim, _TYPES[dtype])
    options = {"num_warps": step.num_warps, "num_stages": step.num_stages}
    types = {"partial_ptr": "*fp32", "weight_ptr": "*fp32"}
    for splits in (1, 8):
        constants = shape | {"ROWS": decode._ROWS, "KEYS": step.keys, "SPLITS": splits}
        yield _variant(
            f"decode {name} splits {splits}", decode.decode_kernel, dtype, constants, types=types,
            uses_tensor_cores=uses, **options,
        )  # fmt: skip
    tile = prefill.prefill_config(head_dim, _TYPES[dtype], arch)
    yield _variant(
        f"prefill {name}", prefill.prefill_kernel, dtype, shape | {"QUERIES": tile.queries, "KEYS": tile.keys},
        uses_tensor_cores=uses, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if block_size == 16:
        merged = {"NUM_HEADS": 8 * group, "HEAD_DIM": head_dim, "SPLITS": 8, "WIDTH": 8}
        yield _variant(f"merge {name}", decode.merge_kernel, dtype, merged, types=types, num_warps=1)


def _experts() -> Iterator[Variant]:
    for average in (1, 64, 1024):
        tile = experts.experts_config(128 * average, 128)
        constants = {
            "NUM_EXPERTS": 128, "WIDTH": 128, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
        }  # fmt: skip
        yield _variant(
            f"experts {tile.rows} rows", experts.experts_kernel, "bf16", constants, uses_tensor_cores=True,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def _choices() -> Iterator[Variant]:
    columns = {
        "temperature_ptr": "*fp64", "top_p_ptr": "*fp64", "log_min_p_ptr": "*fp64", "top_k_ptr": "*i64",
        "seed_ptr": "*i64", "positions_ptr": "*i64", "tokens_ptr": "*i64", "maxima_ptr": "*fp32", "sums_ptr": "*fp32",
    }  # fmt: skip
    for dtype in ("bf16", "fp32"):
        scan = {key: columns[key] for key in ("temperature_ptr", "maxima_ptr", "sums_ptr")}
        chunk = {"CHUNK": choose.CHUNK}
        yield _variant("choose scan", choose.scan_kernel, dtype, chunk, types=scan, num_warps=4)
        constants = chunk | {"SHIFT": 16 if dtype == "bf16" else 0, "WIDTH": 256}
        yield _variant("choose", choose.choose_kernel, dtype, constants, types=columns, num_warps=4)
