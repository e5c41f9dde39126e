"""The Triton backend without a GPU: texts by golden files, machine code for NVIDIA and AMD and what is in it, and, in a
process of its own, interpreted kernels against the CPU's."""
from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import forked
from anyshape.backend.targets import usual_target
from anyshape.backend.triton import toolchain
from anyshape.backend.triton.codegen import scalars
from anyshape.backend.triton.codegen.online import one_pass
from anyshape.backend.triton.codegen.recompute import without_row_buffers
from anyshape.backend.triton.codegen.scalars import unsupported
from anyshape.backend.triton.compile import Compiler, object_key
from anyshape.backend.triton.kernel import ALIGNED, DeviceKernel, KernelSource, number_of
from anyshape.backend.triton.schedule import emit
from anyshape.backend.triton.target import HARDWARE
from anyshape.backend.triton.text import read
from anyshape.base.errors import AnyShapeError, DeviceError, ParseError, VerifyError
from anyshape.ir.scalar import SCALAR
from anyshape.ir.types import kind_of
from anyshape.kernel.loop_ir.directives import Vectorize
from anyshape.kernel.loop_ir.parse import parse
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.kernel.loop_ir.show import show
from anyshape.sym.expr import symbol
from sampling import crossed

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942")
SPILLED = re.compile(r"(?:private_segment_fixed_size:?|ScratchSize:) (\d+)")

SOFTMAX = """kernel softmax(p0: in bf16, p1: out bf16; n0, n1)
  row buffer t0: f32[n1]
  rows (i0: n0)
    columns (i1: n1) vector i1
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = reduce maximum r0
    columns (i1: n1) vector i1
      r2: f32 = load p0[i0*n1 + i1]
      r3: f32 = sub r2, r1
      r4: f32 = exp r3
      store t0[i1] r4
      r5: f32 = reduce add r4
    columns (i1: n1) vector i1
      r6: f32 = load t0[i1]
      r7: f32 = div r6, r5
      store p1[i0*n1 + i1] r7
"""
NORM = """kernel norm(p0: in bf16, p1: in bf16, p2: in bf16, p3: out bf16; n0, n1)
  rows (i0: n0)
    columns (i1: n1) vector i1
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = reduce add r0
    row
      r20: i64 = index n1
      r21: f32 = cast r20
      r22: f32 = div r1, r21
    columns (i1: n1) vector i1
      r2: f32 = load p0[i0*n1 + i1]
      r3: f32 = sub r2, r22
      r4: f32 = mul r3, r3
      r5: f32 = reduce add r4
    row
      r23: f32 = div r5, r21
      r24: f32 = 1e-05
      r25: f32 = add r23, r24
      r26: f32 = rsqrt r25
    columns (i1: n1) vector i1
      r6: f32 = load p0[i0*n1 + i1]
      r7: f32 = sub r6, r22
      r8: f32 = mul r7, r26
      r9: f32 = load p1[i1]
      r10: f32 = mul r8, r9
      r11: f32 = load p2[i1]
      r12: f32 = add r10, r11
      store p3[i0*n1 + i1] r12
"""
EMBEDDING = """kernel embedding_backward(p0: inout f32, p1: in i64, p2: in f32; n0)
  rows (i1: 64) vector i1
    columns (i0: n0)
      r0: i64 = load p1[i0]
      r1: f32 = load p2[64*i0 + i1]
      scatter p0[64*%0 + i1] r1 with add
"""
BIAS = """kernel bias_gradient(p0: in f32, p1: out f32; n0)
  rows (i0: n0)
  split_reduction (i2: min((n0 + 31)//32, 32))
    columns (i1: 512) vector i1
      r0: f32 = load p0[512*i0 + i1]
      fold p1[i1 + 512*i2] r0 with add
"""
CUMSUM = """kernel cumsum(p0: in f32, p1: out f32; n0, n1)
  rows (i0: n0)
    columns (i1: n1) vector i1
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = scan add r0
      store p1[i0*n1 + i1] r1
"""
LINEAR = """kernel linear(p0: in f32, p1: in f32, p2: out f32; n0, n1)
  rows (i0: n0)
    columns (i1: n1) vector i1
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = load p1[i0*n1 + i1]
      r2: f32 = scan linear r1, r0
      store p2[i0*n1 + i1] r2
"""
DROPOUT = """kernel dropout(p0: in i64, p1: in f32, p2: out f32; n0)
  rows (i0: n0) vector i0
    row
      r0: i64 = load p0[0]
      r1: i64 = index i0
      r2: f32 = random r0, r1
      r3: f32 = 0.5
      r4: bool = lt r2, r3
      r5: f32 = load p1[i0]
      r6: f32 = 0.0
      r7: f32 = where r4, r5, r6
      store p2[i0] r7
"""


