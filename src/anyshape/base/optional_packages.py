"""Optional dependencies: what is said where a package that an extra of this one brings is not installed."""
from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from anyshape.base.errors import ConfigError

# package -> the extra of pyproject.toml that brings it
EXTRAS = {
    "torch": "torch", "llvmlite": "torch", "rich": "torch", "onnx": "onnx", "jax": "jax", "jaxlib": "jax",
    "triton": "gpu", "highspy": "plan", "transformers": "bench", "matplotlib": "demo", "tokenizers": "demo",
    "safetensors": "demo", "tensorflow": "tensorflow", "keras": "tensorflow",
    "starlette": "serve", "uvicorn": "serve", "prometheus_client": "serve",
}  # fmt: skip


class MissingPackage(ConfigError):
    """A package is not installed. package: its name. extra: what brings it."""

    def __init__(self, who: str, package: str, extra: str) -> None:
        super().__init__(f"{who} needs the package {package}", where="this environment", why="it is not installed",
                         do=f"pip install 'anyshape[{extra}]'")
        self.package, self.extra = package, extra


@contextmanager
def needed_by(who: str, extra: str = "") -> Iterator[None]:
    """Around imports: a package of an extra that is missing becomes an error that says what to install. Where imports
    are within imports, it names what the user called.

    Args:
        who: needs it, for the message.
        extra: to install; that of the package when left out.

    Raises:
        MissingPackage: a package of EXTRAS is not installed.
    """
    try:
        yield
    except MissingPackage as error:
        raise MissingPackage(who, error.package, extra or error.extra) from error.__cause__
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingPackage(who, package, extra or EXTRAS[package]) from error


def check_picture() -> None:
    """Whether a report can be written as a picture.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a picture needs the package matplotlib", why="it is not installed",
                          do="pip install matplotlib, or write the report as .html or .json")
