"""The mixture of experts of a feed-forward layer (Shazeer et al. 2017): a router picks a few experts for each token.

Invariant: a token's result is the sum over its own experts, best first, so neither which tokens share the step nor how
they are sorted shows in it (beyond what the product itself does with more rows).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nanoserve.model.config import MoEConfig
from nanoserve.model.kernels.base import Kernels
from nanoserve.model.quant.base import LinearMethod, PreparedLinear
from nanoserve.model.quant.experts import PreparedExperts, prepare_experts
from nanoserve.model.quant.none import NoQuantization
from nanoserve.model.share import WHOLE, Share
from nanoserve.model.slots import Slot, Slots


class Router:
    """Picks the best experts of each token; the loader fills ``weight`` [num_experts, hidden_size]."""

    def __init__(self, config: MoEConfig, hidden_size: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(config.num_experts, hidden_size, dtype=dtype)
        self._linear: PreparedLinear
        self._num_chosen = config.num_experts_per_token
        self._normalizes = config.normalizes_weights

    def prepare(self) -> None:
        """Takes full precision whatever the experts take: it is small, and its order decides."""
        self._linear = NoQuantization().prepare(self.weight, None)
        self.weight = self.weight[:0].clone()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, hidden_size] -> weights (float32) and expert ids, each [num_tokens, num_chosen], best first.

        Probabilities are those of a softmax over all experts in float32; normalised, the chosen ones add up to one.
        """
        probabilities = self._linear(x).softmax(dim=-1, dtype=torch.float32)
        weights, expert_ids = probabilities.topk(self._num_chosen, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if self._normalizes else weights), expert_ids


class ExpertLinear:
    """One or several projections of every expert, stacked; as :class:`Linear`, but for rows that come sorted by expert.

    ``parts`` maps a checkpoint's projection name to its number of output features, in order. On a rank of several it
    holds ``share`` of every expert's entries along ``axis`` (0: outputs, 1: inputs).
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: Mapping[str, int],
        *,
        dtype: torch.dtype,
        method: LinearMethod,
        axis: int = 0,
        share: Share = WHOLE,
    ) -> None:
        self._parts = dict(parts)
        self._axis, self._share = axis, share
        self._method = method
        self._weight: Tensor | None = torch.empty(num_experts, sum(parts.values()), in_features, dtype=dtype)
        self._prepared: PreparedExperts

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names and the memory they fill: ``{prefix}{expert}.{part}.weight``."""
        assert self._weight is not None, "the weight was already handed to its method"
        return {
            f"{prefix}{expert}.{part}.weight": Slot.of(view, self._axis, self._share)
            for expert, weight in enumerate(self._weight)
            for part, view in zip(self._parts, weight.split(list(self._parts.values())), strict=True)
        }

    def prepare(self) -> None:
        """Hands the loaded weights to the method and forgets them."""
        assert self._weight is not None, "prepared twice"
        self._prepared = prepare_experts(self._method, self._weight)
        self._weight = None

    @property
    def weight_bytes(self) -> int:
        return self._prepared.weight_bytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]; expert e's rows end before ``ends[e]``."""
        return self._prepared(rows, ends)


class SparseMoE:
    """Experts that are each ``down(silu(gate(x)) * up(x))``, weighted by the router."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        method: LinearMethod,
        kernels: Kernels,
        share: Share = WHOLE,
    ) -> None:
        """``share``: what ``config.intermediate_size`` is of every expert; the result is an addend then."""
        count, inner = config.num_experts, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate = Router(config, hidden_size, dtype)
        self.gate_up_proj = ExpertLinear(count, hidden_size, parts, dtype=dtype, method=method, share=share)
        down = {"down_proj": hidden_size}
        self.down_proj = ExpertLinear(count, inner, down, dtype=dtype, method=method, axis=1, share=share)
        self._silu_and_mul, self._weighted_sum = kernels.silu_and_mul, kernels.weighted_sum
        self._num_experts = count

    def slots(self, prefix: str) -> Slots:
        experts = f"{prefix}experts."
        router = {f"{prefix}gate.weight": Slot(self.gate.weight)}
        return router | self.gate_up_proj.slots(experts) | self.down_proj.slots(experts)

    def prepare(self) -> None:
        self.gate.prepare()
        self.gate_up_proj.prepare()
        self.down_proj.prepare()

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        weights, expert_ids = self.gate(x)
        num_chosen = expert_ids.shape[1]
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)
        # Not by counting: bincount waits for the device, and a captured graph must not.
        experts = torch.arange(self._num_experts, device=flat.device)
        ends = torch.searchsorted(flat[order], experts, right=True, out_int32=True)
        inner = self._silu_and_mul(self.gate_up_proj(x[order // num_chosen], ends))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return self._weighted_sum(self.down_proj(inner, ends), places.view_as(expert_ids), weights)
