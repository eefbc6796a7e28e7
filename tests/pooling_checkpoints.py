"""The forms in which embedding and reranking checkpoints come, from one SENS model, and what transformers gives."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3ForSequenceClassification

from nanoserve.text.tokenizer import Tokenizer
from tests.checkpoints import SMALL_VOCAB, edit_config, save, sens_model
from tests.text.small_tokenizer import write_tokenizer

CLOSING = "<|endoftext|>"
FORMS = ("causal", "tied", "bare", "published", "prefixed", "classifier")


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the transformers model that it was made from."""

    folder: Path
    model: Any
    tokenizer: Tokenizer

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int], dimensions: int | None = None) -> list[float]:
        """Qwen3-Embedding's pooling (its model card): the last token's state, cut, then scaled to length 1."""
        hidden = self.model.model(torch.tensor([list(token_ids)])).last_hidden_state[0, -1, :dimensions]
        numbers: list[float] = functional.normalize(hidden, dim=0).tolist()
        return numbers

    @torch.inference_mode()
    def judge(self, token_ids: Sequence[int]) -> float:
        """Qwen3-Reranker's score (its model card): "yes" against "no" after the last token."""
        logits = self.model(torch.tensor([list(token_ids)])).logits[0, -1, [self.id_of("no"), self.id_of("yes")]]
        return float(logits.log_softmax(dim=0)[1].exp())

    def id_of(self, word: str) -> int:
        [token_id] = self.tokenizer.encode(word, allow_special=False)
        return token_id


def write(folder: Path, form: str, *, closing: str | None = CLOSING, seed: int = 0) -> Saved:
    """``published``: as Qwen3-Embedding lies on the hub: bare names under a config that names a causal model.

    ``prefixed``: a bare model whose names kept their prefix. ``classifier``: a converted reranker, whose one label is
    the difference of two rows of the vocabulary head.
    """
    write_tokenizer(folder, words=("yes\n", "no\n"), closing=closing)
    tokenizer = Tokenizer.load(folder)
    model = sens_model(seed=seed, tie_word_embeddings=form == "tied")
    saved = Saved(folder, model, tokenizer)
    with torch.no_grad():  # SENS norms are 1, and a vector scaled to length 1 would not show that one was left out
        model.model.norm.weight.uniform_(0.3, 3.0, generator=torch.Generator().manual_seed(seed))
        if form != "tied":  # or every verdict is a certain one
            model.lm_head.weight[[saved.id_of("yes"), saved.id_of("no")]] *= 0.1
    if form in ("causal", "tied"):
        save(model, folder)
    elif form == "classifier":
        _classifier(saved).save_pretrained(folder)
    else:
        model.model.save_pretrained(folder)
        if form == "published":
            edit_config(folder, lambda raw: raw.update(architectures=["Qwen3ForCausalLM"]))
        elif form == "prefixed":
            _add_prefix(folder)
    return saved


def _classifier(saved: Saved) -> Any:
    model = saved.model
    config = type(model.config)(**(model.config.to_dict() | {"num_labels": 1}))
    classifier = Qwen3ForSequenceClassification(config).float().eval()
    classifier.model.load_state_dict(model.model.state_dict())
    rows = model.lm_head.weight
    with torch.no_grad():
        classifier.score.weight[0] = rows[saved.id_of("yes")] - rows[saved.id_of("no")]
    return classifier


def _add_prefix(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def write_recipe(
    folder: Path, *, pooling: str = "lasttoken", modules: Sequence[str] = ("Transformer", "Pooling", "Normalize")
) -> None:
    """The files that sentence-transformers writes beside the weights."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    listed = [
        {"idx": index, "name": str(index), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "lasttoken")}
    width = sens_width(folder)
    pooling_config = {"word_embedding_dimension": width, "include_prompt": True} | flags
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    prompts = {"query": "Instruct: Find the words\nQuery:", "document": ""}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def sens_width(folder: Path) -> int:
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    assert isinstance(width, int)
    return width


__all__ = ["CLOSING", "FORMS", "SMALL_VOCAB", "Saved", "write", "write_recipe"]
