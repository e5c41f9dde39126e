"""Bugs of torch that are worked around (base/upstream_bugs.py) are still there; a check that fails says that a
workaround can go. docs/upstream-bugs.md is their table."""
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyshape.base.upstream_bugs import FAULTS

ROOT = Path(__file__).resolve().parent.parent
INF, NAN = math.inf, math.nan
aten = torch.ops.aten


def taken_apart(operator: Any) -> Callable[..., Any]:
    return decomposition_table[operator]  # type: ignore[no-any-return]


def divides_by_0(operator: Any, *given: Any) -> bool:
    with pytest.raises(ZeroDivisionError):
        taken_apart(operator)(*given)
    return True


def lies_otherwise(operator: Any, *given: Any) -> bool:
    results = taken_apart(operator)(*given), operator(*given)
    a, b = (one[0] if isinstance(one, tuple) else one for one in results)
    return a.stride() != b.stride()


def permuted() -> torch.Tensor:
    return torch.rand(4, 3, 5).permute(2, 1, 0)


def division_of_sizes() -> bool:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = torch.compile(lambda a, b: torch.ones(1) * float(aten.div(int(a), int(b))), backend="eager")(
            torch.tensor(6), torch.tensor(3))
    torch._dynamo.reset()
    return bool(found.isnan())


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return op(*given, **(named or {}))


def first_call_under_a_mode() -> bool:
    x = torch.randn(3, 2, dtype=torch.complex64)
    with Mode():
        found = torch.linalg.pinv(x)
    return not torch.allclose(found, torch.linalg.pinv(x), atol=1e-3)


def layout_of_one_hot() -> bool:
    x = torch.zeros(3, 2, dtype=torch.int64).t()
    with enable_python_dispatcher():
        found = F.one_hot(x, 5).stride()
    return found != F.one_hot(x, 5).stride()


def targets_after_minus_1() -> bool:
    torch.manual_seed(0)
    operator, target = aten.multilabel_margin_loss_forward.default, torch.tensor([[0, -1, 1, -1, -1], [1, 2, -1, 0, 1]])
    given = torch.rand(2, 5), target, 1
    return not torch.allclose(taken_apart(operator)(*given)[0], operator(*given)[0])


def gradient_of_batch_norms() -> bool:
    x, weight = torch.zeros(1, 3, 4, 4, requires_grad=True), torch.ones(3)
    gradient = torch.rand(1, 16, 3)  # the batch norm multiplies by 1, so this is the gradient, too
    found, = torch.autograd.grad(F.batch_norm(x, weight * 0, weight, weight, eps=0.0).flatten(2).mT, x, gradient)
    return not torch.allclose(found.flatten(2).mT, gradient)


def pixels_of_upsample_nearest() -> bool:
    operator, given = aten.upsample_nearest2d.default, (torch.rand(1, 1, 2, 2), [6, 10], 2.3, 4.7)
    try:
        return not torch.equal(taken_apart(operator)(*given), operator(*given))
    except IndexError:
        return True


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, incoming: float) -> torch.Tensor:
    leaf = x.requires_grad_()
    return torch.autograd.grad(function(leaf).sum() * incoming, leaf)[0]


def layouts_of_two_operands() -> bool:
    a, b = torch.rand(5, 1, 10).transpose(0, 2), torch.rand(5, 10).t()
    cube = torch.rand(5, 10, 5)
    return all(lies_otherwise(op, a, b) for op in (aten.heaviside.default, aten.logaddexp.default,
                                                   aten.logaddexp2.default)) and all(
        lies_otherwise(op, cube, b) for op in (aten.xlogy.Tensor, aten.special_xlog1py.default))


def bags_of_bfloat16() -> bool:
    def bags() -> torch.Size:
        return aten._embedding_bag(  # type: ignore[no-any-return]
            torch.rand(4, 2, dtype=torch.bfloat16), torch.arange(4), torch.tensor([0, 2]))[1].shape

    with FakeTensorMode():
        found = bags()
    return found != bags()


