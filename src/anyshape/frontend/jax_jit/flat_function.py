"""A function of arrays in a line, compiled for all sizes: called with arrays, and inside of JAX's transforms.

    arrays                    its program, by DLPack
    in jax.jit, lax.scan...   the program by XLA's FFI (ffi_programs.py)
    in jax.grad               the program of its gradient, a flat function as well, which computes the forward again
    in jax.vmap               the program of the function over one more dim, a flat function as well

What cannot be compiled runs as JAX runs it, and is counted.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from anyshape.base.config import Config
from anyshape.base.errors import InputError, Unsupported
from anyshape.base.optional_packages import needed_by
from anyshape.frontend.importer_stablehlo.callable import CompiledPart, StablehloCallable, to_jax
from anyshape.frontend.importer_stablehlo.jax_export import module_of
from anyshape.frontend.jax_jit import ffi_programs
from anyshape.frontend.jax_jit.call_primitive import ProgramCall, equally_varying
from anyshape.frontend.jax_jit.size_questions import Questions, listening
from anyshape.frontend.jax_jit.size_search import SizeSearch
from anyshape.frontend.jax_jit.symbolic_sizes import ResultSizes, SizeClasses, Sizes, specs_of, told_again, told_by
from anyshape.frontend.programs.session import Compilation

with needed_by("anyshape.jax.jit"):
    import jax
    from jax import export
    from jax import numpy as jnp
    from jax.extend import source_info_util

source_info_util.register_exclusion(__file__)  # programs' steps are told by the lines of the user's function
Flat = Callable[..., tuple[Any, ...]]
MOST_KNOWN = 1024  # sizes of calls whose program is at hand


class _Inlining(threading.local):
    """Whether a function is being exported: compiled functions that it calls become a part of it."""

    on = False


_inlining = _Inlining()


class SizedProgram:
    """A program for arguments of some classes of sizes."""

    def __init__(self, classes: SizeClasses, exported: Any, compilation: Compilation, config: Config) -> None:
        self.classes = classes
        self.exported = exported
        self.program = StablehloCallable(module_of(exported), config, compilation)
        self.number = ffi_programs.number_of(exported.mlir_module_serialized, config)
        self.kept = exported.module_kept_var_idx
        self.counts = tuple(self.kept[place] for place in self.program.counts)
        self.result_sizes = ResultSizes.of(exported)
        self.calls: dict[Sizes, ProgramCall] = {}

    def refusal(self, leaves: Sequence[Any]) -> str:
        """Why it is not for these arguments; "": it is. A number that it takes for a size is at least 0."""
        below = next((k for k in self.counts if isinstance(leaves[k], jax.core.Tracer) or leaves[k] < 0), None)
        return "" if below is None else f"argument {below} is a number that the program takes for a size, and " + (
            "is not known in a trace" if isinstance(leaves[below], jax.core.Tracer) else "is negative")

    def __call__(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The results, arrays of JAX."""
        avals = self.exported.in_avals
        given = [_array(leaves[k], avals[k].dtype) for k in self.kept]
        return tuple(map(to_jax, self.program.tensors(given)))

    def call_at(self, leaves: Sequence[Any], sizes: Sizes, owner: FlatFunction) -> ProgramCall:
        """The call in a trace of arguments of these sizes.

        Raises:
            ValueError: of JAX, where sizes are not those that the user gave.
        """
        known = self.calls.get(sizes)
        if known is None:
            results = self._result_types(leaves, sizes)
            known = ProgramCall(self.number, self.kept, results, owner.run, owner.batched)
            if len(self.calls) < MOST_KNOWN and all(isinstance(size, int) for size in sizes):
                self.calls[sizes] = known
        ffi_programs.offered(self.program, self.number)
        return known

    def _result_types(self, leaves: Sequence[Any], sizes: Sizes) -> tuple[Any, ...]:
        shapes = self.result_sizes.at(sizes) if self._holds(leaves) else None
        if shapes is None:  # JAX finds them, or says what does not agree
            specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(jax.typeof, leaves)]
            return tuple(jax.eval_shape(self.exported.call, *specs))
        return tuple(jax.ShapeDtypeStruct(shape, aval.dtype)
                     for shape, aval in zip(shapes, self.exported.out_avals, strict=True))

    def _holds(self, leaves: Sequence[Any]) -> bool:
        """Whether sizes are as the module says; False as well where that is found only when it runs."""
        part = self.program.run
        if not isinstance(part, CompiledPart):
            return False
        try:
            part.check([jax.typeof(leaves[k]) if k not in self.counts else leaves[k] for k in self.kept])
        except InputError:
            return False
        return True


