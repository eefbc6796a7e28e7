"""8-bit floating weights: what they mean, what stays as it is, and how far a model's answers move."""

from pathlib import Path

import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.build import build
from nanoserve.model.quant import linear_method
from nanoserve.model.quant.fp8 import Float8Linear, quantize
from tests import checkpoints
from tests.model.driver import Driver, Habits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_quantized_operands(dtype: torch.dtype, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=generator).to(dtype) for n in (48, 5))
    weight[3] *= 1000
    x[1] = 0
    bias = torch.randn(48, generator=generator).to(dtype) if has_bias else None
    linear = Float8Linear(weight, bias)
    (x_values, x_scales), (w_values, w_scales) = quantize(x), quantize(weight)
    exact = (x_values.double() * x_scales) @ (w_values.double() * w_scales).T
    exact = exact if bias is None else exact + bias.double()
    error = (linear(x).double() - exact).norm(dim=0) / exact.norm(dim=0)
    assert error.max() < 1e-2
    assert linear.weight_bytes == 48 * 64 + 48 * 4


def test_rows_are_those_of_the_quantized_weight() -> None:
    weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = Float8Linear(weight, None).rows(torch.tensor([31, 0, 0]))
    assert ((rows - weight[[31, 0, 0]]).norm() / weight.norm()) < 0.04
    assert torch.equal(rows[1], rows[2])


def test_sizes_that_the_product_does_not_take_keep_full_precision() -> None:
    weight, x = torch.randn(3, 20), torch.randn(2, 20)
    torch.testing.assert_close(linear_method("fp8").prepare(weight, None)(x), x @ weight.T)


def test_log_probabilities_stay_close(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.sens_model(seed=2), tmp_path)
    prompt = list(range(40, 90))
    params = SamplingParams(max_tokens=1, temperature=0, seed=0, prompt_logprobs=0)
    found = {}
    for method in ("none", "fp8"):
        loaded = build(EngineArgs(model=str(folder), quantization=method, kv_cache_memory="1MiB"))
        (result,) = Driver(loaded, Habits()).run([prompt], [params])
        found[method] = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    error = (found["fp8"] - found["none"]).norm() / found["none"].norm()
    assert 0 < error < 0.1


def test_rows_in_other_company_may_differ_in_their_last_bits_so_deterministic_refuses(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.sens_model(), tmp_path)
    with pytest.raises(ConfigError, match="deterministic"):
        build(EngineArgs(model=str(folder), quantization="fp8", deterministic=True))
