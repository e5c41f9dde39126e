"""What `anyshape.compile_tensorflow` takes, as a SavedModel on the disk, and how its calls look.

A Keras model and a `tf.function` become a function of arrays in a line, whose results have numbers for names; how
arguments and results are nested is kept beside it (artifact/format/signature.py).
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anyshape.artifact.format.signature import Tree
from anyshape.base.errors import InputError, Unsupported
from anyshape.base.optional_packages import needed_by
from anyshape.frontend.importer_tensorflow.convert import WHERE

with needed_by(WHERE):
    import tensorflow as tf

TAKES = "it takes the folder of a SavedModel, a .keras file, a Keras model, or a tf.function with an input_signature"


@dataclass(frozen=True, slots=True)
class Source:
    """A SavedModel. name: for messages. signature: of the SavedModel. arguments, results: keys of the signature in the
    order of leaves; None: by name. names: of the arguments. args, kwargs, gives: trees of leaves. concrete: what was
    traced; None of a folder. keys: name -> what the saved function calls it, of arguments and of results."""

    folder: Path
    name: str
    signature: str
    arguments: tuple[str, ...] | None = None
    results: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    args: Tree = None
    kwargs: Tree = None
    gives: Tree = None
    concrete: Any = None
    keys: tuple[Mapping[str, str], Mapping[str, str]] = field(default_factory=lambda: ({}, {}))


def source_of(source: Any, signature: str, scratch: Path) -> Source:
    """The SavedModel of what the user has.

    Raises:
        InputError: it is none of those.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir() and any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
            return Source(path, path.name, signature)
        if path.suffix not in (".keras", ".h5") or not path.is_file():
            raise InputError(f"there is no SavedModel in {path}", where=WHERE, do="pass a folder with saved_model.pb",
                             why="it has no saved_model.pb" if path.is_dir() else "it is no folder and no .keras file")
        source = _keras().saving.load_model(path, compile=False)
    if hasattr(source, "stateless_call") or type(source).__module__.split(".")[0] == "keras":
        return _of_function(_of_keras(source), source.name, scratch)
    if not hasattr(source, "get_concrete_function") and not hasattr(source, "structured_input_signature"):
        raise InputError(f"anyshape.compile_tensorflow was given a {type(source).__name__}", where="its first argument",
                         why=TAKES, do="decorate the function with @tf.function(input_signature=[...])")
    return _of_function(_concrete(source), getattr(source, "__name__", "function"), scratch)


def _keras() -> Any:
    with needed_by(WHERE):
        import keras
    return keras


def _of_keras(model: Any) -> Any:
    """A model's inference as a concrete function of its inputs."""
    backend = _keras().backend.backend()
    if backend != "tensorflow":
        raise Unsupported(f"the Keras model runs on {backend}", where=f"{WHERE}: {model.name}",
                          why="a model belongs to the backend that Keras was imported with",
                          do="export it by jax.export and use anyshape.compile_jax" if backend == "jax" else
                          "set KERAS_BACKEND=tensorflow before Keras is imported")
    try:
        inputs = model.input
    except (AttributeError, ValueError):
        inputs = getattr(model, "inputs", None)  # of a sequential model, which takes one
        inputs = inputs[0] if inputs and len(inputs) == 1 else inputs
    if inputs is None:
        raise InputError(f"the Keras model {model.name} does not say what it takes", where=WHERE,
                         why="it is made of a class of its own, or has not been built",
                         do="pass a tf.function with an input_signature that calls it")
    specs = tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype, one.name), inputs)
    function = tf.function(lambda arguments: model(arguments, training=False), autograph=False)
    try:
        with _steps_as_samples():
            return function.get_concrete_function(specs)
    except (NotImplementedError, TypeError, ValueError) as error:  # of which TensorFlow's own are
        raise Unsupported(f"the Keras model {model.name} cannot be traced with sizes left open", where=WHERE,
                          why=str(error).strip().splitlines()[0][:200],
                          do="give its Input the sizes that the layer needs, or use its JAX backend") from error


@contextmanager
def _steps_as_samples() -> Iterator[None]:
    """TimeDistributed over an open length takes all time steps at once, as samples: Keras 3.15 traces a loop over as
    many steps as there are samples."""
    distributed = _keras().layers.TimeDistributed
    plain = distributed.call

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if not tf.is_tensor(inputs) or inputs.shape[1] is not None:
            return plain(self, inputs, training=training, mask=mask)
        count, length = tf.shape(inputs)[0], tf.shape(inputs)[1]

        def joined(x: Any) -> Any:
            found = tf.reshape(x, tf.concat([[count * length], tf.shape(x)[2:]], 0))
            return tf.ensure_shape(found, [None, *x.shape[2:]])

        def apart(x: Any) -> Any:
            found = tf.reshape(x, tf.concat([[count, length], tf.shape(x)[1:]], 0))
            return tf.ensure_shape(found, [inputs.shape[0], None, *x.shape[1:]])

        taken = inspect.signature(self.layer.call).parameters
        keywords = {"training": training} if "training" in taken else {}
        if mask is not None and "mask" in taken:
            keywords["mask"] = joined(mask)
        return tf.nest.map_structure(apart, self.layer.call(joined(inputs), **keywords))

    distributed.call = call
    try:
        yield
    finally:
        distributed.call = plain


def _concrete(function: Any) -> Any:
    if hasattr(function, "structured_input_signature"):
        return function
    try:
        return function.get_concrete_function()
    except (TypeError, ValueError) as error:
        raise InputError("the tf.function does not say what it takes", where=WHERE,
                         why=str(error).strip().splitlines()[0][:200],
                         do="give it input_signature=[tf.TensorSpec([None, 8], tf.float32)], or pass what "
                         "function.get_concrete_function(...) returns") from error


