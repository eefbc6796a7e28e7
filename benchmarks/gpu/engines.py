"""The engine on a GPU: right against transformers, then fast on nano-vllm's workload beside transformers."""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.place import REHEARSES, device, size, synchronize
from benchmarks.make_checkpoint import SHAPES, Shape, random_weights, write_checkpoint
from nanoserve.core.config import EngineArgs
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore
from nanoserve.model import build as building
from nanoserve.model.build import LoadedModel

_ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_VOCABULARY = 10_000  # of prompts, as in nano-vllm's bench.py


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and how many tokens to generate after it."""

    prompt: tuple[int, ...]
    num_output_tokens: int


def nano_workload() -> list[Job]:
    """256 sequences of 100 to 1,024 tokens in and out, drawn as nano-vllm's bench.py draws them (seed 0)."""
    rng = random.Random(0)
    count, least, most, words = size(256, 3), size(100, 3), size(1024, 6), size(_VOCABULARY, 500)
    prompts = [tuple(rng.randint(0, words) for _ in range(rng.randint(least, most))) for _ in range(count)]
    return [Job(prompt, rng.randint(least, most)) for prompt in prompts]


def load(folder: Path, **overrides: Any) -> LoadedModel:
    """The engine's half below the scheduler, on this step's device."""
    settings: dict[str, Any] = {"device": "cpu" if REHEARSES else "cuda", "max_model_len": size(2304, 96)}
    if REHEARSES:
        settings |= {"attention_backend": "triton", "kv_cache_memory": "4MiB"}
    return building.build(EngineArgs(model=str(folder), **(settings | overrides)))


class Engine:
    """A loaded model under a scheduler, for one run after another."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.info, self.scheduler = loaded.info, loaded.scheduler
        self._core = EngineCore(loaded.runner, loaded.scheduler)
        self._num_runs = 0

    def run(self, jobs: Sequence[Job], **sampling: Any) -> tuple[list[list[int]], list[float]]:
        """The tokens of every job, and the seconds of every step."""
        self._num_runs += 1
        tokens: dict[str, list[int]] = {}
        for index, job in enumerate(jobs):
            request_id = f"{self._num_runs}-{index}"
            tokens[request_id] = []
            params = SamplingParams(max_tokens=job.num_output_tokens, ignore_eos=True, seed=index, **sampling)
            self._core.add(GenerateRequest(request_id=request_id, prompt_token_ids=job.prompt, sampling=params))
        steps_s = []
        while self._core.has_work:
            began = time.perf_counter()
            for output in self._core.step().outputs:
                tokens[output.request_id] += output.new_token_ids
            steps_s.append(time.perf_counter() - began)
        return list(tokens.values()), steps_s


def equality() -> dict[str, object]:
    """Float32 networks of 4 layers, dense and MoE: every token is the best that transformers sees after its own prefix.

    Chunks of 64 tokens, shared prefixes, few blocks so that requests are preempted, and graphs.
    """
    from tests.checkpoints import save, sens_model, sens_moe_model

    figures: dict[str, object] = {}
    rng = random.Random(1)
    shared = tuple(rng.randrange(500) for _ in range(size(80, 20)))
    own = [tuple(rng.randrange(500) for _ in range(size(60, 3) + i)) for i in range(size(16, 2))]
    jobs = [Job((shared if i % 2 else ()) + prompt, size(48, 3)) for i, prompt in enumerate(own)]
    shapes = {"head_dim": size(128, 32), "num_hidden_layers": size(4, 1)}
    for name, make in {"dense": sens_model, "moe": sens_moe_model}.items():
        given = shapes if name == "dense" else {"head_dim": size(128, 32)}
        model = make(seed=1, **given)
        with tempfile.TemporaryDirectory() as folder:
            loaded = load(save(model, Path(folder)), dtype="float32", max_num_batched_tokens=64, max_num_seqs=8)
        outputs, steps_s = Engine(loaded).run(jobs, temperature=0)
        worst = max(_shortfall(model.to(device()), job, tokens) for job, tokens in zip(jobs, outputs, strict=True))
        assert worst < 0.01, f"{name}: a token is {worst} nats below the best"
        figures[name] = {"worst_shortfall_nats": worst, "steps": len(steps_s)}
    return figures


@torch.inference_mode()
def _shortfall(model: Any, job: Job, tokens: Sequence[int]) -> float:
    """How far the least fitting token lies below the best one, in nats."""
    assert len(tokens) == job.num_output_tokens, "tokens are missing"
    ids = torch.tensor([[*job.prompt, *tokens]], device=device())
    scores = model(ids).logits[0, len(job.prompt) - 1 : -1].float().log_softmax(-1)
    taken = scores.gather(1, torch.tensor(tokens, device=device())[:, None])[:, 0]
    return float((scores.amax(dim=1) - taken).max())


def small_checkpoint() -> Path:
    """Qwen3-0.6B's shape with random weights in memory, written once."""
    name = "small" if REHEARSES else "0.6b"
    shape, folder = SHAPES[name], _ROOT / f"nanoserve-gpu-{name}"
    if not (folder / "config.json").is_file():
        write_checkpoint(shape, random_weights(shape, 0), folder)
    return folder