SCALED = """kernel scaled(p0: in bf16, p1: in f32, p2: out bf16; n0, n1)
  rows (i0: n0)
    columns (i1: n1) vector i1
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = load p1[i1]
      r2: f32 = mul r0, r1
      store p2[i0*n1 + i1] r2
"""
SCANNED = """kernel scanned(p0: in f32, p1: out f32; n0, n1)
  row buffer t0: f32[n1]
  rows (i0: n0)
    columns (i1: n1) vector i1
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = scan add r0
      store t0[i1] r1
      r2: f32 = reduce maximum r1
    columns (i1: n1) vector i1
      r3: f32 = load t0[i1]
      r4: f32 = sub r3, r2
      store p1[i0*n1 + i1] r4
"""
RELU = """kernel relu_linear(p0: in bf16, p1: in bf16, p2: in bf16, p3: out bf16; n0, n1, n2)
  rows (i0: n0)
  product t0: bf16 = p0[n2; 1] @ p1[1; n2] over n2
    columns (i1: n1) vector i1
      r0: f32 = load t0[i0*n1 + i1]
      r1: f32 = load p2[i1]
      r2: f32 = add r0, r1
      r3: f32 = 0.0
      r4: f32 = maximum r2, r3
      store p3[i0*n1 + i1] r4
"""
# the product is stored, too, for a backward
KEPT = RELU.replace("relu_linear", "kept_linear").replace("p3: out bf16;", "p3: out bf16, p4: out bf16;").replace(
    "r1: f32 = load p2[i1]", "store p4[i0*n1 + i1] r0\n      r1: f32 = load p2[i1]")
# the operands the other way round, and a kernel that reads another matrix beside the product
GATED = """kernel gated(p0: in bf16, p1: in bf16, p2: in bf16, p3: out bf16; n0, n1, n2)
  rows (i0: n0)
  product t0: bf16 = p0[1; n0] @ p1[n1; 1] over n2
    columns (i1: n1) vector i1
      r0: f32 = load p2[i0*n1 + i1]
      r1: f32 = sigmoid r0
      r2: f32 = mul r0, r1
      r3: f32 = load t0[i0*n1 + i1]
      r4: f32 = mul r2, r3
      store p3[i0*n1 + i1] r4
"""
DOWN = """kernel cumsum_down(p0: in f32, p1: out f32; n0, n1)
  rows (i1: n1) vector i1
    columns (i0: n0)
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = scan add r0
      store p1[i0*n1 + i1] r1
"""


def every_scalar(dtype: str, missing: frozenset[str] = frozenset()) -> LoopProgram:
    """All scalar instructions of a dtype on the elements of two arrays, a result each."""
    body = [Instruction(0, "load", (), dtype, "x", symbol("i")), Instruction(1, "load", (), dtype, "y", symbol("i"))]
    params = [Param("x", dtype, "in"), Param("y", dtype, "in")]
    for row in SCALAR.values():
        fits = row.kinds or (("int", "uint") if row.name.startswith("shift") else ("int", "uint", "bool")
                             if row.name in ("and", "or", "xor", "not") else ())
        if not {kind_of(dtype), dtype} & set(fits) or row.name in unsupported() | missing:
            continue
        result, register = len(params), "bool" if row.test else dtype
        params.append(Param(f"o{result}", register, "out"))
        body += [Instruction(result, row.name, (0, 1)[:row.arity], register),
                 Instruction(-1, "store", (result,), register, f"o{result}", symbol("i"))]
    return LoopProgram(f"scalars_{dtype}", tuple(params), ("n",), (("i", symbol("n")),), (), (Vectorize("i"),),
                       (Stage("row", tuple(body)),))


def program(text: str) -> LoopProgram:
    return parse(text)[0][1]


