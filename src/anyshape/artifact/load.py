"""The loader of deployed programs: maps a file and makes a program of it, without torch.

    trust_native=True     plan.txt and the native cache are used as they are: milliseconds, and numpy alone is enough
    trust_native=False    graph.txt is compiled by this process (llvmlite), or was by an earlier one of this user, whose
                          cache has it: nothing in the file becomes code

What a file may do is bounded in either case: its texts are parsed under limits, the graph is verified, and a plan is
judged at every new set of sizes before it runs.
"""
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anyshape.artifact import arrays
from anyshape.artifact.format import safetensors
from anyshape.artifact.format.container import WEIGHTS, Container, refused
from anyshape.artifact.format.safetensors import parse_json
from anyshape.artifact.format.signature import Signature, decode, most_leaf
from anyshape.artifact.format.text_limits import parse_graph, parse_plan
from anyshape.artifact.judged import Judged
from anyshape.artifact.native_code import NativeCode, native_code
from anyshape.artifact.requirements import FORMAT, VERSION, VERSIONS, check
from anyshape.backend.interface import PythonSteps
from anyshape.backend.loaded_code import LoadedKernel
from anyshape.backend.targets import deployment
from anyshape.base.digests import sha256
from anyshape.base.errors import ArtifactError, ConfigError, InputError, printable
from anyshape.ir.types import TensorType
from anyshape.plan.ir.liveness import peak_bytes
from anyshape.plan.ir.program import KernelStep, Plan, Window, parts_of
from anyshape.plan.verify import verify
from anyshape.runtime.call.program import Program, written_inputs
from anyshape.runtime.context.process_context import Context
from anyshape.runtime.driver.numpy_driver import NumpyDriver
from anyshape.runtime.specialize.shape_binding import renamed
from anyshape.runtime.specialize.specialization import Specialization
from anyshape.sym.expr import evaluate

if TYPE_CHECKING:
    from anyshape.base.config import Config

MOST_THREADS = 1024
_compiling = threading.Lock()
deployment()  # every load needs it: it is imported with this module


class Head(NamedTuple):
    """What format.json says. weights: (position among the plan's inputs, name). needed: sizes that must be at least 0
    in a call."""

    made_with: str
    signature: Signature
    weights: tuple[tuple[int, str], ...]
    needed: tuple[str, ...]
    digests: Mapping[str, str]


def load(path: str | Path, trust_native: bool = False, threads: int = 0, verify: bool = False) -> LoadedModel:
    """Loads a file that `save` wrote; arguments, result and errors are those of `anyshape.load`."""
    if not isinstance(threads, int) or not 0 <= threads <= MOST_THREADS:
        raise ConfigError(f"threads is {threads!r}", why="it is how many threads a call may use",
                          do=f"pass a whole number up to {MOST_THREADS}; 0 is as many as there are cores")
    for name, value in (("trust_native", trust_native), ("verify", verify)):
        if not isinstance(value, bool):  # "false" is a text that is not empty, and would be trusted
            raise ConfigError(f"{name} is {value!r:.80}", why="it is neither True nor False", do="pass one of them")
    container = Container(Path(path))
    try:
        head = read_head(container)
        check_digests(container, head, verify)
        weights = safetensors.decode(container.part(WEIGHTS), f"{container.path}: {WEIGHTS}")
        driver = NumpyDriver(threads)
        options = (trust_native, threads, verify)
        if trust_native:
            return LoadedModel(container, head, *_trusted(container, threads), weights, driver, options)
        return _without_trust(container, head, weights, driver, options)
    except BaseException:
        container.close()
        raise


