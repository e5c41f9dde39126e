"""The bytecode format: the records of the host's programs and blocks, which backend/cpu/bytecode encodes and the
routines of backend/cpu/routines decode.

    program: head, then steps;  each step: op, its length in words, its number, and what the op needs
    block:   one per call: head, one address per buffer ("slot"), and room for the block of a kernel
    table of functions: addresses of library routines, then of the program's kernels

Each record is the one place that says where a field is: the routines read its attributes, the encoders call its
`encoder`, which takes every field by name, and ask `index` for a word that they change.
"""
from __future__ import annotations

from typing import Annotated

from anyshape.backend.cpu.microkernels.tables import (
    direct_conv,
    direct_conv_last,
    gemm,
    gemv,
    recurrence,
    softmax_rows,
    winograd_conv,
)
from anyshape.backend.cpu.native.records import Array, Inline, Nested, Struct, i64, words_of


class Place(Struct):
    """An address in a call: that of a slot, and bytes from there."""

    slot: i64
    bytes: i64


class Load(Struct):
    """What is known of the machine's load (backend/cpu/routines/threads.py)."""

    until: i64  # until when to use one thread, in nanoseconds; 0: all
    watched: i64  # how many regions are watched
    alone: i64  # how often one thread was found to be quicker


class Functions(Struct):
    """The table of functions; routines and kernels follow, which steps name by their entries (KERNELS on: four
    addresses each: run, blocks, scratch, work)."""

    gomp_parallel: i64
    thread_number: i64
    team_size: i64
    sgemm: i64
    dgemm: i64
    clock: i64  # clock_gettime
    sgemm_batch: i64
    dgemm_batch: i64
    barrier: i64  # GOMP_barrier
    load: Load


class ProgramHead(Struct):
    """The head of a program."""

    kept: i64  # bytes of the kept block: arena offsets from here on lie in the temporary block
    scratch: i64  # bytes of scratch per thread
    first: i64  # word of the first step
    workspace: i64  # word of the block where kernel blocks are built
    given: i64  # slots of inputs and of saved tensors, which are the first ones
    empty: i64  # how many of these have no elements, and so no address
    placed: i64  # number of pairs that follow: a slot, and its offset in the arena
    pairs: Annotated[Array[Place], Inline(0)]


class CallBlock(Struct):
    """The head of a call's block."""

    status: i64  # 0, or the value of a failed check
    state: i64  # number of the call, given back to the callback
    kept: i64  # address of the block of the saved values
    temp: i64  # address of the block of everything else
    threads: i64
    callback: i64
    functions: Functions
    program: ProgramHead
    step: i64  # number of the step that runs; the callback writes STEP_DONE there when it has done one
    times: i64  # 0, or where the clock is written after every step: (seconds, nanoseconds,
    # number of the step) each, the first before all steps
    scratch: i64  # address of the threads' scratch
    waited: i64  # nanoseconds in which the first thread of a parallel region waited for others at its barriers
    slots: Annotated[Array[i64], Inline(0)]  # slot 0 is the status; buffers follow


class StepHead(Struct):
    """How every step begins."""

    op: i64
    length: i64  # in words
    number: i64


class KernelStepWords(StepHead):
    """A fused kernel."""

    function: i64
    blocks: i64  # what `measure` writes: row blocks, scalar operations, bytes of scratch per thread
    work: i64
    scratch: i64
    params: i64
    sizes: i64
    places: Annotated[Array[Place], Inline(0)]  # of the params; each size follows


class SeriesStep(StepHead):
    """Kernels, or series: they follow, as so many words (backend/cpu/routines/parallel_region.py)."""

    words: i64


class KernelState(Struct):
    """What a kernel of a series has in front of its block."""

    status: i64
    threads: i64
    block: Annotated[Array[i64], Inline(0)]


class Dim(Struct):
    """A batch dim of a product: bytes of A, B, C and the addend from one to the next."""

    size: i64
    steps: Annotated[Array[i64], Inline(4)]


class ProductStep(StepHead):
    """A batch of matrix products, all in the terms of a column-major library; with packed panels, `function` is the
    entry of its dtype's first routine."""

    function: i64
    m: i64
    n: i64
    k: i64
    ldc: i64
    alpha: i64  # the bits of a float or double
    beta: i64
    item: i64  # bytes per element
    a: Nested[Place]
    b: Nested[Place]
    c: Nested[Place]
    bias: Nested[Place]  # slot -1: none
    bias_row: i64  # bytes from one column of C (a row, seen row-major) to the next, and within it
    bias_column: i64
    batches: i64  # number of matrices
    rank: i64  # batch dims


