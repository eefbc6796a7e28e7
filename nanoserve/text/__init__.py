"""Words to tokens and back: tokenizer, chat template, detokenizer, reasoning, tools."""