def read_head(container: Container) -> Head:
    """What format.json says.

    Raises:
        ArtifactError: it is of another format or version, or broken.
    """
    where = f"{container.path}: format.json"
    found = parse_json(container.data("format.json"), where)
    if found.get("format") != FORMAT:
        raise refused(where, f"the format is {str(found.get('format'))[:80]!r}, not {FORMAT!r}")
    version = found.get("version")
    if version not in VERSIONS or isinstance(version, bool):
        made = found.get("made_with", "")
        raise ArtifactError(f"the file has version {str(version)[:20]!r}, this AnyShape reads versions "
                            f"{VERSION} to {VERSIONS[-1]}",
                            where=where, why=f"it was made with {str(made)[:80]}",
                            do="install a later AnyShape, or save the program again with this one")
    weights, needed, digests = found.get("weights"), found.get("needed"), found.get("digests")
    if not isinstance(weights, list) or not all(
            isinstance(one, list) and len(one) == 2 and type(one[0]) is int and isinstance(one[1], str)
            for one in weights):
        raise refused(where, "it does not say where weights belong")
    if not isinstance(needed, list) or not all(isinstance(one, str) for one in needed):
        raise refused(where, "conditions are no texts")
    if not isinstance(digests, dict) or digests.keys() != container.places.keys() - {"format.json"}:
        raise refused(where, "it does not have the digests of all members")
    made = found.get("made_with")
    if not isinstance(made, dict):
        raise refused(where, "it does not say what it was made with")
    said = " ".join(f"{name} {number}" for name, number in made.items())
    return Head(said[:200], decode(found.get("signature"), where),
                tuple((one[0], one[1]) for one in weights), tuple(needed), digests)


def check_digests(container: Container, head: Head, all_bytes: bool) -> None:
    """Raises ArtifactError where a member is not what was saved. The bytes of weights are numbers, whatever they are:
    they are read only where `all_bytes`."""
    for name in container.places.keys() - {"format.json"}:
        if name != WEIGHTS or all_bytes:
            if sha256(container.part(name)).hexdigest() != head.digests[name]:
                raise refused(f"{container.path}: {name}", "its bytes are not those that were saved",
                              "copy the file again")


def _trusted(container: Container, threads: int) -> tuple[Any, Plan, Sequence[LoadedKernel]]:
    """The plan and the machine code of the file."""
    return _loaded(native_code(container), container.text("plan.txt"), f"{container.path}: plan.txt", threads)


def _loaded(code: NativeCode, text: str, where: str, threads: int) -> tuple[Any, Plan, Sequence[LoadedKernel]]:
    """A plan of which there is machine code."""
    plan = parse_plan(text, where)
    names = dict.fromkeys(name for step in plan.steps for part in parts_of(step) if isinstance(part, KernelStep)
                          for one in part.regimes for name in one.kernels)
    target = deployment().trusted_target(code.machine, code, threads)
    return target, plan, code.kernels(names)


def _without_trust(container: Container, head: Head, weights: Mapping[str, tuple[str, np.ndarray[Any, Any]]],
                   driver: NumpyDriver, options: tuple[bool, int, bool]) -> LoadedModel:
    """The program of the file's graph, compiled by this process, or by an earlier one of this user."""
    try:
        import llvmlite  # noqa: F401
    except ImportError:
        raise ArtifactError("the program cannot be compiled in this process", where=str(container.path),
                            why="llvmlite is not installed, and the file's machine code is not trusted",
                            do="pip install llvmlite; or, if the file comes from you, load it with trust_native=True "
                               "(--trust-native on the command line)") from None
    # what compiles is not needed where machine code is trusted
    from anyshape.artifact import kept_code
    from anyshape.base.config import Config
    from anyshape.base.disk_cache import cache_of
    config, threads = Config.make(), options[1]
    cache = cache_of(config)
    key = "" if cache is None else kept_code.key_of(container.data("graph.txt"), head.needed, config, threads)
    found = kept_code.kept(key, cache) if key and cache is not None else None
    if found is not None:
        loaded = _loaded(found[1], found[0], f"{container.path}: its plan, as it is kept", threads)
        return LoadedModel(container, head, *loaded, weights, driver, options)
    target, plan, kernels = _compiled(container, head, config, threads)
    model = LoadedModel(container, head, target, plan, kernels, weights, driver, options)
    if key:
        kept_code.keep(key, target, plan, kernels)
    return model


def _compiled(container: Container, head: Head, config: Config,
              threads: int) -> tuple[Any, Plan, Sequence[LoadedKernel]]:
    """The graph of the file, compiled by this process."""
    from anyshape.base.disk_cache import cache_of
    from anyshape.compiler.driver import plan_graph
    graph, needed = parse_graph(container.text("graph.txt"), head.needed, f"{container.path}: graph.txt")
    with _compiling:
        target = deployment().compiling_target(cache_of(config), threads)
        try:
            planned = plan_graph(graph, target, config, needed=needed)
        except Exception as error:  # the border to a stranger's graph
            raise refused(f"{container.path}: graph.txt", f"it cannot be compiled: {str(error)[:200]}") from error
    verify(planned.plan)  # at each new set of sizes only what depends on them is checked
    kernels = [one for one in planned.kernels if isinstance(one, LoadedKernel)]
    return target, planned.plan, kernels


