"""Writes a dense Qwen3 checkpoint as GGUF with the ``gguf`` package: its tensors, sizes and a byte-level vocabulary.

Names and keys of the architecture "qwen3" are those of llama.cpp's format (gguf-py, MODEL_ARCH.QWEN3).
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """``kind``: BF16, Q8_0 or Q4_0 for matrices; vectors stay float32."""
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    _add_sizes(writer, config, gguf.LlamaFileType[f"MOSTLY_{kind}"])
    _add_vocabulary(writer, config["vocab_size"], gguf.TokenType)
    for name, values in _tensors(folder / "model.safetensors"):
        quantization = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(_name(name), gguf.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _add_sizes(writer: Any, config: dict[str, Any], file_type: Any) -> None:
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def _add_vocabulary(writer: Any, size: int, types: Any) -> None:
    """A vocabulary that only has to load: prompts are ids, and no text is read. Its first 256 entries are the bytes."""
    printable = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters = printable + [chr(256 + index) for index in range(256 - len(printable))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(letters + [f"t{index}" for index in range(len(letters), size)])
    writer.add_token_types([types.NORMAL] * (size - 1) + [types.CONTROL])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, float32 values) of a safetensors file whose tensors are BF16 (the format's own header, read here)."""
    numpy: Any = importlib.import_module("numpy")
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"Only BF16 tensors are written as GGUF. {name} is {entry['dtype']}.")
        first, last = entry["data_offsets"]
        halves = data[start + first : start + last].view(numpy.uint16)
        yield name, (halves.astype(numpy.uint32) << 16).view(numpy.float32).reshape(entry["shape"])


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.weight"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[part]}.weight"
