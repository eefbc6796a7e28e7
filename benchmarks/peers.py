"""Peers that run the same workload on the same checkpoint in the same run."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Trace
from benchmarks.workloads import Item


class TransformersPeer:
    """transformers' own batched generation: one left-padded batch, greedy, run until its longest request is done.

    Only the tokens that were asked for count, so a request's tokens beyond its own length are waste, as they are for a
    user.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def run(self, items: Sequence[Item]) -> list[Trace]:
        """One trace an item; tokens are stamped when the step that made them ended."""
        width = max(len(item.prompt_token_ids) for item in items)
        ids = torch.zeros((len(items), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, width - len(item.prompt_token_ids) :] = torch.tensor(item.prompt_token_ids)
            mask[row, width - len(item.prompt_token_ids) :] = 1
        longest = max(item.num_output_tokens for item in items)
        stamps = _Stamps()
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                streamer=None,
                logits_processor=[stamps],
                pad_token_id=0,
            )
        stamps.times_s.append(time.perf_counter())
        times = stamps.times_s[1:]
        return [Trace(sent_s=start, token_times_s=tuple(times[: item.num_output_tokens])) for item in items]


class _Stamps:
    """A logits processor that changes nothing: it is called once a step, before the step's token is chosen."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return scores