class Thin(Struct):
    """A product of a matrix with few vectors."""

    function: i64  # 0, or the entry of the routine (backend/cpu/microkernels/gemv.py)
    second: i64  # the matrix is operand B, the vectors are A
    rows: i64  # results of each vector
    step: i64  # bytes from row to row of the matrix, as it is stored
    count: i64  # vectors
    vector: i64  # bytes from vector to vector, and from one element of it to the next
    element: i64
    result: i64  # bytes from the results of one vector to those of the next, and from one to the next
    result_step: i64


class LibraryProduct(ProductStep):
    """A product by BLAS, or of few vectors."""

    transpose_a: i64  # PLAIN or TURNED
    transpose_b: i64
    lda: i64
    ldb: i64
    thin: Nested[Thin]
    batch: i64  # 0, or the library's product of many matrices at once
    dims: Annotated[Array[Dim], Inline(0)]


class PackedProduct(ProductStep):
    """A product by packed panels (backend/cpu/routines/packed_gemm.py)."""

    a_lane: i64  # bytes from one element along M to the next; of B along N; of A, of B along K; where A lies in panels
    # (ops/matmul.py), from panel to panel of A, and from word to word
    b_lane: i64
    a_inner: i64
    b_inner: i64
    lanes: i64  # of a vector of f32
    grain: i64  # rows of the smallest panel; others have two, three times as many
    per_word: i64  # elements along k in a word
    rows: i64  # of the largest tile, along N; columns along M; words of the largest block along K
    columns: i64
    deep: i64
    a_item: i64  # bytes per element of A, of B, of C: those of `item`, or 4, of f32; of A 0: it lies in panels
    b_item: i64
    c_item: i64
    scratch: i64  # bytes of scratch per thread
    dims: Annotated[Array[Dim], Inline(0)]


class ByteConvStep(StepHead):
    """A convolution of 8-bit numbers: a product whose rows are what the windows see
    (backend/cpu/routines/packed_gemm.py). Such a row is runs of elements, `tall` lines of `wide` ones."""

    product: Nested[PackedProduct]  # one row a position
    image: i64  # bytes from image to image, from line to line of positions, and from one to the next
    down: i64
    across: i64
    out_y: i64  # lines of positions of an image, and positions of one
    out_x: i64
    wide: i64  # runs of a line of the window
    run: i64  # bytes of a run; from a line of runs to the next, and from one to the next
    apart_y: i64
    apart_x: i64
    scratch: i64  # bytes of scratch per thread


class EndsStep(StepHead):
    """A step over groups whose ends are data (ops/matmul.py)."""

    ends: Nested[Place]
    end_item: i64  # bytes of an end: 4 or 8; and from one to the next
    end_step: i64
    count: i64  # groups
    size: i64  # of the dim that is cut into groups


class GroupedStep(EndsStep):
    """Products of groups of rows (backend/cpu/routines/grouped_gemm.py). Steps are bytes from group to group of A, B
    and C (as the words of a product name them), and along the dim that is cut."""

    along: i64  # ALONG_ROWS or ALONG_TERMS: which word of a product says how many elements of that dim it has
    a_group: i64
    b_group: i64
    c_group: i64
    a_along: i64
    b_along: i64
    c_along: i64
    order: Nested[Place]  # in which rows are gathered; slot -1: none
    cells: i64  # row i is read at place order[i] of so many rows; bytes from one to the next, and within one
    row: i64
    element: i64
    rows: i64  # rows that are gathered at a time for the library
    apart: i64  # bytes of a row that is gathered for it
    most_few: i64  # up to how many rows are few
    ours: i64  # 1: other groups are multiplied by packed panels; 0: by the library
    wide: i64  # columns of the smallest share of a thread
    scratch: i64  # bytes of scratch per thread
    lane: i64  # bytes from one column of A to the next
    thin: Annotated[Array[i64], Inline(max(max(counts) for counts in gemv.COUNTS.values()))]  # the entries of the
    # routines for 1, 2, ... rows
    panels: Nested[PackedProduct]  # one product by packed panels, all elements in it
    library: Nested[LibraryProduct]  # the same by the library, or with few rows


