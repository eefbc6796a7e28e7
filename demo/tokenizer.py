"""The demo model's tokenizer: Qwen's pipeline, special tokens and chat template over a small vocabulary of its own."""

import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo import words
from demo.data import BASE, Example, Split, examples

# Qwen's pre-tokenizer, from the tokenizer.json of Qwen3 (Apache-2.0): every digit is a token of its own.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of their ids in Qwen3.
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
# Embedding rows. The ids above the tokenizer's length are padding rows, as in Qwen3.
VOCAB_ROWS = 2560
BPE_TOKENS = 2500
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MAX_LENGTH = 4096


def bpe(texts: Iterable[str]) -> Tokenizer:
    """Trains byte-level BPE and adds Qwen's tokens after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return tokenizer


def corpus(seed: int, count: int) -> Iterable[str]:
    """The training split, with the known words and the chat template often enough to become whole tokens."""
    for example in islice(examples(random.Random(seed), Split.TRAIN, BASE), count):
        yield "\n".join(str(message["content"]) for message in example.messages)
        yield from (json.dumps(tool) for tool in example.tools)
        yield example.target()
    known = (words.WORDS, words.NAMES, words.CITIES, list(words.CAPITALS), words.ANIMALS, words.ITEMS, words.COLORS)
    for word in (word for group in known for word in group):
        yield f" {word}\n" * 300 + f"{word}\n" * 250
    yield CHAT_TEMPLATE.read_text(encoding="utf-8").replace("\\n", "\n") * 200


def write_tokenizer(folder: Path, *, seed: int, count: int = 30_000) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer = bpe(corpus(seed, count))
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in (*SPECIAL, *ADDED)
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert isinstance(tokenizer, PreTrainedTokenizerBase), type(tokenizer)
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[int]:
    """The prompt exactly as a server renders it, up to where the assistant writes."""
    text = tokenizer.apply_chat_template(
        list(example.messages),
        tools=list(example.tools) or None,
        add_generation_prompt=True,
        enable_thinking=example.thinking,
        tokenize=False,
    )
    assert isinstance(text, str), type(text)
    return list(tokenizer.encode(text))


def target_ids(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[int]:
    """What the model has to write, with the end of turn."""
    return list(tokenizer.encode(example.target() + "<|im_end|>"))
