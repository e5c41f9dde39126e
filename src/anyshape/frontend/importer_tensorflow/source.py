"""What `anyshape.compile_tensorflow` takes, as a SavedModel on the disk, and how its calls look.

A Keras model and a `tf.function` become a function of arrays in a line, whose results have numbers for names; how
arguments and results are nested is kept beside it (artifact/signature.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyshape.artifact.signature import Tree
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
    traced; None of a folder."""

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
    return tf.function(lambda arguments: model(arguments, training=False)).get_concrete_function(specs)


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
    keys = tuple(f"a{place:04}" for place in range(len(leaves)))
    specs = [tf.TensorSpec(one.shape, one.dtype, key) for one, key in zip(leaves, keys, strict=True)]

    def line(*values: Any) -> dict[str, Any]:
        given = iter(values)
        filled = tf.nest.map_structure(lambda one: next(given) if isinstance(one, tf.TypeSpec) else one, (args, kwargs))
        found = concrete(*filled[0], **filled[1])
        return {f"r{place:04}": tf.identity(one) for place, one in enumerate(tf.nest.flatten(found))}

    module = tf.Module()
    module.variables_of_it = list(concrete.graph.variables)
    module.line = tf.function(line, input_signature=specs)
    try:
        tf.saved_model.save(module, str(scratch), signatures={"serving_default": module.line})
    except (AssertionError, ValueError, TypeError) as error:
        raise Unsupported("the function cannot be saved", where=f"{WHERE}: {name}",
                          why=str(error).strip().splitlines()[0][:300],
                          do="save the model with tf.saved_model.save, and pass its folder") from error
    count, number = iter(range(len(leaves))), iter(range(len(results)))
    names = _names(leaves)
    return Source(scratch, name, "serving_default", keys, tuple(f"r{k:04}" for k in range(len(results))), names,
                  _tree(args, count, name), _tree(kwargs, count, name),
                  _tree(concrete.structured_outputs, number, name), concrete)


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
    if type(value) in (tuple, list) or type(value).__name__ in ("ListWrapper", "_TupleWrapper"):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_tree(one, leaves, name) for one in value]]
    raise Unsupported(f"the function takes or gives a {type(value).__name__}", where=f"{WHERE}: {name}",
                      why="tensors lie in tuples, lists and dicts", do="take and give those")
