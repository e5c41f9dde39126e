"""Small programs on fenced memory, against eager PyTorch and float64; as a program, a worker that reports line by line.

    python tests/bounding.py 0 20 64              seed 0, 20 calls of every program, vectors of up to 64 bytes
    python tests/bounding.py 0 20 32 products     of one family, as on an older processor
    python tests/bounding.py 0 0 64               2 calls of the programs in QUICK, in one dtype each

A line is a case about to run, or what was wrong with the last one. A worker that dies leaves the case as its last line.
"""
from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import fences
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine import target
from anyshape.compiler import driver
from comparing import differs, no_worse

Tensors = tuple[Any, ...]
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 97, 127, 128, 129, 200, 257, 300)
FEW = (1, 2, 3, 4, 5, 7, 8, 9)
INNER = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 256, 257, 385, 509, 512, 705, 769, 1024, 1409,
         1500, 1537, 2048, 3001)
HEADS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129, 160)
WORK = 6 << 20  # multiply-adds of a case, at most: more rows would go the same ways
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TILES = target.host().has("amx-bf16")  # then oneDNN's products may spread a NaN over its row (torch 2.13)
LONG = (2051, 2053)  # rows and columns of what is streamed


@dataclass(frozen=True)
class Case:
    """A program: what is run, and what draws its operands. trains: gradients of the first `trains` operands, too.
    plants: NaNs and infinities may be among the elements."""

    name: str
    run: Callable[..., Any]
    draw: Callable[[Draw], Tensors]
    trains: int = 0
    plants: bool = True
    dtypes: Sequence[torch.dtype] = FLOATS
    settings: dict[str, Any] = field(default_factory=dict)


class Draw:
    """Random sizes and operands."""

    def __init__(self, random_: random.Random, dtype: torch.dtype, plants: bool) -> None:
        self.random = random_
        self.dtype = dtype
        self.plants = plants and random_.random() < 0.2

    def one(self, sizes: Sequence[int] = SIZES) -> int:
        return self.random.choice(sizes)

    def sizes(self, count: int, most: int = 1 << 18, sizes: Sequence[int] = SIZES) -> list[int]:
        """So many sizes, whose product is not too large."""
        while True:
            found = [self.one(sizes) for _ in range(count)]
            product = 1
            for size in found:
                product *= size
            if product <= most:
                return found

    def tensor(self, *shape: int) -> torch.Tensor:
        found = torch.randn(shape, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)
        if not self.dtype.is_floating_point:
            return (found * 50).to(self.dtype)
        if self.plants and found.numel():
            for value in (float("nan"), float("inf"), -float("inf"))[:self.random.randint(1, 3)]:
                found.view(-1)[self.random.randrange(found.numel())] = value
        return found.to(self.dtype)

    def laid(self, *shape: int) -> torch.Tensor:
        """A matrix, or several: dense, transposed, with a wider row, or every second element of a row."""
        kind = self.random.choice(("dense", "dense", "transposed", "wider", "apart"))
        *batch, rows, columns = shape
        if kind == "transposed":
            return self.tensor(*batch, columns, rows).transpose(-1, -2)
        if kind == "wider":
            return self.tensor(*batch, rows, columns + 3)[..., 1:columns + 1]
        if kind == "apart":
            return self.tensor(*batch, rows, 2 * columns)[..., ::2]
        return self.tensor(*shape)

    def product(self, wide: bool = False) -> tuple[int, int, int]:
        """Rows, terms and columns."""
        while True:
            rows, inner, columns = self.one(), self.one(INNER), self.one()
            if self.random.random() < 0.3:
                rows = self.one(FEW)
            if self.random.random() < 0.2:
                columns = self.one(FEW)
            if rows * inner * columns <= WORK * (4 if wide else 1):
                return rows, inner, columns

    def index(self, shape: Sequence[int], below: int) -> torch.Tensor:
        return torch.randint(0, max(below, 1), tuple(shape)) if below else torch.zeros(0, dtype=torch.int64)


# ---- operands

def two_matrices(draw: Draw) -> Tensors:
    rows, inner, columns = draw.product()
    return draw.laid(rows, inner), draw.laid(inner, columns)