class LoadedModel:
    """A loaded program: a callable, used like the module that was saved. Calls may run at once in several threads.

    Arguments are arrays of numpy, PyTorch, JAX, or anything else with `__dlpack__`; results are of the kind of the
    first one.

    Raises (when called):
        InputError: an argument does not fit; nothing has run. IndexRangeError, DivisionError: the data are wrong.
    """

    def __init__(self, container: Container, head: Head, target: Any, plan: Plan, kernels: Sequence[LoadedKernel],
                 weights: Mapping[str, tuple[str, np.ndarray[Any, Any]]], driver: NumpyDriver,
                 options: tuple[bool, int, bool]) -> None:
        where = str(container.path)
        self.options = options  # of `load`, beside the path
        check(plan, where, {position for position, _ in head.weights})
        self.path, self.signature, self.made_with = container.path, head.signature, head.made_with
        self.plan = plan
        bound = _bound(plan, head, weights, where)
        self.inputs = [(number, one, plan.inputs[one.position] if one.position >= 0 else None)
                       for number, one in enumerate(self.signature.inputs)]
        self.flat_count = len(self.inputs) if self.signature.is_flat else -1  # of arguments that need no unpacking
        self.fixed = [(number, one.value) for number, one, _ in self.inputs if one.kind == "fixed"]
        self.closed = frozenset(number for number, _ in self.fixed)
        written = written_inputs(plan)
        self.order = _order(plan, self.signature, bound, where)
        self.written = [place for place, number in enumerate(self.order)
                        if self.signature.inputs[number].position in written]
        self.kinds = {number: kind.dtype if isinstance(kind, TensorType) else "" for number, _, kind in self.inputs}
        self.dtypes = [entry.type.dtype if isinstance(entry, Window) else "" for entry in plan.outputs]
        if most_leaf(self.signature.results) >= len(plan.outputs):
            raise refused(where, "a result of the signature is no output of the program")
        context = Context(target.native, driver)
        specializer = Judged(plan, target.runner(plan, kernels), target.native, names=self.signature.names)
        self.program: Program | None = Program(specializer, kernels, context, steps=_host_steps, bound=bound)
        self.container, self.context = container, context
        self.needs: weakref.WeakKeyDictionary[Specialization, int] = weakref.WeakKeyDictionary()  # see `bytes_of`
        self.names = [f"the argument {one.name}" for one in self.signature.inputs]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        program = self._open()
        is_flat = not keywords and len(arguments) == self.flat_count
        flat = list(arguments) if is_flat else self.signature.flat(arguments, keywords)
        results = program(self._given(flat))
        make = arrays.outgoing(flat)
        return self.signature.nested([make(one, dtype) if dtype else one
                                      for one, dtype in zip(results, self.dtypes, strict=True)])

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """The program's outputs, as arrays of numpy (of bf16 the bits) and numbers, for one argument per input of the
        signature. Errors as of a call."""
        return self._open()(self._given(flat))

    def bytes_of(self, flat: Sequence[Any]) -> int:
        """Bytes of memory that such a call takes, results included; arguments and weights are not. Nothing runs.
        Errors as of a call's arguments."""
        program = self._open()
        record = program.specialization(self._given(flat))
        found = self.needs.get(record)
        if found is None:
            found = self.needs[record] = self._bytes(program, record)
        return found

    def _bytes(self, program: Program, record: Specialization) -> int:
        results = sum((1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))) * dtype.itemsize
                      for (sizes, strides), dtype in zip(record.allocations, program.dtypes, strict=True)
                      if 0 not in sizes)
        made = [(evaluate(b.bytes, record.values), b.first, b.last) for b in self.plan.buffers if b.is_external]
        arena = self.context.temporary.block_bytes(record.arena + record.scratch * program.driver.threads())
        return results + arena + peak_bytes(made, len(self.plan.steps))

    def _open(self) -> Program:
        if self.program is None:
            raise InputError(f"{self.path} is closed", why="close() was called", do="load it again")
        return self.program

    def _given(self, flat: Sequence[Any]) -> list[Any]:
        """The program's arguments."""
        for number, value in self.fixed:
            if flat[number] != value or type(flat[number]) is not type(value):
                raise InputError(f"{self.names[number]} is {flat[number]!r:.80}", do="pass that value",
                                 why=f"the program was made for {value!r}")
        given = [0 if number in self.closed else arrays.incoming(flat[number], self.names[number], self.kinds[number])
                 for number in self.order]
        for place in self.written:
            number = self.order[place]
            if isinstance(given[place], np.ndarray) and not arrays.takes_writes(flat[number], given[place]):
                raise InputError(f"{self.names[number]} cannot be written to", do="pass a copy of it",
                                 why="the program writes into it, as the module does that was saved")
        return given

    def describe(self) -> str:
        """What a call takes, a line an argument, with sizes by name and their ranges."""
        lines = []
        for _, one, kind in self.inputs:
            what = f"fixed to {one.value!r}" if one.kind == "fixed" else "a whole number" if isinstance(kind, str) \
                else renamed(str(kind), self.signature.names)
            lines.append(f"{one.name}: {what}")
        for name, low, high in self.plan.facts.ranges:
            shown = self.signature.names.get(name, name)
            lines.append(f"{low} <= {shown}" + ("" if high is None else f" <= {high}"))
        return printable("\n".join(lines))

    def release(self) -> int:
        """Gives back the memory that idles; returns the bytes."""
        return self.context.release()

    def close(self) -> None:
        """Gives everything back; calls that run keep what they have. Later ones are refused."""
        program, self.program = self.program, None
        if program is not None:
            self.context.release()
            del program
            gc.collect()  # generated code and what it learns of arguments know each other
            self.container.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that are spawned, and for copies: the file is loaded again."""
        self._open()
        return load, (self.path.absolute(), *self.options)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _host_steps(*call: Any) -> PythonSteps:
    """Does the steps of a call that are numpy's."""
    from anyshape.artifact.host_steps import HostSteps  # operators by numpy, which most programs do not have
    return HostSteps(*call)


