"""Python kernels of operators (`py_impl`), which PyTorch runs in traces in place of the operators, where those compute
something else than eager PyTorch does: inside of `eager_operators` they are set aside, or ours run instead.

    softshrink          torch's is differentiated step by step: 0 * inf is NaN where the operator's gradient is 0
    upsample_nearest    torch's takes other pixels where a factor is no whole number
    fused attention     before 2.13, the sums of exponentials are said to be float32 where they are float64
    lstm, gru, rnn      torch's are taken apart over time, so that there would be a program for each length
    bernoulli_          draws in the order of memory; as a function, which it becomes in a graph, in that of indices
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.torch_compat.versions.memory_order import drawn_in_memory_order

aten = torch.ops.aten
Kernel = Callable[..., Any]
_POSITIONS = "_compute_upsample_nearest_indices"  # what torch's kernels for resizing share


def _softshrink(x: torch.Tensor, lambd: Any = 0.5) -> torch.Tensor:
    """What lies within the limits has no gradient, whatever comes from behind."""
    most = torch.finfo(x.dtype).max
    check = compat.need("torch._check")
    check(0 <= lambd <= most,
          lambda: f"lambda must be in range [0, {most}] for input dtype {x.dtype}, but found {lambd}")
    y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # where the limit is not rounded
    return torch.where(y.abs() > lambd, y - torch.sign(y).detach() * lambd, y.detach() * 0).to(x.dtype)


def nearest_positions(x: torch.Tensor, output_size: Sequence[Any], scales: Sequence[float | None],
                      exact: bool = False) -> list[torch.Tensor]:
    """Which pixels of x: [n, channels, ...] a resizing takes, along each dim, as the CPU's kernels have it
    (ATen/native/cpu/UpSampleKernel.cpp): numbers are float32, and the scale is 1 / factor if a factor was given."""
    count = len(output_size)
    of_sizes = count == 2 or (count == 3 and x.is_contiguous(memory_format=torch.channels_last_3d))
    found = []
    for dim, (size, factor) in enumerate(zip(output_size, scales, strict=True)):
        given = x.shape[dim - count]
        place = torch.arange(size, device=x.device)
        positions = _nearest(place, size, given, factor if factor and factor > 0 else None, exact, of_sizes)
        found.append(positions.reshape([-1] + [1] * (count - 1 - dim)))
    return found


def _nearest(place: torch.Tensor, size: Any, given: Any, factor: float | None, exact: bool,
             of_sizes: bool) -> torch.Tensor:
    """of_sizes: a dim of the same or of twice the size is resized by that, whatever the factor was."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    whole = [times for times in (1, 2, 4, 8) if statically_known_true(size == given * times)]
    if whole and not exact and factor in (None, float(whole[0])):
        return place if whole[0] == 1 else place // whole[0]
    scaled = (place.float() + 0.5 if exact else place.float()) * (given / size if factor is None else 1.0 / factor)
    positions = scaled.to(torch.int64)
    if factor is None:
        return positions
    positions = torch.minimum(positions, torch.scalar_tensor(given - 1, dtype=torch.int64, device=place.device))
    if exact or not of_sizes:
        return positions
    beyond = torch.scalar_tensor(size - given, dtype=torch.int64, device=place.device)
    size_of = torch.scalar_tensor(given, dtype=torch.int64, device=place.device)
    return torch.where(beyond == 0, place, torch.where(beyond == size_of, place // 2, positions))


def refuse_size_0(sizes: Sequence[Any], error: type[Exception], message: str) -> None:
    """Raises where a size is 0; of a size that is a symbol this is a guard. Sizes that only data tell are not asked."""
    import sympy
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
    for size in sizes:
        if isinstance(size, torch.SymInt) and not free_unbacked_symbols(size):
            # not `size == 0`, which operators are answered without a guard (general_tracing)
            size = int(bool(size.node.shape_env.evaluate_expr(sympy.Ne(size.node.expr, 0))))
        if isinstance(size, int) and size == 0:
            raise error(message)


def _not_of_nothing(torchs: Kernel) -> Kernel:
    """A resizing, which eager PyTorch refuses for images without pixels or channels. Rows of pixels come in order."""
    def resize(x: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        message = f"Input and output sizes should be greater than 0, and the tensor not empty: {tuple(x.shape)}"
        refuse_size_0(x.shape[1:], RuntimeError, message)
        result = torchs(x, *arguments, **keywords)
        refuse_size_0(result.shape[2:], RuntimeError, message)
        return result.contiguous() if x.dim() == 3 else result  # of one dim never as x lies

    return resize


def _in_its_dtype(torchs: Kernel) -> Kernel:
    """Attention: (result, logarithm of the sum of exponentials of each row); the latter of float64 is float64."""
    def attention(query: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        result, sums = torchs(query, *arguments, **keywords)
        return result, sums.double() if query.dtype == torch.float64 else sums

    return attention


def _bernoulli_(x: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    mask = drawn_in_memory_order(x.detach(), p, generator)
    return x.copy_(aten.bernoulli.p(x.detach(), p, generator=generator) if mask is None else mask)


def _is_plain(x: torch.Tensor, states: Sequence[torch.Tensor]) -> bool:
    return states[0].shape[2] == states[-1].shape[2] and not torch.is_autocast_enabled(x.device.type)


def _layers(cell: str) -> Callable[[Kernel], Kernel]:
    """All layers and directions of a recurrent network, each by an operator of ours
    (frontend/recurrent/operators.py); dropout between them draws as the operator does."""
    def changed(_torchs: Kernel) -> Kernel:
        def layers(x: torch.Tensor, states: Any, weights: Sequence[torch.Tensor], biased: bool, count: int,
                   dropout: float, train: bool, both: bool, batch_first: bool) -> tuple[torch.Tensor, ...]:
            ours: Any = torch.ops.anyshape_recurrent
            given = list(states) if cell == "lstm" else [states]
            if not _is_plain(x, given):
                raise compat.need("torch._subclasses.fake_tensor.UnsupportedFakeTensorException")(
                    "a recurrent layer with projections, or under autocast, is left to PyTorch")
            each, y = 4 if biased else 2, x.transpose(0, 1) if batch_first else x
            lasts = []
            for layer in range(count):
                found = []
                for place in range(layer * (1 + both), (layer + 1) * (1 + both)):
                    w, r, *biases = weights[place * each:(place + 1) * each]
                    b, rb = biases or [w.new_zeros(w.shape[0])] * 2
                    own = [one[place] for one in given]
                    back = both and place % 2 == 1
                    first, *last = ours.lstm(y, *own, w, r, b, rb, back) if cell == "lstm" else ours.cell(
                        y, *own, w, r, b, rb, back, cell)
                    found.append(first)
                    lasts.append(last)
                y = torch.cat(found, 2) if both else found[0]
                if dropout and train and layer < count - 1:
                    y = torch.dropout(y, dropout, train)
            ends = [torch.stack(one) for one in zip(*lasts, strict=True)]
            return (y.transpose(0, 1) if batch_first else y, *ends)

        return layers

    return changed


_RESIZING = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
             "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
             "upsample_bicubic2d", "upsample_trilinear3d")
_RECURRENT = {aten.lstm.input: _layers("lstm"), aten.gru.input: _layers("gru"), aten.rnn_tanh.input: _layers("tanh"),
              aten.rnn_relu.input: _layers("relu")}
# operator -> the kernel in place of torch's
_OURS: dict[Any, Callable[[Kernel], Kernel]] = {
    aten.softshrink.default: lambda torchs: _softshrink,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _in_its_dtype,
    **_RECURRENT,
    **{getattr(getattr(aten, name), overload): _not_of_nothing
       for name in _RESIZING for overload in ("default", "vec")},
}
# operator that has no such kernel -> ours
_MORE: dict[Any, Kernel] = {aten.bernoulli_.float: _bernoulli_}
_BEFORE_GRADIENTS = "torch._C.DispatchKey.Autograd"  # where they are looked for


def recurrent_decompositions() -> dict[Any, Kernel]:
    """Recurrent networks, which `torch.export` leaves whole, by operators of ours; those that have projections stay."""
    def unless_projected(layers: Kernel) -> Kernel:
        def decomposed(x: torch.Tensor, states: Any, *arguments: Any) -> Any:
            given = list(states) if isinstance(states, (list, tuple)) else [states]
            return layers(x, states, *arguments) if _is_plain(x, given) else NotImplemented

        return decomposed

    return {op: unless_projected(changed(op)) for op, changed in _RECURRENT.items()}


@contextlib.contextmanager
def eager_operators() -> Iterator[None]:
    """Sets torch's Python kernels of `_OURS` and `_MORE` aside while a trace runs. Other threads that compile wait, for
    this is every thread's."""
    decompositions = compat.get("torch._decomp.decompositions")
    torchs = getattr(decompositions, _POSITIONS, None)
    with compat.compile_lock(), python_kernels(_OURS, _MORE):
        if torchs is not None:
            setattr(decompositions, _POSITIONS, nearest_positions)
        try:
            yield
        finally:
            if torchs is not None:
                setattr(decompositions, _POSITIONS, torchs)


@contextlib.contextmanager
def python_kernels(changes: Mapping[Any, Callable[[Kernel], Kernel]],
                   more: Mapping[Any, Kernel] | None = None) -> Iterator[None]:
    """Inside, the Python kernels of each operator are what its function makes of them, and others have those of `more`,
    if this torch has such."""
    more, place = more or {}, compat.get(_BEFORE_GRADIENTS)
    ops = [*changes, *(more if place is not None else ())] if compat.has(*compat.PYTHON_KERNELS) else []
    found = [(op, *compat.python_kernels(op)) for op in ops]
    before = [(kernels, chosen, dict(kernels)) for _, kernels, chosen in found]
    for op, kernels, chosen in found:
        kernels.update({place: more[op]} if op in more else {
            key: changes[op](kernel) for key, kernel in kernels.items()})
        chosen.clear()
    try:
        yield
    finally:
        for kernels, chosen, torchs in before:
            kernels.clear()
            kernels.update(torchs)
            chosen.clear()