def compiled(source: KernelSource, sizes: Sequence[int], architecture: str, alignment: int = ALIGNED,
             guarded: bool = False) -> DeviceKernel:
    """A version without a cache."""
    kernel, = Compiler(architecture).compile([(source, source.choose(sizes, alignment, guarded))])
    return kernel


@pytest.mark.parametrize("name", ["softmax", "embedding", "bias", "cumsum", "linear", "dropout", "relu", "kept"])
def test_text(name: str, golden: Callable[[str, str], None]) -> None:
    text = emit(program(globals()[name.upper()]))
    golden(f"triton/{name}.txt", text)
    assert emit(program(globals()[name.upper()])) == text
    source = read(text)
    assert source.text == text and [one.name for one in source.versions]


def test_choice_of_versions() -> None:
    source = read(emit(program(SOFTMAX)))
    chosen = {n: source.choose([1000, n]).title for n in (0, 1, 5, 300, 1000, 1024, 5003, 16384, 16385, 16400, 16411,
                                                               1536, 1537, 1544, 100_000)}
    assert chosen == {0: "rows4 i32 /16", 1: "rows4 i32", 5: "rows16 i32", 300: "rows512_window i32 /4",
                      1000: "rows1024 i32 /8", 1024: "rows1024 i32 /16", 5003: "rows5120_window i32",
                      16384: "rows16384 i32 /16", 16385: "rows16384_window i32", 16400: "looped i32 /16",
                      16411: "looped_window i32", 1536: "rows1536 i32 /16", 1537: "rows1536_window i32",
                      1544: "rows2048 i32 /8", 100_000: "looped i32 /16"}
    assert source.choose([100_000, 100_000]).index == "i64"  # offsets beyond 2^31
    assert source.choose([8, 1023]).title == "rows1024_window i32"
    assert source.choose([8, 1023], 2).title == "rows1024 i32 unaligned"
    assert source.choose([8, 1024], 2).title == "rows1024 i32 /16 unaligned"
    with pytest.raises(VerifyError, match="without a kernel"):
        read("import triton\n")


def test_a_size_of_0_that_others_are_divided_by() -> None:
    """As in offsets of rows that are rolled: where there are none, nothing is launched."""
    rolled = program("""kernel rolled(p0: in f32, p1: out f32; n0, n1)
  rows (i0: n0)
    columns (i1: n1) vector i1
      r0: f32 = load p0[n1*((i0 + 2)//n0) + i1]
      store p1[i0*n1 + i1] r0
""")
    source = read(emit(rolled))
    version = source.choose([0, 5])
    assert source.small is not None and any("//" in str(size) for size in source.small)
    assert number_of(version.grid, {"n0": 0, "n1": 5}) == 0 and version.title == "tiles16 i32"


def test_nvidia_code() -> None:
    """Loads and stores of 16 bytes at any width; of 2 where addresses are not aligned, and at the ends of windows."""
    source = read(emit(program(SOFTMAX)))
    wide, windows, narrow = (compiled(source, [64, n], "sm_90", alignment).assembly
                             for n, alignment in ((1024, 16), (1023, 16), (1023, 2)))
    for text in (wide, windows):
        assert re.search(r"ld\.global\.v4\.b32", text) and re.search(r"st\.global\.v4\.b32", text)
    assert not re.search(r"ld\.global\.b16", wide) and len(re.findall(r"ld\.global\.b16", windows)) == 8  # of the ends
    assert not re.search(r"ld\.global\.v", narrow) and re.search(r"ld\.global\.b16", narrow)


@pytest.mark.parametrize(("text", "most"), [(SOFTMAX, (14, 20)), (NORM, (18, 33))])
def test_instructions_of_an_element(text: str, most: tuple[int, int]) -> None:
    """A kernel is bound by memory only where its instructions are few: an H200 has time for some 27 while it copies an
    element of bf16. Rows that begin anywhere cost half as many again; few lanes are there for nothing."""
    source = read(emit(program(text)))
    for columns, version, allowed in ((1000, "rows1024 i32 /8", most[0]), (4096, "rows4096 i32 /16", most[0]),
                                      (4104, "rows5120 i32 /8", most[0]), (1001, "rows1024_window i32", most[1]),
                                      (4099, "rows4096_window i32", most[1]), (5003, "rows5120_window i32", most[1])):
        kernel = compiled(source, [64, columns], "sm_90")
        assert kernel.version.title == version
        constants = dict(kernel.version.constants)
        lanes = constants["R"] * (constants["C"] + constants.get("D", 0)) / kernel.threads
        assert len(re.findall(r"^\t(?:@%p\d+ )?[a-z][^;]*;", kernel.assembly, re.MULTILINE)) < allowed * lanes, columns


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_a_linear_recurrence_compiles(architecture: str) -> None:
    for columns in (1000, 100_000):
        assert compiled(read(emit(program(LINEAR))), [64, columns], architecture).image[:4] == b"\x7fELF"

