"""The command `anyshape`. A subcommand's module is imported when it is asked for, so that --help comes at once."""
from __future__ import annotations

import argparse
import importlib
import io
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from types import ModuleType

from anyshape import __version__
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape.base.optional_packages import needed_by
from anyshape.base.units import bytes_text
from anyshape.tools.bench_package import bench_package

# name -> (module with add_arguments and main, help); of cache and version there is none, bench_package has bench's
COMMANDS = {
    "demo": ("anyshape.tools.demo", "train a small language model on batches of every shape"),
    "bench": ("", "compare with eager PyTorch and Inductor"),
    "explain": ("anyshape.tools.explain", "compile a program and say what was decided"),
    "report": ("anyshape.tools.report", "write the memory of a model, step by step, as a page, a picture or data"),
    "strategy": ("anyshape.tools.strategy", "search how to train a model on many devices, and say why"),
    "repro": ("anyshape.tools.repro", "run a program that failed to compile again"),
    "opt": ("anyshape.tools.opt", "run passes over the text form of a graph"),
    "compile": ("anyshape.tools.deploy_compile", "compile an ONNX or TensorFlow model to a file to deploy"),
    "check": ("anyshape.tools.deploy_check", "say what a deployed file holds, and whether it is as it was saved"),
    "run": ("anyshape.tools.deploy_run", "run a deployed file on arrays of numpy"),
    "serve": ("anyshape.tools.serve.command", "answer requests for deployed files over HTTP"),
    "machine": ("anyshape.tools.machine", "show which routines multiply on this machine, and what was measured"),
    "cache": ("", "show, prune or clear the compiled code kept on disk"),
    "version": ("", "versions of everything a result depends on"),
}

INTERRUPTED = 130  # what shells give for Ctrl-C: 128 and the number of the signal


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `anyshape ...`; returns the exit code: 0 done, 1 failed with a message, 2 wrong arguments, 130
    interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be what the terminal cannot show
    name = next((word for word in given if word in COMMANDS), "")
    parser = argparse.ArgumentParser("anyshape", description="A compiler and runtime for PyTorch programs whose shapes "
                                                             "change from call to call.",
                                     epilog="anyshape COMMAND --help says what a command takes.")
    parser.add_argument("--version", action="version", version=f"anyshape {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    try:
        for command, (module, text) in COMMANDS.items():
            sub = commands.add_parser(command, help=text, description=text[0].upper() + text[1:] + ".")
            if command == "cache":
                _cache_arguments(sub)
            elif command == name and command != "version":
                with _needed(command):
                    _module(module).add_arguments(sub)
        parsed = parser.parse_args(given)
        if parsed.command == "cache":
            return _cache(parsed)
        if parsed.command == "version":
            return _version()
        with _needed(parsed.command):
            return int(_module(COMMANDS[parsed.command][0]).main(parsed))
    except AnyShapeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a disk that is full, a folder that may not be written
        print("error: " + str(ConfigError(f"anyshape {name} ended", where=str(error.filename or "its output"),
                                          why=str(error.strerror or error),
                                          do="free some space, or name another place")), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"anyshape {name} was interrupted", file=sys.stderr)
        return INTERRUPTED


def _needed(command: str) -> AbstractContextManager[None]:
    """Around what may import a package that is not there; two commands have extras of their own."""
    return needed_by(f"anyshape {command}", command if command in ("demo", "bench") else "")


def _module(name: str) -> ModuleType:
    """A command's module; that of `bench` is in a package of its own."""
    return importlib.import_module(name) if name else bench_package()


def _cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "prune", "clear"), nargs="?", default="show",
                        help="prune: remove what was used longest ago until the rest keeps to the limit; "
                             "clear: remove everything")
    parser.add_argument("--dir", default="", metavar="FOLDER",
                        help="the cache (default: ANYSHAPE_CACHE_DIR, or the user's cache folder)")
    parser.add_argument("--limit", default="", metavar="BYTES",
                        help="bytes to keep, such as 200MB (default: ANYSHAPE_CACHE_LIMIT)")


def _cache(parsed: argparse.Namespace) -> int:
    from anyshape.base.disk_cache import cache_of
    given = {name: value for name, value in (("cache_dir", parsed.dir), ("cache_limit", parsed.limit)) if value}
    cache = cache_of(Config.make(**given, cache=True))
    assert cache is not None
    if Path(cache.folder).exists() and not Path(cache.folder).is_dir():
        raise ConfigError(f"{cache.folder} is no cache", why="it is not a folder", do="name a folder with --dir")
    removed, freed = (0, 0) if parsed.action == "show" else cache.prune(0 if parsed.action == "clear" else None)
    if parsed.action == "clear":
        for path in Path(cache.folder).glob("??"):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    if parsed.action != "show":
        print(f"{cache.folder}: removed {removed} entries, {bytes_text(freed)}")
    if parsed.action != "clear":
        left = sorted(cache.entries(), key=lambda entry: entry.used)
        size = sum(entry.size for entry in left)
        print(f"{cache.folder}: {len(left)} entries, {bytes_text(size)} of at most {bytes_text(cache.limit)}")
        if left:
            print(f"used between {_day(left[0].used)} and {_day(left[-1].used)}")
    return 0


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _version() -> int:
    """Read from the packages' metadata: where files are only run or served there is no torch."""
    found = {"anyshape": __version__}
    for name in ("torch", "llvmlite", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found |= {"python": sys.version.split()[0], "system": f"{platform.system()} {platform.machine()}"}
    for name, version in found.items():
        print(f"{name:<10} {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
