"""Bytecode format: the words of the host's programs and blocks: what runtime/specialize/specialization.py writes and
backend/cpu/interpreter.py reads.

    program: head, then steps;  each step: op, its length in words, its number, and what the op needs
    block:   one per call: head, one address per buffer ("slot"), and room for the block of a kernel
    table of functions: addresses of library routines, then of the program's kernels
"""
from __future__ import annotations

from anyshape.backend.cpu.microkernels import gemm, gemv, softmax_rows

# words of a call block
STATUS = 0  # 0, or the value of a failed check
STATE = 1  # number of the call, given back to the callback
KEPT = 2  # address of the block of the saved values
TEMP = 3  # address of the block of everything else
THREADS = 4
CALLBACK = 5
FUNCTIONS = 6  # address of the table of functions
PROGRAM = 7
STEP = 8  # number of the step that runs; the callback writes STEP_DONE there when it has done one
TIMES = 9  # 0, or where the clock is written after every step: (seconds, nanoseconds,
           # number of the step) each, the first before all steps
SCRATCH = 10  # address of the threads' scratch
WAITED = 11  # nanoseconds in which the first thread of a parallel region waited for others at its barriers
SLOTS = 12  # slot 0 is the status; buffers follow
STEP_DONE = -1

# words of a program's head
HEAD_KEPT = 0  # bytes of the kept block: arena offsets from here on lie in the temporary block
HEAD_SCRATCH = 1  # bytes of scratch per thread
HEAD_FIRST = 2  # word of the first step
HEAD_WORKSPACE = 3  # word of the block where kernel blocks are built
HEAD_GIVEN = 4  # slots of inputs and of saved tensors, which are the first ones
HEAD_EMPTY = 5  # how many of these have no elements, and so no address
HEAD_PLACED = 6  # number of (slot, arena offset) pairs, which follow
HEAD_WORDS = 7

# entries of the table of functions; kernels follow, four addresses each: run, blocks, scratch, work
GOMP_PARALLEL = 0
THREAD_NUMBER = 1
TEAM_SIZE = 2
SGEMM = 3
DGEMM = 4
CLOCK = 5  # clock_gettime
SGEMM_BATCH = 6
DGEMM_BATCH = 7
BARRIER = 8  # GOMP_barrier
LOAD = 9  # no routine, but what is known of the machine's load (backend/cpu/routines/threads.py): until when to use one
# thread (nanoseconds; 0: all), how many regions are watched, and how often one thread was found to be quicker
THIN = 10  # the routines of backend/cpu/microkernels/gemv.py in their order
PACKED = THIN + len(gemv.routines())  # those of backend/cpu/microkernels/gemm.py in theirs
WEIGH = PACKED + len(gemm.routines())  # those of backend/cpu/microkernels/softmax_rows.py
KERNELS = WEIGH + len(softmax_rows.routines())

MONOTONIC = 1  # the clock's number
# processor time, which other programs do not disturb, where one thread does everything
THREAD_TIME = 3

KERNEL_SCRATCH = 6  # word of a kernel step: bytes of scratch per thread

# ops of steps; every step starts with op, length, number
END = 0
KERNEL = 1  # function, blocks, work, scratch, params, sizes, (slot, bytes) each, size each
MATMUL = 2
CALL = 3
COPY = 4
PRODUCT = 5  # a matmul step of bf16 or f16, by packed panels
ATTENTION = 6
OVER = 7  # a product step whose rows are packed over themselves (backend/cpu/routines/packed_gemm_in_place.py)
GROUPED = 8  # products of groups of rows (backend/cpu/routines/grouped_gemm.py)
SERIES = 9  # number, words of the kernel steps that follow (backend/cpu/routines/parallel_region.py)
BANDS = 10  # the same of the series that follow, which are one step

SERIES_WORDS = 3
SERIES_HEAD = 4
SERIES_MORE = 2  # words of a kernel's status, and of its threads, in front of its block

# what run_plan returns
DONE = 0
CHECK_FAILED = 1
CALLBACK_FAILED = 2
NO_MEMORY = 3  # an input with elements has no address

