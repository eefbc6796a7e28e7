"""Several ranks answer as one: tokens, scores and vectors, whatever is shared out; and what becomes of a lost rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import CheckpointError, ConfigError, EngineDeadError
from nanoserve.core.sampling import SamplingParams
from nanoserve.llm import LLM
from nanoserve.model.build import LoadedModel, build
from nanoserve.model.kernels.native import library
from nanoserve.model.parallel import group as group_module
from nanoserve.model.parallel.channel import Channel, Hello, Listener, Meeting, call
from nanoserve.model.parallel.launcher import ChildProcesses
from tests.checkpoints import save, sens_model, sens_moe_model
from tests.model.driver import Driver, Habits

HABITS = Habits(max_chunk=9, max_batch=3, preempt_one_in=7, reuse_prefixes=True, seed=5)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 12, [100, 200, 300], [7, 8, 9] * 12 + [44], [501], [13] * 90]
GREEDY = SamplingParams(temperature=0, max_tokens=20, seed=1, logprobs=2)
SCORED = SamplingParams(temperature=0, max_tokens=1, seed=1, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=20, seed=7)

needs_kernels = pytest.mark.skipif(library() is None, reason="Gloo joins ranks that have no native kernels")


def _plain() -> Any:
    return sens_model()


def _odd() -> Any:
    """A vocabulary that no number of ranks divides, tied to the output, and biases, which only one rank may add."""
    model = sens_model(509, seed=2, attention_bias=True, tie_word_embeddings=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(len(name)))
    return model


MODELS: dict[str, Callable[[], Any]] = {"plain": _plain, "odd": _odd, "moe": sens_moe_model}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save(MODELS[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def settings(folder: Path, **overrides: Any) -> EngineArgs:
    chosen: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory": "4MiB",
        "max_model_len": 256,
        "num_threads": 1,
    } | overrides
    return EngineArgs(model=str(folder), **chosen)


def answers(loaded: LoadedModel) -> tuple[list[list[int]], torch.Tensor]:
    """Token ids of all prompts, and log probabilities of the prompts and the greedy tokens."""
    params = [SAMPLED if index % 3 == 2 else GREEDY for index in range(len(PROMPTS))]
    try:
        requests = Driver(loaded, HABITS).run(PROMPTS, params)
        scored = Driver(loaded, Habits(max_chunk=70)).run(PROMPTS, [SCORED] * len(PROMPTS))
    finally:
        loaded.runner.close()
    entries = [entry for request in scored for entry in request.prompt_logprobs]
    entries += [entry for request in requests for entry in request.logprobs]
    return [request.token_ids for request in requests], torch.tensor([entry.logprob for entry in entries])


def children() -> list[int]:
    """Shards that are children of this process and have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            is_shard = b"nanoserve.model.parallel.shard" in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if is_shard and int(words[1]) == os.getpid() and words[0] != "Z":
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("plain", 2),
        ("odd", 4),
        pytest.param("plain", 4, marks=pytest.mark.slow),
        pytest.param("odd", 2, marks=pytest.mark.slow),
        ("moe", 2),
        pytest.param("moe", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_answer_as_one(folders: Callable[[str], Path], name: str, size: int) -> None:
    """Four ranks share two KV heads here, so two hold the same one."""
    alone = answers(build(settings(folders(name))))
    loaded = build(settings(folders(name), tensor_parallel_size=size))
    shared = answers(loaded)
    assert (loaded.info.tensor_parallel_size, loaded.info.num_parameters) == (size, _parameters(folders(name)))
    assert shared[0] == alone[0]
    torch.testing.assert_close(shared[1], alone[1], atol=2e-4, rtol=1e-3)
    assert children() == []


def _parameters(folder: Path) -> int:
    return build(settings(folder)).info.num_parameters


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_shares_are_quantized_as_well_as_the_whole(folders: Callable[[str], Path], quantization: str) -> None:
    """A share of the inputs has scales of its own, so numbers differ, but they are no worse."""
    exact = answers(build(settings(folders("plain"))))[1]
    errors = [
        (_first_scores(answers(build(settings(folders("plain"), quantization=quantization, **more)))[1], exact))
        for more in ({}, {"tensor_parallel_size": 2})
    ]
    assert 0 < errors[1] < 1.5 * errors[0]


def _first_scores(scores: torch.Tensor, exact: torch.Tensor) -> float:
    """The mean error over the first prompt, which no sampled token has touched."""
    count = len(PROMPTS[0]) - 1
    return float((scores[:count] - exact[:count]).abs().mean())


class OverTcp(ChildProcesses):
    """Shards that come as from another machine."""

    host = "127.0.0.1"

    def start(self, meeting: Meeting, num_ranks: int) -> None:
        super().start(Meeting(None, meeting.address, meeting.secret), num_ranks)


@pytest.mark.slow
def test_ranks_of_several_machines_answer_as_one(folders: Callable[[str], Path]) -> None:
    alone = answers(build(settings(folders("plain"))))
    loaded = build(settings(folders("plain"), tensor_parallel_size=2), OverTcp())
    assert loaded.info.collective == "gloo"
    assert answers(loaded)[0] == alone[0]
    assert children() == []
    with pytest.raises(ConfigError, match="`deterministic` with several ranks needs"):
        build(settings(folders("plain"), tensor_parallel_size=2, deterministic=True), OverTcp())
    assert children() == []


@needs_kernels
def test_the_offline_engine_shares_a_model_out(tmp_path: Path) -> None:
    """And its text, vectors and verdicts stay what they were."""
    found = []
    for size in (1, 2):
        chosen: dict[str, Any] = {"max_model_len": 256, "num_threads": 1, "speculation": "ngram"}
        with LLM("demo", dtype="float32", tensor_parallel_size=size, **chosen) as llm:
            params = SamplingParams(temperature=0, max_tokens=40)
            chat = llm.chat([{"role": "user", "content": "What is 12 + 7?"}], params, use_tqdm=False)
            vector = llm.embed(["a word", "another"], use_tqdm=False)[1].outputs.embedding
            found.append((chat[0].outputs[0].text, torch.tensor(vector)))
            assert len(children()) == size - 1
    assert found[0][0] == found[1][0]
    assert "19" in found[0][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-3)
    assert children() == []


def test_a_shard_reads_its_slices_alone(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoserve.model import loader

    reads: dict[str, int] = {}
    whole = loader._Stored.read

    def counted(self: Any, where: Any = None) -> torch.Tensor:
        tensor = whole(self, where)
        reads[self.name] = reads.get(self.name, 0) + tensor.numel()
        return tensor

    monkeypatch.setattr(loader._Stored, "read", counted)
    build(settings(folders("plain")))
    alone, reads = dict(reads), {}
    build(settings(folders("plain"), tensor_parallel_size=2)).runner.close()
    norms = {name for name in alone if "norm" in name}
    assert {name: count * (1 if name in norms else 2) for name, count in reads.items()} == alone


def test_a_checkpoint_of_other_shapes_is_refused_by_the_whole_shape(tmp_path: Path) -> None:
    folder = save(sens_model(), tmp_path)
    from tests.checkpoints import edit_config

    edit_config(folder, lambda raw: raw.update(intermediate_size=256))
    with pytest.raises(CheckpointError, match=r"has shape \[128, 64\]; config.json asks for \[256, 64\]"):
        build(settings(folder, tensor_parallel_size=2))
    assert children() == []


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("plain", 0, "must be >= 1. Given: 0."),
        ("plain", 3, "must divide the model's 4 attention heads. Given: 3."),
        ("plain", 8, "must divide the model's 4 attention heads. Given: 8."),
        ("moe", 32, "must divide the model's 4 attention heads. Given: 32."),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused_at_once(
    folders: Callable[[str], Path], name: str, size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=r"^`tensor_parallel_size` ") as caught:
        build(settings(folders(name), tensor_parallel_size=size))
    assert message in caught.value.message
    assert children() == []


# Losing a rank


@pytest.fixture
def llm(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(group_module, "SILENCE_S", 3.0)
    with LLM("demo", dtype="float32", max_model_len=256, num_threads=1, tensor_parallel_size=2) as llm:
        yield llm
    assert children() == []


@needs_kernels
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "shard 1 died"), (signal.SIGSTOP, r"shard 1 did not answer for \d s")]
)
def test_a_lost_shard_ends_the_engine_with_the_reason(llm: LLM, number: signal.Signals, reason: str) -> None:
    """In the middle of an answer: rank 0 waits in a sum, where nothing else would wake it."""
    params = SamplingParams(temperature=1.5, min_tokens=200, max_tokens=200, seed=1)
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    [shard] = children()
    seen = 0

    def lose(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            os.kill(shard, number)

    step = llm._core.step
    llm._core.step = lambda: (lose(), step())[1]  # type: ignore[method-assign, func-returns-value]
    began_s = time.monotonic()
    with pytest.raises(EngineDeadError, match=reason):
        llm.generate("once", params, use_tqdm=False)
    assert time.monotonic() - began_s < 30
    with pytest.raises(EngineDeadError, match=rf"The engine failed: {reason}; make a new LLM\."):
        llm.generate("again", params, use_tqdm=False)


_PROGRAM = """
import signal
from nanoserve import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit it ignored
llm = LLM("demo", max_model_len=256, num_threads=1, tensor_parallel_size=2)
print("ready", flush=True)
while True:
    llm.generate("a", SamplingParams(temperature=1.5, min_tokens=200, max_tokens=200), use_tqdm=False)
"""


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_shard_outlives_its_parent(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        check_end(process, number)
    finally:
        process.kill()


def check_end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    [shard] = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    if number is signal.SIGINT:  # as a terminal sends it: to the whole group
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.wait(20)
    assert b"shard" not in process.stderr.read().lower()  # type: ignore[union-attr]
    give_up_s = time.monotonic() + 10
    while Path(f"/proc/{shard}").exists():
        assert time.monotonic() < give_up_s, "the shard lives on"
        time.sleep(0.05)


def test_who_does_not_know_the_secret_is_turned_away() -> None:
    listener = Listener("127.0.0.1", "right")
    places = [listener.meeting, Meeting(None, listener.meeting.address, "right")]
    try:
        for place in places:
            stranger, friend = call(place), call(place)
            stranger.send(Hello(1, "wrong", True))
            friend.send(Hello(2, "right", True))
            callers = [listener.accept() for _ in range(2)]
            assert [caller and caller.hello.rank for caller in callers] == [None, 2]
            assert stranger.receive() is None
            for channel in (stranger, friend, *[caller.channel for caller in callers if caller]):
                channel.close()
        assert listener.accept() is None
    finally:
        listener.close()


def test_a_frame_in_pieces_is_one_message_and_two_in_one_piece_are_two() -> None:
    import socket

    left, right = socket.socketpair()
    sender, receiver = Channel(left), Channel(right)
    hello = Hello(3, "secret", False)
    sender.send(hello)
    frame = right.recv(100)
    for byte in frame[:-1]:
        left.send(bytes([byte]))
        assert receiver.receive() == []
    left.send(frame[-1:] + frame + frame)
    assert receiver.receive() == [hello, hello, hello]
    sender.close()
    assert receiver.receive() is None
    receiver.close()