class TopkStep(StepHead):
    """The largest elements of lines (backend/cpu/routines/topk.py)."""

    x: Nested[Place]
    values: Nested[Place]  # dense, as the indices are
    indices: Nested[Place]
    lines: i64
    line: i64  # bytes from line to line, and from one element to the next
    element: i64
    count: i64  # elements of a line
    k: i64
    item: i64  # bytes per element
    infinity: i64  # the bits of a float's infinity; 0: whole numbers
    unsigned: i64  # 0 or 1


class RecurrenceStep(StepHead):
    """A recurrence over time, in one direction (backend/cpu/routines/recurrence); f32."""

    gates: Nested[Place]
    weights: Nested[Place]
    bias: Nested[Place]
    h: Nested[Place]
    c: Nested[Place]  # slot -1: none
    y: Nested[Place]
    last_h: Nested[Place]
    last_c: Nested[Place]  # slot -1: none; of two routines [2, batch, hidden], see ops/recurrence.py
    lengths: Nested[Place]  # of sequences, i64; slot -1: all have all times
    time: i64
    batch: i64
    hidden: i64
    blocks: i64  # of hidden units
    gates_count: i64  # of a unit
    gates_time: i64  # bytes from time to time, and from row to row of the gates
    gates_row: i64
    reverse: i64  # 1: the last time comes first
    height: i64  # rows at a time
    function: i64  # entry of the routine for so many; the next one is that for one row
    routines: i64  # 2: of each row count, one behind the other (backend/cpu/microkernels/recurrence.py)


class ByteRecurrenceStep(StepHead):
    """The same of an LSTM whose state and weights are quantised."""

    gates: Nested[Place]
    weights: Nested[Place]
    sums: Nested[Place]
    scales: Nested[Place]
    h: Nested[Place]
    c: Nested[Place]
    y: Nested[Place]
    last_h: Nested[Place]
    last_c: Nested[Place]
    state: Nested[Place]  # quantised
    time: i64
    batch: i64
    hidden: i64
    blocks: i64  # of hidden units
    words: i64  # of a state
    gates_time: i64  # bytes from time to time, and from row to row of the gates
    gates_row: i64
    reverse: i64  # 1: the last time comes first
    height: i64  # rows at a time
    function: i64  # entry of the routine for so many; then come those for one row, and for quantising a state


class RoutePlanStep(StepHead):
    """A counting sort of choices by branch (backend/cpu/routines/route_plan.py)."""

    ids: Nested[Place]
    order: Nested[Place]
    inverse: Nested[Place]
    ends: Nested[Place]
    cells: i64
    choices: i64
    cell: i64  # bytes from cell to cell, and from one choice to the next
    choice: i64
    branches: i64


class SegmentStep(EndsStep):
    """The group of each row (backend/cpu/routines/route_plan.py)."""

    result: Nested[Place]


class GroupedConvStep(StepHead):
    """Convolutions of groups of rows (backend/cpu/routines/convolution/grouped_conv.py), in three dims."""

    rows: Nested[Place]
    weight: Nested[Place]
    ends: Nested[Place]
    bias: Nested[Place]  # slot -1: none
    addend: Nested[Place]  # of the size of the result; slot -1: none
    result: Nested[Place]
    order: Nested[Place]  # of the rows; slot -1: none
    gathered: i64  # 1: row i is read at place order[i]; of so many rows, a row bytes apart
    cells: i64
    row: i64
    scattered: i64  # 1: the result of row i is written at place order[i]
    least: i64  # the bits of what the result is at least
    end_item: i64  # bytes of an end: 4 or 8; and from one to the next
    end_step: i64
    count: i64  # groups
    size: i64  # rows
    channels: i64  # of the rows, and of the result
    outs: i64
    taps: i64  # channels times places of the window
    size_z: i64  # positions of a row
    size_y: i64
    wide: i64
    volume: i64  # all of them
    out_z: i64  # positions of the result
    out_y: i64
    out_x: i64
    area: i64
    kernel_z: i64
    kernel_y: i64
    kernel_x: i64
    stride_z: i64
    stride_y: i64
    stride_x: i64
    padding_z: i64
    padding_y: i64
    padding_x: i64
    dilation_z: i64
    dilation_y: i64
    dilation_x: i64
    deep: i64  # lines of a channel in scratch, with their padding: planes, and lines of one
    high: i64
    phase: i64  # elements of a line that have one remainder by the stride
    line: i64  # bytes of a line
    lanes: i64  # of a vector of f32
    grain: i64  # channels of the smallest panel; others have two, three times as many
    function: i64  # entry of the first routine of backend/cpu/microkernels/direct_conv.py
    panels: i64  # where in a thread's scratch, behind the offsets of the taps, the weights are; the input; its bytes
    input: i64
    input_bytes: i64
    near: i64  # rows whose operands and results stay in a core's caches
    winograd: i64  # entry of the first routine of backend/cpu/microkernels/winograd_conv.py; 0: without it
    blocks: i64  # of channels of the result there
    flag: i64  # where in scratch: its flag, sums, transformed input and weights, biases
    sums: i64
    transformed: i64
    factors: i64
    biases: i64
    scratch: i64  # bytes of scratch per thread