@pytest.mark.parametrize(("text", "most"), [(SOFTMAX, 19), (NORM, 31)])
def test_long_rows_are_read_twice(text: str, most: int) -> None:
    """Once for both of its reductions, which stay in a thread until all columns are read, and once for the result."""
    source = read(emit(program(text)))
    for columns, form in ((100_000, "loop"), (100_003, "loop_window")):
        function, = (one for one in source.text.split("@triton.jit\n") if f"_{form}(" in one)
        assert function.count("for start in ") == 2 and (function.count("tl.load(p0") == 2) == (form == "loop")
        kernel = compiled(source, [64, columns], "sm_90")
        body = [line for loop in inner_loops(kernel.assembly) for line in loop]
        assert kernel.version.function.endswith(form) and not any("bar.sync" in line for line in body)
        assert 0 < len(body) * kernel.threads / dict(kernel.version.constants)["C"] < most


def inner_loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop of PTX."""
    lines, found = assembly.split("\n"), []
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith("$L__BB")}
    for number, line in enumerate(lines):
        back = re.search(r"bra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if back is not None and labels[back[1]] <= number:
            found.append([one for one in lines[labels[back[1]]:number + 1]
                          if re.match(r"\t(?:@!?%p\d+ )?[a-z][^;]*;", one)])
    return found


@pytest.mark.parametrize(("text", "old", "new"), [
    (SOFTMAX, "sub r2, r1", "sub r1, r2"),
    (SOFTMAX, "reduce maximum r0", "reduce minimum r0"),
    (SOFTMAX, "r2: f32 = load p0[i0*n1 + i1]", "r2: f32 = load p0[i0*n1 + i1 + 1]"),
    (NORM, "r1: f32 = reduce", "store p0[i0*n1 + i1] r0\n      r1: f32 = reduce"),  # what is read again
    (NORM, "r20: i64 = index n1", "r20: i64 = index n1 - 1"),
    (NORM, "r4: f32 = mul r3, r3", "r4: f32 = mul r3, r2"),
    (NORM, "r5: f32 = reduce add r4", "r5: f32 = reduce maximum r4")])
def test_passes_that_stay_apart(text: str, old: str, new: str) -> None:
    plain = without_row_buffers(program(text))
    changed = without_row_buffers(program(text.replace(old, new).replace("p0: in ", "p0: inout ")))
    assert old in text and plain is not None and changed is not None
    assert len(one_pass(plain).stages) == len(plain.stages) - 1
    assert one_pass(changed) is changed


def test_amd_code() -> None:
    kernel = compiled(read(emit(program(SOFTMAX))), [64, 1024], "gfx942")
    assert "global_load_dwordx4" in kernel.assembly or "buffer_load_dwordx4" in kernel.assembly
    assert kernel.image[:4] == b"\x7fELF"
    assert kernel.parameters == ("pointer", "pointer", "status", "i32", "i32", "null", "null")


@pytest.mark.parametrize(("text", "dtype"), crossed([RELU, GATED], ["bf16", "f16"]))
def test_products_on_tensor_cores(text: str, dtype: str, tmp_path: Path) -> None:
    """Operands come 16 bytes at a time where sizes allow; accumulators and epilogue stay in registers."""
    source = read(emit(program(text.replace("bf16", dtype))))
    for sizes, name in (((4096, 1024, 512), "product128x128 i32 /16"), ((64, 1024, 512), "product64x64 i32 /16"),
                        ((1023, 1021, 509), "product128x128 i32")):
        nvidia, amd = (compiled(source, sizes, architecture) for architecture in ("sm_90", "gfx942"))
        assert nvidia.version.title == amd.version.title == name
        assert "wgmma.mma_async" in nvidia.assembly and "mma.sync" not in nvidia.assembly
        assert re.search(rf"v_mfma_f32_\w+_{dtype}", amd.assembly)
        assert ("cp.async.cg.shared.global" in nvidia.assembly) == name.endswith("/16")  # of 16 bytes
        registers, local = resources(nvidia, tmp_path)
        assert not local and occupancy(registers, nvidia.threads // 32, nvidia.shared) >= 0.12
        assert not any(int(one) for one in SPILLED.findall(amd.assembly))
        assert amd.shared <= 64 << 10


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "gfx942"])
def test_products_of_f32_are_exact(architecture: str) -> None:
    """No TF32: the fused multiply and add of each thread, or AMD's products of f32."""
    assembly = compiled(read(emit(program(RELU.replace("bf16", "f32")))), (1024, 1024, 512), architecture).assembly
    assert "tf32" not in assembly and "xf32" not in assembly
    assert re.search(r"fma\.rn\.f32|fma\.rn\.f32x2|v_mfma_f32_\w+_f32", assembly)