# words of a matmul step after the head of three; all in the terms of a column-major library
MATMUL_FUNCTION = 3
MATMUL_M = 4
MATMUL_N = 5
MATMUL_K = 6
MATMUL_TRANSPOSE_A = 7
MATMUL_TRANSPOSE_B = 8
MATMUL_LDA = 9
MATMUL_LDB = 10
MATMUL_LDC = 11
MATMUL_ALPHA = 12  # the bits of a float or double
MATMUL_BETA = 13
MATMUL_ITEM = 14  # bytes per element
MATMUL_A = 15  # slot, bytes
MATMUL_B = 17
MATMUL_C = 19
MATMUL_BIAS = 21  # slot (-1: none), bytes
MATMUL_BIAS_ROW = 23  # bytes from one column of C (a row, seen row-major) to the next, and within it
MATMUL_BIAS_COLUMN = 24
MATMUL_BATCHES = 25  # number of matrices
MATMUL_RANK = 26  # batch dims; then per dim: size, bytes of A, B, C, bias from one to the next
MATMUL_THIN = 27  # 0, or the entry of the routine for a matrix and a few vectors (backend/cpu/microkernels/gemv.py);
# then:
MATMUL_THIN_SECOND = 28  # the matrix is operand B, the vectors are A
MATMUL_THIN_ROWS = 29  # results of each vector
MATMUL_THIN_STEP = 30  # bytes from row to row of the matrix, as it is stored
MATMUL_THIN_COUNT = 31  # vectors
MATMUL_THIN_VECTOR = 32  # bytes from vector to vector, and from one element of it to the next
MATMUL_THIN_ELEMENT = 33
MATMUL_THIN_RESULT = 34  # bytes from the results of one vector to those of the next, and from one to the next
MATMUL_THIN_RESULT_STEP = 35
MATMUL_BATCH = 36  # 0, or the library's product of many matrices at once
MATMUL_DIMS = 37

# of a product by packed panels: MATMUL_FUNCTION is the entry of its dtype's first routine; and in place of what only
# the library needs:
PACKED_A_LANE = 7  # bytes from one element along M to the next; of B along N; of A, of B along K
PACKED_B_LANE = 8
PACKED_A_INNER = 9
PACKED_B_INNER = 10
PACKED_LANES = 27  # of a vector of f32
PACKED_GRAIN = 28  # rows of the smallest panel; others have two, three times as many
PACKED_PER_WORD = 29  # elements along k in a word
PACKED_ROWS = 30  # of the largest tile, along N; columns along M; words of the largest block along K
PACKED_COLUMNS = 31
PACKED_WORDS = 32
PACKED_A_ITEM = 33  # bytes per element of A, of B, of C: those of MATMUL_ITEM, or 4, of f32
PACKED_B_ITEM = 34
PACKED_C_ITEM = 35
PACKED_SCRATCH = 36  # bytes of scratch per thread
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

# words of a step of products of groups after the head of three
GROUPED_ENDS = 3  # slot, bytes
GROUPED_END_ITEM = 5  # bytes of an end: 4 or 8; and from one to the next
GROUPED_END_STEP = 6
GROUPED_COUNT = 7  # groups
GROUPED_SIZE = 8  # of the dim that is cut into groups
GROUPED_ALONG = 9  # which word of a product says how many elements of that dim it has: MATMUL_N or MATMUL_K
GROUPED_STEPS = 10  # bytes from group to group of A, B and C (as the words of a product name them), and along that dim
GROUPED_MOST_FEW = 16  # up to how many rows are few
GROUPED_OURS = 17  # 1: other groups are multiplied by packed panels; 0: by the library
GROUPED_WIDE = 18  # columns of the smallest share of a thread
GROUPED_SCRATCH = 19  # bytes of scratch per thread
GROUPED_LANE = 20  # bytes from one column of A to the next
GROUPED_THIN = 21  # the entries of the routines for 1, 2, ... rows
GROUPED_FEW = max(max(counts) for counts in gemv.COUNTS.values())
GROUPED_PANELS = GROUPED_THIN + GROUPED_FEW  # the words of one product by packed panels, all elements in it
GROUPED_LIBRARY = GROUPED_PANELS + MATMUL_DIMS  # those by the library, or with few rows
GROUPED_WORDS = GROUPED_LIBRARY + MATMUL_DIMS
GROUPED_READ = 8  # rows whose product takes as long as reading a matrix of weights