class DirectConvStep(StepHead):
    """Convolutions with channels last (backend/cpu/routines/convolution/direct_conv.py), in two dims."""

    x: Nested[Place]
    weight: Nested[Place]
    bias: Nested[Place]  # slot -1: none
    factors: Nested[Place]  # of channels; slot -1: none
    shifts: Nested[Place]  # of channels, where there are factors; slot -1: none
    addend: Nested[Place]  # of the size of the result; slot -1: none
    result: Nested[Place]
    least: i64  # the bits of what the result is at least
    images: i64
    channels: i64  # of the images, and of the result
    outs: i64
    taps: i64  # channels times places of the window
    size_y: i64  # lines of an image
    out_y: i64  # lines of the result, and positions of one
    out_x: i64
    kernel_y: i64
    kernel_x: i64
    stride_y: i64
    stride_x: i64
    padding_y: i64
    padding_x: i64
    dilation_y: i64
    dilation_x: i64
    wide: i64  # bytes of a line of an image, and of one with its padding
    line: i64
    lines: i64  # of the result in a band; how many bands an image has; lines of the image that a band's windows meet
    bands: i64
    band_lines: i64
    padded: i64  # 0: tiles read the images themselves
    weights_last: i64  # 1: the channels of a place of the window are neighbours; 0: the places of a channel
    lanes: i64  # of a vector of f32
    grain: i64  # positions of the smallest tile; others have two, three times as many
    function: i64  # entry of the first routine of backend/cpu/microkernels/direct_conv_last.py
    turn: i64  # entry of what turns squares (backend/cpu/microkernels/gemm.py)
    panels: i64  # of two vectors of channels, and bytes of one
    panel_bytes: i64
    scales: i64  # where in a panel its factors and shifts are
    places: i64  # where in a thread's scratch, behind the offsets of the taps, those of positions are; weights; input
    weights: i64
    input: i64
    scratch: i64  # bytes of scratch per thread


OPERANDS = ("q", "k", "v", "mask", "sums", "result", "gradient", "products", "dq", "dk", "dv")
(QUERY, KEY, VALUE, MASK, SUMS, RESULT, GRADIENT, PRODUCTS, DQUERY, DKEY, DVALUE) = range(len(OPERANDS))


class Operand(Struct):
    """An operand of attention, slot -1: none; bytes from batch to batch, head to head, row to row."""

    place: Nested[Place]
    batch: i64
    head: i64
    row: i64


class AttentionStep(StepHead):
    """Attention, forward or backward."""

    product: i64  # entry of the library's product; in half precision, of the first routine of gemm.py
    weigh: i64  # entry of the routine for rows of scores
    backward: i64  # 0 or 1
    batch: i64
    groups: i64  # heads of keys, and the heads of queries that each one serves
    share: i64
    rows: i64  # of queries
    columns: i64  # rows of keys
    depth: i64  # of a head
    causal: i64  # 0 or 1
    item: i64  # bytes per element of what is not f32 in half precision: scores, mask, sums and products are
    scale: i64  # the bits of a float or double; then those of 1 and of 0
    one: i64
    zero: i64
    tile: i64  # rows of scores at a time
    step: i64  # bytes from one of them to the next
    scratch: i64  # bytes of scratch per thread
    dot: i64  # 0, or the entries of the routines for a matrix and a few vectors (backend/cpu/microkernels/gemv.py)
    spread: i64
    lanes: i64  # of a vector of f32, for products by packed panels; 0: by the library
    grain: i64  # rows of the smallest panel
    per_word: i64  # elements in a word
    # where in a thread's scratch, behind the scores, there are: gradients of scores; panels of keys, of values, of keys
    # for their second product; of rows; of columns; gradients of keys and of values; sums of a result; factors of rows
    gradients: i64
    keys: i64
    values: i64
    keys_again: i64
    row_panels: i64
    column_panels: i64
    dkeys: i64
    dvalues: i64
    sums: i64
    factors: i64
    operands: Annotated[Array[Operand], Inline(len(OPERANDS))]