def test_a_product_is_read_where_it_is_made() -> None:
    assert show(program(RELU)) + "\n" == RELU
    with pytest.raises(VerifyError, match="elsewhere"):
        emit(program(RELU.replace("load t0[i0*n1 + i1]", "load t0[i0*n1 + i1 + 1]")))
    with pytest.raises(VerifyError, match="pointwise"):
        emit(program(RELU.replace("r4: f32 = maximum r2, r3", "r4: f32 = scan add r2")))
    with pytest.raises(ParseError, match="cannot read") as found:
        program(RELU.replace("p0: in bf16", "p0: in f32"))
    assert "is no operand" in found.value.why


def test_machine_code_is_kept() -> None:
    class Cache(dict[str, bytes]):
        def put(self, key: str, data: bytes) -> None:
            self[key] = data

    source, cache = read(emit(program(BIAS))), Cache()
    version = source.choose([64])
    first, = Compiler("sm_90", cache).compile([(source, version)])  # type: ignore[arg-type]
    assert list(cache) == [object_key(source, version, "sm_90")]
    again, = Compiler("sm_90", cache).compile([(source, version)])  # type: ignore[arg-type]
    assert (again.image, again.parameters, again.threads, again.shared) == (
        first.image, first.parameters, first.threads, first.shared)
    assert object_key(source, source.choose([64], guarded=True), "sm_90") not in cache


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.module.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        with pytest.raises(AnyShapeError, match="is not installed"):
            compiled(read(emit(program(BIAS))), [64], "sm_90")


DIGAMMA = """kernel psi(p0: in f32, p1: out f32; n0)
  rows (i0: n0) vector i0
    row
      r0: f32 = load p0[i0]
      r1: f32 = digamma r0
      store p1[i0] r1
"""


def test_digamma_compiles() -> None:
    assert not unsupported()
    for architecture in ("sm_90", "gfx942"):
        compiled(read(emit(program(DIGAMMA))), [1024], architecture)


def test_a_text_that_triton_refuses() -> None:
    source = read(emit(program(CUMSUM)).replace("tl.associative_scan", "tl.no_such_scan"))
    with pytest.raises(DeviceError, match="does not compile kernel"):
        compiled(source, [3, 5], "sm_90")


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_both_vendors_libraries_have_what_is_called(vendor: str) -> None:
    library = toolchain.module(f"triton.language.extra.{vendor}.libdevice")
    tables = (scalars.FLOAT, *scalars.BY_DTYPE.values(), scalars.FUNCTIONS)
    called = set(re.findall(r"libdevice\.(\w+)", " ".join(text for table in tables for text in table.values())))
    assert called
    assert sorted(name for name in called if not hasattr(library, name)) == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "i16", "i8", "u8", "bool"])
def test_every_scalar_instruction_compiles(dtype: str) -> None:
    assert len(every_scalar("f32").params) > 45
    for architecture in ("sm_90", "gfx942"):
        compiled(read(emit(every_scalar(dtype))), [1024], architecture)


