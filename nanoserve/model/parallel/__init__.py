"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"): one network over several processes, the ranks.

Each rank holds a share of every layer and computes the same step; sums over the ranks make whole results of that.
Rank 0 plans, samples and answers; the other ranks, the shards, follow its plans (``group``, ``shard``). Every rank
holds the same hidden states to the last bit, so what depends on them alone, like the choice of experts, needs no talk.
"""

from nanoserve.model.parallel.collective import ALONE, Collective

__all__ = ["ALONE", "Collective"]
