"""A digest of memory, printed as LLVM: 64 bits that tell whether a tensor still holds what it held.

    digest = polynomials at odd constants, modulo 2**64; their coefficients are the bytes as i64 words, padded with 0

32 polynomials run side by side, so that memory is the limit. A product with an odd constant can be undone, so a change
of one word always shows; several changed words cancel by accident in one of 2**64 cases.

    digest(i64 address, i64 bytes, i64 result): writes the i64 to the address `result`
"""
from __future__ import annotations

LANES = 8
CHAINS = 4
STEP = 8 * LANES * CHAINS  # bytes of one round
_FACTOR = 0x9E3779B97F4A7C15  # odd; 2**64 over the golden ratio
_BITS = 1 << 64


def emit_digest() -> str:
    """LLVM text of the routine `digest`."""
    vector = f"<{LANES} x i64>"
    factor = ", ".join(f"i64 {_signed(pow(_FACTOR, lane + 1, _BITS))}" for lane in range(LANES))
    seed = ", ".join(f"i64 {lane + 1}" for lane in range(LANES))
    chains = range(CHAINS)
    phis = [f"  %a{c} = phi {vector} [ <{seed}>, %entry ], [ %n{c}, %loop ]" for c in chains]
    ends = [f"  %e{c} = phi {vector} [ <{seed}>, %entry ], [ %n{c}, %loop ]" for c in chains]

    def round_of(state: str, source: str, result: str) -> list[str]:
        """The next coefficients, from `source`: state -> result."""
        return [line for c in chains for line in (
            f"  %{result}p{c} = getelementptr i8, ptr %{source}, i64 {8 * LANES * c}",
            f"  %{result}x{c} = load {vector}, ptr %{result}p{c}, align 1",
            f"  %{result}m{c} = mul {vector} %{state}{c}, <{factor}>",
            f"  %{result}{c} = add {vector} %{result}m{c}, %{result}x{c}")]

    fold, total = [], "0"
    for c in chains:
        for lane in range(LANES):
            name = f"%s{c}_{lane}"
            fold += [f"  {name}x = extractelement {vector} %g{c}, i64 {lane}",
                     f"  {name}m = mul i64 {total}, {_signed(_FACTOR)}",
                     f"  {name} = add i64 {name}m, {name}x"]
            total = name
    return "\n".join([
        "define void @digest(i64 %address, i64 %bytes, i64 %result) {",
        "entry:",
        f"  %rest = alloca [{STEP} x i8], align 64",
        f"  %rounds = udiv i64 %bytes, {STEP}",
        f"  %whole = mul i64 %rounds, {STEP}",
        "  %left = sub i64 %bytes, %whole",
        "  %base = inttoptr i64 %address to ptr",
        f"  call void @llvm.memset.p0.i64(ptr %rest, i8 0, i64 {STEP}, i1 false)",
        "  %none = icmp eq i64 %rounds, 0",
        "  br i1 %none, label %end, label %loop",
        "loop:",
        "  %i = phi i64 [ 0, %entry ], [ %next, %loop ]",
        *phis,
        "  %at = getelementptr i8, ptr %base, i64 %i",
        *round_of("a", "at", "n"),
        f"  %next = add i64 %i, {STEP}",
        "  %more = icmp ult i64 %next, %whole",
        "  br i1 %more, label %loop, label %end",
        "end:",
        *ends,
        "  %tail = getelementptr i8, ptr %base, i64 %whole",
        "  call void @llvm.memcpy.p0.p0.i64(ptr %rest, ptr %tail, i64 %left, i1 false)",
        *round_of("e", "rest", "g"),
        *fold,
        "  %to = inttoptr i64 %result to ptr",
        f"  store i64 {total}, ptr %to",
        "  ret void",
        "}",
        "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
        ""])


def _signed(word: int) -> int:
    return word - _BITS if word >= _BITS // 2 else word