def interpret(file: str, *more: str) -> str:
    """The tests of a file in a process that interprets; none may be skipped."""
    done = forked.run_tests(["-p", "interpreted", "-o", "python_files=interpreted_*.py", f"tests/{file}", *more],
                            TRITON_INTERPRET="1")
    last = done.stdout.strip().split("\n")[-1]
    assert done.returncode == 0 and "passed" in last and "skipped" not in last, done.stdout[-4000:] + done.stderr[-999:]
    return done.stdout


def test_interpreted() -> None:
    interpret("interpreted_cases.py", "-m", "not full")


def test_models_on_interpreted_kernels() -> None:
    interpret("interpreted_models.py", "-m", "not full")


@pytest.mark.full
def test_interpreted_wide() -> None:
    interpret("interpreted_cases.py", "-m", "full")


@pytest.mark.full
def test_every_model_on_interpreted_kernels() -> None:
    interpret("interpreted_models.py", "-m", "full")


def occupancy(registers: int, warps: int, shared: int) -> float:
    """Share of an H100's 64 warp slots that can be in flight (CUDA C++ Programming Guide, compute capability 9.0)."""
    of_a_warp = -(-max(registers, 1) // 8) * 8 * 32
    return min(65536 // of_a_warp // warps, 64 // warps, 32, (228 << 10) // (shared + 1024)) * warps / 64


def resources(kernel: DeviceKernel, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory, as NVIDIA's tool says."""
    import triton
    (folder / "cubin").write_bytes(kernel.image)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", folder / "cubin"], capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "LOCAL"))  # type: ignore[index, return-value]


@functools.cache
def recorded_programs() -> tuple[LoopProgram, ...]:
    """The kernels of the recorded graphs, fused and scheduled for a GPU."""
    import recorded

    class Gpu:
        hardware = HARDWARE
        unsupported = unsupported()

        def __getattr__(self, name: str) -> object:
            return getattr(usual_target(), name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "usual_target", Gpu)
        return tuple({made.name: made for model in recorded.MODELS for _, made in recorded.compiled(model)
                      if isinstance(made, LoopProgram)}.values())


def structure(made: LoopProgram) -> tuple[object, ...]:
    """What a kernel has in common with others, of which one is compiled for all: the kinds of its tiles and directives,
    the operations that are more than an element's, and how many values of a row it computes one after the other."""
    forms = {re.sub(r"\d+", "", version.name) for version in read(emit(made)).versions}
    ops = {(one.op, one.combine) for stage in made.stages for one in stage.instructions} & {
        (op, combine) for op in ("reduce", "scan", "scatter", "fold", "check", "random") for combine in (
            "", "add", "mul", "maximum", "minimum", "and", "or")}
    reductions = sum(any(one.op == "reduce" for one in stage.instructions) for stage in made.stages)
    return (*sorted(forms), *sorted({type(one).__name__ for one in made.schedule}), *sorted(ops), reductions)


@functools.cache
def representatives() -> list[LoopProgram]:
    """The shortest recorded kernel of each structure."""
    found: dict[tuple[object, ...], LoopProgram] = {}
    for made in sorted(recorded_programs(), key=lambda one: (len(show(one)), one.name)):
        found.setdefault(structure(made), made)
    return list(found.values())


def check_machine_code(programs: Sequence[LoopProgram], sizes: Sequence[tuple[int, int]], architecture: str,
                       folder: Path) -> None:
    """Kernels compile at sizes and alignments; none spills, and enough warps fit."""
    sources = [read(emit(made)) for made in programs]
    wanted = [(source, source.choose([size] * len(source.sizes), alignment))
              for source in sources for size, alignment in sizes]
    for kernel in Compiler(architecture).compile(wanted):
        assert not any(int(one) for one in SPILLED.findall(kernel.assembly)), kernel.version.title
        if architecture == "sm_90":
            registers, local = resources(kernel, folder)
            assert not local and occupancy(registers, kernel.threads // 32, kernel.shared) >= 0.12, kernel.version.title


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_a_recorded_kernel_of_each_structure(architecture: str, tmp_path: Path) -> None:
    some = representatives()  # which writes them all
    assert len(recorded_programs()) >= 140 and 20 <= len(some) <= 40
    check_machine_code(some, [(999, ALIGNED)], architecture, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_kernels(architecture: str, tmp_path: Path) -> None:
    """All of them, at small, odd and large sizes."""
    check_machine_code(recorded_programs(), [(64, 16), (999, 16), (1 << 20, 1)], architecture, tmp_path)
