"""What speculation by n-gram lookup gains on texts that repeat themselves, and costs on those that do not.

    python -m benchmarks.speculation [--shape 0.6b] [--layers 28] [--repeat 5] [--threads 2]

A model of the shape's full cost writes scripted texts (``benchmarks/scripted.py``): ``edit`` gives a prompt of 200
tokens back with every 20th changed, ``loop`` repeats a quarter as many, ``fresh`` never repeats anything. One stream
each, with and without speculation in turns; the answers must be equal. Seconds are this thread's own CPU time when
--threads is 1 (other processes do not count), else the wall clock's. Writes benchmarks/results/speculation.json.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.make_checkpoint import SHAPES, write_checkpoint
from benchmarks.report import table, write
from benchmarks.scripted import scripted
from nanoserve.core.config import EngineArgs
from nanoserve.core.outputs import StepStats
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import LoadedModel, build

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt whose last token triggers the script, the script that is answered over and over, and how much of it."""

    prompt_token_ids: tuple[int, ...]
    script: tuple[int, ...]
    num_output_tokens: int


def texts(num_tokens: int, seed: int = 0) -> dict[str, Text]:
    ids = random.Random(seed).sample(range(1000, 8000), 4 * num_tokens)
    original, others, fresh, loop = (tuple(ids[i * num_tokens : (i + 1) * num_tokens]) for i in range(4))
    edited = tuple(others[i] if i % 20 == 10 else token_id for i, token_id in enumerate(original))
    return {
        "edit": Text(prompt_token_ids=(*original, 198), script=edited, num_output_tokens=num_tokens),
        "loop": Text(prompt_token_ids=(*others, 199), script=loop[: num_tokens // 4], num_output_tokens=num_tokens),
        "fresh": Text(prompt_token_ids=(*others, 200), script=fresh, num_output_tokens=num_tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--layers", type=int, help="cut the shape to so many layers")
    parser.add_argument("--tokens", type=int, default=200, help="of a prompt, and of an answer")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    args = parser.parse_args()
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    shape = replace(SHAPES[args.shape], num_hidden_layers=args.layers or SHAPES[args.shape].num_hidden_layers)
    asked = texts(min(args.tokens, (shape.hidden_size // 2 - 8) * 4 // 9))
    with TemporaryDirectory(dir=args.folder) as folder:
        scripts = {text.prompt_token_ids[-1]: text.script for text in asked.values()}
        write_checkpoint(*scripted(shape, scripts), Path(folder))
        loaded = build(EngineArgs(model=folder, max_model_len=1024, max_num_seqs=4, num_threads=args.threads))
    rows = {}
    for name, text in asked.items():
        rows[name] = compare(loaded, text, args.num_speculative_tokens, args.repeat, clock)
        print(f"{name}: {rows[name]['speedup']:.2f} times as fast", flush=True)
    print(table(rows))
    record = {"shape": args.shape, "layers": shape.num_hidden_layers, "threads": args.threads, "texts": rows}
    print(f"written: {write('speculation', record).name}")


def compare(loaded: LoadedModel, text: Text, num_drafts: int, repeat: int, clock: Clock) -> dict[str, float]:
    """Medians of tokens per second without and with speculation; the first run of each warms up and is dropped."""
    seconds: dict[int, list[float]] = {0: [], num_drafts: []}
    stats = StepStats()
    for turn in range(repeat + 1):
        for count, times in seconds.items():
            token_ids, spent_s, stats = answer(loaded, text, count, f"{turn}-{count}", clock)
            expected = (text.script * (1 + text.num_output_tokens // len(text.script)))[: text.num_output_tokens]
            assert tuple(token_ids) == expected, f"with {count} drafts: {token_ids}"
            times += [spent_s] if turn else []
    plain_s, drafted_s = (statistics.median(times) for times in seconds.values())
    return {
        "plain_tokens_per_s": text.num_output_tokens / plain_s,
        "speculating_tokens_per_s": text.num_output_tokens / drafted_s,
        "speedup": plain_s / drafted_s,
        "drafted_tokens": stats.num_draft_tokens_total,
        "accepted_tokens": stats.num_accepted_tokens_total,
        "steps": stats.step_id,
    }


def answer(
    loaded: LoadedModel, text: Text, num_drafts: int, salt: str, clock: Clock
) -> tuple[list[int], float, StepStats]:
    """The tokens, and the seconds from the first of them to the last."""
    core = EngineCore(loaded.runner, replace(loaded.scheduler, num_speculative_tokens=num_drafts), cache_salt=salt)
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=text.num_output_tokens)
    core.add(GenerateRequest(request_id=salt, prompt_token_ids=text.prompt_token_ids, sampling=sampling))
    token_ids: list[int] = []
    start_s = 0.0
    while core.has_work:
        for output in core.step().outputs:
            token_ids += output.new_token_ids
        start_s = start_s or clock()
    spent_s = clock() - start_s
    loaded.runner.close()  # what ends with a step is released by the next one, and there is none
    return token_ids, spent_s, core.scheduler.stats()


if __name__ == "__main__":
    main()
