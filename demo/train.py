"""Trains the demo model from nothing and writes it as a Hugging Face checkpoint.

`python -m demo.train` makes tokenizer and weights in under two hours on two cores with AVX-512 or AMX. The forward pass
is Qwen3's, written for speed in training: bf16 activations, attention without the slow CPU flash backward, the loss
only where the assistant writes. `demo.evaluate` runs the result through transformers, which proves that both agree.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3Config

from demo.data import BASE, FINAL, FOCUS, Mixture, Split, examples
from demo.tokenizer import MAX_LENGTH, VOCAB_ROWS, load_tokenizer, prompt_ids, target_ids, write_tokenizer

FOLDER = Path(__file__).parent.parent / "nanoserve" / "demo_model"
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 768, 4, 4, 2, 64
ROPE_THETA = 1_000_000.0
EPS = 1e-6
# Conversations beyond this are skipped; a micro-batch holds at most this many padded tokens.
MAX_TOKENS = 2048
MICRO_BATCH_TOKENS = 4096
Forward = Callable[[Tensor, Tensor], Tensor]
# The steps at which the mixture changes: `BASE`, `FOCUS`, `FINAL`.
FOCUS_FROM, FINAL_FROM = 1280, 1560


def examples_per_step(step: int) -> int:
    """Small steps at first, when every gradient says the same; the committed weights were trained so."""
    return 32 if step < 400 else 64


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float32, back to bf16."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(torch.bfloat16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, length, heads, head_dim]; cos and sin are [length, 1, head_dim / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(torch.bfloat16)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(torch.bfloat16))


class Layer(nn.Module):
    """The weights of one Qwen3 layer; the names are those of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Parameter(torch.randn(HEADS * HEAD_DIM, HIDDEN) * HIDDEN**-0.5)
        self.k_proj = nn.Parameter(torch.randn(KV_HEADS * HEAD_DIM, HIDDEN) * HIDDEN**-0.5)
        self.v_proj = nn.Parameter(torch.randn(KV_HEADS * HEAD_DIM, HIDDEN) * HIDDEN**-0.5)
        self.o_proj = nn.Parameter(torch.zeros(HIDDEN, HEADS * HEAD_DIM))
        self.gate_proj = nn.Parameter(torch.randn(INTERMEDIATE, HIDDEN) * HIDDEN**-0.5)
        self.up_proj = nn.Parameter(torch.randn(INTERMEDIATE, HIDDEN) * HIDDEN**-0.5)
        self.down_proj = nn.Parameter(torch.zeros(HIDDEN, INTERMEDIATE))
        self.q_norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.k_norm = nn.Parameter(torch.ones(HEAD_DIM))
        self.input_layernorm = nn.Parameter(torch.ones(HIDDEN))
        self.post_attention_layernorm = nn.Parameter(torch.ones(HIDDEN))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Causal attention with plain matrix products: five times as fast as the backward of CPU flash attention."""
        batch, length, _ = x.shape
        q = linear(x, self.q_proj).view(batch, length, HEADS, HEAD_DIM)
        k = linear(x, self.k_proj).view(batch, length, KV_HEADS, HEAD_DIM)
        v = linear(x, self.v_proj).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = rotate(rms_norm(q, self.q_norm), cos, sin).transpose(1, 2)
        k = rotate(rms_norm(k, self.k_norm), cos, sin).transpose(1, 2)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * HEAD_DIM**-0.5 + mask
        mixed = torch.softmax(scores, -1).to(torch.bfloat16) @ v
        return linear(mixed.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM), self.o_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attend(rms_norm(x, self.input_layernorm), cos, sin, mask)
        y = rms_norm(x, self.post_attention_layernorm)
        return x + linear(F.silu(linear(y, self.gate_proj)) * linear(y, self.up_proj), self.down_proj)


class Model(nn.Module):
    """Qwen3 with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Muon soon makes the layers write vectors of norm 60, in which a tied embedding of the usual std 0.02 drowns.
        # It starts large here, and the last norm small to keep the logits near 1.
        self.embedding = nn.Parameter(torch.randn(VOCAB_ROWS, HIDDEN) * 0.5)
        self.norm = nn.Parameter(torch.full((HIDDEN,), 0.125))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(MAX_TOKENS)[:, None] * frequencies
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])

    def forward(self, token_ids: Tensor, where: Tensor) -> Tensor:
        """Logits [num_where, vocab] at the flat positions `where` of token_ids [batch, length], padded on the right."""
        length = token_ids.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        x = F.embedding(token_ids, self.embedding.to(torch.bfloat16))
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length], mask)
        return linear(rms_norm(x.flatten(0, 1)[where], self.norm), self.embedding).float()


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized conversation and the spans [first, end) of it that are learned; the last one is the target."""

    task: str
    token_ids: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations of similar length, padded: token_ids [batch, length].

    `where` are flat positions; each has the token that follows as its label, a weight, and as its owner the row whose
    target it belongs to, -1 for an earlier answer.
    """

    token_ids: Tensor
    where: Tensor
    labels: Tensor
    weights: Tensor
    owner: Tensor
    tasks: list[str]


