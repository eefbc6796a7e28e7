"""A byte-level BPE with Qwen's pre-tokenizer and special tokens, trained in a moment, and its own chat template."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
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
{%- for tool in tools or [] %}
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


def write_tokenizer(
    folder: Path,
    *,
    template: str | None = TEMPLATE,
    fragments: Sequence[str] = (),
    words: Sequence[str] = (),
    closing: str | None = None,
) -> Path:
    """tokenizer.json and its config, as a model folder has them.

    ``fragments``: texts whose short pieces are tokens too, across words, so that they can be cut in many ways.
    ``words`` are one token each. ``closing``: a special token that is put behind every text.
    """
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    in_words = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"), as_bytes])
    limit: dict[str, Any] = {"max_token_length": 5} if fragments else {}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480 if fragments else 420, initial_alphabet=alphabet, show_progress=False, **limit
    )
    backend.pre_tokenizer = as_bytes if fragments else in_words
    backend.train_from_iterator([*CORPUS, *fragments, *list(words) * 9] * 4, trainer)
    backend.pre_tokenizer = in_words
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    if closing is not None:
        special = [(closing, backend.token_to_id(closing))]
        backend.post_processor = processors.TemplateProcessing(single=f"$A {closing}", special_tokens=special)
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