def logits() -> dict[str, object]:
    """bfloat16 log probabilities of 0.6B's shape over a prompt, beside transformers': their relative error."""
    from transformers import AutoModelForCausalLM

    folder = small_checkpoint()
    prompt = tuple(random.Random(2).randrange(size(_VOCABULARY, 500)) for _ in range(size(512, 20)))
    loaded = load(folder, enable_prefix_caching=False)
    core = EngineCore(loaded.runner, loaded.scheduler)
    params = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True, prompt_logprobs=0)
    core.add(GenerateRequest(request_id="a", prompt_token_ids=prompt, sampling=params))
    ours: list[float] = []
    while core.has_work:
        for output in core.step().outputs:
            ours += [entry.logprob for entry in output.prompt_logprobs]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device())
    ids = torch.tensor([prompt], device=device())
    with torch.inference_mode():
        scores = model(ids).logits[0, :-1].float().log_softmax(-1)
    theirs: Tensor = scores.gather(1, ids[0, 1:, None])[:, 0].cpu()
    error = float((torch.tensor(ours) - theirs).norm() / theirs.norm())
    assert error < 2e-2, f"log probabilities differ by {error:.1e}"
    return {"relative_error": error, "positions": len(ours)}


def start() -> dict[str, object]:
    """Seconds from nothing to the first token, weights in the page cache; a second process finds kernels compiled."""
    began = time.perf_counter()
    loaded = load(small_checkpoint(), max_num_seqs=size(256, 4))
    built_s = time.perf_counter() - began
    Engine(loaded).run([Job((1, 2, 3), 2)], temperature=0)
    return {"build_s": built_s, "until_second_token_s": time.perf_counter() - began}


def engine_small() -> dict[str, object]:
    """nano-vllm's workload on 0.6B's shape, steps of single tokens as graphs."""
    return _throughput(small_checkpoint())


def engine_small_eager() -> dict[str, object]:
    """The same without graphs."""
    return _throughput(small_checkpoint(), enforce_eager=True)


def _throughput(folder: Path, **overrides: Any) -> dict[str, object]:
    settings = {"max_num_seqs": size(256, 4), "max_num_batched_tokens": size(16_384, 32)} | overrides
    engine = Engine(load(folder, enable_prefix_caching=False, **settings))
    jobs = nano_workload()
    falling = [Job(job.prompt[:64], size(1 + i, 2)) for i, job in enumerate(jobs)]
    engine.run(falling, temperature=0.6)  # captures the graph of every batch size on the way down
    best: dict[str, object] = {}
    for _ in range(size(2, 1)):
        synchronize()
        began = time.perf_counter()
        outputs, steps_s = engine.run(jobs, temperature=0.6)
        took_s = time.perf_counter() - began
        num_tokens = sum(len(tokens) for tokens in outputs)
        assert num_tokens == sum(job.num_output_tokens for job in jobs), "tokens are missing"
        rate = num_tokens / took_s
        if rate > float(str(best.get("output_tok/s", 0))):
            best = {"output_tok/s": rate, "s": took_s, "steps": len(steps_s), "median_step_ms": 1e3 * _median(steps_s)}
    memory = {} if REHEARSES else {"peak_GiB": torch.cuda.max_memory_allocated() / 2**30}
    return {**best, **memory, "attention": engine.info.attention_backend, "num_blocks": engine.scheduler.num_blocks}


def latency_small() -> dict[str, object]:
    """Milliseconds a step and tokens a second of steady decoding at some batch sizes."""
    engine = Engine(load(small_checkpoint(), max_num_seqs=size(256, 4), enable_prefix_caching=False))
    figures: dict[str, object] = {}
    for batch in (1, size(64, 2), size(256, 3)):
        jobs = [Job(tuple(range(i, i + size(128, 4))), size(192, 4)) for i in range(batch)]
        engine.run(jobs, temperature=0)
        _, steps_s = engine.run(jobs, temperature=0)
        step_s = _median(steps_s[len(steps_s) // 2 :])
        figures[f"B {batch}"] = {"step_ms": 1e3 * step_s, "tok/s": batch / step_s}
    return figures


def engine_large() -> dict[str, object]:
    """nano-vllm's workload on 8B's shape; the weights are made on the card, since nobody reads 16 GB for this."""
    shape = SHAPES["small"] if REHEARSES else Shape(4096, 12288, 36, 32, 8, tie_word_embeddings=False)
    folder = _ROOT / "nanoserve-gpu-config-only"
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "rms_norm_eps": 1e-6}
    config |= {"hidden_act": "silu", "max_position_embeddings": 40960, "rope_theta": 1e6, "attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config | asdict(shape)))
    with patch.object(building, "load_weights", _fill), patch.object(building, "tensor_names", _no_names):
        return _throughput(folder)


def _no_names(folder: Path) -> frozenset[str]:
    return frozenset()


def _fill(folder: Path, slots: dict[str, Tensor]) -> None:
    """In the place of the loader: norms 1, the rest normal with std 0.02."""
    for name, slot in slots.items():
        if "norm" in name:
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02)


def transformers_small() -> dict[str, object]:
    """The same workload by transformers' continuous batching, with its graphs where its release has them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint(), dtype=torch.bfloat16).to(device())
    generation = transformers.GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=-1, max_new_tokens=1024)
    batching = transformers.ContinuousBatchingConfig(use_cuda_graph=not REHEARSES, use_async_batching=not REHEARSES)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    jobs = nano_workload()
    _through(manager, [Job(job.prompt, 8) for job in jobs[:8]])
    began = time.perf_counter()
    num_tokens = _through(manager, jobs)
    took_s = time.perf_counter() - began
    manager.stop(block=False)
    return {"output_tok/s": num_tokens / took_s, "s": took_s, "version": transformers.__version__}


def _through(manager: Any, jobs: Sequence[Job]) -> int:
    for job in jobs:
        manager.add_request(list(job.prompt), max_new_tokens=job.num_output_tokens, eos_token_id=-1)
    results = [manager.get_result(timeout=100) for _ in jobs]
    assert all(result is not None for result in results), "transformers lost a request"
    return sum(len(result.generated_tokens) for result in results)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
