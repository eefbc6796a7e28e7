"""The FlashAttention backend over stand-ins of each release: right results, and right reasons for what it takes."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanoserve.core.errors import ConfigError
from nanoserve.model.attention import choose_backend, flash_attn
from nanoserve.model.attention.flash_attn import FlashAttention
from tests.model.kernels.interpreted import fake_flash_attn
from tests.model.test_attention import check, spec

MIXED = [(9, 1), (0, 6), (10, 5), (2, 1), (0, 3)]


@pytest.fixture(autouse=True)
def _ours_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time of each phase is that of the Triton kernels."""

    def seconds(self: Any, call: Callable[[], object] | None) -> float:
        return 2.0 if call is None else 1.0

    monkeypatch.setattr(flash_attn._Trial, "seconds", seconds)


@pytest.mark.parametrize(
    "modules, block_size, taken",
    [
        (["flash_attn"], 256, {"prefill": "2", "prefix": "2", "decode": "2"}),
        (["flash_attn"], 16, {"prefill": "2", "prefix": "", "decode": ""}),
        (["flash_attn_interface"], 16, {"prefill": "3", "prefix": "3", "decode": "3"}),
        (["flash_attn.cute"], 16, {"prefill": "4", "prefix": "4", "decode": ""}),
    ],
)
def test_each_release(
    modules: list[str], block_size: int, taken: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flash_attn.install(monkeypatch, *modules)
    wanted = spec(dtype=torch.float16, block_size=block_size)
    check("flash_attn", wanted, MIXED, seed=3, atol=5e-3)
    backend = FlashAttention(wanted)
    names = {phase: name for phase, (name, _) in backend._chosen.items()}
    assert names == {phase: f"flash-attn {number}" if number else "triton" for phase, number in taken.items()}


def test_one_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_flash_attn.install(monkeypatch, "flash_attn_interface")
    module = sys.modules["flash_attn_interface"]
    original = module.flash_attn_varlen_func
    monkeypatch.setattr(module, "flash_attn_varlen_func", lambda q, *rest, **named: original(-q, *rest, **named))
    monkeypatch.delattr(module, "flash_attn_with_kvcache")
    monkeypatch.setattr(module, "flash_attn_with_kvcache", _broken, raising=False)
    with caplog.at_level("INFO", "nanoserve"):
        backend = FlashAttention(spec(dtype=torch.float16))
    assert {name for name, _ in backend._chosen.values()} == {"triton"}
    assert "differs from our own kernels" in caplog.text
    assert "no kernel image" in caplog.text


def _broken(*given: Any, **named: Any) -> None:
    raise RuntimeError("no kernel image is available")


def test_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_flash_attn.install(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(flash_attn._Trial, "seconds", lambda self, call: 1e-6 if call is None else 2e-6)
    with caplog.at_level("INFO", "nanoserve"):
        backend = FlashAttention(spec(dtype=torch.float16))
    assert {name for name, _ in backend._chosen.values()} == {"triton"}
    assert "flash-attn 3: 2 us" in caplog.text


def test_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash_attn.install(monkeypatch, "flash_attn_interface")
    made: list[FlashAttention] = []
    original = FlashAttention.__init__

    def remember(self: FlashAttention, given: Any) -> None:
        original(self, given)
        made.append(self)

    monkeypatch.setattr(FlashAttention, "__init__", remember)
    check("flash_attn", spec(dtype=torch.float16), [(9, 1), (0, 6)], seed=3, atol=5e-3)
    assert made[0].num_calls["decode", "flash-attn 3"] == 1
    assert made[0].num_calls["prefill", "flash-attn 3"] == 2


def test_without_any_release_it_cannot_be_forced() -> None:
    with pytest.raises(ConfigError, match="flash-attn is not installed"):
        choose_backend("flash_attn", spec(dtype=torch.float16))
