"""The callable that `anyshape.compile_tensorflow` returns: called as the function, model or signature is."""
from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from anyshape.artifact.deployable import Deployable
from anyshape.artifact.format.signature import InputSpec, Signature
from anyshape.base.config import Config
from anyshape.base.errors import InputError, Unsupported
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.importer_stablehlo.callable import StablehloCallable
from anyshape.frontend.importer_stablehlo.module import Module, operations
from anyshape.frontend.importer_stablehlo.reader import read
from anyshape.frontend.importer_stablehlo.table import ROWS
from anyshape.frontend.importer_tensorflow.convert import INSTEAD, WHERE, convert, left_over
from anyshape.frontend.importer_tensorflow.graph_call import graph_call, in_graph
from anyshape.frontend.importer_tensorflow.source import Source, misread, rewritten_source, source_of


def compile_source(source: Any, signature: str, config: Config) -> TensorflowCallable:
    """Compiles what TensorFlow made; see `anyshape.compile_tensorflow`.

    Raises:
        InputError: the source is none. Unsupported: the converter, or the importer of what it wrote, refuses.
    """
    with tempfile.TemporaryDirectory(prefix="anyshape-tensorflow-") as folder:
        scratch = Path(folder)
        found = source_of(source, signature, scratch / "model")
        try:
            if not misread(found):
                return _compiled(found, config)
        except Unsupported:  # of an operation that the converter left as it is, or wrote by sizes found in data
            pass
        return _compiled(rewritten_source(found, scratch / "rewritten"), config)


def _compiled(source: Source, config: Config) -> TensorflowCallable:
    module = read(_converted(source))
    return TensorflowCallable(source, StablehloCallable(module, config), _signature(source, module))


def _converted(source: Source) -> bytes:
    """The module of a source, in which no operation of TensorFlow is left but those that are carried."""
    made = convert(source.folder, source.signature, "serve")
    try:
        module = read(made)
    except InputError as error:
        raise left_over(made) from error
    left = next((one for function in module.functions.values() for one in operations(function.body)
                 if one.name.startswith("tf.") and one.name not in ROWS), None)
    if left is not None:
        raise Unsupported(f"TensorFlow's converter has no StableHLO for {left.name[3:]}", where=f"{WHERE}: {left}",
                          why="it carries it for some sizes only, or not at all", do=INSTEAD)
    return made


def _signature(source: Source, module: Module) -> Signature:
    """How a call looks. The module's arguments and results are in an order of the converter's."""
    main = module.functions["main"]
    taken, given = source.keys
    arguments = list(source.arguments or sorted(taken or main.labels))
    results = list(source.results or sorted(given or main.results))
    names = source.names or tuple(arguments)
    inputs = tuple(InputSpec(name, "array", main.labels.index(taken.get(key, key)))
                   for name, key in zip(names, arguments, strict=True))
    places = [main.results.index(given.get(key, key)) for key in results]
    if source.arguments is None:
        return Signature(inputs, ["tuple", []], ["dict", [[name, k] for k, name in enumerate(names)]],
                         ["dict", [[name, place] for name, place in zip(results, places, strict=True)]], {})
    return Signature(inputs, source.args, source.kwargs, _placed(source.gives, places), {})


def _placed(tree: Any, places: list[int]) -> Any:
    """A tree of results with the module's places for leaves."""
    if isinstance(tree, int):
        return places[tree]
    if tree[0] == "dict":
        return ["dict", [[key, _placed(item, places)] for key, item in tree[1]]]
    return [tree[0], [_placed(item, places) for item in tree[1]]]


class TensorflowCallable:
    """A compiled function of TensorFlow, called as the function is; a signature of a SavedModel by its names.

    Arguments are arrays of TensorFlow, numpy, torch or JAX, and results of the kind of the first one; dtypes are those
    of the function. Inside of a `tf.function` a call is one operation of its graph, without a gradient.

    Raises (when called):
        InputError: other nesting, dtypes, ranks or sizes than those of the function; nothing has run then.
    """

    def __init__(self, source: Source, program: StablehloCallable, signature: Signature) -> None:
        self.name = source.name
        self.program = program
        self.signature = signature

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        leaves = self.signature.flat(arguments, keywords)
        values: list[Any] = [None] * len(leaves)
        for one, value in zip(self.signature.inputs, leaves, strict=True):
            if value is None:
                raise InputError(f"{one.name} is None", where=self.name, why="the function takes an array there",
                                 do="pass one")
            values[one.position] = value
        if in_graph(values):
            return self.signature.nested(graph_call(self.program.results_of, values, self.program.results, self.name))
        return self.signature.nested(self.program.results_of(values))

    def deployable(self) -> Deployable:
        """What a file holds of it (`anyshape.save`): it is called as this is. Errors as of `StablehloCallable`."""
        found = self.program.deployable()
        return dataclasses.replace(found, signature=dataclasses.replace(self.signature, names=found.signature.names))

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; `sizes` by the names of the program's sizes."""
        return self.program.explain(**sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What the program needs, as formulas; `.bytes` is the predicted peak at `sizes`."""
        return self.program.memory(**sizes)
