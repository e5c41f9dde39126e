"""A call of a program inside of a `tf.function`: one operation of its graph, which calls back with arrays of numpy."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from anyshape.base.errors import Unsupported
from anyshape.frontend.importer_stablehlo.module import Type

NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "bool": "bool", "i8": "int8",
         "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
         "u64": "uint64", "c64": "complex64", "c128": "complex128"}


def in_graph(values: Sequence[Any]) -> bool:
    """Whether a `tf.function` is being traced: a tensor of its graph is among them."""
    return any(isinstance(one, tf.Tensor) and tf.is_symbolic_tensor(one) for one in values)


def graph_call(call: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any], types: Sequence[Type], name: str
               ) -> list[Any]:
    """The results as tensors of the graph, with the sizes that are known.

    Raises:
        Unsupported: when a gradient is asked for.
    """
    dtypes = [tf.dtypes.as_dtype(NAMES[one.dtype]) for one in types]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def called(*tensors: Any) -> tuple[Any, Any]:
        found = tf.numpy_function(lambda *arrays: list(call(arrays)), list(tensors), dtypes, stateful=False)
        results = found if isinstance(found, (list, tuple)) else [found]
        for result, kind in zip(results, types, strict=True):
            result.set_shape(kind.shape)

        def gradient(*_: Any) -> Any:
            raise Unsupported(f"there is no gradient of {name}", where="a gradient through a compiled program",
                              why="anyshape.compile_tensorflow compiles what the function gives, and not its gradient",
                              do="compile a tf.function that computes the gradient, or use the function itself")
        return list(results), gradient

    return list(called(*(tf.convert_to_tensor(one) for one in values)))
