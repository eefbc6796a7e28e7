"""A byte-level BPE with Qwen's pre-tokenizer and special tokens, trained in a moment, and a chat template of its own."""

import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CORPUS = (
    "hello world say it alpha beta gamma words follow the quick brown fox jumps over the lazy dog",
    '{"name": "add", "arguments": {"x": 2, "y": 40}} system user assistant think tool call',
    "Zürich 日本語 naïve café\n\nPlain answer. Pick the second one.\n",
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Like Qwen3's: thoughts of past turns are dropped, tool results are user turns, thinking off is an empty pair of tags.
TEMPLATE = """
{%- if messages[0].role == 'system' or tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.last %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- endif %}"""


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """tokenizer.json and its config, as a model folder has them."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    pretrained: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[SPECIAL[1]],
    )
    pretrained.chat_template = template
    pretrained.save_pretrained(folder)
    return folder


def random_cut(pieces: dict[bytes, int], text: str, rng: random.Random) -> list[int]:
    """Token ids whose bytes are ``text``, cut at random, through characters and tags; ``pieces``: bytes -> id."""
    data, ids = text.encode(), []
    while data:
        fits = [length for length in range(1, 9) if data[:length] in pieces]
        length = rng.choice(fits)
        ids.append(pieces[data[:length]])
        data = data[length:]
    return ids