def _bound(plan: Plan, head: Head, weights: Mapping[str, tuple[str, np.ndarray[Any, Any]]],
           where: str) -> dict[int, np.ndarray[Any, Any]]:
    """The weights by position, each as the plan has it."""
    found: dict[int, np.ndarray[Any, Any]] = {}
    if {name for _, name in head.weights} != weights.keys():
        raise refused(where, "there are weights without a place, or places without weights")
    for position, name in head.weights:
        kind = plan.inputs[position] if 0 <= position < len(plan.inputs) else None
        dtype, array = weights[name]
        if not isinstance(kind, TensorType) or kind.dtype != dtype or kind.shape != array.shape or position in found:
            raise refused(where, f"the weights {name[:80]} are {dtype}{list(array.shape)}; the program takes {kind}")
        strides = kind.layout()
        if not all(isinstance(step, int) for step in strides):
            raise refused(where, f"the strides of the weights {name[:80]} are no numbers")
        found[position] = NumpyDriver().restrided(array, strides)  # type: ignore[arg-type]
    return found


def _order(plan: Plan, signature: Signature, bound: Mapping[int, Any], where: str) -> list[int]:
    """The numbers of the user's inputs in the order of the plan's."""
    by_position = {one.position: number for number, one in enumerate(signature.inputs) if one.position >= 0}
    taken = [position for position in range(len(plan.inputs)) if position not in bound]
    used = [one for one in signature.inputs if one.position >= 0]
    if len(used) != len(by_position) or sorted(by_position) != taken:
        raise refused(where, "not every input of the program is an argument or has weights")
    for position, number in by_position.items():
        entry, kind = plan.inputs[position], signature.inputs[number].kind
        scalar = not isinstance(entry, TensorType) or not entry.shape  # as fixed values are, which nothing reads
        if not (scalar if kind == "fixed" else isinstance(entry, TensorType) is (kind == "array")):
            raise refused(where, f"the argument {signature.inputs[number].name[:80]} is of another kind")
    return [by_position[position] for position in taken]