def past_spans(tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> list[tuple[int, int]]:
    """Earlier answers in a prompt, without their first token.

    The template drops the thoughts of the past, so there the first token does not tell how to begin a turn; what
    follows it is learned as well as in a conversation of its own, for a third of the tokens.
    """
    begin, end = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    firsts = [i + len(begin) for i in range(len(prompt)) if prompt[i : i + len(begin)] == begin]
    return [(i + 1, prompt.index(end, i) + 1) for i in firsts if end in prompt[i:]]


def tokenized(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, split: Split, mixture: Mixture
) -> Iterator[Tokens]:
    for example in examples(rng, split, mixture):
        prompt = prompt_ids(tokenizer, example)
        token_ids = prompt + target_ids(tokenizer, example)
        if len(token_ids) <= MAX_TOKENS:
            mode = "thinking" if example.thinking else "direct"
            spans = [*past_spans(tokenizer, prompt), (len(prompt), len(token_ids))]
            yield Tokens(f"{example.task} / {mode}", token_ids, spans)


def collate(group: list[Tokens]) -> Batch:
    """Pads to a multiple of 16 and to two rows, since torch.compile would compile a single row anew.

    A short answer weighs more per token than a story: each answer 1 / sqrt(length).
    """
    length = -(-max(len(item.token_ids) for item in group) // 16) * 16
    token_ids = torch.zeros(max(len(group), 2), length, dtype=torch.long)
    where: list[int] = []
    labels: list[int] = []
    weights: list[float] = []
    owner: list[int] = []
    for row, item in enumerate(group):
        token_ids[row, : len(item.token_ids)] = torch.tensor(item.token_ids)
        for first, end in item.spans:
            where += range(row * length + first - 1, row * length + end - 1)
            labels += item.token_ids[first:end]
            weights += [(end - first) ** -0.5] * (end - first)
            owner += [row if (first, end) == item.spans[-1] else -1] * (end - first)
    tasks = [item.task for item in group]
    return Batch(
        token_ids, torch.tensor(where), torch.tensor(labels), torch.tensor(weights), torch.tensor(owner), tasks
    )


def micro_batches(items: list[Tokens]) -> list[Batch]:
    """Sorts by length and cuts where the padded size would pass the limit."""
    batches: list[list[Tokens]] = [[]]
    for item in sorted(items, key=lambda item: len(item.token_ids)):
        padded = -(-len(item.token_ids) // 16) * 16
        if batches[-1] and padded * (len(batches[-1]) + 1) > MICRO_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(item)
    return [collate(group) for group in batches]


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over 100 steps, flat up to 600, then straight to zero at the end of each mixture."""
    if step < 600:
        return min(1.0, (step + 1) / 100)
    end = FOCUS_FROM if step < FOCUS_FROM else FINAL_FROM if step < FINAL_FROM else steps
    return (1 - step / end) / 0.6


def optimizers(model: Model, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [p for layer in model.layers for p in layer.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def exact(model: Model, batches: list[Batch]) -> dict[str, tuple[int, int]]:
    """Examples right and seen per task. Under teacher forcing all arg-maxes are right just when a greedy answer is."""
    counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for batch in batches:
        wrong = model(batch.token_ids, batch.where).argmax(-1) != batch.labels
        missed = set(batch.owner[wrong].tolist())
        for row, task in enumerate(batch.tasks):
            right, seen = counts[task]
            counts[task] = (right + (row not in missed), seen + 1)
    return dict(counts)


def config() -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_ROWS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        dtype="float32",  # what it is computed in; the weights are stored in bf16
    )


def state(model: Model) -> dict[str, Tensor]:
    """The weights under the names of Qwen3ForCausalLM, in bf16; the tied lm_head is left out."""
    weights = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for index, layer in enumerate(model.layers):
        for name, weight in layer.named_parameters():
            part = "mlp." if name in ("gate_proj", "up_proj", "down_proj") else "self_attn."
            weights[f"model.layers.{index}.{'' if name.endswith('layernorm') else part}{name}.weight"] = weight
    return {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}


def save(model: Model, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes config, generation config and weights beside the tokenizer."""
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    written = config()
    written.eos_token_id, written.pad_token_id = end, pad
    written.save_pretrained(str(folder))
    sampling = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[end, pad], pad_token_id=pad
    )
    sampling.save_pretrained(str(folder))
    save_file(state(model), folder / "model.safetensors", metadata={"format": "pt"})


def train_step(forward: Forward, batches: list[Batch], optims: list[torch.optim.Optimizer]) -> float:
    """One optimizer step over the micro-batches; returns the mean loss."""
    total = sum(float(batch.weights.sum()) for batch in batches)
    loss_sum = 0.0
    for batch in batches:
        logits = forward(batch.token_ids, batch.where)
        loss = (F.cross_entropy(logits, batch.labels, reduction="none") * batch.weights).sum() / total
        loss.backward()
        loss_sum += float(loss.detach())
    for optim in optims:
        optim.step()
        optim.zero_grad(set_to_none=True)
    return loss_sum


def table(counts: dict[str, tuple[int, int]]) -> str:
    return "  ".join(f"{task} {100 * right / seen:.0f}%" for task, (right, seen) in sorted(counts.items()))


class Training:
    """A run that can be stopped and resumed: the model, its optimizers, and the state of the data stream."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> None:
        self.model = Model()
        self.optims = optimizers(self.model, args.muon_lr, args.adam_lr)
        self.bases = [[group["lr"] for group in optim.param_groups] for optim in self.optims]
        self.rng = random.Random(args.seed)
        # All draw from one generator of random numbers, so its state alone is the state of the data.
        self.streams = [tokenized(tokenizer, self.rng, Split.TRAIN, mixture) for mixture in (BASE, FOCUS, FINAL)]
        self.step, self.num_tokens, self.seconds = 0, 0, 0.0

    def set_learning_rate(self, factor: float) -> None:
        for optim, lrs in zip(self.optims, self.bases, strict=True):
            for group, lr in zip(optim.param_groups, lrs, strict=True):
                group["lr"] = lr * factor

    def advance(self, forward: Forward) -> float:
        """One step; returns the loss."""
        started = time.perf_counter()
        stream = self.streams[(self.step >= FOCUS_FROM) + (self.step >= FINAL_FROM)]
        items = list(islice(stream, examples_per_step(self.step)))
        loss = train_step(forward, micro_batches(items), self.optims)
        self.step += 1
        self.num_tokens += sum(len(item.token_ids) for item in items)
        self.seconds += time.perf_counter() - started
        return loss

    def dump(self, path: Path) -> None:
        torch.save(
            {
                "model": self.model.state_dict(),
                "optims": [optim.state_dict() for optim in self.optims],
                "rng": self.rng.getstate(),
                "counts": (self.step, self.num_tokens, self.seconds),
            },
            path,
        )

    def restore(self, path: Path) -> None:
        saved = torch.load(path, weights_only=False)
        self.model.load_state_dict(saved["model"])
        for optim, optim_state in zip(self.optims, saved["optims"], strict=True):
            optim.load_state_dict(optim_state)
        self.rng.setstate(saved["rng"])
        self.step, self.num_tokens, self.seconds = saved["counts"]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.out, seed=args.seed)
    tokenizer = load_tokenizer(args.out)
    run = Training(tokenizer, args)
    if args.resume:
        run.restore(args.resume)
    print(f"tokens: {len(tokenizer)}  parameters: {sum(p.numel() for p in run.model.parameters())}", flush=True)
    forward = run.model if args.no_compile else torch.compile(run.model, dynamic=True)
    held_out_stream = tokenized(tokenizer, random.Random(args.seed + 1), Split.HELD_OUT, FINAL)
    held_out = micro_batches(list(islice(held_out_stream, args.held_out)))
    while run.step < args.steps:
        run.set_learning_rate(learning_rate(run.step, args.steps))
        loss = run.advance(forward)
        if run.step % 20 == 0 or run.step <= 5:
            print(f"step {run.step} loss {loss:.4f} seconds {run.seconds:.0f} tokens {run.num_tokens}", flush=True)
        if run.step % args.save_every == 0 or run.step == args.steps:
            save(run.model, tokenizer, args.out)
            if args.state:
                run.dump(args.state)
            print(f"step {run.step} held-out: {table(exact(run.model, held_out))}", flush=True)
    report = {"train_s": round(run.seconds), "steps": run.step, "tokens": run.num_tokens, "seed": args.seed}
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=1900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--muon-lr", type=float, default=0.015)
    parser.add_argument("--adam-lr", type=float, default=0.005)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--held-out", type=int, default=600)
    parser.add_argument("--state", type=Path, help="write the state of the run here with every save")
    parser.add_argument("--resume", type=Path, help="continue from a state; the same as never having stopped")
    parser.add_argument("--no-compile", action="store_true", help="slower, but needs no C++ compiler")
    parser.add_argument("--threads", type=int, default=2, help="1 is faster where other programs want the cores")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