class CopyDim(Struct):
    """A dim of a copy: its size, and its stride in the target and in the source, in bytes."""

    size: i64
    target: i64
    source: i64


class CopyStepWords(StepHead):
    """A strided copy."""

    item: i64  # bytes per element: 1, 2, 4, 8, 16, or any number when the inner dim is one run
    target: Nested[Place]
    source: Nested[Place]
    outer: i64  # number of inner runs
    rank: i64  # outer dims
    inner: Nested[CopyDim]
    dims: Annotated[Array[CopyDim], Inline(0)]


OF_A, OF_B, OF_C, OF_BIAS = range(4)  # which of the steps of a batch dim
# positions that encoders count with, and words that it writes by themselves
HEAD_WORDS, STEP_WORDS, SERIES_HEAD = words_of(ProgramHead), words_of(StepHead), words_of(SeriesStep)
MATMUL_DIMS = words_of(PackedProduct)  # words of a product without batch dims
SERIES_WORDS = SeriesStep.index("words")
STATUS, STATE, KEPT, TEMP, THREADS, CALLBACK, FUNCTIONS, PROGRAM, STEP, TIMES, SCRATCH, SLOTS = map(CallBlock.index, (
    "status", "state", "kept", "temp", "threads", "callback", "functions", "program", "step", "times", "scratch",
    "slots"))
HEAD_FIRST, HEAD_SCRATCH, HEAD_WORKSPACE = map(ProgramHead.index, ("first", "scratch", "workspace"))
MATMUL_A, MATMUL_B, MATMUL_C, MATMUL_BIAS = map(ProductStep.index, ("a", "b", "c", "bias"))
SGEMM, DGEMM, SGEMM_BATCH, DGEMM_BATCH = map(Functions.index, ("sgemm", "dgemm", "sgemm_batch", "dgemm_batch"))
STEP_DONE = -1
ALONG_ROWS, ALONG_TERMS = ProductStep.index("n"), ProductStep.index("k")
GROUPED_FEW = GroupedStep.fields["thin"].words
GROUPED_READ = 8  # rows whose product takes as long as reading a matrix of weights

# entries of routines in the table of functions
THIN = words_of(Functions)  # the routines of backend/cpu/microkernels/gemv.py in their order
PACKED = THIN + len(gemv.routines())  # those of backend/cpu/microkernels/gemm.py in theirs
WEIGH = PACKED + len(gemm.routines())  # those of backend/cpu/microkernels/softmax_rows.py
CONV = WEIGH + len(softmax_rows.routines())  # those of backend/cpu/microkernels/direct_conv.py
CONV_LAST = CONV + len(direct_conv.routines())  # those of backend/cpu/microkernels/direct_conv_last.py
WINOGRAD = CONV_LAST + len(direct_conv_last.routines())  # those of backend/cpu/microkernels/winograd_conv.py
RECURRENT = WINOGRAD + len(winograd_conv.routines())  # those of backend/cpu/microkernels/recurrence.py
KERNELS = RECURRENT + len(recurrence.routines())

MONOTONIC = 1  # the clock's number
# processor time, which other programs do not disturb, where one thread does everything
THREAD_TIME = 3

# ops of steps
NO_REGIME_WORDS = 2
NO_REGIME = -1  # no version of the kernel of the step, whose number follows, fits these sizes
END = 0
KERNEL = 1
MATMUL = 2
CALL = 3
COPY = 4
PRODUCT = 5  # a matmul step of bf16 or f16, by packed panels
ATTENTION = 6
OVER = 7  # a product step whose rows are packed over themselves (backend/cpu/routines/packed_gemm_in_place.py)
GROUPED = 8  # products of groups of rows (backend/cpu/routines/grouped_gemm.py)
SERIES = 9
BANDS = 10  # several series, which are one step
TOPK = 11
ROUTE_PLAN = 12
SEGMENTS = 13
GROUPED_CONV = 14  # convolutions of groups of rows
DIRECT_CONV = 15  # convolutions with channels last
RECURRENCE = 16  # recurrent cells over time
BYTE_CONV = 17  # convolutions of 8-bit numbers
BYTE_RECURRENCE = 18  # recurrent cells over time, of 8-bit numbers

