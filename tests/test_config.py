"""Settings are checked where they are made: each field's type and range, each name, in errors of four parts."""
from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import anyshape
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError

FIELDS = {knob.name: knob for knob in fields(Config)}


def refused(**settings: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    with pytest.raises(ConfigError) as also:
        Config().replace(**settings)
    with pytest.raises(ConfigError) as third:
        Config.make(**settings)
    assert str(caught.value) == str(also.value) == str(third.value)
    assert caught.value.why and caught.value.do
    return caught.value


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_another_type_is_refused(name: str) -> None:
    kind = type(FIELDS[name].default)
    wrong: tuple[object, ...] = {bool: (1, "yes", None), int: (True, "many", 0.5, [1], 10**30, -1),
                                 str: (3, b"folder", None, "a\0b")}[kind]
    for value in wrong:
        assert refused(**{name: value}).what.startswith(f"setting {name} is ")


@pytest.mark.parametrize("name", FIELDS)
def test_the_default_is_a_value(name: str) -> None:
    default = FIELDS[name].default
    assert getattr(Config(**{name: default}), name) == default


@pytest.mark.parametrize("given, near", (("memory_limits", "memory_limit"), ("tretads", "threads"),
                                         ("Strict", "strict"), ("fulgraph", "fullgraph"), ("product", "products")))
def test_a_misspelt_name_gives_the_nearest(given: str, near: str) -> None:
    error = refused(**{given: 1})
    assert error.what == f"unknown setting {given!r}" and error.do.endswith(f"perhaps {near}") and near in error.why


def test_names_of_torch_compile_are_explained() -> None:
    assert "there is one mode" in refused(mode="max-autotune").do
    assert "perhaps library" in refused(products="librari").do


def test_values_have_one_form() -> None:
    config = Config(memory_limit="1.5GiB", cache_dir=Path("folder"), threads=np.int64(3), memory_store_limit=None)
    assert (config.memory_limit, config.cache_dir, config.threads) == (3 << 29, "folder", 3)
    assert type(config.threads) is int and config.memory_store_limit == 0
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config) == config.replace()
    assert config.replace(check=2) == Config(memory_limit=3 << 29, cache_dir="folder", threads=3, check=2)


def test_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYSHAPE_CHECK", "3")
    with pytest.raises(ConfigError, match="at most 2"):
        Config.make()
    assert Config.make(check=1).check == 1
    assert anyshape.Config(check=0).check == 0  # without the environment
