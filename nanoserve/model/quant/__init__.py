"""Ways to store and multiply linear weights; one file and one table line each."""

from functools import partial

from nanoserve.core.errors import ConfigError
from nanoserve.model.quant.base import LinearMethod, LinearMethodFactory
from nanoserve.model.quant.fp8 import Float8Weights
from nanoserve.model.quant.integer import IntegerWeights
from nanoserve.model.quant.none import NoQuantization

LINEAR_METHODS: dict[str, LinearMethodFactory] = {
    "none": NoQuantization,
    "int8": partial(IntegerWeights, 8),
    "int4": partial(IntegerWeights, 4),
    "fp8": Float8Weights,
}


def linear_method(name: str) -> LinearMethod:
    """The method behind ``--quantization name``.

    Raises:
        ConfigError: there is no such method.
    """
    if name not in LINEAR_METHODS:
        raise ConfigError(
            f"`quantization` {name!r} is not built yet; choose from: {', '.join(LINEAR_METHODS)}.", param="quantization"
        )
    return LINEAR_METHODS[name]()