SERIES_MORE = words_of(KernelState)  # words in front of a kernel's block

WIDE_TILES = direct_conv_last.HIGHEST[2]
F32 = 4  # bytes per element
OVER_INNER = 1024  # elements of such a row, at most
PACKED_PAD = 64  # bytes after a panel, which is written in whole vectors
PACKED_TURN = gemm.TURN
PACKED_ALONG = gemm.ALONG
PACKED_ANY = gemm.ANY
PACKED_FINISH = gemm.FINISH
PACKED_FINISH_WIDE = gemm.FINISH_WIDE
PACKED_BEGIN = gemm.BEGIN
PACKED_END = gemm.END
PACKED_ROWS_WAY = gemm.ROWS
PACKED_WIDE = gemm.WIDE
# elements along k that are packed of all lanes before the next ones, where lanes lie side by side: lines far apart, by
# powers of two above all, push each other out of the caches before the next panel wants the rest of them
PACKED_CHUNK = 16
# panels of columns that are packed at a time for whole tiles: where lanes lie side by side, and rows in pages of their
# own, one panel would take a line of each page
PACKED_GROUP = 2
# bytes of a result of whole tiles that goes past the caches: 2000 x 4096 x 512 takes 1.2 to 1.6 times the time else,
# on one core of a Xeon with AMX (2026-11-24); from 1 MiB on, whole train steps take 7 % longer, for it is read soon
PACKED_LARGE = 8 << 20
LINE = gemm.LINE
FLAT = 4  # a thread has blocks of rows that are at most this many times as high as its columns are wide

# op -> the word of a step that says how much scratch a thread needs
THREADS_SCRATCH = {KERNEL: KernelStepWords.index("scratch"), PRODUCT: PackedProduct.index("scratch"),
                   GROUPED: GroupedStep.index("scratch"), GROUPED_CONV: GroupedConvStep.index("scratch"),
                   DIRECT_CONV: DirectConvStep.index("scratch"), BYTE_CONV: ByteConvStep.index("scratch"),
                   ATTENTION: AttentionStep.index("scratch")}
PLAIN = 78  # "N" and "T", as the library wants to be told
TURNED = 84

TOPK_COUNT = 256  # elements of a line, at most
TOPK_MOST = 16  # elements that are chosen of it, at most

BATCH = 64  # matrices given to the library at once

PARALLEL_WORK = 131072  # scalar operations (a few microseconds) below which one more thread costs more than it gives
PARALLEL_FLOPS = 262144  # the same for multiply-adds of a batch of matrices
PARALLEL_BYTES = 262144  # the same for a copy
SHORT_RUN, COPY_BLOCK = 16, 1024  # strided runs of a copy up to so long go across, so many side by side
THIN_ROWS = 64  # results of a thread come in multiples of these, so that no two write into one line of the cache
LARGE_MATRIX = 16777216  # multiply-adds from which a single matrix keeps all threads busy on its own

# of parallel regions (backend/cpu/routines/threads.py)
PATIENCE = 300_000  # nanoseconds of waiting that are nothing unusual: a thread that slept, or meets new pages
WORTH = 16  # a sixteenth of the time is lost in finding out that the machine is busy still
LONGEST = 1_000_000_000  # nanoseconds after which one is tried again in any case
WATCHED = 256  # regions

# of the placement of buffers (backend/cpu/routines/offset_assignment.py)
SHORT = 32  # lists up to here are sorted in one go
CROWDED = 4  # where a buffer is alive with more than this part of all, looking at all of them takes no longer
BY_SIZE, BY_AREA, BY_POWER, BY_POWER_BETWEEN, BY_BIRTH = range(5)  # orders in which buffers are placed
REPAIRS = 12  # orders that are tried from one start to mend what is at the top
MOST_REPAIRED = 4000  # values that are placed for it in all: the more there are, the longer each order takes
