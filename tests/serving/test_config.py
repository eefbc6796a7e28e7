"""The builder's arguments: flat, typed, and wrong in one sentence."""

import dataclasses
from typing import Any

import pytest

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError
from nanoserve.serving.config import ServingArgs, deployment_name


def test_engine_settings_stand_beside_the_others() -> None:
    args = ServingArgs.model_validate({"model": "folder", "max_num_seqs": 8, "num_replicas": 2, "api_keys": ["k"]})
    assert args.engine == EngineArgs(model="folder", max_num_seqs=8)
    assert (args.num_replicas, args.api_keys) == (2, ("k",))


def test_without_arguments_it_is_one_demo_engine() -> None:
    args = ServingArgs.model_validate({})
    assert args.engine == EngineArgs()
    assert (args.num_replicas, args.num_routers, args.min_replicas) == (1, 1, None)


def test_no_setting_means_two_things() -> None:
    own = set(ServingArgs.model_fields)
    assert not own & {field.name for field in dataclasses.fields(EngineArgs)}


def test_several_models_each_have_their_own_settings_and_deployment() -> None:
    args = ServingArgs.model_validate(
        {"models": [{"model": "org/a", "num_replicas": 2}, {"model": "b", "served_model_name": "x"}], "num_routers": 2}
    )
    assert [model.name for model in args.served] == ["org/a", "x"]
    assert [model.num_replicas for model in args.served] == [2, 1]
    assert [deployment_name(args, model) for model in args.served] == ["Engine:org-a", "Engine:x"]
    alone = ServingArgs.model_validate({"model": "a"})
    assert [deployment_name(alone, model) for model in alone.served] == ["Engine"]


@pytest.mark.parametrize("names", [("a", "a"), ("org/a", "org-a")])
def test_two_models_cannot_have_one_name(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="twice"):
        ServingArgs.model_validate({"models": [{"model": name} for name in names]})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"modle": "demo"}, "modle"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"min_replicas": 1}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas"),
        ({"api_keys": [""]}, "api_keys"),
        ({"drain_s": -1}, "drain_s"),
        (["model"], "args"),
        ({"models": [{"model": "a"}, {"modle": "b"}]}, "modle"),
        ({"models": [{"model": "a", "drain_s": 3}]}, "drain_s"),
        ({"models": [{"model": "a"}], "max_num_seqs": 3}, "engine"),
        ({"models": [{"model": "a"}], "num_replicas": 3}, "num_replicas"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(given: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServingArgs.model_validate(given)
    assert f"`{named}`" in caught.value.message
    assert "\n" not in caught.value.message
