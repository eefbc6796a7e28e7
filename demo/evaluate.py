"""Exact-match accuracy of the demo model on held-out items, per task and mode.

`python -m demo.evaluate --min` prints the table and exits 1 when a task is below its floor. What writes the answers is
any `Generate`: nanoserve's own engine, or transformers (`--engine transformers`), which knows nothing of our code.
"""

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from demo.data import FINAL, Example, Split, examples
from demo.tokenizer import load_tokenizer, prompt_ids

FOLDER = Path(__file__).parent.parent / "nanoserve" / "demo_model"
# What a task is made of, and its least share of exact answers in each mode, in percent. The rest is shown only.
GROUPS = {
    "arithmetic": ("sum", "difference", "product"),
    "facts": ("fact",),
    "JSON": ("json",),
    "tools": ("tool call", "tool answer"),
    "copying": ("repeat", "reverse"),
}
FLOORS = {"arithmetic": 95.0, "facts": 95.0, "JSON": 95.0, "tools": 95.0, "copying": 90.0}
TASKS = tuple(task for group in GROUPS.values() for task in group)
# Stories have no one right answer.
UNMEASURED = frozenset({"story"})
MODES = ("direct", "thinking")
MAX_TOKENS = 160
TOOL_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class Generate(Protocol):
    """Continues prompts, each given as token ids, until the end of turn; the ids it returns end before it."""

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[int]]: ...


class EngineGenerate:
    """nanoserve's own engine in this process, greedy or with the checkpoint's sampling defaults."""

    def __init__(self, folder: Path, *, dtype: str, sample: bool, seed: int, quantization: str = "none") -> None:
        from nanoserve import LLM

        self.llm = LLM(str(folder), dtype=dtype, quantization=quantization, max_num_seqs=64, seed=seed)
        params = replace(self.llm.get_default_sampling_params(), max_tokens=MAX_TOKENS)
        self.params = params if sample else replace(params, temperature=0.0)

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        answers = self.llm.generate(list(prompts), self.params, use_tqdm=sys.stderr.isatty())
        outputs = [answer.outputs[0] for answer in answers]
        return [list(out.token_ids[: -1 if out.finish_reason == "stop" else None]) for out in outputs]


class TransformersGenerate:
    """Batched `generate` of transformers, greedy or with the sampling of the checkpoint's generation_config.json."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, sample: bool, batch_size: int = 64) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(str(folder), dtype=dtype)
        self.sample = sample
        self.batch_size = batch_size
        ends = self.model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Sorts by length first, so that a batch pads little."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        written: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(order), self.batch_size):
            group = order[first : first + self.batch_size]
            for index, token_ids in zip(group, self.batch([prompts[index] for index in group]), strict=True):
                written[index] = token_ids
        return written

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]]) -> list[list[int]]:
        """One padded batch; pads stand on the left, so all prompts end at the same place."""
        length = max(map(len, prompts))
        token_ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        choice = (
            {"do_sample": True}
            if self.sample
            else {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        )
        out = self.model.generate(input_ids=token_ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, **choice)
        return [self.until_end(row) for row in out[:, length:].tolist()]

    def until_end(self, token_ids: list[int]) -> list[int]:
        stop = next((i for i, token_id in enumerate(token_ids) if token_id in self.ends), len(token_ids))
        return token_ids[:stop]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answered item."""

    example: Example
    written: str
    right: bool


def answer_part(written: str, thinking: bool) -> str | None:
    """The text after the thoughts; None when a thinking model did not close them."""
    if not thinking:
        return written
    thought, found, answer = written.partition("</think>\n\n")
    return answer if found and thought.startswith("<think>\n") else None


def is_right(example: Example, written: str) -> bool:
    """Exact text; JSON objects and tool calls are compared as values, extra keys or text being wrong."""
    answer = answer_part(written, example.thinking)
    if answer is None:
        return False
    if example.task == "json":
        return parsed(answer) == parsed(example.answer)
    if example.task == "tool call":
        calls = [parsed(body) for body in TOOL_CALL.findall(answer)]
        expected = [json.loads(body) for body in TOOL_CALL.findall(example.answer)]
        return calls == expected and not TOOL_CALL.sub("", answer).strip()
    return answer == example.answer


def parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def held_out(seed: int, count: int) -> list[Example]:
    """`count` held-out items of every measured task and mode, in the mixture's own contexts."""
    wanted = {(task, thinking) for task in TASKS for thinking in (False, True)}
    chosen: dict[tuple[str, bool], list[Example]] = defaultdict(list)
    for example in examples(random.Random(seed), Split.HELD_OUT, FINAL):
        group = chosen[example.task, example.thinking]
        if example.task not in UNMEASURED and len(group) < count:
            group.append(example)
        if all(len(chosen[key]) >= count for key in wanted):
            break
    return [example for group in chosen.values() for example in group]


def evaluate(generate: Generate, tokenizer: PreTrainedTokenizerBase, items: Sequence[Example]) -> list[Outcome]:
    """Answers every item and checks it."""
    written = generate([prompt_ids(tokenizer, example) for example in items])
    texts = [str(tokenizer.decode(token_ids)) for token_ids in written]
    return [Outcome(item, text, is_right(item, text)) for item, text in zip(items, texts, strict=True)]


def shares(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], tuple[int, int]]:
    """Right and seen, per task and mode."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for outcome in outcomes:
        key = outcome.example.task, MODES[outcome.example.thinking]
        right, seen = counts.get(key, (0, 0))
        counts[key] = (right + outcome.right, seen + 1)
    return counts


def percent(counts: dict[tuple[str, str], tuple[int, int]], task: str, mode: str) -> float:
    right, seen = counts.get((task, mode), (0, 0))
    return 100 * right / seen if seen else 0.0


def markdown(counts: dict[tuple[str, str], tuple[int, int]]) -> str:
    """The table of the README."""
    counts = counts | grouped(counts)
    tasks = [*FLOORS, *TASKS, *sorted({task for task, _ in counts} - {*FLOORS, *TASKS})]
    lines = ["| task | items per mode | direct | thinking | floor |", "| --- | ---: | ---: | ---: | ---: |"]
    for task in tasks:
        cells = " | ".join(f"{percent(counts, task, mode):.1f} %" for mode in MODES)
        floor = f"{FLOORS[task]:.0f} %" if task in FLOORS else ""
        lines.append(f"| {task} | {min(counts.get((task, mode), (0, 0))[1] for mode in MODES)} | {cells} | {floor} |")
    return "\n".join(lines)


def grouped(counts: dict[tuple[str, str], tuple[int, int]]) -> dict[tuple[str, str], tuple[int, int]]:
    """The counts of each group: those of its tasks added up."""
    return {
        (group, mode): (
            sum(counts.get((task, mode), (0, 0))[0] for task in tasks),
            sum(counts.get((task, mode), (0, 0))[1] for task in tasks),
        )
        for group, tasks in GROUPS.items()
        for mode in MODES
    }


def below_floor(counts: dict[tuple[str, str], tuple[int, int]]) -> list[str]:
    return [
        f"{task}, {mode}: {percent(counts, task, mode):.1f} % is below {floor:.0f} %"
        for task, floor in FLOORS.items()
        for mode in MODES
        if percent(counts, task, mode) < floor
    ]


def show_wrong(outcomes: Sequence[Outcome], count: int) -> None:
    for outcome in [outcome for outcome in outcomes if not outcome.right][:count]:
        print(f"{outcome.example.task}: {outcome.example.messages[-1]['content']!r}")
        print(f"  expected {outcome.example.target()!r}\n  written  {outcome.written!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="checkpoint to measure")
    parser.add_argument("--count", type=int, default=100, help="items per task and mode")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--engine", choices=("nanoserve", "transformers"), default="nanoserve")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="float32 is what is served")
    parser.add_argument("--quantization", default="none", help="none, int8 or int4; nanoserve's engine alone has it")
    parser.add_argument(
        "--sample", action="store_true", help="sample as generation_config.json says, instead of greedy"
    )
    parser.add_argument("--min", action="store_true", help="exit 1 when a task is below its floor")
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    generate: Generate
    if args.engine == "nanoserve":
        generate = EngineGenerate(
            args.folder, dtype=args.dtype, sample=args.sample, seed=args.seed, quantization=args.quantization
        )
    else:
        generate = TransformersGenerate(args.folder, dtype=getattr(torch, args.dtype), sample=args.sample)
    outcomes = evaluate(generate, load_tokenizer(args.folder), held_out(args.seed, args.count))
    counts = shares(outcomes)
    print(markdown(counts))
    show_wrong(outcomes, args.wrong)
    failures = below_floor(grouped(counts)) if args.min else []
    print("\n".join(failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