def with_addend(draw: Draw) -> Tensors:
    rows, inner, columns = draw.product()
    addend = draw.random.choice(((rows, columns), (columns,), (1, columns), (rows, 1), (1, 1)))
    return draw.tensor(*addend), draw.laid(rows, inner), draw.laid(inner, columns)


def batches(draw: Draw) -> Tensors:
    rows, inner, columns = draw.product()
    batch, heads = draw.one((0, 1, 2, 3, 5)), draw.one((1, 2, 3))
    left = draw.random.choice(((batch, heads), (1, heads), (heads,), (batch, 1), ()))
    right = draw.random.choice(((batch, heads), (1, heads), (heads,), (batch, 1), ()))
    while rows * inner * columns > WORK // 8:
        rows, inner, columns = draw.product()
    return draw.laid(*left, rows, inner), draw.laid(*right, inner, columns)


def vector_and_matrix(draw: Draw) -> Tensors:
    _, inner, columns = draw.product()
    return draw.tensor(2 * inner)[::draw.random.choice((1, 2))][:inner], draw.laid(inner, columns)


def perceptron(draw: Draw) -> Tensors:
    rows, inner, columns = draw.product()
    return draw.tensor(rows, inner), draw.tensor(columns, inner), draw.tensor(columns), draw.tensor(inner, columns)


def three_weights(draw: Draw) -> Tensors:
    rows, inner, columns = draw.product()
    other = draw.one()
    return draw.tensor(rows, inner), draw.tensor(columns, inner), draw.tensor(other, inner), draw.tensor(columns, inner)


def summands(draw: Draw) -> Tensors:
    rows, inner, columns = draw.product()
    return (draw.tensor(rows, columns), draw.tensor(rows, inner), draw.tensor(inner, columns),
            draw.tensor(rows, inner), draw.tensor(inner, columns))


def queries(draw: Draw, masked: bool = False) -> Tensors:
    batch, groups, share = draw.one((1, 2, 3)), draw.one((1, 2)), draw.one((1, 2, 3))
    depth = draw.one(HEADS)
    while True:
        rows, columns = draw.one(SIZES[1:]), draw.one(SIZES[1:])
        if batch * groups * share * rows * columns * depth <= WORK:
            break
    turned = draw.random.random() < 0.5

    def heads(count: int, length: int) -> torch.Tensor:
        if turned:
            return draw.tensor(batch, length, count, depth).transpose(1, 2)
        return draw.tensor(batch, count, length, depth)
    found = (heads(groups * share, rows), heads(groups, columns), heads(groups, columns))
    if not masked:
        return found
    mask = draw.random.choice(((batch, groups * share, rows, columns), (1, 1, rows, columns), (batch, 1, 1, columns)))
    return *found, draw.tensor(*mask)


def masked_queries(draw: Draw) -> Tensors:
    return queries(draw, masked=True)


def square_queries(draw: Draw) -> Tensors:
    q, k, v = queries(draw)
    return q, k, v


def matrix(draw: Draw) -> Tensors:
    return (draw.tensor(*draw.sizes(2)),)


def laid_matrix(draw: Draw) -> Tensors:
    return (draw.laid(*draw.sizes(2)),)


def cube(draw: Draw) -> Tensors:
    return (draw.tensor(*draw.sizes(3, 1 << 16)),)


def pair(draw: Draw) -> Tensors:
    rows, columns = draw.sizes(2)
    return draw.tensor(rows, columns), draw.tensor(draw.random.choice((1, rows)), columns)


def normed(draw: Draw) -> Tensors:
    rows, columns = draw.sizes(2, sizes=SIZES[1:])
    return draw.tensor(rows, columns), draw.tensor(columns), draw.tensor(columns)


def several(draw: Draw) -> Tensors:
    """Of rows as many as a variance needs."""
    rows, columns = draw.one((2, 3, 17, 33, 200)), draw.one(SIZES[1:])
    return draw.tensor(rows, columns), draw.tensor(columns), draw.tensor(columns)


