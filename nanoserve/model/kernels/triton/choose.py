"""The choice of tokens by the rule of ``model/choice.py``: same filters, same order of ids, same uniform numbers.

Two launches. The first reads all logits once, a program a chunk of 1,024: the chunk's best token, and its weight. The
second, a program a row, finds the chunk of a greedy or an unfiltered token from those, and reads that chunk alone.
Where filters are on, the chunks' maxima bound the kept logits from below; the few tokens above that bound are collected
in order of id, and bisection over their bits finds the exact k-th largest and the exact edge of the nucleus: no sort.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of a float32 that are all alike in the dtype

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * tl.full([], _MIX_1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _MIX_2, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def uniform(seed, position):
    """SplitMix64 at ``position`` of the stream of ``seed``, as ``model/randomness.py``: float64 in [0, 1)."""
    golden = tl.full([], _GOLDEN, tl.uint64)
    counter = _mix(seed.to(tl.uint64) + golden) + (position.to(tl.uint64) + 1) * golden
    return (_mix(counter) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _scaled(x, best, temperature):
    """(x - best) / temperature, and -inf where both are."""
    return tl.where(x == float("-inf"), float("-inf"), (x - best) / temperature)


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """int32 that compare as the float32 ``x`` do. ``SHIFT``: low bits that tell no two of them apart."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _middle(low, high):
    """Half way, rounded up; the sum of the two might not fit (Warren, Hacker's Delight, section 2-5)."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def scan_kernel(
    logits_ptr, rows_ptr, temperature_ptr, maxima_ptr, places_ptr, sums_ptr, stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (row, chunk): maximum, its place, and the sum of exp((logit - maximum) / temperature)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + tl.load(rows_ptr + row)).to(tl.float32)
    best = tl.max(x, axis=0)
    place = tl.min(tl.where(x == best, token, vocab_size - 1), axis=0)
    weights = tl.exp(_scaled(x, best, tl.where(temperature > 0, temperature, 1.0)))
    here = row * num_chunks + chunk
    tl.store(maxima_ptr + here, best)
    tl.store(places_ptr + here, place)
    tl.store(sums_ptr + here, tl.sum(weights, axis=0))


@triton.jit
def _locate(weights, target, index):
    """The first ``index`` whose cumulative weight exceeds ``target``, and the weight before it; else the last with any.

    ``index`` rises along ``weights``, which are float64.
    """
    cumulative = tl.cumsum(weights, axis=0)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    found = tl.minimum(tl.min(tl.where(cumulative > target, index, 0x7FFFFFFF), axis=0), last)
    return found, tl.sum(tl.where(index < found, weights, 0.0), axis=0)


@triton.jit
def _pick_unfiltered(logits, maxima, sums, best, temperature, u, vocab_size, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Which chunk, then which of its tokens."""
    weights = sums * tl.exp(_scaled(maxima, best, temperature).to(tl.float64))
    target = u * tl.sum(weights, axis=0)
    chunk, before = _locate(weights, target, tl.arange(0, WIDTH))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    inside = tl.exp(_scaled(x, best, temperature)).to(tl.float64)
    # The chunk's own sum was rounded otherwise; measured by the sum of this pass the target stays inside.
    share = (target - before) / tl.sum(tl.where(tl.arange(0, WIDTH) == chunk, weights, 0.0), axis=0)
    found, _ = _locate(inside, share * tl.sum(inside, axis=0), token)
    return found


@triton.jit
def _lowest(maxima, best, temperature, top_k, top_p, log_min_p, mass, SHIFT: tl.constexpr):
    """A bound in ordered bits that no kept token lies below, from the maxima of chunks [WIDTH] alone.

    Maxima are tokens too: k of them at or above a value put the k-th token there, and so with their mass. ``mass``: of
    all tokens.
    """
    keys = _ordered(maxima, SHIFT)
    weights = tl.exp(_scaled(maxima, best, temperature).to(tl.float64))
    low, high = tl.min(keys, axis=0), _ordered(best, SHIFT)
    while low < high:
        middle = _middle(low, high)
        above = keys >= middle
        is_enough = (top_k > 0) & (tl.sum(above.to(tl.int32), axis=0) >= top_k)
        is_enough |= (top_p < 1) & (tl.sum(tl.where(above, weights, 0.0), axis=0) >= top_p * mass)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    is_enough = (top_k > 0) & (tl.sum((keys >= low).to(tl.int32), axis=0) >= top_k)
    is_enough |= (top_p < 1) & (tl.sum(tl.where(keys >= low, weights, 0.0), axis=0) >= top_p * mass)
    bound = tl.where(is_enough, low, -0x80000000)
    likely = log_min_p.to(tl.float32) * temperature
    # A little lower than min_p asks, since the exact comparison divides by the temperature; the rest is filtered later.
    likely = best + likely - tl.abs(likely) * 1e-5 - tl.abs(best) * 1e-6
    return tl.maximum(bound, _ordered(likely, SHIFT))