def _array(leaf: Any, dtype: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype)


class FlatFunction:
    """A function of arrays in a line and its programs, for all sizes. Its arguments have the same dtypes and numbers of
    dims in every call.

    Args:
        function: arrays -> a tuple of arrays, as JAX traces it.
        name, labels: of it and its arguments, for messages and as names of sizes.
        specs: shapes that somebody gave, with symbolic sizes; None: see symbolic_sizes.py. constraints: what they said
            of these sizes.
        keys: which arguments are the words of keys of random numbers; how many words is a number.
    """

    def __init__(self, function: Flat, name: str, labels: Sequence[str], compilation: Compilation,
                 specs: Sequence[Any] | None = None, keys: Sequence[int] = (), constraints: Sequence[str] = ()) -> None:
        self.function = function
        self.name = name
        self.labels = tuple(labels)
        self.compilation = compilation
        self.config = compilation.config
        self.specs = specs
        self.constraints = tuple(constraints)
        self.keys = tuple(keys)
        self.plain = jax.jit(function)
        self.programs: list[SizedProgram] = []
        self.known: dict[Sizes, SizedProgram] = {}
        self.search = SizeSearch(labels, keys)
        self.refusal = ""
        self.derived: dict[Any, FlatFunction] = {}
        self.lock = threading.RLock()
        self.differentiable = self._with_rules()

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self.function(*leaves) if _inlining.on else self.differentiable(*equally_varying(leaves))
        return self.run(*leaves)

    def run(self, *leaves: Any) -> tuple[Any, ...]:
        """The results of a call, alone or in a trace of `jax.jit` or `jax.vmap`."""
        avals = [jax.typeof(leaf) for leaf in leaves]
        sizes = tuple(size for aval in avals for size in aval.shape)
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        program = self.known.get(sizes) or self._program(avals, sizes)
        devices = set[Any]() if traced or not _several_devices() else _devices(leaves)
        refusal = self.refusal if program is None else program.refusal(leaves)
        if len(devices) > 1:
            refusal = "its arguments lie on several devices"
        if program is None or refusal:
            if self.config.strict:
                raise Unsupported(f"{self.name} cannot run as compiled", where="anyshape.jax.jit", why=refusal,
                                  do="leave strict out: the call then runs as JAX runs it")
            self.compilation.ran_eagerly(refusal)
            return self.plain(*leaves)  # type: ignore[no-any-return]
        if not traced:
            results = program(leaves)
            return tuple(jax.device_put(results, *devices)) if devices else results
        return program.call_at(leaves, sizes, self)(
            [_array(leaf, aval.dtype) for leaf, aval in zip(leaves, avals, strict=True)])

    # ---- programs

    def _program(self, avals: Sequence[Any], sizes: Sizes) -> SizedProgram | None:
        """The program for these sizes, compiled if there is none; None: JAX runs them."""
        with self.lock:
            if self.refusal:
                return None
            found = next((one for one in reversed(self.programs) if one.classes.serves(sizes)), None)
            if found is None:
                found = self._compiled(avals, sizes)
            if found is not None and all(isinstance(size, int) for size in sizes):
                if len(self.known) >= MOST_KNOWN:
                    self.known.clear()
                self.known[sizes] = found
            return found

    def _compiled(self, avals: Sequence[Any], sizes: Sizes) -> SizedProgram | None:
        """A new program; where JAX or the compiler refuses a symbolic size, with a number in its place."""
        search = self.search
        classes = search.started(avals, sizes) if self.specs is None else told_by(self.specs)
        trials = 0
        while True:
            questions = Questions()
            try:
                exported = self._exported(classes, avals, questions)
                narrower = search.answered(classes, questions.asked, sizes)
                if narrower is not None:
                    classes = narrower
                    continue
                if search.guesses:
                    classes = search.released(classes, lambda free: self._exports(free, avals, sizes))
                    questions = Questions()
                    exported = self._exported(classes, avals, questions)
                classes = search.differing(classes, questions.asked, sizes)
                made = SizedProgram(classes, exported, self.compilation, self.config)
                self.programs.append(made)
                for reason in search.news():
                    self.compilation.record(self.name, "sizes", reason)
                return made
            except Exception as error:  # of JAX, of the function itself, or of the compiler
                if not trials:
                    self._raise_own(avals)
                trials += 1
                narrower = search.answered(classes, questions.asked, sizes)
                if narrower is None and self.specs is None:
                    narrower = search.narrowed(classes, str(error), _first_line(error), questions.last)
                if narrower is None:
                    self._refuse(error)
                    return None
                classes = narrower

    def _raise_own(self, avals: Sequence[Any]) -> None:
        """Raises what the function itself raises at these sizes."""
        with _as_part():
            jax.eval_shape(self.function, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
                                            for aval in avals))

    def _exports(self, classes: SizeClasses, avals: Sequence[Any], sizes: Sizes) -> bool:
        questions = Questions()
        try:
            self._exported(classes, avals, questions)
        except Exception:  # of JAX or of the function
            return False
        return not any(classes.compared(a, "==", b, sizes) for a, b in questions.asked)

    def _exported(self, classes: SizeClasses, avals: Sequence[Any], questions: Questions) -> Any:
        """The function as JAX exports it. questions: takes what it asks of sizes."""
        specs = specs_of(classes, avals) if self.specs is None else told_again(self.specs, classes, self.constraints)
        with _as_part(), listening(questions):
            exported = export.export(jax.jit(self.function), platforms=("cpu",))(*specs)
        self.compilation.tracing = (self.name, "other sizes were equal" if self.programs else "", "jax")
        return exported

    def _refuse(self, error: Exception) -> None:
        reason = _first_line(error)
        if self.config.strict:
            raise Unsupported(f"{self.name} cannot be compiled", where="anyshape.jax.jit", why=str(error),
                              do="rewrite that part, or leave strict out: it then runs as JAX runs it") from error
        self.refusal = reason
        self.compilation.record(self.name, "jax", reason)

    # ---- transforms

    def _with_rules(self) -> Callable[..., tuple[Any, ...]]:
        @jax.custom_vjp
        def differentiable(*leaves: Any) -> tuple[Any, ...]:
            return self.run(*leaves)

        def forward(*leaves: Any) -> Any:
            return self(*leaves), leaves

        def backward(leaves: Sequence[Any], gradients: Sequence[Any]) -> Any:
            return self._gradients(leaves, gradients)

        differentiable.defvjp(forward, backward)
        return differentiable  # type: ignore[no-any-return]

    def batched(self, which: tuple[bool, ...], leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The results over one dim more, which is the first of the arguments that have it, and of all results."""
        axes = tuple(0 if one else None for one in which)
        return self._derived(("vmap", axes), lambda: FlatFunction(
            jax.vmap(self.function, axes), f"vmap of {self.name}", self.labels, self.compilation,
            keys=self.keys))(*leaves)

    def _gradients(self, leaves: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients of all arguments; None for those that have none."""
        of = tuple(k for k, leaf in enumerate(leaves) if jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact))
        by = tuple(k for k, one in enumerate(gradients) if one.dtype != jax.dtypes.float0)
        if not of or not by:
            return (None,) * len(leaves)
        labels = *self.labels, *(f"gradient_{k}" for k in by)
        found = self._derived(("grad", of, by), lambda: FlatFunction(
            _gradient(self.function, of, by, len(leaves)), f"gradient of {self.name}", labels,
            self.compilation, keys=self.keys))(*leaves, *(gradients[k] for k in by))
        every: list[Any] = [None] * len(leaves)
        for k, one in zip(of, found, strict=True):
            every[k] = one
        return tuple(every)

    def _derived(self, key: Any, make: Callable[[], FlatFunction]) -> FlatFunction:
        with self.lock:
            if key not in self.derived:
                self.derived[key] = make()
            return self.derived[key]


