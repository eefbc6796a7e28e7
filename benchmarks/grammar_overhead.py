"""What structured outputs cost a step: the same decodes with and without a JSON schema, in turns in one process.

    python -m benchmarks.make_checkpoint 0.6b FOLDER --tokenizer QWEN3_TOKENIZER
    python -m benchmarks.grammar_overhead --model FOLDER

Prints a table and writes benchmarks/results/grammar_overhead.json.
"""

import argparse
import json
import statistics
import time

from benchmarks.report import table, write
from nanoserve.core.config import EngineArgs
from nanoserve.core.request import GenerateRequest, Grammar
from nanoserve.core.sampling import SamplingParams, StructuredOutputs
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import build
from nanoserve.text.grammar import grammar_text

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}


def requests(num_streams: int, num_prompt_tokens: int, grammar: Grammar | None, run: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{run}-{index}",
            prompt_token_ids=tuple(1000 + (run * 31 + index * 17 + i) % 5000 for i in range(num_prompt_tokens)),
            sampling=SamplingParams(max_tokens=None, seed=index, temperature=0.6, top_k=20, top_p=0.95),
            grammar=grammar,
        )
        for index in range(num_streams)
    ]


def step_times(core: EngineCore, batch: list[GenerateRequest], num_steps: int) -> list[float]:
    """Seconds of each decode step of all requests, without the prefill and the two steps after it."""
    for request in batch:
        core.add(request)
    times = []
    for _ in range(num_steps + 3):
        start_s = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start_s)
    for request in batch:
        core.abort(request.request_id)
    core.step()
    return times[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-streams", type=int, default=16)
    parser.add_argument("--num-prompt-tokens", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    built = build(EngineArgs(model=arguments.model, dtype=arguments.dtype, max_model_len=512, kv_cache_memory="1GiB"))
    core = EngineCore(built.runner, built.scheduler)
    text = grammar_text(StructuredOutputs(json=json.dumps(SCHEMA)))
    times: dict[str, list[float]] = {"free": [], "constrained": []}
    for round_ in range(2 * (arguments.rounds + 1)):
        name = ("free", "constrained")[round_ % 2]
        grammar = Grammar(text, (0,)) if name == "constrained" else None
        batch = requests(arguments.num_streams, arguments.num_prompt_tokens, grammar, round_)
        new = step_times(core, batch, arguments.num_steps)
        times[name] += new if round_ > 1 else []  # the first two rounds load the vocabulary and warm up
    figures = {name: {"step_p50_ms": 1e3 * statistics.median(values)} for name, values in times.items()}
    overhead = figures["constrained"]["step_p50_ms"] / figures["free"]["step_p50_ms"] - 1
    print(table(figures))
    print(f"overhead: {100 * overhead:.1f} % of a step of {arguments.num_streams} streams")
    write("grammar_overhead", {"num_streams": arguments.num_streams, "figures": figures, "overhead": overhead})


if __name__ == "__main__":
    main()