def _of_function(concrete: Any, name: str, scratch: Path) -> Source:
    """The function saved, with arguments and results in a line."""
    args, kwargs = concrete.structured_input_signature
    leaves = [one for one in tf.nest.flatten((args, kwargs)) if isinstance(one, tf.TypeSpec)]
    odd = [one for one in leaves if not isinstance(one, tf.TensorSpec)]
    results = tf.nest.flatten(concrete.structured_outputs)
    if odd or not all(isinstance(one, (tf.TensorSpec, tf.Tensor)) for one in results):
        raise Unsupported("the function takes or gives what is no tensor", where=f"{WHERE}: {name}",
                          why=f"{odd[0] if odd else 'a result'} is none", do="take and give dense tensors")
    if not results:
        raise Unsupported("the function gives nothing", where=f"{WHERE}: {name}", why="it has no results",
                          do="return what it computes")
    def line(*values: Any) -> list[Any]:
        given = iter(values)
        filled = tf.nest.map_structure(lambda one: next(given) if isinstance(one, tf.TypeSpec) else one, (args, kwargs))
        return tf.nest.flatten(concrete(*filled[0], **filled[1]))  # type: ignore[no-any-return]

    keys, outputs = _saved(line, leaves, concrete.graph.variables, name, scratch)
    count, number = iter(range(len(leaves))), iter(range(len(results)))
    names = _names(leaves)
    return Source(scratch, name, "serving_default", keys, outputs[:len(results)], names,
                  _tree(args, count, name), _tree(kwargs, count, name),
                  _tree(concrete.structured_outputs, number, name), concrete)


def _saved(line: Any, leaves: Sequence[Any], variables: Sequence[Any], name: str, scratch: Path
           ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Saves a function of tensors in a line; the keys of its arguments and results in the signature."""
    keys = tuple(f"a{place:04}" for place in range(len(leaves)))
    specs = [tf.TensorSpec(one.shape, one.dtype, key) for one, key in zip(leaves, keys, strict=True)]
    outputs: list[str] = []

    def named(*values: Any) -> dict[str, Any]:
        found = {f"r{place:04}": tf.identity(one) for place, one in enumerate(line(*values))}
        outputs[:] = found
        return found

    module = tf.Module()
    module.variables_of_it = list(variables)
    module.line = tf.function(named, input_signature=specs, autograph=False)
    try:
        tf.saved_model.save(module, str(scratch), signatures={"serving_default": module.line})
    except (AssertionError, NotImplementedError, ValueError, TypeError) as error:
        raise Unsupported("the function cannot be saved", where=f"{WHERE}: {name}",
                          why=str(error).strip().splitlines()[-1][:300],
                          do="write this part otherwise, or run it where it comes from") from error
    return keys, tuple(outputs)


def rewritten_source(source: Source, scratch: Path) -> Source:
    """The same with operations that the converter lacks written with others (replay.py).

    Raises:
        Unsupported: there is none.
    """
    concrete = _concrete_of(source)
    from anyshape.frontend.importer_tensorflow.replay import rewritten
    line, inputs = rewritten(concrete)
    keys, outputs = _saved(line, inputs, (), source.name, scratch)
    if source.arguments is None:
        arguments, results = _keys_of(concrete)
        names = dict(zip(arguments, keys, strict=True)), dict(zip(results, outputs, strict=True))
        return replace(source, folder=scratch, signature="serving_default", keys=names)
    return replace(source, folder=scratch, signature="serving_default", concrete=concrete)


def misread(source: Source) -> bool:
    """Whether the converter would carry an operation wrongly: padding SAME of pooling, where sizes are open."""
    graph = _concrete_of(source).graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    return any(node.op in ("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D") and node.attr["padding"].s == b"SAME"
               for node in nodes)


def _concrete_of(source: Source) -> Any:
    if source.concrete is not None:
        return source.concrete
    try:
        return tf.saved_model.load(str(source.folder)).signatures[source.signature]
    except (KeyError, OSError, ValueError) as error:
        raise InputError(f"the SavedModel has no signature {source.signature} that can be read", where=WHERE,
                         why=str(error).strip().splitlines()[0][:200] or type(error).__name__,
                         do="name one of its signatures: signature=") from error


def _keys_of(concrete: Any) -> tuple[list[str], list[str]]:
    """Names of a signature's arguments and results, in the order of its tensors."""
    return [one.name for one in tf.nest.flatten(concrete.structured_input_signature)], sorted(
        concrete.structured_outputs)


def _names(leaves: Sequence[Any]) -> tuple[str, ...]:
    found: list[str] = []
    for place, one in enumerate(leaves):
        name = one.name or f"argument_{place}"
        found.append(f"{name}_{place}" if name in found else name)
    return tuple(found)


def _tree(value: Any, leaves: Any, name: str) -> Tree:
    """A nesting of TensorFlow's as that of a signature."""
    if isinstance(value, (tf.TypeSpec, tf.Tensor)):
        return next(leaves)
    if type(value) is dict:
        found = {key: _tree(value[key], leaves, name) for key in sorted(value)}  # as tf.nest has them in order
        return ["dict", [[key, found[key]] for key in value]]
    named = isinstance(value, tuple) and hasattr(value, "_fields")  # becomes a plain tuple
    if named or type(value) in (tuple, list) or type(value).__name__ in ("ListWrapper", "_TupleWrapper"):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_tree(one, leaves, name) for one in value]]
    raise Unsupported(f"the function takes or gives a {type(value).__name__}", where=f"{WHERE}: {name}",
                      why="tensors lie in tuples, lists and dicts", do="take and give those")
