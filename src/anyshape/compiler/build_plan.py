"""From a graph and its kernels to a plan: which values are stored, as what, and the steps in order.

    kernel(x) -> h;  matmul(permute h) -> y    -->    buffers h (arena), y (output); steps kernel, matmul(window of h)

Views cost nothing: an operand that is a view is a strided window of the stored value under it. It is stored on its own
only where no window can express it or the caller wants other strides.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyshape.ir.asynchronous import writes_results
from anyshape.ir.graph import Graph, Node, Operand, Value, effect_of
from anyshape.ir.op import checks_of, row
from anyshape.ir.types import SizeType, TensorType
from anyshape.kernel.fusion.dead_init import covered
from anyshape.kernel.fusion.result import FusedKernel, Fusion, FusionBlocklist, fusable, taken_over
from anyshape.kernel.loop_ir.aliasing import overwritable
from anyshape.kernel.loop_ir.elementwise import along
from anyshape.kernel.schedule.multiversion import Versions
from anyshape.plan.ir.home import External, Home, Input, Output, Restored, Saved, Temp
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    Plan,
    Regime,
    Step,
    Window,
    touched,
)
from anyshape.sym.expr import Expr, Size, substitute

STATUS = Window("status", TensorType("i64", ()))


@dataclass(frozen=True, slots=True)
class Storage:
    """What must be stored, and how operands see it.

    required: stored values by name. layouts: their types where not dense. windows: operand name -> its window.
    copies: output positions whose result must be copied into a buffer of its own.
    places: value -> the buffer that it lies in, where that is another's: a scatter writes into what it takes over.
    """

    required: Mapping[str, Value]
    layouts: Mapping[str, TensorType]
    windows: Mapping[str, Window]
    copies: frozenset[int]
    places: Mapping[str, str]

    def base(self) -> dict[str, str]:
        """Operand name -> name of the stored value under it."""
        return {name: window.buffer for name, window in self.windows.items()}


def storage(graph: Graph, refused: FusionBlocklist) -> Storage:
    """Decide which values of `graph` are stored (before fusion, which may add more). `refused`: what must stay out of
    kernels."""
    return _Storage(graph, refused).run()


class _Storage:
    def __init__(self, graph: Graph, refused: FusionBlocklist) -> None:
        self.graph = graph
        self.refused = refused
        self.producers = graph.producers()
        self.required: dict[str, Value] = {}
        self.layouts: dict[str, TensorType] = {}
        self.windows: dict[str, Window] = {}
        self.inputs = {v.name for v in graph.inputs}

    def run(self) -> Storage:
        places = self.taken_over()
        copies = self.outputs()
        blank = covered(self.graph)
        for node in self.graph.nodes:
            if row(node).kind == "scatter" and fusable(node, self.refused):
                base, *others = node.values()
                if base.name not in blank or base.name not in places:
                    self.need(base)
                if places.get(node.output.name) in self.inputs:
                    for value in self.checked(others):
                        self.need(value)
            if row(node).stored:
                self.need(node.output)
            if row(node).kind != "view" and not fusable(node, self.refused):
                for value, traced in _operands(node):
                    self.need(value, node.op == "extern" and not _any_strides(node), traced, "attention" in node.op)
        for operand in (*self.graph.saved, *(v for _, v in self.graph.writes)):
            if isinstance(operand, Value):
                self.need(operand)
        return Storage(self.required, self.layouts, self.windows, copies, places)

    def taken_over(self) -> dict[str, str]:
        """The places of scatters: the first operand lies where the result lies, if it has no other use; both lie in an
        input that is to receive the result, if nothing else needs the input as it was or shares its memory."""
        users = self.graph.users()
        ends = {value.name for value in self.graph.roots()}
        writes = {value.name: target for target, value in self.graph.writes}
        kept = {value.name for value in (*self.graph.outputs, *self.graph.saved) if isinstance(value, Value)}
        places: dict[str, str] = {}
        for node in reversed(self.graph.nodes):
            if row(node).kind != "scatter" or not fusable(node, self.refused):
                continue
            base, result = node.inputs[0], node.output.name
            assert isinstance(base, Value)
            if base.name in ends or len(users[base.name]) > 1 or sum(v is base for v in node.values()) > 1:
                continue
            made = self.producers.get(base.name)
            last = places.get(result, result)
            if base.name in self.inputs:
                if writes.get(last) is base and not self.reaches(last, users, kept):
                    chain = [name for name, place in places.items() if place == last]
                    for name in (last, *chain):
                        places[name] = base.name
                        self.layouts[name] = base.tensor
            elif made is not None and (row(made).kind == "library" or (
                    row(made).kind != "view" and fusable(made, self.refused))):
                places[base.name] = last
        return places

    def checked(self, values: list[Value]) -> list[Value]:
        """What may fail on the way to the values: before an input is written, it has to be known."""
        found: dict[str, Value] = {}
        seen: set[str] = set()
        while values:
            value = values.pop()
            node = self.producers.get(value.name)
            if node is None or value.name in seen or not fusable(node, self.refused):
                continue
            seen.add(value.name)
            if row(node).checks:
                found[value.name] = value
            else:
                values.extend(node.values())
        return list(found.values())

    def reaches(self, name: str, users: Mapping[str, list[Node]], ends: set[str]) -> bool:
        """Is the value, or a view of it, one of `ends`?"""
        views = [node.output.name for node in users.get(name, ()) if row(node).kind == "view"]
        return name in ends or any(self.reaches(view, users, ends) for view in views)

    def outputs(self) -> frozenset[int]:
        """Outputs come first: they fix the strides of what is stored."""
        copies: set[int] = set()
        taken: dict[str, str] = {}
        strides = self.graph.output_strides or (None,) * len(self.graph.outputs)
        memory = self.graph.memory or ("",) * len(self.graph.outputs)
        for position, operand in enumerate(self.graph.outputs):
            if isinstance(operand, Value):
                wanted = TensorType(operand.tensor.dtype, operand.tensor.shape, strides[position])
                if not self.place_output(operand, wanted, memory[position], taken):
                    copies.add(position)
                    self.need(operand)
        return frozenset(copies)

    def place_output(self, value: Value, wanted: TensorType, memory: str, taken: dict[str, str]) -> bool:
        """Let the output be a window of a stored value, or stored with the wanted strides; False: it needs a copy.

        Memory is shared with an input, or with another output, exactly where the program's own results share it.
        """
        window = self.window(value)
        if window is not None and same_strides(window.type, wanted):
            if window.buffer in self.inputs:
                if memory == window.buffer:
                    self.windows[value.name] = window
                return memory == window.buffer
            whole = window.type.count == self.stored_type(window.buffer).count
            if taken.get(window.buffer, memory) == memory and (memory or (whole and window.buffer not in taken)):
                taken[window.buffer] = memory
                self.keep(window, value)
                return True
        node = self.producers.get(value.name)
        if node is None or row(node).kind in ("library", "extern", "scatter") or value.name in taken:
            return False
        if value.name in self.windows or not fusable(node, self.refused):
            return False
        taken[value.name] = memory
        self.required[value.name] = value
        self.layouts[value.name] = wanted
        self.windows[value.name] = Window(value.name, wanted)
        return True

    def need(self, value: Value, dense: bool = False, traced: tuple[Size, ...] | None = None,
             rows: bool = False) -> None:
        """Let it be stored, or a window of what is: where `dense`, of strides `traced`; where `rows`, along rows."""
        if value.name in self.windows:
            return
        window = self.window(value, force=True)
        if rows and window is not None and window.type.layout()[-1] != 1 and value.tensor.shape[-1] != 1:
            window = None
        fits = window is not None and traced is not None and same_strides(
            window.type, TensorType(value.tensor.dtype, value.tensor.shape, traced))
        if window is None or (dense and window.buffer != value.name and not fits):
            self.required[value.name] = value
            self.windows[value.name] = Window(value.name, self.stored_type(value.name, value))
        else:
            self.keep(window, value)

    def keep(self, window: Window, value: Value) -> None:
        self.windows[value.name] = window
        self.required[window.buffer] = self.value(window.buffer, value)

    def value(self, name: str, fallback: Value) -> Value:
        node = self.producers.get(name)
        if node is None:
            return next((v for v in self.graph.inputs if v.name == name), fallback)
        return next(v for v in node.outputs if v.name == name)

    def stored_type(self, name: str, value: Value | None = None) -> TensorType:
        if name in self.layouts:
            return self.layouts[name]
        return (value or self.value(name, value)).tensor  # type: ignore[arg-type]

    def window(self, value: Value, force: bool = False) -> Window | None:
        """`value` as a strided window of a stored value, or None. With `force`, a view on the way that no strides can
        express becomes a stored value itself."""
        if value.name in self.windows:
            return self.windows[value.name]
        if value.name in self.layouts:
            return Window(value.name, self.layouts[value.name])
        node = self.producers.get(value.name)
        strided = row(node).strided if node is not None else None
        if node is None or strided is None:
            return Window(value.name, value.tensor)
        source = self.window(next(node.values()), force)
        if source is None:
            return None
        result = strided(source.type.shape, source.type.layout(), source.offset, node)
        if result is None and force:
            self.required[value.name] = value
            self.windows[value.name] = Window(value.name, value.tensor)
            return self.windows[value.name]
        if result is None:
            return None
        kind = TensorType(value.tensor.dtype, value.tensor.shape, result[0])
        if same_strides(kind, kind.dense()):
            kind = kind.dense()
        return Window(source.buffer, kind, result[1])


def same_strides(a: TensorType, b: TensorType) -> bool:
    """Equal strides wherever the size is not the literal 1."""
    return all(x == y for x, y, size in zip(a.layout(), b.layout(), a.shape, strict=True) if size != 1)


def _operands(node: Node) -> list[tuple[Value, tuple[Size, ...] | None]]:
    """The operands that are values, with the strides that they had in the trace, where that is known."""
    traced = dict(node.attrs).get("strides")
    strides = traced if isinstance(traced, tuple) else (None,) * len(node.inputs)
    return [(operand, own) for operand, own in zip(node.inputs, strides, strict=True)  # type: ignore[misc]
            if isinstance(operand, Value)]


def _any_strides(node: Node) -> bool:
    """PyTorch's own operators take any strides; a custom one, or one whose result is a view, gets dense operands, and
    so does one with an effect: numbers are drawn in the order of memory."""
    target = node.attr("target")
    assert isinstance(target, str)
    name = target.removeprefix("aten.")
    views = name.startswith(("view", "as_strided", "_unsafe_view", "unfold"))
    return target.startswith("aten.") and not node.attr("effect") and not views


def assemble(graph: Graph, fusion: Fusion, store: Storage, versions: Mapping[int, Versions]) -> Plan:
    """The plan of `graph` without offsets. `versions`: position of a kernel in the fusion -> its named programs."""
    return _Assembly(graph, fusion, store, versions).run()


class _Assembly:
    def __init__(self, graph: Graph, fusion: Fusion, store: Storage, versions: Mapping[int, Versions]) -> None:
        self.graph = graph
        self.fusion = fusion
        self.store = store
        self.versions = versions
        self.steps: list[Step] = []
        self.position = -1  # of the item that steps are made of
        self.types: dict[str, TensorType] = {}
        self.born: dict[str, int] = {}
        self.extern: set[str] = set()
        self.copied: dict[int, str] = {}
        self.read = {value.name for node in graph.nodes for value in node.values()}
        self.read.update(value.name for value in graph.roots())

    def run(self) -> Plan:
        for value in self.graph.inputs:
            if isinstance(value.type, TensorType):
                self.types[value.name] = value.type
        for position, item in enumerate(self.fusion.items):
            self.position = position
            if isinstance(item, FusedKernel):
                self.kernel(item, self.versions[position])
            elif row(item).kind == "library":
                self.library(item)
            else:
                self.call(item)
        outputs = self.outputs()
        self.writes()
        saved = tuple(self.window(o) if isinstance(o, Value) else o for o in self.graph.saved)
        buffers = self.buffers(outputs, saved)
        return Plan(
            self.graph.name,
            tuple(v.name if isinstance(v.type, SizeType) else v.type for v in self.graph.inputs),
            outputs, saved, buffers, tuple(self.steps), (), 0, self.graph.facts,
            tuple(self.graph.inputs.index(v) for v in self.graph.restored))

    def define(self, name: str, kind: TensorType) -> Window:
        name = self.place(name)
        self.types[name] = kind
        self.born[name] = len(self.steps)
        return Window(name, kind)

    def window(self, value: Value) -> Window:
        found = self.store.windows.get(value.name)
        if found is None:
            return self.stored(value.name)
        return Window(self.place(found.buffer), found.type, found.offset)

    def place(self, name: str) -> str:
        """The buffer that a stored value lies in."""
        return self.store.places.get(name, name)

    def stored(self, name: str) -> Window:
        name = self.place(name)
        return Window(name, self.types[name])

    def kernel(self, item: FusedKernel, versions: Versions) -> None:
        for base in taken_over(item):
            result = item.group.roots[0]
            if self.place(base.name) != self.place(result.name):
                self.steps.append(CopyStep(self.window(base), self.define(result.name, result.tensor.dense())))
        stored = {v.name: v for v in item.group.stored}
        params: list[Window] = []
        outputs: list[int] = []
        for k, value_name in enumerate(item.lowered.values):
            if value_name in stored:
                outputs.append(k)
            if value_name == "":
                params.append(STATUS)
            elif value_name in stored and self.place(value_name) not in self.types:
                kind = self.store.layouts.get(value_name, stored[value_name].tensor.dense())
                params.append(self.define(value_name, kind))
            else:  # it reads what is there, or writes into it
                params.append(self.stored(value_name))
        regimes = []
        handed: list[Window] = []
        inside: dict[str, Size] = dict(zip(item.lowered.program.sizes, item.lowered.sizes, strict=True))
        for version in versions:
            first, *others = (program.name for program in version.programs)
            conditions = tuple(substitute(condition, inside) for condition in version.conditions)
            regimes.append(Regime(first, conditions, item.lowered.sizes, tuple(others)))
            for dtype, count in version.handed:
                kind = TensorType(dtype, (substitute(count, inside),))
                handed.append(self.define(f"{item.group.stored[0].name} handed {len(handed)}", kind))
        over = [overwritable(*version.programs) for version in versions]
        text = "; ".join(dict.fromkeys(n.where for n in item.group.nodes if n.where))
        self.steps.append(KernelStep(
            tuple(regimes), tuple(params), tuple(outputs), text, tuple(p for p in over[0] if all(p in r for r in over)),
            tuple(handed), along(versions[0].programs[0]) if len(versions) == 1 else (), checks_of(item.group.nodes),
            self.position))

    def library(self, node: Node) -> None:
        inputs = tuple(self.window(v) for v in node.values())
        if node.op in ("direct_conv", "conv_bytes"):
            inputs = (self.dense(inputs[0], node), *inputs[1:])
        if node.op in ("recurrence", "recurrence_bytes"):
            inputs = tuple(one if place == 0 and self.in_rows(one) else self.dense(one, node, place)
                           for place, one in enumerate(inputs))
        outputs = tuple(self.define(v.name, v.tensor.dense()) for v in node.outputs)
        self.steps.append(LibraryStep(node.op, inputs, outputs, node.attrs, node.where, self.position))

    def call(self, node: Node) -> None:
        inputs = tuple(self.window(o) if isinstance(o, Value) else o for o in node.inputs)
        if node.op == "convolution":
            inputs = (self.dense(inputs[0], node), *inputs[1:])
        # a result that nothing reads is not kept, and may be other than traced
        written = writes_results(node)
        outputs = tuple(self.define(v.name, v.tensor) if written or v.name in self.read else None for v in node.outputs)
        if not written:
            self.extern.update(v.name for v in node.outputs if v.name in self.read)
        if node.op == "extern":
            target, template = node.attr("target"), node.attr("template")
        else:
            target, template = f"anyshape.{node.op}", tuple(node.attrs)
        assert isinstance(target, str)
        self.steps.append(ExternStep(target, inputs, template, outputs, node.where, effect_of(node),
                                     self.position))

    def in_rows(self, window: Window) -> bool:
        """Whether the elements of the last dim are next to each other, in any order of the other dims."""
        return window.type.strides is None or window.type.strides[-1] == 1

    def dense(self, window: Operand | Window, node: Node, place: int = 0) -> Window:
        """The operand of a library that would copy it aside: here the copy lies in the arena."""
        assert isinstance(window, Window)
        if same_strides(window.type, window.type.dense()):
            return window
        target = self.define(f"{node.outputs[0].name} operand{f' {place}' * (place > 0)}", window.type.dense())
        self.steps.append(CopyStep(window, target, node.where))
        return target

    def outputs(self) -> tuple[Window | Expr | int | float | None, ...]:
        result: list[Window | Size | float | None] = []
        strides = self.graph.output_strides or (None,) * len(self.graph.outputs)
        for position, operand in enumerate(self.graph.outputs):
            if not isinstance(operand, Value):
                result.append(operand)
            elif position in self.store.copies:
                source = self.window(operand)
                kind = TensorType(operand.tensor.dtype, operand.tensor.shape, strides[position])
                name = f"output {position}"
                target = self.define(name, kind)
                self.copied[position] = name
                self.steps.append(CopyStep(source, target))
                result.append(target)
            else:
                result.append(self.window(operand))
        return tuple(result)

    def writes(self) -> None:
        """Written inputs receive their values at the end; a value that is itself a written input is set aside first."""
        targets = {target.name for target, _ in self.graph.writes}
        sources = []
        for position, (target, value) in enumerate(self.graph.writes):
            source = self.window(value)
            if source.buffer in targets and source.buffer != target.name:
                aside = self.define(f"write {position}", source.type.dense())
                self.steps.append(CopyStep(source, aside))
                source = aside
            sources.append(source)
        for (target, value), source in zip(self.graph.writes, sources, strict=True):
            if self.place(value.name) == target.name != value.name:
                continue  # it is there
            self.steps.append(CopyStep(source, Window(target.name, target.tensor)))

    def buffers(self, outputs: tuple[Operand | Window | None, ...], saved: tuple[Operand | Window, ...]
                ) -> tuple[Buffer, ...]:
        homes: dict[str, Home] = {}
        for index, value in enumerate(self.graph.inputs):
            if isinstance(value.type, TensorType):
                homes[value.name] = Input(index)
        homes |= {value.name: Restored(index) for index, value in enumerate(self.graph.restored)}
        homes |= {name: External() for name in self.extern}
        for index, entry in enumerate(outputs):
            if isinstance(entry, Window):
                homes.setdefault(entry.buffer, Output(index))
        for index, entry in enumerate(saved):
            if isinstance(entry, Window):
                homes.setdefault(entry.buffer, Saved(index))
        end = len(self.steps)
        last: dict[str, int] = {}
        for position, step in enumerate(self.steps):
            for window in touched(step):
                last[window.buffer] = position
        for entry in (*outputs, *saved):
            if isinstance(entry, Window):
                last[entry.buffer] = end
        result = []
        for name, kind in self.types.items():
            home = homes.get(name, Temp())
            if name not in self.born and isinstance(home, Input) and name not in last:
                last[name] = 0
            result.append(Buffer(name, kind.bytes, home, self.born.get(name, 0),
                                 last.get(name, self.born.get(name, 0)), kind.device))
        return tuple(result)
