"""The index against the obvious one: a set of keys a replica."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.outputs import StepStats
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.routing.kv_index import KVIndex, PrefixChain
from nanoserve.scheduler.scheduler import Scheduler

REPLICAS = ["a", "b", "c"]


def chain(token_ids: Iterable[int], block_size: int = 2, salts: tuple[str, ...] = ("m", "", "")) -> PrefixChain:
    return PrefixChain(tuple(token_ids), block_size=block_size, salts=salts)


class Index(RuleBasedStateMachine):
    """Two tokens and short prompts, so that prefixes collide all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KVIndex()
        self.held: dict[str, set[int]] = {}
        self.expected: dict[str, Counter[int]] = {}
        self.sent: list[tuple[str, list[int]]] = []

    replicas = st.sampled_from(REPLICAS)
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)

    @rule(replica=replicas, prompts=st.lists(prompts, max_size=3))
    def reset(self, replica: str, prompts: list[list[int]]) -> None:
        blocks = {key for prompt in prompts for key in chain(prompt)}
        self.index.reset(replica, list(blocks))
        self.held[replica] = blocks
        self.expected[replica] = Counter()
        self.sent = [one for one in self.sent if one[0] != replica]

    @rule(replica=replicas)
    def forget(self, replica: str) -> None:
        self.index.forget(replica)
        self.held.pop(replica, None)
        self.expected.pop(replica, None)
        self.sent = [one for one in self.sent if one[0] != replica]

    @rule(replica=replicas, published=prompts, evicted=prompts, cut=st.integers(0, 3))
    def update(self, replica: str, published: list[int], evicted: list[int], cut: int) -> None:
        gone, come = list(chain(evicted))[cut:], list(chain(published))
        self.index.update(replica, come, gone)
        if replica in self.held:
            self.held[replica] = (self.held[replica] - set(gone)) | set(come)

    @rule(replica=replicas, prompt=prompts)
    def expect(self, replica: str, prompt: list[int]) -> None:
        keys = list(chain(prompt))
        self.index.expect(replica, keys)
        if replica in self.held:
            self.expected[replica].update(keys)
            self.sent.append((replica, keys))

    @rule(number=st.integers(0, 20))
    def settle(self, number: int) -> None:
        if self.sent:
            replica, keys = self.sent.pop(number % len(self.sent))
            self.index.settle(replica, keys)
            self.expected[replica].subtract(keys)

    @invariant()
    def finds_what_sets_find(self) -> None:
        for prompt in ([0] * 9, [1] * 7, [0, 0, 1, 1, 0, 0, 1], [0, 1] * 4, [1]):
            assert self.index.hit_tokens(chain(prompt)) == self._plainly(chain(prompt))

    def _plainly(self, chain: PrefixChain) -> dict[str, int]:
        found = {}
        for replica, held in self.held.items():
            depth = 0
            for key in chain:
                if key not in held and self.expected[replica][key] <= 0:
                    break
                depth += 1
            if depth:
                found[replica] = depth * chain.block_size
        return found


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_doors_name_blocks_as_engines_do() -> None:
    prompt = tuple(range(13))
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, block_size=4), cache_salt="m")
    told = run(scheduler, "a", prompt)
    assert list(chain(prompt, 4)) == list(told.blocks_published)
    assert len(told.blocks_published) == 3


@pytest.mark.parametrize("salts", [("other", "", ""), ("m", "adapter", ""), ("m", "", "tenant")])
def test_another_model_adapter_or_tenant_shares_nothing(salts: tuple[str, ...]) -> None:
    assert not set(chain(range(9))) & set(chain(range(9), salts=salts))


def test_the_last_token_is_never_a_hit() -> None:
    assert [len(chain(range(length))) for length in (0, 1, 2, 3, 4, 5)] == [0, 0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(1, 8))
def test_a_chain_says_the_same_twice_and_shares_prefixes(token_ids: list[int], block_size: int) -> None:
    whole = chain(token_ids, block_size)
    assert list(whole) == list(whole)
    half = chain(token_ids[: len(token_ids) // 2 + 1], block_size)
    assert list(half) == list(whole)[: len(half)]


def run(scheduler: Scheduler, name: str, prompt: tuple[int, ...]) -> StepStats:
    """Answers one request of one token in one step."""
    sampling = SamplingParams(max_tokens=1, seed=0)
    scheduler.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    plan = scheduler.schedule()
    sampled = {one.request_id: SampledTokens((9,)) for one in plan.scheduled}
    scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled=sampled))
    return scheduler.stats()


def test_a_steps_evictions_come_before_what_takes_their_place() -> None:
    """The same block may come back in the step that threw it out."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=2, block_size=2, max_num_seqs=1))
    index = KVIndex()
    index.reset("a", ())
    for number in range(6):
        told = run(scheduler, f"r{number}", (1, 2, 3) if number % 2 else (4, 5, 6))
        index.update("a", told.blocks_published, told.blocks_evicted)
        assert index.num_blocks("a") == told.num_cached_blocks
