"""`anyshape run FILE --input x.npy`: execution of a deployed file on arrays that numpy saved."""
from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from anyshape.artifact.load import load
from anyshape.base.errors import InputError, OutputError, printable
from anyshape.base.files import replacing
from anyshape.tools.named_file import named_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("file", help="a file that anyshape.save wrote")
    parser.add_argument("--input", action="append", default=[], metavar="FILE.npy",
                        help="an argument, in the order of `anyshape check`; NAME=FILE.npy for one by name")
    parser.add_argument("--output", default="", metavar="FILE.npz", help="where results go; shown when left out")
    parser.add_argument("--trust-native", action="store_true",
                        help="run the machine code in the file: for files that come from you")
    parser.add_argument("--profile", action="store_true",
                        help="show how long each step takes, of a second call at these sizes")
    parser.add_argument("--seed", type=int, help="of the random numbers that the program draws; its own each time "
                                                 "when left out")
    parser.add_argument("--threads", type=int, default=0, help="at most; 0: as many as there are cores")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with load(arguments.file, arguments.trust_native, arguments.threads, seed=arguments.seed) as model:
        given: list[Any] = []
        named: dict[str, Any] = {}
        for word in arguments.input:
            name, path = named_file(word)
            if name in named:
                raise InputError(f"the argument {name} is given twice", why=f"one is {path}", do="leave one out")
            if name:
                named[name] = _read(path)
            else:
                given.append(_read(path))
        flat = model.signature.flat(given, named)
        outputs = model.run(flat)
        if arguments.profile:
            from anyshape.runtime.inspect.profile import profile  # with the cost model, which a run needs not
            with profile() as found:
                model.run(flat)
            print(found)
        results = [(name, outputs[leaf]) for name, leaf in model.signature.result_names()]
        if arguments.output:
            try:
                with replacing(Path(arguments.output)) as file, zipfile.ZipFile(file, "w") as whole:
                    for name, value in results:  # as np.savez does, which has no arrays called "file"
                        with whole.open(f"{name}.npy", "w", force_zip64=True) as part:
                            np.lib.format.write_array(part, np.asarray(value), allow_pickle=False)
            except OSError as error:
                raise OutputError(f"{arguments.output} cannot be written", why=error.strerror or str(error),
                                  do="name another file") from error
        for name, value in results:
            shown = "" if arguments.output else f"\n{value}"
            print(f"{printable(name)}: {getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}{shown}")
    return 0


def _read(path: str) -> Any:
    try:
        array = np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False)  # what is read may be a pipe
    except Exception as error:  # the border to a file of anybody's
        raise InputError(f"{path} is no array", why=getattr(error, "strerror", None) or str(error),
                         do="write it with numpy.save") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path} is no array", why=f"it holds several, by name: {', '.join(array)[:200]}",
                         do="write each with numpy.save, and pass NAME=FILE.npy for each")
    return array