def many_rows(draw: Draw) -> Tensors:
    return (draw.tensor(draw.one((1, 2, 3, 17)), draw.one((4099, 65537, 70001))),)


def large(draw: Draw) -> Tensors:
    rows, columns = LONG
    return (draw.tensor(rows + draw.one((0, 1, 5)), columns + draw.one((0, 1, 6)))[:, draw.one((0, 1, 3)):],)


def picked(draw: Draw) -> Tensors:
    rows, columns = draw.sizes(2, sizes=SIZES[1:])
    return draw.tensor(rows, columns), draw.index((draw.one(),), rows)


def gathered(draw: Draw) -> Tensors:
    rows, columns = draw.sizes(2, sizes=SIZES[1:])
    return draw.tensor(rows, columns), draw.index((rows, draw.one()), columns)


def scattered(draw: Draw) -> Tensors:
    rows, columns = draw.sizes(2, sizes=SIZES[1:])
    count = draw.one()
    return draw.tensor(rows, columns), draw.index((count,), rows), draw.tensor(count, columns)


# ---- programs

def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def attend_causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def feed_forward(x: Any, w: Any, b: Any, u: Any) -> Any:
    return torch.tanh(F.linear(x, w, b)) @ u.t()


def head(x: Any, w: Any, b: Any, u: Any) -> Any:
    """A large result whose rows die in the product."""
    return F.linear(torch.tanh(x), w)