@triton.jit
def _tally(logits, ids, count, key, tie_limit, best, temperature, log_min_p, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """How many collected tokens lie above ``key`` and at it, and the mass of those above with ``tie_limit`` at it."""
    num_above, num_at = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass, weight_at = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        token = tl.load(ids + place, mask=place < count, other=0)
        x = tl.load(logits + token, mask=place < count, other=float("-inf")).to(tl.float32)
        scaled = _scaled(x, best, temperature).to(tl.float64)
        is_likely = (place < count) & (scaled >= log_min_p)
        keys = _ordered(x, SHIFT)
        weights = tl.exp(scaled)
        num_above += tl.sum((is_likely & (keys > key)).to(tl.int32), axis=0)
        num_at += tl.sum((is_likely & (keys == key)).to(tl.int32), axis=0)
        mass += tl.sum(tl.where(is_likely & (keys > key), weights, 0.0), axis=0)
        weight_at = tl.maximum(weight_at, tl.max(tl.where(is_likely & (keys == key), weights, 0.0), axis=0))
    taken = tl.minimum(num_at, tie_limit)
    return num_above, num_at, mass, weight_at, taken


@triton.jit
def _draw(
    logits, ids, count, key, num_ties, best, temperature, log_min_p, target, SHIFT: tl.constexpr, CHUNK: tl.constexpr
):
    """The token, in order of id, at which the cumulative mass of the kept ones exceeds ``target``."""
    chosen, last = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
    before, ties_before = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        token = tl.load(ids + place, mask=place < count, other=0x7FFFFFFF)
        x = tl.load(logits + token, mask=place < count, other=float("-inf")).to(tl.float32)
        scaled = _scaled(x, best, temperature).to(tl.float64)
        is_likely = (place < count) & (scaled >= log_min_p)
        keys = _ordered(x, SHIFT)
        is_tie = (is_likely & (keys == key)).to(tl.int32)
        is_taken_tie = (is_tie > 0) & (ties_before + tl.cumsum(is_tie, axis=0) <= num_ties)
        weights = tl.where((is_likely & (keys > key)) | is_taken_tie, tl.exp(scaled), 0.0)
        total = tl.sum(weights, axis=0)
        found, _ = _locate(weights, target - before, token)
        chosen = tl.where((chosen < 0) & (before + total > target), found, chosen)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, token, 0), axis=0))
        before += total
        ties_before += tl.sum(is_tie, axis=0)
    return tl.where(chosen < 0, last, chosen)


