"""Operators by numpy, for programs without PyTorch: the same as PyTorch's, and as ONNX's by PyTorch."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anyshape
from anyshape.artifact.check import check
from anyshape.artifact.load import load
from anyshape.base.errors import AnyShapeError, ArtifactError, VerifyError
from anyshape.runtime.numpy_ops import call, calls, reason_against
from anyshape.runtime.torch_ops.extern_calls import call_extern, results_of
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.dtypes import DTYPE_NAMES
from deploying import alone, members_of, mutants, with_members


def entry(value: Any, operands: list[Any]) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        operands.append(value)
        return ("operand", len(operands) - 1)
    if isinstance(value, (list, tuple)):
        return ("list", *(entry(one, operands) for one in value))
    if isinstance(value, torch.dtype):
        return ("dtype", DTYPE_NAMES[value])
    if isinstance(value, complex):
        return ("complex", value.real, value.imag)
    return ("none",) if value is None else (type(value).__name__, value)


def same(target: str, *arguments: Any, close: float = 1e-5, **keywords: Any) -> None:
    operands: list[torch.Tensor] = []
    template = (("args", *(entry(one, operands) for one in arguments)),
                ("kwargs", *((name, entry(one, operands)) for name, one in keywords.items())))
    wanted = call_extern(target, template, operands)
    found = call(target, template, [one.resolve_conj().numpy() for one in operands])
    wanted = results_of(wanted, len(found))
    for have, want in zip(found, wanted, strict=True):
        if callable(have):  # gradients alone read it
            with pytest.raises(VerifyError, match="factors"):
                have()
            continue
        torch.testing.assert_close(torch.from_numpy(np.array(have)), want.contiguous(), rtol=close,
                                   atol=close, equal_nan=True)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=made, dtype=dtype)
    return torch.randint(-9 if dtype.is_signed else 0, 10, shape, generator=made, dtype=dtype)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("channels", "outs", "groups"), [(1, 1, 1), (4, 6, 1), (4, 6, 2), (5, 5, 5), (3, 6, 3)])
def test_convolutions_are_pytorchs(dims: int, channels: int, outs: int, groups: int) -> None:
    sizes = (7, 5, 3)[:dims]
    for kernel, stride, padding, dilation in ((1, 1, 0, 1), (3, 1, 1, 1), (2, 2, 0, 1), (3, 3, 4, 2), (2, 1, 2, 3)):
        rest = [stride] * dims, [padding] * dims, [dilation] * dims
        if any(n + 2 * padding < dilation * (kernel - 1) + 1 for n in sizes):
            continue
        for batch, dtype, bias in ((2, torch.float32, True), (1, torch.float64, False), (0, torch.float32, False)):
            x = draw(batch, channels, *sizes, dtype=dtype)
            w = draw(outs, channels // groups, *[kernel] * dims, dtype=dtype, seed=1)
            b = draw(outs, dtype=dtype, seed=2) if bias else None
            same("aten.convolution.default", x, w, b, *rest, False, [0] * dims, groups)
            turned = draw(channels, outs // groups, *[kernel] * dims, dtype=dtype, seed=1)
            full = [(n - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 for n in sizes]
            if min(full) > 0 and batch:
                same("aten.convolution.default", x, turned, b, *rest, True, [stride - 1] * dims, groups)


def test_convolutions_with_channels_last_and_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyshape.runtime.numpy_ops import convolution
    for groups, outs in ((1, 6), (2, 6), (4, 4)):
        x, w, b = draw(2, 9, 5, 4), draw(outs, 4 // groups, 3, 2, seed=1), draw(outs, seed=2)
        wanted = torch.conv2d(x.movedim(-1, 1), w, b, (2, 1), (1, 2), (1, 2), groups).movedim(1, -1)
        for most in (1 << 20, 1, 200):
            monkeypatch.setattr(convolution, "BAND", most)
            monkeypatch.setattr(convolution, "NEAR", most)
            found, = call("anyshape.convolution", (("stride", (2, 1)), ("padding", (1, 2)), ("dilation", (1, 2)),
                                                   ("groups", groups)), [x.numpy(), w.numpy(), b.numpy()])
            torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-5)
    same("aten.convolution.default", draw(1, 4, 6, 5), draw(4, 2, 3, 2, seed=1), None, [2, 1], [1, 0], [1, 2], True,
         [1, 0], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_sorting_is_pytorchs(dtype: torch.dtype) -> None:
    for shape in ((7,), (3, 5), (0, 4), (2, 3, 11), (3, 1)):
        x = draw(*shape, dtype=dtype)
        if dtype.is_floating_point and x.numel():
            x.view(-1)[::4] = torch.nan
        for dim, descending in itertools.product(range(-1, len(shape)), (False, True)):
            same("aten.sort.stable", x, stable=True, dim=dim, descending=descending)
            if x.shape[dim] > 1:
                same("onnx.topk", x, 2, dim, descending)
        same("aten.cummax.default", x, 0)
        same("aten.cummin.default", x, len(shape) - 1)
        same("aten.cumprod.default", x, 0)
    same("aten.sort.default", torch.tensor(3.0))
    same("aten.logcumsumexp.default", draw(3, 5), 1)


def test_pools_are_pytorchs() -> None:
    for dims, shape in ((2, (2, 3, 7, 6)), (3, (1, 2, 5, 6, 4))):
        x = draw(*shape)
        x.view(-1)[5] = torch.nan
        for kernel, stride, padding, up in (([2], [], [0], False), ([3], [2], [1], True), ([3] * dims, [1], [1], False),
                                            ([2], [3], [1], True)):
            same(f"aten.max_pool{dims}d_with_indices.default", x, kernel, stride, padding, [1], up)
            for count, divisor in ((True, None), (False, None), (True, 5)):
                same(f"aten.avg_pool{dims}d.default", x, kernel, stride, padding, up, count, divisor)
        size = [3, 4, 2][:dims]
        same(f"aten._adaptive_avg_pool{dims}d.default", x, size)
        same(f"aten.adaptive_max_pool{dims}d.default", x, size)
    same("aten.max_pool2d_with_indices.default", draw(1, 2, 9, 7), [2], [1], [0], [3])
    same("onnx.max_pool_positions", draw(2, 2, 5, 4), [2, 2], [2, 1], [1, 1], [0, 1], [0, 0], [2, 4], 1)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resizing_is_onnxs(mode: str) -> None:
    x = draw(2, 3, 5, 4)
    for places, nearest, exclude, antialias in itertools.product(
            ("half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners", "pytorch_half_pixel",
             "tf_crop_and_resize"), ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"), (False, True),
            (False, True)):
        if (mode == "nearest") == (exclude or antialias) or (mode != "nearest" and nearest != "floor"):
            continue
        for shape, scales in (((2, 3, 9, 3), (1.0, 1.0, -1.0, -1.0)), ((2, 3, 2, 8), (1.0, 1.0, 0.5, 2.0)),
                              ((2, 3, 1, 4), (1.0, 1.0, 0.3, 1.0))):
            roi = [0.0, 0.0, 0.1, -0.2, 1.0, 1.0, 0.8, 1.3] if places == "tf_crop_and_resize" else []
            same("onnx.resize", x, list(shape), list(scales), mode, places, nearest, -0.75, exclude, 7.0, antialias,
                 roi, [0, 1, 2, 3], close=1e-4)
    same("onnx.resize", draw(1, 1, 3, 3, dtype=torch.uint8), [1, 1, 5, 7], [-1.0] * 4, mode, "half_pixel", "floor",
         -0.75, False, 0.0, False, [], [0, 1, 2, 3])


def layers(kind: str, hidden: int, inputs: int, directions: int) -> list[torch.Tensor]:
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[kind] * hidden
    return [draw(directions, gates, inputs, seed=1), draw(directions, gates, hidden, seed=2),
            draw(directions, 2 * gates, seed=3)]


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_recurrent_layers_are_onnxs(kind: str) -> None:
    usual: dict[str, Sequence[str]] = {"lstm": ("Sigmoid", "Tanh", "Tanh"), "gru": ("Sigmoid", "Tanh"),
                                       "rnn": ("Tanh",)}
    for direction, layout, clip, variant in itertools.product(("forward", "bidirectional", "reverse"), (0, 1),
                                                              (0.0, 0.3), (0, 1)):
        directions = 2 if direction == "bidirectional" else 1
        time, batch, inputs, hidden = 5, 2, 3, 4
        x = draw(*((batch, time) if layout else (time, batch)), inputs)
        lengths = torch.tensor([5, 3], dtype=torch.int32) if variant else None
        states: list[Any] = [draw(*((batch, directions) if layout else (directions, batch)), hidden, seed=4)]
        if kind == "lstm":
            states += [None, draw(directions, 3 * hidden, seed=5) if variant else None]
        names = list(usual[kind]) * directions
        same(f"onnx.{kind}", x, *layers(kind, hidden, inputs, directions), lengths, *states, hidden, direction, names,
             [], [], clip, layout, variant)
    names = ["HardSigmoid", "LeakyRelu", "Softsign"] if kind == "lstm" else ["Affine", "ScaledTanh"][-len(usual[kind]):]
    same(f"onnx.{kind}", draw(3, 2, 3), *layers(kind, 4, 3, 1), None, *[None] * (3 if kind == "lstm" else 1), 4,
         "forward", names, [0.3, 0.2], [0.4], 0.0, 0, 0)


def test_what_is_not_on_the_list_or_does_not_fit_is_refused() -> None:
    args = (("args", ("operand", 0)), ("kwargs",))
    assert "aten.from_file.default" in reason_against("aten.from_file.default", args, 1)
    assert reason_against("aten.sort.default", args, 1, effect=1) and not reason_against("aten.sort.default", args, 1)
    assert reason_against("aten.sort.default", (("args", ("operand", 3)), ("kwargs",)), 1)
    x = np.zeros((2, 3), np.float32)
    for target, template in (("aten.from_file.default", args), ("aten.convolution.default", args),
                             ("aten.sort.default", (("args", ("operand", 0), ("int", 7)), ("kwargs",))),
                             ("aten.sort.default", (("args", ("operand", 0)), ("kwargs", ("__class__", ("int", 1)))))):
        with pytest.raises(VerifyError) as caught:
            call(target, template, [x], "here")
        assert caught.value.why and caught.value.do and caught.value.where == "here"


# --- in programs


def network() -> Any:
    """A small detector and reader of lines: strided, depthwise and grouped convolutions, squeeze and excitation, a
    transposed convolution, resizing, and a recurrent layer without a routine; with two results and top-k."""
    onnx = pytest.importorskip("onnx")
    node, info, number = onnx.helper.make_node, onnx.helper.make_tensor_value_info, np.random.default_rng(0)
    constants: dict[str, np.ndarray] = {}

    def weights(name: str, *shape: int) -> str:
        constants[name] = (number.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        return name
    constants |= {"k": np.array([3]), "scales": np.array([1, 1, 2, 2], np.float32), "axes": np.array([2])}
    nodes = [
        node("Conv", ["x", weights("w0", 8, 3, 3, 3)], ["a0"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("HardSwish", ["a0"], ["a"]),
        node("Conv", ["a", weights("w1", 8, 1, 3, 3), weights("b1", 8)], ["b0"], group=8, pads=[1, 1, 1, 1]),
        node("Relu", ["b0"], ["b"]), node("GlobalAveragePool", ["b"], ["m"]),
        node("Conv", ["m", weights("w2", 8, 8, 1, 1)], ["m0"]), node("HardSigmoid", ["m0"], ["m1"]),
        node("Mul", ["b", "m1"], ["c"]),
        node("Conv", ["c", weights("w3", 12, 4, 3, 3)], ["d"], group=2, pads=[1, 1, 1, 1]),
        node("ConvTranspose", ["d", weights("w4", 12, 2, 2, 2), weights("b4", 2)], ["e"], strides=[2, 2]),
        node("Resize", ["c", "", "scales"], ["f"], mode="linear"), node("ReduceMean", ["f"], ["g"], axes=[1, 2],
                                                                        keepdims=0),
        node("ReduceMean", ["d"], ["s"], axes=[2], keepdims=0), node("Transpose", ["s"], ["t"], perm=[2, 0, 1]),
        node("GRU", ["t", weights("w5", 2, 15, 12), weights("w6", 2, 15, 5)], ["u", ""], hidden_size=5,
             direction="bidirectional", clip=3.0),
        node("TopK", ["u", "k"], ["values", "places"], axis=-1),
    ]
    graph = onnx.helper.make_graph(
        nodes, "reader", [info("x", 1, ["n", 3, "h", "w"])], [info(name, kind, None) for name, kind in (
            ("e", 1), ("g", 1), ("values", 1), ("places", 7))],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


RUN = """
    import sys
    import numpy as np
    import anyshape
    run = anyshape.load(sys.argv[1], trust_native=sys.argv[3] == "native")
    with np.load(sys.argv[2]) as given:
        for number in range(3):
            for name, found in zip(("e", "g", "values", "places"), run(given[f"x{number}"]), strict=True):
                np.testing.assert_allclose(found, given[f"{name}{number}"], rtol=1e-4, atol=1e-5)
    print("same", "torch" in sys.modules)
    """


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks") / "reader.any"
    return anyshape.save(anyshape.compile_onnx(network()), path)


def test_an_onnx_network_runs_where_there_is_only_numpy(file: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(network().SerializeToString())
    data: dict[str, np.ndarray] = {}
    for number, shape in enumerate(((1, 3, 8, 12), (2, 3, 17, 21), (1, 3, 31, 6))):
        data[f"x{number}"] = draw(*shape).numpy()
        wanted = session.run(None, {"x": data[f"x{number}"]})
        data |= {f"{name}{number}": one for name, one in zip(("e", "g", "values", "places"), wanted, strict=True)}
    np.savez(file.with_suffix(".npz"), **data)
    assert alone(RUN, file, file.with_suffix(".npz"), "native").split() == ["same", "False"]
    assert alone(RUN, file, file.with_suffix(".npz"), "text", blocked=("torch",)).split() == ["same", "False"]


def test_calls_in_several_threads_and_memory_that_is_given_back(file: Path) -> None:
    x = draw(1, 3, 16, 20).numpy()
    with load(file, trust_native=True, threads=1) as run:
        wanted = run(x)
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(lambda _: run(x), range(12)):
                for have, want in zip(found, wanted, strict=True):
                    np.testing.assert_array_equal(have, want)
        assert run.bytes_of([x]) > sum(one.nbytes for one in wanted)


def test_a_strangers_file_that_names_other_operators_is_refused(file: Path, tmp_path: Path) -> None:
    members = members_of(file)
    for old, new in ((b"aten.convolution.default", b"aten.from_file.default"), (b"onnx.gru", b"os.system"),
                     (b"effect=False", b"effect=1")):
        assert old in members["graph.txt"]
        changed = with_members(tmp_path / "changed.any", {
            **members, "graph.txt": members["graph.txt"].replace(old, new, 1)})
        with pytest.raises(ArtifactError) as caught:
            check(changed)
        assert "operator of PyTorch" in caught.value.why and caught.value.do
    wrong = members["graph.txt"].replace(b'["operand", 1]', b'["str", "w"]')
    changed = with_members(tmp_path / "changed.any", {**members, "graph.txt": wrong})
    with pytest.raises(AnyShapeError):
        load(changed)(draw(1, 3, 8, 12).numpy())


def test_changed_files_are_read_or_refused(file: Path, tmp_path: Path) -> None:
    read = 0
    for what, path in mutants(file, tmp_path, 60, 3):
        try:
            check(path)
            read += 1
        except ArtifactError as error:
            assert error.what and error.why and error.do, what
    assert read


def test_depthwise_convolutions_are_kernels() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 7, 1)]
    for kernel, stride, dilation in (((3, 3), 2, 1), ((1, 5), 1, 1), ((2, 2), 1, 2)):
        layers += [nn.Conv2d(7, 7, kernel, stride, tuple(k // 2 for k in kernel), dilation, groups=7), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(7, 4, 1)).eval()
    before = anyshape.stats()["extern_calls"]
    with torch.no_grad():
        compiled = anyshape.compile(model)
        for shape in ((2, 3, 9, 11), (1, 3, 40, 17), (3, 3, 8, 8)):
            x = draw(*shape)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert anyshape.stats()["extern_calls"] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resizing_of_images_is_pytorchs(dtype: torch.dtype) -> None:
    names = {1: ("nearest", "_nearest_exact", "linear"), 2: ("nearest", "_nearest_exact", "bilinear", "bicubic"),
             3: ("nearest", "_nearest_exact", "trilinear")}
    for dims, rows in names.items():
        x = draw(2, 3, *(5, 7, 4)[:dims], dtype=dtype)
        for row in rows:
            name = f"upsample_{row}{dims}d" if row[0] != "_" else f"_upsample_nearest_exact{dims}d"
            for align in ((),) if "nearest" in row else ((True,), (False,)):
                for sizes in ([9, 3, 4][:dims], [1] * dims, [5, 7, 4][:dims]):
                    same(f"aten.{name}.vec", x, sizes, *align, None)
                    same(f"aten.{name}.default", x, sizes, *align, *([0.7] * dims))
                for scales in ([2.0] * dims, [0.6] * dims, [1.3] * dims, [1.1] * dims):
                    same(f"aten.{name}.vec", x, None, *align, scales)
    same("aten.upsample_nearest2d.vec", draw(1, 2, 3, 4, dtype=torch.uint8), [6, 7], None)
    with pytest.raises(VerifyError, match="nearest elements only"):
        same("aten.upsample_bilinear2d.vec", draw(1, 2, 3, 4, dtype=torch.uint8), [6, 7], False, None)


def test_sampling_on_a_grid_is_pytorchs() -> None:
    for dims, modes in ((2, (0, 1, 2)), (3, (0, 1))):
        x, grid = draw(2, 3, *(5, 7, 4)[:dims]), draw(2, *(3, 4, 2)[:dims], dims, seed=1)
        for mode, padding, align in itertools.product(modes, (0, 1, 2), (True, False)):
            same(f"aten.grid_sampler_{dims}d.default", x, grid, mode, padding, align, close=1e-4)
    same("aten.grid_sampler_2d.default", draw(1, 2, 1, 1), draw(1, 3, 3, 2), 0, 2, True)
    same("aten.grid_sampler_2d.default", draw(0, 2, 4, 3), draw(0, 3, 3, 2), 0, 0, True)


def test_searches_and_distances_are_pytorchs() -> None:
    lines, x = draw(3, 9).sort(-1)[0], draw(3, 4, seed=1)
    for right in (False, True):
        same("aten.searchsorted.Tensor", lines, x, right=right)
        same("aten.searchsorted.Tensor", lines[0], x, out_int32=True, side="right" if right else "left")
        same("aten.bucketize.Tensor", x, lines[0], right=right)
    same("aten.searchsorted.Tensor", lines, lines, sorter=torch.arange(9).expand(3, 9))
    same("aten.searchsorted.Tensor", lines[:, :0], x)
    for shape in ((7,), (2, 4), (1,), (0,)):
        same("aten.median.default", draw(*shape))
    same("aten.median.default", torch.tensor([1.0, float("nan"), 0.0]))
    for p in (0.0, 1.0, 1.5, 2.0, float("inf")):
        same("aten._cdist_forward.default", draw(2, 3, 5), draw(2, 4, 5, seed=1), p, None, close=1e-4)
    same("aten._cdist_forward.default", draw(3, 0), draw(2, 0), 2.0, None)
    checked = (("args", ("operand", 0), ("str", "less")), ("kwargs",))
    assert call("aten._assert_async.msg", checked, [np.ones(3, bool)]) == ()
    with pytest.raises(AnyShapeError, match="less"):
        call("aten._assert_async.msg", checked, [np.zeros(1, bool)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fourier_transforms_and_complex_numbers_are_pytorchs(dtype: torch.dtype) -> None:
    x = draw(3, 4, 5, dtype=dtype)
    z = torch.complex(x, draw(3, 4, 5, dtype=dtype, seed=1))
    for dims, scale, flag in itertools.product(([2], [1, 2], [0, 2], [1]), (0, 1, 2), (True, False)):
        same("aten._fft_r2c.default", x, dims, scale, flag)
        same("aten._fft_c2c.default", z, dims, scale, flag)
        same("aten._fft_c2r.default", z, dims, scale, 2 * (z.shape[dims[-1]] - 1) + flag)
    with pytest.raises(VerifyError, match="no half"):
        call("aten._fft_c2r.default", (("args", ("operand", 0), ("list", ("int", 2)), ("int", 0), ("int", 1 << 40)),
                                       ("kwargs",)), [z.numpy()])
    for name in ("abs", "angle", "sgn", "exp", "reciprocal", "neg", "sqrt", "conj_physical", "isfinite"):
        same(f"aten.{name}.default", z)
    same("aten.angle.default", torch.tensor([1.0, -2.0, 0.0, float("nan")], dtype=dtype))
    same("aten.sgn.default", torch.zeros(2, dtype=z.dtype))
    for name, other in itertools.product(("mul", "div", "add", "sub"), (z[0], x, x[0, 0, 0], z[:, :1])):
        same(f"aten.{name}.Tensor", z, other)
    same("aten.add.Tensor", z, z.flip(0), alpha=2.5)
    same("aten.mul.Scalar", z, 1.5 - 2j)
    same("aten.pow.Tensor_Scalar", z, 2)
    same("aten.view_as_real.default", z)
    same("aten.view_as_complex.default", draw(3, 2, dtype=dtype))
    same("aten.complex.default", x, x[:1])
    same("aten.polar.default", x.abs(), x)
    same("aten.full.default", [2, 3], 1, dtype=z.dtype)
    same("prims.convert_element_type.default", x, z.dtype)
    same("aten.sum.dim_IntList", z, [1], True)
    same("aten.mean.dim", z, [0, 2])
    same("aten.bmm.default", z, z.mT)
    for name, given in (("permute.default", ([2, 0, 1],)), ("view.default", ([4, -1],)), ("unfold.default", (-1, 3, 2)),
                        ("expand.default", ([2, -1, 4, 5],)), ("select.int", (1, -1)), ("slice.Tensor", (-1, 1, 9, 2)),
                        ("unsqueeze.default", (-1,)), ("flip.default", ([0, 2],)), ("transpose.int", (0, -1)),
                        ("index_select.default", (1, torch.tensor([3, 0, 0])))):
        same(f"aten.{name}", z, *given)
    same("aten.squeeze.dims", z[:1, :, :1], [0, 1])
    same("aten.cat.default", [z, z[:1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_linear_algebra_is_pytorchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, b = torch.randn(2, 4, 4, dtype=dtype), torch.randn(2, 4, 3, dtype=dtype)
    whole = x @ x.mH + torch.eye(4)
    for name, *given in (("linalg_inv_ex", x), ("_linalg_solve_ex", x, b), ("_linalg_solve_ex", x, b[..., 0]),
                         ("_linalg_det", x), ("_linalg_slogdet", x), ("linalg_lu_factor_ex", b), ("linalg_qr", b),
                         ("linalg_cholesky_ex", whole), ("linalg_qr", b, "complete")):
        same(f"aten.{name}.default", *given, close=1e-4)
    same("aten._linalg_solve_ex.default", x, b.mT, left=False, close=1e-4)
    same("aten.linalg_cholesky_ex.default", whole.triu(), upper=True)
    factor = torch.linalg.cholesky(whole)
    for upper, left, unit in itertools.product((True, False), repeat=3):
        same("aten.linalg_solve_triangular.default", factor.mH if upper else factor, b if left else b.mT, upper=upper,
             left=left, unitriangular=unit)
    for upper, one in ((False, factor), (True, factor.mH)):
        same("aten.cholesky_solve.default", b, one, upper, close=1e-4)
        same("aten.cholesky_inverse.default", one, upper, close=1e-4)
    same("aten._linalg_svd.default", b, False, False)
    same("aten._linalg_eigh.default", whole, "U", False)
    # matrices that fail, beside others: PyTorch says nothing of what their results are
    bad = torch.stack([whole[0], torch.ones(4, 4, dtype=dtype), torch.tensor([1, 1, -1, 1]).diag().to(dtype)])
    for name, given in (("linalg_inv_ex", (bad,)), ("_linalg_solve_ex", (bad, torch.ones_like(bad))),
                        ("linalg_cholesky_ex", (bad,)), ("linalg_lu_factor_ex", (bad,))):
        template = (("args", *(("operand", place) for place in range(len(given)))), ("kwargs",))
        found = call(f"aten.{name}.default", template, [one.resolve_conj().numpy() for one in given])
        wanted = getattr(torch.ops.aten, name).default(*given)
        assert found[-1].tolist() == wanted[-1].tolist() and any(found[-1]), name
        torch.testing.assert_close(torch.from_numpy(found[0][0].copy()), wanted[0][0], rtol=1e-4, atol=1e-4)
    for target, given in (("aten._linalg_eigh.default", np.full((2, 2), np.nan)),
                          ("aten._linalg_svd.default", np.full((2, 2), np.nan))):
        with pytest.raises(AnyShapeError):
            call(target, (("args", ("operand", 0)), ("kwargs",)), [given])


@pytest.mark.parametrize("target, given", [
    ("aten.digamma.default", (torch.linspace(-3.3, 30, 50),)),
    ("aten.polygamma.default", (1, torch.linspace(-3.3, 30, 50))),
    ("aten.polygamma.default", (3, torch.linspace(0.1, 30, 50))),
    ("aten.special_zeta.default", (torch.linspace(1.1, 9, 50), torch.linspace(0.2, 30, 50))),
    *((f"aten.{name}.default", (torch.linspace(-20, 20, 50),)) for name in (
        "i0", "special_i0e", "special_i1", "special_i1e", "special_bessel_j0", "special_bessel_j1")),
    ("aten.special_erfcx.default", (torch.linspace(-3, 60, 50),)),
    ("aten.erfinv.default", (torch.linspace(-1.01, 1.01, 51),)),
    ("aten.special_ndtri.default", (torch.linspace(0, 1, 51),)),
    ("aten.igamma.default", (torch.linspace(0, 30, 50), torch.linspace(40, 0, 50))),
    ("aten.igammac.default", (torch.linspace(0, 30, 50), torch.linspace(40, 0, 50))),
    ("aten.kthvalue.default", (torch.randperm(24).reshape(4, 6).float(), 3, 0, True)),
    ("aten.mode.default", (torch.randint(0, 3, (5, 9)).float(), -1)),
    ("aten.nanmedian.dim", (torch.tensor([[1.0, math.nan, 3.0, 2.0], [5.0, math.nan, math.nan, 4.0]]), 1)),
    ("aten.median.dim", (torch.tensor([[1.0, 7.0, 3.0, 2.0], [4.0, 9.0, 5.0, 6.0]]), 1)),
    ("aten.histc.default", (torch.linspace(-2, 3, 40), 7, -1, 2)),
    ("aten.std.dim", (torch.randn(4, 5), [1], True, True)),
    ("aten.round.decimals", (torch.randn(9) * 100, {"decimals": -1})),
    ("aten._pdist_forward.default", (torch.randn(5, 3), 2.0)),
    ("aten.constant_pad_nd.default", (torch.randn(4, 5), [1, -2, 0, 3], 2.0)),
    ("aten.masked_scatter.default", (torch.zeros(3, 4), torch.tensor([True, False, True, True]), torch.randn(12))),
    ("aten.index_put.default", (torch.zeros(3, 4), [None, torch.tensor([1, 1, 3])], torch.ones(3, 3), True)),
    ("aten.slice_scatter.default", (torch.zeros(5, 4), torch.randn(2, 4), 0, 1, 5, 2)),
    ("aten.diagonal_scatter.default", (torch.zeros(5, 4), torch.randn(3), 1)),
    ("aten.lu_unpack.default", torch.linalg.lu_factor(torch.randn(2, 5, 5))),
    ("aten.linalg_lu_solve.default", (*torch.linalg.lu_factor(torch.eye(4) + torch.rand(4, 4)), torch.randn(4, 2))),
    ("aten.linalg_pinv.atol_rtol_tensor", (torch.randn(2, 5, 3),)),
    ("aten.linalg_matrix_exp.default", (torch.randn(2, 4, 4),)),
    ("aten._trilinear.default", (torch.randn(3, 4), torch.randn(5, 4, 6), torch.randn(3, 6), [1, 3], [0], [1, 2],
                                 [2, 3])),
    *(("aten._embedding_bag_forward_only.default", (
        torch.randn(7, 4), torch.tensor([1, 2, 2, 5, 6, 0]), torch.tensor([0, 2, 2, 5]), False, mode, False, None,
        False, 2)) for mode in (0, 1, 2)),
])
def test_operators_beside_pytorch(target: str, given: tuple[Any, ...]) -> None:
    _, name, kind = target.split(".")
    keywords = given[-1] if isinstance(given[-1], dict) else {}
    given = given[:-1] if keywords else given
    wanted = getattr(getattr(torch.ops.aten, name), kind)(*given, **keywords)
    found = calls._OPERATORS[target](*pytree.tree_map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, given),
                                     **keywords)
    found, wanted = (one if isinstance(one, tuple) else (one,) for one in (found, wanted))
    if "embedding_bag" in name:  # the others are for gradients
        found, wanted = found[:1], wanted[:1]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(np.ascontiguousarray(one)).reshape(one.shape), other, rtol=1e-4,
                                   atol=1e-5, equal_nan=True)
