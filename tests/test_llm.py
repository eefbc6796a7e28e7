"""The offline engine, used as its users use it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from nanoserve.core.sampling import StructuredOutputs
from nanoserve.llm import GenerationResult, Prompt
from tests.cases.rig import Rig
from tests.pooling_checkpoints import Saved, write, write_recipe

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def folder(rig: Rig) -> Path:
    return rig.sens()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_model_len=256, kv_cache_memory="1MiB", max_num_seqs=8, max_queued_requests=4) as llm:
        yield llm


def texts(results: list[GenerationResult]) -> list[str]:
    return [result.outputs[0].text for result in results]


def test_results_keep_the_order_of_prompts_of_every_kind(llm: LLM) -> None:
    prompts: list[Prompt] = ["one two", {"prompt_token_ids": [5, 6, 7]}, [8, 9], {"prompt": "three"}]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [result.prompt for result in results] == ["one two", None, None, "three"]
    assert results[1].prompt_token_ids == (5, 6, 7)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    assert [result.outputs[0].token_ids for result in results] == [output.token_ids for output in alone]
    assert len({output.token_ids for output in alone}) == 4, "different prompts must give different answers here"
    assert all(len(output.token_ids) == 12 and output.finish_reason == "length" for output in alone)


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    results = llm.generate([[i + 1, i + 2] for i in range(40)], GREEDY, use_tqdm=False)
    assert len(results) == 40
    assert texts(results)[7] == texts(llm.generate([[8, 9]], GREEDY, use_tqdm=False))[0]


def test_each_prompt_may_have_its_own_settings(llm: LLM) -> None:
    one, two = SamplingParams(temperature=0, max_tokens=1), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    results = llm.generate([[5], [5]], [one, two], use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 2]
    with pytest.raises(InvalidRequestError, match="one a prompt"):
        llm.generate([[5], [5]], [one], use_tqdm=False)


def test_n_answers_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1, seed=7, max_tokens=10, ignore_eos=True)
    first, again = (llm.generate([[5, 6]], params, use_tqdm=False)[0] for _ in range(2))
    assert [output.token_ids for output in first.outputs] == [output.token_ids for output in again.outputs]
    assert len({output.token_ids for output in first.outputs}) == 3
    unseeded = llm.generate([[5, 6]], SamplingParams(max_tokens=10, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    repeat = SamplingParams(max_tokens=10, ignore_eos=True, seed=unseeded.seed)
    assert llm.generate([[5, 6]], repeat, use_tqdm=False)[0].outputs[0].token_ids == unseeded.token_ids


def test_the_engine_seed_makes_unseeded_calls_repeatable(folder: Path) -> None:
    def run(seed: int) -> list[str]:
        with LLM(str(folder), max_model_len=64, kv_cache_memory="1MiB", seed=seed) as llm:
            return texts(llm.generate([[5], [5]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False))

    assert run(1) == run(1) != run(2)


def test_logprobs_are_as_in_vllm(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    result = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]
    output = result.outputs[0]
    assert output.logprobs is not None
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry[token_id].rank == 1
        assert entry[token_id].logprob == max(choice.logprob for choice in entry.values())
    assert output.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
    )
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [6 in (result.prompt_logprobs[1] or {}), 7 in (result.prompt_logprobs[2] or {})] == [True, True]


def test_a_stop_string_ends_the_answer_and_the_engine_work(llm: LLM) -> None:
    text = texts(llm.generate([[5, 6]], GREEDY, use_tqdm=False))[0]
    stop = text[3:5]
    result = llm.generate(
        [[5, 6]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop), use_tqdm=False
    )
    output = result[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_chat_and_its_stream_agree(rig: Rig) -> None:
    script, _ = rig.script("<think>\nweigh both options\n</think>\n\nPick the second one.")
    messages = [{"role": "user", "content": "say it"}]
    with LLM(str(script), kv_cache_memory="1MiB", max_model_len=256) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=64)
        text = texts(llm.chat(messages, greedy, use_tqdm=False))[0]
        assert text == "<think>\nweigh both options\n</think>\n\nPick the second one."
        assert texts(llm.chat([messages, messages], greedy, use_tqdm=False)) == [text, text]
        deltas = list(llm.stream_chat(messages, greedy))
        assert "".join(delta.reasoning for delta in deltas) == "weigh both options"
        assert "".join(delta.content for delta in deltas) == "Pick the second one."
        next(iter(llm.stream_chat(messages, greedy))), "left early: the next call must not see its tokens"
        assert texts(llm.chat(messages, greedy, use_tqdm=False)) == [text]


@pytest.mark.parametrize("seed", range(4))
def test_structured_outputs_bind_whatever_the_weights_want(llm: LLM, seed: int) -> None:
    spec = StructuredOutputs(choice=("yes", "no"))
    params = SamplingParams(max_tokens=20, seed=seed, structured_outputs=spec)
    assert texts(llm.generate([[5, 6]], params, use_tqdm=False))[0] in ("yes", "no")


def test_mistakes_are_one_sentence(llm: LLM, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no setting `max_len`"):
        LLM(str(folder), max_len=3)
    with pytest.raises(ConfigError, match=r"nowhere"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidRequestError, match="context"):
        llm.generate([list(range(300))], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["fine", ""], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="token ids"):
        llm.generate([[1, 10**9]], GREEDY, use_tqdm=False)


def test_after_shutdown_a_call_says_so(folder: Path) -> None:
    llm = LLM(str(folder), max_model_len=64, kv_cache_memory="1MiB")
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([[1]], GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return write(tmp_path_factory.mktemp("pooling"), "causal", seed=8)


def test_embed_and_score_equal_transformers(saved: Saved) -> None:
    with LLM(str(saved.folder), max_model_len=256, kv_cache_memory="512KiB", max_queued_requests=4) as llm:
        prompts: list[Prompt] = ["hello world", [5, 6, 7], {"prompt": "say it"}]
        results = llm.embed(prompts * 5, dimensions=20, use_tqdm=False)
        assert len(results) == 15
        for result in results:
            assert result.outputs.embedding == pytest.approx(saved.embed(result.prompt_token_ids, 20), abs=2e-5)
        assert results[1].prompt_token_ids == (5, 6, 7)
        [instructed] = llm.embed("hello", instruction="Find it", use_tqdm=False)
        [written] = llm.embed("Instruct: Find it\nQuery:hello", use_tqdm=False)
        assert instructed.prompt_token_ids == written.prompt_token_ids
        scored = llm.score("quick", ["fox", "dog"], use_tqdm=False)
        assert [s.outputs.score for s in scored] == pytest.approx([saved.judge(s.prompt_token_ids) for s in scored])
        assert len(llm.score(["a", "b"], ["c", "d"], use_tqdm=False)) == 2
        assert llm.generate([5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids, "and it still writes"
        for call in (lambda: llm.embed([]), lambda: llm.embed([[5], []]), lambda: llm.score("a", [])):
            with pytest.raises(InvalidRequestError):
                call()
        with pytest.raises(InvalidRequestError, match="at most"):
            llm.embed("7" * 300)


@pytest.mark.slow
def test_embed_equals_sentence_transformers(tmp_path: Path) -> None:
    peer = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    saved = write(tmp_path, "published", seed=9)
    write_recipe(saved.folder)
    texts = ["hello world", "naïve café", "<|im_end|> odd"]
    model = peer.SentenceTransformer(str(saved.folder), device="cpu")
    cases: list[dict[str, Any]] = [{}, {"prompt_name": "query"}]
    with LLM(str(saved.folder), kv_cache_memory="1MiB") as llm:
        for fields in cases:
            results = llm.embed(texts, use_tqdm=False, **fields)
            for result, vector in zip(results, model.encode(texts, **fields).tolist(), strict=True):
                assert result.outputs.embedding == pytest.approx(vector, abs=2e-5)


def test_an_embedding_checkpoint_writes_nothing(tmp_path: Path) -> None:
    with LLM(str(write(tmp_path, "published").folder), kv_cache_memory="1MiB") as llm:
        assert len(llm.embed("hello", use_tqdm=False)[0].outputs.embedding) == 64
        with pytest.raises(InvalidRequestError, match="writes no text"):
            llm.generate("hello")


@pytest.mark.parametrize("prompts", [None, 5, [None], b"bytes", [b"bytes"], [{"prompt": 5}]])
def test_what_is_no_prompt_is_refused_in_words(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be text, token ids"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("settings", [{"temperature": 0}, "hot", 5])
def test_what_are_no_settings_is_refused_in_words(llm: LLM, settings: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        llm.generate(["a"], settings, use_tqdm=False)


@pytest.mark.parametrize("messages", ["hi", None, ["hi"], [5], [[5]]])
def test_what_is_no_conversation_is_refused_in_words(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="list of messages"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [[i + 1, i + 2, i + 3] for i in range(6)]
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: llm.generate([prompt], GREEDY, use_tqdm=False)[0], prompts))
    assert [result.outputs[0].token_ids for result in together] == alone
