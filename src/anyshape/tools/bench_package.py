"""The benchmarks, a package of their own (`anyshape_bench`): the one place where this package imports it, lazily."""
from __future__ import annotations

import importlib
import sys
from types import ModuleType

from anyshape.base.errors import ConfigError

NAME = "anyshape_bench"


def bench_package(module: str = "") -> ModuleType:
    """The package, or one of its modules: `bench_package("models.suite")`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(f"{NAME}.{module}".rstrip("."))
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        raise ConfigError(
            "the benchmarks are not installed", where=f"Python at {sys.executable}",
            why=f"they are a package of their own, {NAME}, which is not there",
            do="pip install 'anyshape[bench]', or in a checkout pip install -e '.[bench]'") from error
