"""Native kernels in every level that this machine can run."""

import pytest

from nanoserve.core.errors import ConfigError
from nanoserve.model.kernels.native import dispatch
from nanoserve.model.kernels.native.build import LEVELS


@pytest.fixture(params=list(LEVELS))
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dispatch.Library:
    """The kernels of one level, which :func:`dispatch.library` also gives during the test."""
    monkeypatch.setenv(dispatch.VARIABLE, request.param)
    try:
        chosen = dispatch.library()
    except ConfigError as error:
        pytest.skip(error.message)
    assert chosen is not None
    return chosen
