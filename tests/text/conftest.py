"""One small tokenizer for all tests of words."""

import pytest

from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.preprocess import ModelLimits, Preprocessor
from nanoserve.text.tokenizer import Tokenizer
from tests.text.small_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def pieces(tokenizer: Tokenizer) -> dict[bytes, int]:
    """bytes -> id of the ordinary tokens."""
    plain = [i for i in range(tokenizer.num_tokens) if tokenizer.token_bytes(i)[:1] != b"<"]
    return {tokenizer.token_bytes(i): i for i in plain} | {b"<": tokenizer.encode("<", allow_special=False)[0]}


@pytest.fixture(scope="session")
def limits(tokenizer: Tokenizer) -> ModelLimits:
    """Eight more embedding rows than tokens, as real checkpoints have padding rows."""
    return ModelLimits(max_model_len=512, vocab_size=tokenizer.num_tokens + 8, max_kv_tokens=4096)


@pytest.fixture(scope="session")
def preprocessor(tokenizer: Tokenizer, limits: ModelLimits) -> Preprocessor:
    eos = tuple(i for i in (tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")) if i is not None)
    return Preprocessor(tokenizer, limits, GenerationDefaults(eos_token_ids=eos))
