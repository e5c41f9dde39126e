"""The Mersenne twister (MT19937) of PyTorch's generator for CPUs, printed as LLVM: many random bools at a time that are
true with a given probability.

The generator is the Mersenne Twister MT19937 (Matsumoto and Nishimura, 1998): 624 words, of which the next 624 are made
at once; each is then tempered. `bernoulli_` takes two words for an element: the low 21 bits of the first above the
second are a number below 2**53, and the element is true where it is less than the probability times 2**53.

    draw(i64 state, i64 result, i64 count, i64 limit)
        state: address of what `Generator.get_state` gives (the state for the next number is left there);
        result: address of `count` bools; limit: of the numbers that give true
"""
from __future__ import annotations

from collections.abc import Callable

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.machine.target import Machine

WORDS, MIDDLE = 624, 397
# in the state of a generator (struct CPUGeneratorImplStateLegacy of ATen), in bytes
LEFT, NEXT, STATE, BYTES = 8, 16, 24, 5056
_UPPER, _LOWER, _MATRIX = -(1 << 31), (1 << 31) - 1, 0x9908B0DF - (1 << 32)
_TEMPER = ((11, -1, "lshr"), (7, 0x9D2C5680 - (1 << 32), "shl"), (15, 0xEFC60000 - (1 << 32), "shl"), (18, -1, "lshr"))
_FRONT = 16  # room for what a vector reads before the first
_ROOM = _FRONT + WORDS + 80  # a last vector may reach beyond
_PAIR = 53


def emit_twister(target: Machine) -> str:
    """LLVM text of the routine `draw`."""
    body = _Draw(target)
    body.run()
    lines = ["define void @draw(i64 %state, i64 %result, i64 %count, i64 %limit) nounwind {",
             *body.code.function_body(), "}", ""]
    return "\n".join([f'target triple = "{target.triple}"', "", *lines,
                      *(body.code.declarations[name] for name in sorted(body.code.declarations)), ""])