# words of an attention step after the head of three
ATTENTION_PRODUCT = 3  # entry of the library's product; in half precision, of the first routine of gemm.py
ATTENTION_WEIGH = 4  # entry of the routine for rows of scores
ATTENTION_BACKWARD = 5  # 0 or 1
ATTENTION_BATCH = 6
ATTENTION_GROUPS = 7  # heads of keys, and the heads of queries that each one serves
ATTENTION_SHARE = 8
ATTENTION_ROWS = 9  # of queries
ATTENTION_COLUMNS = 10  # rows of keys
ATTENTION_DEPTH = 11  # of a head
ATTENTION_CAUSAL = 12  # 0 or 1
ATTENTION_ITEM = 13  # bytes per element of what is not f32 in half precision: scores, mask, sums and products are
ATTENTION_SCALE = 14  # the bits of a float or double; then those of 1 and of 0
ATTENTION_ONE = 15
ATTENTION_ZERO = 16
ATTENTION_TILE = 17  # rows of scores at a time
ATTENTION_STEP = 18  # bytes from one of them to the next
ATTENTION_SCRATCH = 19  # bytes of scratch per thread
ATTENTION_DOT = 20  # 0, or the entries of the routines for a matrix and a few vectors
# (backend/cpu/microkernels/gemv.py)
ATTENTION_SPREAD = 21
ATTENTION_LANES = 22  # of a vector of f32, for products by packed panels; 0: by the library
ATTENTION_GRAIN = 23  # rows of the smallest panel
ATTENTION_PER_WORD = 24  # elements in a word
# where in a thread's scratch, behind the scores, there are: gradients of scores; panels of keys, of values, of keys for
# their second product; of rows; of columns; gradients of keys and of values; sums of a result; factors of rows
ATTENTION_GRADIENTS = 25
ATTENTION_KEYS = 26
ATTENTION_VALUES = 27
ATTENTION_KEYS_AGAIN = 28
ATTENTION_ROW_PANELS = 29
ATTENTION_COLUMN_PANELS = 30
ATTENTION_DKEYS = 31
ATTENTION_DVALUES = 32
ATTENTION_SUMS = 33
ATTENTION_FACTORS = 34
ATTENTION_OPERANDS = 35  # per operand: slot (-1: none), bytes, and bytes from batch to batch, head to head, row to row
OPERANDS = ("q", "k", "v", "mask", "sums", "result", "gradient", "products", "dq", "dk", "dv")
(QUERY, KEY, VALUE, MASK, SUMS, RESULT, GRADIENT, PRODUCTS, DQUERY, DKEY, DVALUE) = range(len(OPERANDS))
# op -> the word of a step that says how much scratch a thread needs
THREADS_SCRATCH = {KERNEL: KERNEL_SCRATCH, PRODUCT: PACKED_SCRATCH, GROUPED: GROUPED_SCRATCH,
                   ATTENTION: ATTENTION_SCRATCH}
PLAIN = 78  # "N" and "T", as the library wants to be told
TURNED = 84

BATCH = 64  # matrices given to the library at once

# words of a copy step
COPY_ITEM = 3  # bytes per element: 1, 2, 4, 8, 16, or any number when the inner dim is one run
COPY_TARGET = 4  # slot, bytes
COPY_SOURCE = 6
COPY_OUTER = 8  # number of inner runs
COPY_RANK = 9  # outer dims
COPY_INNER = 10  # elements of the inner dim, its stride in the target and in the source, in bytes
COPY_DIMS = 13  # per outer dim: size, stride in the target, stride in the source

PARALLEL_WORK = 131072  # scalar operations (a few microseconds) below which one more thread costs more than it gives
PARALLEL_FLOPS = 262144  # the same for multiply-adds of a batch of matrices
PARALLEL_BYTES = 262144  # the same for a copy
THIN_ROWS = 64  # results of a thread come in multiples of these, so that no two write into one line of the cache
LARGE_MATRIX = 16777216  # multiply-adds from which a single matrix keeps all threads busy on its own

# of parallel regions (backend/cpu/routines/threads.py)
PATIENCE = 300_000  # nanoseconds of waiting that are nothing unusual: a thread that slept, or meets new pages
WORTH = 16  # a sixteenth of the time is lost in finding out that the machine is busy still
LONGEST = 1_000_000_000  # nanoseconds after which one is tried again in any case
WATCHED = 256  # regions
# words of a region: table of functions, routine, its argument, when it began, when the first thread had done its share,
# whether it is watched, and the nanoseconds in which a thread did not run
REGION_FUNCTIONS, REGION_ROUTINE, REGION_DATA, REGION_BEGIN, REGION_END, REGION_WATCHED, REGION_LOST = range(7)

# of the placement of buffers (backend/cpu/routines/offset_assignment.py)
SHORT = 32  # lists up to here are sorted in one go
CROWDED = 4  # where a buffer is alive with more than this part of all, looking at all of them takes no longer
BY_SIZE, BY_AREA, BY_POWER, BY_POWER_BETWEEN, BY_BIRTH = range(5)  # orders in which buffers are placed
REPAIRS = 12  # orders that are tried from one start to mend what is at the top
MOST_REPAIRED = 4000  # values that are placed for it in all: the more there are, the longer each order takes