@triton.jit
def _pick_filtered(
    logits, maxima_ptr, ids, maxima, sums, best, temperature, top_k, top_p, log_min_p, u, vocab_size, num_chunks,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    everything = tl.sum(sums * tl.exp(_scaled(maxima, best, temperature).to(tl.float64)), axis=0)
    bound = _lowest(maxima, best, temperature, top_k, top_p, log_min_p, everything, SHIFT)
    count = tl.full([], 0, tl.int32)
    for chunk in range(0, num_chunks):
        if _ordered(tl.load(maxima_ptr + chunk), SHIFT) >= bound:
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            is_candidate = ((_ordered(x, SHIFT) >= bound) & (token < vocab_size)).to(tl.int32)
            tl.store(ids + count + tl.cumsum(is_candidate, axis=0) - 1, token, mask=is_candidate > 0)
            count += tl.sum(is_candidate, axis=0)
    tl.debug_barrier()  # the rest reads what other threads of this program collected

    # The k-th largest: the highest key with at least k tokens at or above it.
    everyone = tl.full([], 0x7FFFFFFF, tl.int32)
    limit = tl.where(top_k > 0, top_k, everyone).to(tl.int32)
    low, high = bound, _ordered(best, SHIFT)
    while low < high:
        middle = _middle(low, high)
        num_above, num_at, _, _, _ = _tally(
            logits, ids, count, middle, everyone, best, temperature, log_min_p, SHIFT, CHUNK
        )
        is_enough = num_above + num_at >= limit
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    top_key = low
    num_above, num_at, mass, weight_at, _ = _tally(
        logits, ids, count, top_key, everyone, best, temperature, log_min_p, SHIFT, CHUNK
    )
    top_ties = tl.minimum(num_at, limit - num_above)
    kept_mass = mass + top_ties.to(tl.float64) * weight_at

    # The edge of the nucleus: the highest key with at least that mass at or above it.
    wanted = tl.where(top_p < 1, top_p, 2.0) * kept_mass
    low, high = top_key, _ordered(best, SHIFT)
    while low < high:
        middle = _middle(low, high)
        _, num_at, mass, weight_at, _ = _tally(
            logits, ids, count, middle, everyone, best, temperature, log_min_p, SHIFT, CHUNK
        )
        is_enough = mass + num_at.to(tl.float64) * weight_at >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    _, num_at, mass, weight_at, _ = _tally(
        logits, ids, count, low, everyone, best, temperature, log_min_p, SHIFT, CHUNK
    )
    most = tl.where(low == top_key, top_ties, num_at)
    needed = tl.ceil((wanted - mass) / tl.where(weight_at > 0, weight_at, 1.0))
    num_ties = tl.minimum(tl.maximum(needed, 1.0), most.to(tl.float64)).to(tl.int32)
    target = u * (mass + num_ties.to(tl.float64) * weight_at)
    return _draw(logits, ids, count, low, num_ties, best, temperature, log_min_p, target, SHIFT, CHUNK)


@triton.jit
def choose_kernel(
    logits_ptr, rows_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr,
    maxima_ptr, places_ptr, sums_ptr, ids_ptr, tokens_ptr, stride, vocab_size, num_chunks,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (row,). ``WIDTH`` is the power of two from ``num_chunks`` up."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(rows_ptr + row)
    chunk = tl.arange(0, WIDTH)
    here = row * num_chunks + chunk
    maxima = tl.load(maxima_ptr + here, mask=chunk < num_chunks, other=float("-inf"))
    best = tl.max(maxima, axis=0)
    temperature = tl.load(temperature_ptr + entry).to(tl.float32)
    top_k = tl.load(top_k_ptr + entry)
    logits = logits_ptr + row * stride
    if (temperature == 0) | (top_k == 1) | (tl.abs(best) == float("inf")) | (best != best):
        first = tl.min(tl.where(maxima == best, chunk, WIDTH - 1), axis=0)
        token = tl.load(places_ptr + row * num_chunks + tl.minimum(first, num_chunks - 1))
    else:
        u = uniform(tl.load(seed_ptr + entry), tl.load(positions_ptr + row))
        sums = tl.load(sums_ptr + here, mask=chunk < num_chunks, other=0.0).to(tl.float64)
        top_p, log_min_p = tl.load(top_p_ptr + entry), tl.load(log_min_p_ptr + entry)
        if (top_k > 0) | (top_p < 1) | (log_min_p > float("-inf")):
            token = _pick_filtered(
                logits, maxima_ptr + row * num_chunks, ids_ptr + row * vocab_size, maxima, sums, best, temperature,
                top_k, top_p, log_min_p, u, vocab_size, num_chunks, SHIFT, CHUNK,
            )  # fmt: skip
        else:
            token = _pick_unfiltered(logits, maxima, sums, best, temperature, u, vocab_size, CHUNK, WIDTH)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsTable:
    """The columns of the sampling table on the device, [num_entries] each.

    float64: ``temperature``, ``top_p``, ``log_min_p``; int64: ``top_k``, and ``seed``, whose 64 bits are unsigned.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seed: Tensor


def choose_tokens(logits: Tensor, rows: Tensor, positions: Tensor, table: SettingsTable) -> Tensor:
    """One token id (int64) a row of ``logits`` [num_rows, vocab_size].

    Row i is chosen by entry ``rows[i]`` of the table, for absolute position ``positions[i]``.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "rows are read from end to end"
    assert len(rows) == len(positions) == num_rows, "a row has an entry and a position"
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    places = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
    scan_kernel[(num_rows, num_chunks)](
        logits, rows, table.temperature, maxima, places, sums, logits.stride(0), vocab_size, num_chunks,
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    choose_kernel[(num_rows,)](
        logits, rows, positions, table.temperature, table.top_k, table.top_p, table.log_min_p, table.seed,
        maxima, places, sums, ids, tokens, logits.stride(0), vocab_size, num_chunks,
        SHIFT=_BITS[logits.dtype], CHUNK=CHUNK, WIDTH=triton.next_power_of_2(num_chunks), num_warps=4,
    )  # fmt: skip
    return tokens
