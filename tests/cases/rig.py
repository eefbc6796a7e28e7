"""Checkpoints with words: what ``tests.checkpoints`` builds, with a tokenizer beside the weights.

SENS answers differ with every prompt token; SCRIPT puts out a chosen text, cut into chosen tokens.
"""

import json
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.text.tokenizer import Tokenizer
from tests.checkpoints import SMALL_VOCAB, ScriptClash, eos_token_id, save, script_model, sens_model
from tests.text.small_tokenizer import MARKUP, write_tokenizer

# Of what the scripts say: a pair of tokens has one successor, so markup must be cut in more ways than one.
_FRAGMENTS = (
    '{"name": "find_route", "arguments": {"from": "Łódź", "stops": [3, {"via": null}], "note": "a}b{c"}}',
    '{"name":"ping","arguments":{}} { "name" : "add", "arguments" : {"x": 2} } {"name": "ping", "arguments": {}}',
    "weigh both options Pick the second one. use the tool",
    "Zürich \U0001f9f5 日本語 — naïve café ✅ alpha beta gamma STOP-HERE tail words follow",
    *["\n\n"] * 20,  # one token, as in Qwen3's vocabulary: it ends the prompts without thinking
)


@dataclass
class Rig:
    """Builds each checkpoint once a session. ``vocab_size`` rows, more than the tokenizer has tokens."""

    root: Path
    vocab_size: int = SMALL_VOCAB
    tokenizer_folder: Path = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    _built: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokenizer_folder = self._write_tokenizer()
        self.tokenizer = Tokenizer.load(self.tokenizer_folder)

    def _write_tokenizer(self) -> Path:
        return write_tokenizer(self.root / "tokenizer", fragments=_FRAGMENTS)

    @property
    def eos(self) -> int:
        return eos_token_id(self.vocab_size)

    @property
    def padding_id(self) -> int:
        """A row of the embedding that is no token of the tokenizer."""
        return (self.tokenizer.num_tokens + self.vocab_size) // 2

    def id_of(self, token: str) -> int:
        found = self.tokenizer.id_of(token)
        assert found is not None
        return found

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, allow_special=True)

    def trigger(self, *, thinking: bool) -> int:
        """The last token of a chat prompt, to which a script answers."""
        return self.ids("\n" if thinking else "\n\n")[-1]

    def sens(self, **overrides: Any) -> Path:
        return self._folder(f"sens {overrides}", lambda: sens_model(self.vocab_size, **overrides))

    def script(
        self, text: str, *, thinking: bool = True, split: int | None = None, loop: bool = False
    ) -> tuple[Path, list[int]]:
        """A checkpoint that says ``text`` after a chat prompt, and the ids it says it in.

        ``split``: the seed of a random cut into tokens, characters cut in two included; None is the usual cut.
        """
        rng = random.Random(split)
        for _ in range(3000):
            ids = self._cut(text, rng if split is not None else None)
            try:
                return self.script_ids(ids, trigger=self.trigger(thinking=thinking), loop=loop), ids
            except ScriptClash:
                split = split or 0
        raise AssertionError(f"no cut of this text can be scripted: {text!r}")

    def script_ids(self, ids: Sequence[int], *, trigger: int, loop: bool = False) -> Path:
        name = f"script {trigger} {loop} {list(ids)}"
        return self._folder(name, lambda: script_model(ids, trigger=trigger, loop=loop, vocab_size=self.vocab_size))

    def copy(self, folder: Path, name: str) -> Path:
        """A copy to be changed, made once."""
        target = self.root / name
        if not target.exists():
            shutil.copytree(folder, target)
        return target

    def _folder(self, name: str, build: Any) -> Path:
        if name not in self._built:
            folder = self.root / f"model-{len(self._built)}"
            save(build(), folder)
            for file in self.tokenizer_folder.iterdir():
                shutil.copy(file, folder)
            self._built[name] = folder
        return self._built[name]

    def _cut(self, text: str, rng: random.Random | None) -> list[int]:
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, MARKUP)) + ")", text):
            if part in MARKUP:
                ids.append(self.id_of(part))
            elif part:
                ids += self.ids(part) if rng is None else self._random_cut(part.encode(), rng)
        return ids

    def _random_cut(self, data: bytes, rng: random.Random) -> list[int]:
        """Any tokens that spell ``data``; how much longer ones are preferred is chosen at random too."""
        table = self._pieces()
        ids, start, preference = [], 0, rng.choice((0.5, 1, 2, 3))
        while start < len(data):
            ends = [end for end in range(start + 1, min(start + 12, len(data)) + 1) if data[start:end] in table]
            end = rng.choices(ends, [(end - start) ** preference for end in ends])[0]
            ids.append(table[data[start:end]])
            start = end
        return ids

    def _pieces(self) -> dict[bytes, int]:
        if not hasattr(self, "_table"):
            first_added = min(self.id_of(token) for token in ("<|endoftext|>", *MARKUP))
            self._table = {self.tokenizer.token_bytes(token_id): token_id for token_id in range(first_added)}
        return self._table


def set_generation_config(folder: Path, **values: Any) -> None:
    """Replaces generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(values))