def _gradient(function: Flat, of: Sequence[int], by: Sequence[int], count: int) -> Flat:
    """The function from arguments and the gradients of results `by` to those of arguments `of`."""
    def gradient(*every: Any) -> tuple[Any, ...]:
        leaves, gradients = every[:count], every[count:]

        def chosen(*some: Any) -> list[Any]:
            given = dict(zip(of, some, strict=True))
            results = function(*(given.get(k, leaf) for k, leaf in enumerate(leaves)))
            return [results[k] for k in by]

        _, back = jax.vjp(chosen, *(leaves[k] for k in of))
        return tuple(back(list(gradients)))

    return gradient


@functools.cache
def _several_devices() -> bool:
    return bool(jax.device_count() > 1)


def _devices(leaves: Sequence[Any]) -> set[Any]:
    """Where arrays lie that somebody has put somewhere: results belong there."""
    return set[Any]().union(*(leaf.devices() for leaf in leaves if isinstance(leaf, jax.Array) and leaf.committed))


@contextlib.contextmanager
def _as_part() -> Iterator[None]:
    before, _inlining.on = _inlining.on, True
    try:
        yield
    finally:
        _inlining.on = before


def _first_line(error: Exception) -> str:
    """What an error says, in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (f"{type(error).__name__}: " if not isinstance(error, Unsupported) else "") + " ".join(lines[:2])[:300]