def joined(x: Any, q: Any, k: Any, v: Any) -> Any:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def autocast(x: Any, q: Any, k: Any, v: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return joined(x, q, k, v)


def sums_of_products(c: Any, x: Any, y: Any, z: Any, w: Any) -> Any:
    return torch.tanh(c) + x @ y + z @ w


def norms(x: Any, w: Any, b: Any) -> Any:
    return F.layer_norm(x, (x.shape[-1],), w, b)


PRODUCTS = (
    Case("matmul", torch.matmul, two_matrices),
    Case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), with_addend),
    Case("addmm plain", torch.addmm, with_addend),
    Case("batches", torch.matmul, batches),
    Case("vector", torch.matmul, vector_and_matrix),
    Case("turned", lambda a, b: (a @ b).transpose(-1, -2).contiguous(), batches),
    Case("feed forward", feed_forward, perceptron, trains=4, plants=False),
    Case("head", head, perceptron),
    Case("joined", joined, three_weights),
    Case("autocast", autocast, three_weights, trains=4, plants=False, dtypes=(torch.float32,)),
    Case("sums", sums_of_products, summands),
)
ATTENTION = (
    Case("attention", attend, queries, trains=3, plants=False),
    Case("masked", attend, masked_queries, trains=3, plants=False),
    Case("causal", attend_causal, square_queries, trains=3, plants=False),
    Case("without gradients", attend, masked_queries, plants=False),
)
MOVES = (
    Case("transpose", lambda x: x.t().contiguous() * 2, laid_matrix),
    Case("permute", lambda x: (x.permute(2, 0, 1).contiguous(), x.permute(1, 2, 0) + 1, x.transpose(0, 2).exp()), cube),
    Case("flip", lambda x: (x.flip(0) + 1, x.flip(1) * 2, x.flip(0, 1)), laid_matrix),
    Case("steps", lambda x: (x[:, ::2] + 1, x[:, 1::3] * 2, x[1::2, ::4] - 1, x[:, ::5] + 2), matrix),
    Case("bytes", lambda x: (x.t().contiguous(), x.flip(1).clone(), x[:, ::2].clone(), x[:, 1::3].t().contiguous(),
                             torch.cat([x, x], 1), F.pad(x, (1, 2)), x == x.flip(0)), laid_matrix,
         dtypes=(torch.int8, torch.bool, torch.int64, torch.int16)),
    Case("whole numbers", lambda x: (x.sum(1), x.sum(0), x.amax(1) if x.shape[1] else x, x.cumsum(1), x // 3),
         laid_matrix, dtypes=(torch.int64, torch.int32, torch.uint8)),
    Case("cat", lambda x, y: (torch.cat([x, y], 0), torch.cat([x, x * 2, x], 1)), pair),
    Case("pad and roll", lambda x: (F.pad(x, (1, 2, 3, 0)), torch.roll(x, (1, -2), (0, 1)), x.tril(), x.diagonal() + 1),
         matrix),
    Case("broadcast", lambda x, y: (x + y, x[:, None] * y[None], torch.maximum(x, y)), pair,
         dtypes=(torch.float32, torch.bfloat16)),
    Case("index", lambda x, i: (x[i], x.index_select(0, i) + 1), picked),
    Case("gather", lambda x, i: (x.gather(1, i), torch.take_along_dim(x, i, 1) * 2), gathered),
    Case("embedding", lambda x, i: F.embedding(i, x), picked, trains=1, plants=False),
    Case("scatter", lambda x, i, y: (x.index_add(0, i, y), torch.zeros_like(x).index_put((i,), y, accumulate=True)),
         scattered, plants=False),
    Case("large", lambda x: (x + 1, x.flip(1)), large, dtypes=(torch.float32,)),
    Case("large transpose", lambda x: x.t() * 2, large, dtypes=(torch.float32, torch.bfloat16)),
    Case("large to wider", lambda x: (x.t().contiguous().double(), x.t().contiguous().to(torch.int8)), large,
         plants=False, dtypes=(torch.bfloat16, torch.float32, torch.int8)),
    Case("large steps", lambda x: (x[:, ::2] + 1, torch.cat([x, x], 1)), large, dtypes=(torch.float32,)),
)
ROWS = (
    Case("pointwise", lambda x, y: (torch.sigmoid(x) * y, F.gelu(x), F.silu(x + y), x.exp().log1p()), pair,
         plants=False),
    Case("softmax", lambda x: (x.softmax(1), x.log_softmax(0), x.logsumexp(1)), laid_matrix, trains=1, plants=False),
    Case("sums", lambda x: (x.sum(0), x.sum(1), x.mean(), x.amax(1) if x.shape[1] else x), laid_matrix),
    Case("extremes", lambda x: (x.max(1).values, x.argmin(1), x.amax(0)), lambda draw: (
        draw.tensor(*draw.sizes(2, sizes=SIZES[1:])),)),
    Case("cube", lambda x: (x.sum(1), x.sum((0, 2)), x.var(2), x.amax((0, 1)) if x.numel() else x), cube),
    Case("layer norm", norms, normed, trains=3, plants=False),
    Case("batch norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), several, plants=False),
    Case("scans", lambda x: (x.cumsum(0), x.cumsum(1), x.cumprod(1)), laid_matrix),
    Case("long rows", lambda x: (x.sum(1), x.softmax(1), x.amax(1), x.std(1), x.prod(1)), many_rows, plants=False),
    Case("windows", lambda x: (F.avg_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.interpolate(x, scale_factor=2)),
         lambda draw: (draw.tensor(draw.one((1, 2, 3)), draw.one((1, 3, 5)), draw.one(SIZES[5:17]),
                                   draw.one(SIZES[5:17])),), plants=False, dtypes=(torch.float32, torch.bfloat16)),
    Case("group norm", lambda x: F.group_norm(x, 2), lambda draw: (draw.tensor(
        draw.one((1, 2, 3)), 2 * draw.one((1, 2, 3, 8)), draw.one(SIZES[4:]), draw.one(SIZES[2:9])),), trains=1,
         plants=False),
    Case("triangles", lambda x: (x.softmax(1).tril(), x.triu(1).sum(0), torch.where(x > 0, x, x * 2).cumsum(0)),
         laid_matrix, plants=False),
    Case("few columns", lambda x: (x.softmax(1), x.sum(1), x.sum(0)), lambda draw: (
        draw.tensor(draw.one((1, 15, 16, 17, 33, 1001)), draw.one(FEW)),)),
    Case("loss", lambda x, i: F.cross_entropy(x, i), lambda draw: (lambda rows, columns: (
        draw.tensor(rows, columns), draw.index((rows,), columns)))(*draw.sizes(2, sizes=SIZES[1:])), trains=1,
         plants=False),
)
QUICK = ("matmul", "head", "autocast", "masked", "transpose", "large to wider", "softmax", "layer norm", "long rows")
FAMILIES = {"products": PRODUCTS, "attention": ATTENTION, "moves": MOVES, "rows": ROWS}


# ---- running

def results(case: Case, function: Callable[..., Any], operands: Tensors) -> list[Any]:
    """What the function gives, and the gradients."""
    given = [x.detach().requires_grad_(i < case.trains) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
             for i, x in enumerate(operands)]
    found = function(*given)
    found = list(found) if isinstance(found, tuple) else [found]
    if case.trains:
        total = sum((one.float() * torch.linspace(-1, 1, max(one.numel(), 1))[:one.numel()].view(one.shape)).sum()
                    for one in found)
        total.backward()
        found += [x.grad for x in given[:case.trains]]
    return [one.detach() if isinstance(one, torch.Tensor) else one for one in found]


def check(case: Case, fast: Callable[..., Any], operands: Tensors) -> str:
    """Why the results are wrong; empty when they are not."""
    wanted = results(case, case.run, operands)
    found = results(case, fast, operands)
    wide = tuple(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in operands)
    exact: list[Any] | None = None
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        why = differs(one, other)
        if why and exact is None:
            with torch.autocast("cpu", enabled=False):
                exact = results(case, case.run, wide)
        if why and exact is not None and TILES and one.dtype == torch.bfloat16:
            other = torch.where(other.isnan() & ~exact[i].isnan(), exact[i].to(other.dtype), other)
            why = differs(one, other)
        if why and exact is not None and not no_worse(one, other, exact[i].double()):
            return f"result {i}: {why}"
    return ""


def told(operands: Tensors) -> str:
    return ", ".join(f"{str(x.dtype).split('.')[1]}{list(x.shape)}@{list(x.stride())}" if isinstance(x, torch.Tensor)
                     else str(x) for x in operands)


def run(seed: int, calls: int, families: Sequence[str]) -> Iterator[str]:
    """See the head of this file."""
    import anyshape
    for family in families:
        for case in FAMILIES[family]:
            if not calls and case.name not in QUICK:
                continue
            chosen = random.Random(f"{seed} {case.name}").choice(case.dtypes)
            for dtype in case.dtypes if calls else (chosen,):
                fast = anyshape.compile(case.run, defer=False, products="own")
                random_ = random.Random(f"{seed} {case.name} {dtype}")
                torch.manual_seed(random_.randrange(1 << 30))
                for _ in range(min(calls or 2, 3 if "large" in case.name else calls or 2)):
                    draw = Draw(random_, dtype, case.plants)
                    operands = case.draw(draw)
                    yield f"{family} {case.name}: {told(operands)}"
                    why = check(case, fast, operands)
                    if why:
                        yield f"WRONG {family} {case.name}: {told(operands)}: {why}"


def narrow(vector_bytes: int) -> None:
    """Compiles for a processor with vectors of that width from now on."""
    here = target.host()
    late, cpu = {48: (("avx512bf16", "amx"), here.cpu), 32: (("avx512", "avx10", "evex", "amx"), "haswell"),
                 16: (("avx512", "avx10", "evex", "amx", "avx2", "fma", "f16c", "avx", "vaes", "vpcl"), "nehalem")
                 }.get(vector_bytes, ((), here.cpu))  # 48: wide ones, but no pairs of bf16
    names = [name[1:] for name in here.features.split(",") if name.startswith("+")]
    kept = frozenset(name for name in names if not (late and name.startswith(late)))
    found = target.target_of(here.triple, cpu, kept)
    off = "".join(f",-{name}" for name in names if name not in kept)
    found = dataclasses.replace(found, features=found.features + off)
    target.host = driver.host = jit.host = lambda: found  # type: ignore[assignment]


def main() -> None:
    fences.install()
    seed, calls, vector_bytes, *families = sys.argv[1:]
    narrow(int(vector_bytes))
    for line in run(int(seed), int(calls), families or list(FAMILIES)):
        print(line, flush=True)
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