def is_taken(operator: Any, *given: Any) -> bool:
    """Does a trace take what the operator refuses?"""
    with pytest.raises((RuntimeError, IndexError)):
        operator(*given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            operator(*given)
        except (RuntimeError, IndexError):
            return False
    return True


def dtypes_of_indices() -> bool:
    table, rows, place = torch.ones(4, 2), torch.ones(1, 2), torch.zeros(1)
    return all((is_taken(aten.index_select.default, table, 0, place),
                is_taken(aten.index_add.default, table, 0, place, rows),
                is_taken(aten.index_copy.default, table, 0, place, rows),
                is_taken(aten.index_fill.int_Scalar, table, 0, place, 1.0),
                is_taken(aten.index_put.default, table, [place], rows)))


def nearest_of_an_empty_batch() -> bool:
    with FakeTensorMode(), pytest.raises((RuntimeError, TypeError)):
        aten.upsample_nearest2d.default(torch.ones(0, 1, 2, 2), [4, 4])
    return aten.upsample_nearest2d.default(torch.ones(0, 1, 2, 2), [4, 4]).shape == (0, 1, 4, 4)


def check_of_singular_matrices() -> bool:
    graph = torch.fx.Graph()
    graph.call_function(aten._linalg_check_errors.default, (graph.placeholder("info"), "linalg.inv"),
                        {"is_matrix": True})
    graph.output(())
    graph.eliminate_dead_code()
    return len(graph.nodes) == 2


def dtype_of_sums() -> bool:
    def sums() -> torch.dtype:
        x = torch.ones(1, 1, 2, 4, dtype=torch.float64)
        return aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[1].dtype  # type: ignore[no-any-return]

    with FakeTensorMode():
        found = sums()
    return found != sums()


def images() -> torch.Tensor:
    return torch.rand(2, 4, 4, 4).to(memory_format=torch.channels_last)


def nothing() -> torch.Tensor:
    return torch.ones(0)


# name of the fault -> whether it shows
SHOWS: dict[str, Callable[[], bool]] = {
    "division of sizes": division_of_sizes,
    "first call under a mode": first_call_under_a_mode,
    "layout of one_hot": layout_of_one_hot,
    "targets after -1": targets_after_minus_1,
    "NaN in margin losses": lambda: taken_apart(aten.multi_margin_loss.default)(
        torch.tensor([[0.1, NAN]]), torch.tensor([0])).isnan().item(),
    "probabilities": lambda: taken_apart(aten.binary_cross_entropy.default)(
        torch.tensor([-0.5]), torch.tensor([1.0])) is not None,
    "select_scatter out of range": lambda: taken_apart(aten.select_scatter.default)(
        torch.ones(2, 1), torch.ones(2), 1, 2) is not None,
    "pixels of upsample_nearest": pixels_of_upsample_nearest,
    "gradient of softshrink": lambda: gradient(taken_apart(aten.softshrink.default), torch.tensor([0.1]),
                                               INF).isnan().item(),
    "dtype of threshold_backward": lambda: taken_apart(aten.threshold_backward.default)(
        torch.ones(2, dtype=torch.int64), torch.ones(2), 0.5).dtype is torch.int64,
    "logit of half precision": lambda: taken_apart(aten.logit.default)(torch.ones(1).half(), 1e-6).isfinite().item(),
    "losses of nothing": lambda: divides_by_0(aten.mse_loss_backward.default, torch.ones(()), nothing(), nothing(), 1),
    "group_norm of nothing": lambda: divides_by_0(
        aten.native_group_norm_backward.default, torch.ones(2, 4, 0), torch.ones(2, 4, 0), torch.ones(2, 2),
        torch.ones(2, 2), None, 2, 4, 0, 2, [True, False, False]),
    "NaN in smooth_l1_loss": lambda: taken_apart(aten.smooth_l1_loss_backward.default)(
        torch.ones(1), torch.tensor([NAN]), torch.zeros(1), 0, 1.0).item() == 0,
    "deviations of great numbers": lambda: taken_apart(aten.std.correction)(
        torch.tensor([1e30, -1e30])).isinf().item(),
    "layouts of two operands": layouts_of_two_operands,
    "layouts of batch norms": lambda: lies_otherwise(
        aten.native_batch_norm.default, permuted(), None, None, None, None, True, 0.1, 1e-5),
    "layout of logsigmoid": lambda: lies_otherwise(aten.log_sigmoid_forward.default, permuted()),
    "channels last": lambda: lies_otherwise(aten.channel_shuffle.default, images(), 2) and lies_otherwise(
        aten.max_unpool2d.default, *F.max_pool2d(images(), 2, return_indices=True), [4, 4]),
    "dtypes of indices": dtypes_of_indices,
    "dtypes of an embedding's indices": lambda: is_taken(aten.embedding.default, torch.ones(4, 2), torch.zeros(1)),
    "largest of nothing": lambda: is_taken(aten.max.default, nothing()) and is_taken(aten.min.dim, nothing(), 0),
    "nearest pixels of an empty batch": nearest_of_an_empty_batch,
    "check of singular matrices": check_of_singular_matrices,
    "dtype of attention's sums": dtype_of_sums,
    "frac of -0.0": lambda: taken_apart(aten.frac.default)(torch.tensor([-0.0])).signbit().item(),
    "bags of bfloat16": bags_of_bfloat16,
    "one bound of NaN": lambda: torch.ones(1).clamp(min=NAN).item() == 1,
    "gelu of infinity": lambda: F.gelu(torch.full((64,), INF)).isnan().any().item(),  # type: ignore[dict-item]
    "gradient of hardsigmoid": lambda: gradient(F.hardsigmoid, torch.zeros(1, dtype=torch.float64), 1).item() != 1 / 6,
    "addmv of nothing": lambda: torch.addmv(*(torch.zeros(shape, dtype=torch.int64)
                                              for shape in ((1,), (0, 0), (0,)))).shape == (1,),
    "gradient of batch norms": gradient_of_batch_norms,
    "pixel_unshuffle of nothing": lambda: F.pixel_unshuffle(torch.rand(1, 1, 0, 0), 3).shape == (1, 1, 0, 0),
}  # fmt: skip
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def test_each_fault_that_can_be_checked_has_a_check() -> None:
    assert {one.name for one in FAULTS if one.checked} == SHOWS.keys()
    assert len({one.name for one in FAULTS}) == len(FAULTS)
    assert all(one.checked or one.fixed for one in FAULTS)


@pytest.mark.parametrize("fault", [one for one in FAULTS if one.checked], ids=lambda one: one.name)
def test_a_fault_still_shows(fault: Any) -> None:
    if tuple(map(int, fault.since.split("."))) > VERSION:
        pytest.skip(f"seen with torch {fault.since}")
    if fault.mended and tuple(map(int, fault.mended.split("."))) <= VERSION:
        assert not SHOWS[fault.name](), f"{fault.name} shows in torch {torch.__version__} again"
        return
    assert SHOWS[fault.name](), f"{fault.name}: mended in torch {torch.__version__}; see {fault.workaround}"


def page() -> str:
    """docs/upstream-bugs.md."""
    lines = ["# Bugs of others that are worked around", "",
             "Made from the table in `base/upstream_bugs.py` by `pytest tests/test_upstream.py --update`. Where a bug "
             "is *checked*,", "`tests/test_upstream.py` fails once it is mended: then the workaround can go.", "",
             "| bug | of | seen with | what goes wrong | what is done | seen to be mended by |",
             "|---|---|---|---|---|---|"]
    for one in FAULTS:
        done = one.workaround or "nothing"
        seen = f"{one.since}, not {one.mended}" if one.mended else one.since
        lines.append(f"| {one.name} | {one.where} | {seen} | {one.symptom} | {done} | "
                     f"{'checked' if one.checked else one.fixed} |")
    return "".join(f"{line}\n" for line in lines)


def test_the_page_of_bugs_is_made_from_the_table(request: pytest.FixtureRequest) -> None:
    path = ROOT / "docs" / "upstream-bugs.md"
    if request.config.getoption("--update"):
        path.write_text(page(), encoding="utf-8")
        return
    assert path.read_text("utf-8") == page(), "docs/upstream-bugs.md is out of date; run pytest --update"