class _Draw:
    """Two rows of words, the last ones and the next; and the tempered ones, behind one that may be left of those
    before."""

    def __init__(self, target: Machine) -> None:
        self.code = code = Code(target)
        self.lanes = target.lanes
        self.state = code.convert("inttoptr", Value("%state", "i64"), "ptr")
        self.result = code.convert("inttoptr", Value("%result", "i64"), "ptr")
        self.rows = self.room("one", _FRONT), self.room("other", _FRONT)
        self.tempered = self.room("tempered", _FRONT - 1)  # so that a line begins with its second word

    def room(self, name: str, front: int) -> Value:
        self.code.stack_slots.append(f"  %{name} = alloca [{_ROOM} x i32], align 64")
        return self.word(Value(f"%{name}", "ptr"), number(front))

    def run(self) -> None:
        """Blocks of words: the first is what is left of the last one, each other is made."""
        code = self.code
        count, limit = Value("%count", "i64"), Value("%limit", "i64")
        self.copy(self.rows[0], into=True)
        left = code.load("i32", 0, code.address(self.state, "i8", number(LEFT)), 0, False, 4)
        place = code.load("i64", 0, code.address(self.state, "i8", number(NEXT)), 0, False, 8)
        # one left means none: the generator makes the next before it looks
        place = code.select(code.compare("eq", left, constant("i32", 1)), number(WORDS), place)
        at = code.open_loop(number(0), number(WORDS), self.lanes)
        self.temper(at, self.words(self.rows[0], at))
        code.close_section()
        old, new = code.slot("old", "ptr", 0), code.slot("new", "ptr", 0)
        self.set(old, self.rows[0])
        self.set(new, self.rows[1])
        # a word of the tempered row stands one place later than in the state
        begin, done = code.slot("begin", "i64", 0), code.slot("done", "i64", 0)
        self.set(begin, code.binary("add", place, number(1)))
        self.set(done, number(0))
        lacking = code.binary("sub", code.binary("mul", count, number(2)), code.binary("sub", number(WORDS), place))
        lacking = code.intrinsic("smax", lacking, number(0))
        blocks = code.binary("udiv", code.binary("add", lacking, number(WORDS - 1)), number(WORDS))
        block = code.open_loop(number(0), code.binary("add", blocks, number(1)), 1)
        code.open_if(code.compare("ne", block, number(0)))
        at = self.get(begin)
        self.set(begin, code.select(code.compare("eq", at, number(WORDS)), number(0), number(1)))
        rest = code.load("i32", 0, self.word(self.tempered, number(WORDS)), code.top, False, 4)
        code.do(f"store {rest.typed}, ptr {self.tempered.text}, align 4")
        last, following = (code.load("ptr", 0, slot, code.top, False) for slot in (old, new))
        self.twist(last, following)
        self.set(old, following)
        self.set(new, last)
        code.close_section()
        at, before = self.get(begin), self.get(done)
        pairs = code.binary("lshr", code.binary("sub", number(WORDS + 1), at), number(1))
        pairs = code.intrinsic("smin", pairs, code.binary("sub", count, before))
        self.compare(at, before, pairs, limit)
        self.set(begin, code.binary("add", at, code.binary("mul", pairs, number(2))))
        self.set(done, code.binary("add", before, pairs))
        code.close_section()
        self.copy(code.load("ptr", 0, old, code.top, False), into=False)
        place = code.binary("sub", self.get(begin), number(1))
        left = code.convert("trunc", code.binary("sub", number(WORDS + 1), place), "i32")
        code.do(f"store {place.typed}, ptr {code.address(self.state, 'i8', number(NEXT)).text}, align 8")
        code.do(f"store {left.typed}, ptr {code.address(self.state, 'i8', number(LEFT)).text}, align 4")

    def set(self, slot: Value, value: Value) -> None:
        self.code.do(f"store {value.typed}, ptr {slot.text}")

    def get(self, slot: Value) -> Value:
        return self.code.load("i64", 0, slot, self.code.top, False)

    def word(self, row: Value, at: Value) -> Value:
        return self.code.address(row, "i32", at)

    def words(self, row: Value, at: Value) -> Value:
        return self.code.load("i32", self.lanes, self.word(row, at), self.code.top, False, 4)

    def put(self, row: Value, at: Value, words: Value) -> None:
        self.code.do(f"store {words.typed}, ptr {self.word(row, at).text}, align 4")

    def copy(self, row: Value, into: bool) -> None:
        """The words of the state, which has 64 bits for each, into a row, or back."""
        code = self.code
        at = code.open_loop(number(0), number(WORDS), 8)
        far = code.address(self.state, "i64", code.binary("add", at, number(STATE // 8)))
        if into:
            self.put(row, at, code.convert("trunc", code.load("i64", 8, far, code.top, False, 8), "i32"))
        else:
            wide = code.convert("zext", code.load("i32", 8, self.word(row, at), code.top, False, 4), "i64")
            code.do(f"store {wide.typed}, ptr {far.text}, align 8")
        code.close_section()

    def twist(self, old: Value, new: Value) -> None:
        """The next row: word k of word k, k + 1 and k + MIDDLE, of the new row where the old has no such word."""
        code, lanes = self.code, self.lanes
        here, there = MIDDLE, MIDDLE - WORDS
        edge = (WORDS - MIDDLE) // lanes * lanes
        self.some(old, new, 0, edge, lambda at: self.words(old, code.binary("add", at, number(here))))
        first = code.load("i32", 0, new, code.top, False, 4)
        code.do(f"store {first.typed}, ptr {self.word(old, number(WORDS)).text}, align 4")
        within = code.first_lanes(number(WORDS - MIDDLE - edge), lanes)
        self.some(old, new, edge, edge + lanes, lambda at: code.select(
            within, self.words(old, code.binary("add", at, number(here))),
            self.words(new, code.binary("add", at, number(there)))))
        self.some(old, new, edge + lanes, WORDS, lambda at: self.words(new, code.binary("add", at, number(there))))

    def some(self, old: Value, new: Value, begin: int, end: int, far: Callable[[Value], Value]) -> None:
        code = self.code
        at = code.open_loop(number(begin), number(end), self.lanes)
        upper = code.binary("and", self.words(old, at), self.all(_UPPER))
        following = self.words(old, code.binary("add", at, number(1)))
        mixed = code.binary("or", upper, code.binary("and", following, self.all(_LOWER)))
        odd = code.binary("sub", self.all(0), code.binary("and", following, self.all(1)))
        twisted = code.binary("lshr", mixed, self.all(1))
        twisted = code.binary("xor", twisted, code.binary("and", odd, self.all(_MATRIX)))
        words = code.binary("xor", twisted, far(at))
        self.put(new, at, words)
        self.temper(at, words)
        code.close_section()

    def temper(self, at: Value, words: Value) -> None:
        """Puts the tempered words where they belong."""
        code = self.code
        for shift, mask, direction in _TEMPER:
            moved = code.binary(direction, words, self.all(shift))
            words = code.binary("xor", words, moved if mask == -1 else code.binary("and", moved, self.all(mask)))
        self.put(self.tempered, code.binary("add", at, number(1)), words)

    def compare(self, at: Value, before: Value, pairs: Value, limit: Value) -> None:
        """Bools of `pairs` pairs of words from `at` on, from place `before` of the result on."""
        code, lanes = self.code, 2 * self.lanes
        k = code.open_loop(number(0), pairs, lanes)
        source = self.word(self.tempered, code.binary("add", at, code.binary("mul", k, number(2))))
        both = code.load("i64", lanes, source, code.top, False, 4)
        high = code.binary("shl", both, constant("i64", 32, lanes))
        wide = code.binary("or", high, code.binary("lshr", both, constant("i64", 32, lanes)))
        value = code.binary("and", wide, constant("i64", (1 << _PAIR) - 1, lanes))
        found = code.convert("zext", code.compare("slt", value, limit), "i8")
        target = code.address(self.result, "i8", code.binary("add", before, k))
        left = code.binary("sub", pairs, k)
        code.open_if(code.compare("sge", left, number(lanes)))
        code.do(f"store {found.typed}, ptr {target.text}, align 1")
        code.close_section()
        code.open_if(code.compare("slt", left, number(lanes)))
        code.masked("store", found, target, code.first_lanes(left, lanes), 1, code.top, False)
        code.close_section()
        code.close_section()

    def all(self, value: int) -> Value:
        return constant("i32", value, self.lanes)


def number(value: int) -> Value:
    return constant("i64", value)
