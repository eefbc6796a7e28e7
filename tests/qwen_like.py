"""A tokenizer folder that behaves like Qwen3's and is made in a second: for tests that need words, not a vocabulary.

Byte-level BPE trained on a few lines, Qwen3's added tokens with Qwen3's choice of which are special, padding ids above
the last token, and a chat template of our own with the same turns, tool and think markup.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

NUM_MERGED_TOKENS = 600
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LINES = (
    "The quick brown fox jumps over the lazy dog. Say it again: alpha beta gamma, one two three four.",
    "user assistant system tool name arguments parameters function type object properties string integer",
    '{"name": "add", "arguments": {"x": 2, "y": 40}}\n{"type": "object", "properties": {}}\n\n',
    "Zürich 日本語 naïve café weigh both options and pick the second one. Plain answer 42.\n",
)
_TURN = r"{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{% endmacro %}"
_LAST_USER = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
_TOOLS = r"""
{%- if tools %}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\n' + system + '# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- endif %}"""
_ASSISTANT = r"""
{%- macro assistant(m, last) %}
{{- '<|im_start|>assistant\n' }}
{%- if m.reasoning_content and last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- set arguments = call.function.arguments %}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endmacro %}"""
_MESSAGES = r"""
{%- for m in messages %}
{%- if m.role == 'system' %}{% if not (tools and loop.first) %}{{ turn('system', m.content) }}{% endif %}
{%- elif m.role == 'user' %}{{ turn('user', m.content) }}
{%- elif m.role == 'tool' %}{{ turn('user', '<tool_response>\n' + m.content + '\n</tool_response>') }}
{%- elif m.role == 'assistant' %}{{ assistant(m, loop.index0 > ns.last) }}
{%- endif %}
{%- endfor %}"""
_PROMPT = r"""
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
CHAT_TEMPLATE = _TURN + _LAST_USER + _ASSISTANT + _TOOLS + _MESSAGES + _PROMPT


def write_tokenizer(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``; ``template`` None leaves the chat template out."""
    folder.mkdir(parents=True, exist_ok=True)
    _bpe().save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config |= {"model_max_length": 131072, "clean_up_tokenization_spaces": False}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_MERGED_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_LINES * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer
