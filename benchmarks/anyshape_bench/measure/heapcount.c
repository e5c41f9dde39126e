/* Counts live heap blocks of tensor size (64 KiB and more) and their peak, loaded in front of the C library.
 *
 *   cc -O2 -shared -fPIC heapcount.c -o libheapcount.so -ldl -lpthread
 *   LD_PRELOAD=./libheapcount.so python program.py
 *
 * Counted, in requested bytes: blocks of malloc, calloc, realloc, posix_memalign, aligned_alloc, memalign, and anonymous
 * writable mappings made by the program (the C library's own mappings back blocks that are counted already).
 *
 *   heapcount_live()   bytes alive now
 *   heapcount_peak()   most bytes alive at one moment since the last reset
 *   heapcount_reset()  sets the peak to what is alive now
 *   heapcount_held()   the part of live that is tensor memory: torch takes every CPU tensor as an aligned block, so
 *                      aligned blocks and mappings count, except mappings that the Python interpreter makes for objects.
 *                      Tells an idle arena from the dictionaries that a compiler leaves behind.
 *   heapcount_lost()   blocks that did not fit the table and were not counted; 0 or the numbers are not exact
 *
 * Not seen: mappings resized by mremap, and pages given back by madvise. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>

#define LEAST (64u * 1024u)      /* the smallest block that is counted */
#define SLOTS (1u << 17)         /* blocks of that size alive at once */
#define MAPS 16384               /* mappings alive at once */
#define EXPORT __attribute__((visibility("default")))

enum kind { OBJECT, TENSOR };    /* what a block most likely holds, by the way it was taken */

struct block { uintptr_t address; size_t bytes; enum kind kind; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block blocks[SLOTS];   /* open addressing, linear probing, no tombstones */
static struct block maps[MAPS];
static unsigned used, mapped;        /* filled entries of the two tables */
static long live, held, peak, lost;

static void *(*next_malloc)(size_t);
static void *(*next_calloc)(size_t, size_t);
static void *(*next_realloc)(void *, size_t);
static void (*next_free)(void *);
static int (*next_posix_memalign)(void **, size_t, size_t);
static void *(*next_aligned_alloc)(size_t, size_t);
static void *(*next_memalign)(size_t, size_t);
static void *(*next_mmap)(void *, size_t, int, int, int, off_t);
static int (*next_munmap)(void *, size_t);

/* ---- the first moments: dlsym itself may ask for memory before the real functions are known ---- */

static char early[1 << 16] __attribute__((aligned(64)));
static size_t early_used;
static __thread int finding __attribute__((tls_model("initial-exec")));

static void *early_block(size_t bytes) {
    size_t start = (early_used + 63) & ~(size_t)63;
    if (start + bytes > sizeof early) return NULL;
    early_used = start + bytes;
    return early + start;
}

static int is_early(const void *address) {
    return (const char *)address >= early && (const char *)address < early + sizeof early;
}

static void find_next(void) {
    finding = 1;
    next_calloc = dlsym(RTLD_NEXT, "calloc");
    next_realloc = dlsym(RTLD_NEXT, "realloc");
    next_free = dlsym(RTLD_NEXT, "free");
    next_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    next_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
    next_memalign = dlsym(RTLD_NEXT, "memalign");
    next_mmap = dlsym(RTLD_NEXT, "mmap");
    next_munmap = dlsym(RTLD_NEXT, "munmap");
    next_malloc = dlsym(RTLD_NEXT, "malloc");
    finding = 0;
}

static void take_lock(void) { pthread_mutex_lock(&lock); }
static void give_lock(void) { pthread_mutex_unlock(&lock); }

/* A child made by fork while another thread holds the lock would wait for ever in its first free. */
__attribute__((constructor)) static void start(void) {
    if (!next_malloc) find_next();
    pthread_atfork(take_lock, give_lock, give_lock);
}

/* ---- the table ---- */

static unsigned home(uintptr_t address) {
    return (unsigned)(((address >> 4) * 0x9E3779B97F4A7C15ull) >> 40) & (SLOTS - 1);
}

static void count(long bytes, enum kind kind) {
    live += bytes;
    if (kind == TENSOR) held += bytes;
    if (live > peak) peak = live;
}

static void enter(void *address, size_t bytes, enum kind kind) {
    if (!address || bytes < LEAST) return;
    take_lock();
    if (used >= SLOTS - SLOTS / 8) {
        lost++;
    } else {
        unsigned slot = home((uintptr_t)address);
        while (blocks[slot].address) slot = (slot + 1) & (SLOTS - 1);
        blocks[slot] = (struct block){(uintptr_t)address, bytes, kind};
        used++;
        count((long)bytes, kind);
    }
    give_lock();
}

/* Closes the gap at `slot`, so that every block stays reachable from its home. */
static void close_gap(unsigned slot) {
    unsigned next = slot;
    for (;;) {
        next = (next + 1) & (SLOTS - 1);
        if (!blocks[next].address) break;
        unsigned wanted = home(blocks[next].address);
        if (((next - wanted) & (SLOTS - 1)) >= ((next - slot) & (SLOTS - 1))) {
            blocks[slot] = blocks[next];
            slot = next;
        }
    }
    blocks[slot] = (struct block){0, 0, OBJECT};
}

/* Removes the block and returns its record (bytes 0 when it was never counted). Asking for the usable size first keeps
 * small blocks, nearly all of them, away from the lock. */
static struct block leave(void *address) {
    struct block found = {0, 0, OBJECT};
    if (!address || malloc_usable_size(address) < LEAST) return found;
    take_lock();
    unsigned slot = home((uintptr_t)address);
    while (blocks[slot].address && blocks[slot].address != (uintptr_t)address) slot = (slot + 1) & (SLOTS - 1);
    if (blocks[slot].address) {
        found = blocks[slot];
        close_gap(slot);
        used--;
        count(-(long)found.bytes, found.kind);
    }
    give_lock();
    return found;
}

/* ---- the heap ---- */

EXPORT void *malloc(size_t bytes) {
    if (!next_malloc) {
        if (finding) return early_block(bytes);
        find_next();
    }
    void *address = next_malloc(bytes);
    enter(address, bytes, OBJECT);
    return address;
}

EXPORT void *calloc(size_t number, size_t bytes) {
    if (!next_calloc) {
        if (finding) return early_block(number * bytes);
        find_next();
    }
    void *address = next_calloc(number, bytes);
    enter(address, number * bytes, OBJECT);
    return address;
}

EXPORT void *realloc(void *address, size_t bytes) {
    if (!next_realloc) find_next();
    if (is_early(address)) {
        void *copy = malloc(bytes);
        size_t room = (size_t)(early + sizeof early - (char *)address);
        if (copy) memcpy(copy, address, bytes < room ? bytes : room);
        return copy;
    }
    struct block old = leave(address);
    void *moved = next_realloc(address, bytes);
    if (moved) enter(moved, bytes, old.bytes ? old.kind : OBJECT);
    else if (bytes) enter(address, old.bytes, old.kind);
    return moved;
}

EXPORT void free(void *address) {
    if (!address || is_early(address)) return;
    if (!next_free) find_next();
    leave(address);
    next_free(address);
}

EXPORT int posix_memalign(void **result, size_t alignment, size_t bytes) {
    if (!next_posix_memalign) find_next();
    int status = next_posix_memalign(result, alignment, bytes);
    if (status == 0) enter(*result, bytes, TENSOR);
    return status;
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes) {
    if (!next_aligned_alloc) find_next();
    void *address = next_aligned_alloc(alignment, bytes);
    enter(address, bytes, TENSOR);
    return address;
}

EXPORT void *memalign(size_t alignment, size_t bytes) {
    if (!next_memalign) find_next();
    void *address = next_memalign(alignment, bytes);
    enter(address, bytes, TENSOR);
    return address;
}

/* ---- mappings ---- */

/* Is this address code of the Python interpreter (not of an extension module, whose name only ends in its tag)? */
static int of_interpreter(void *caller) {
    Dl_info information;
    if (!dladdr(caller, &information) || !information.dli_fname) return 0;
    const char *slash = strrchr(information.dli_fname, '/');
    const char *name = slash ? slash + 1 : information.dli_fname;
    return strncmp(name, "python", 6) == 0 || strncmp(name, "libpython", 9) == 0;
}

static void enter_map(uintptr_t address, size_t bytes, enum kind kind) {
    if (mapped == MAPS) {
        lost++;
        return;
    }
    maps[mapped++] = (struct block){address, bytes, kind};
    count((long)bytes, kind);
}

static void *map(void *wish, size_t bytes, int protection, int flags, int file, off_t offset, void *caller) {
    if (!next_mmap) find_next();
    void *address = next_mmap(wish, bytes, protection, flags, file, offset);
    int counted = (flags & MAP_ANONYMOUS) && !(flags & (MAP_FIXED | MAP_STACK)) && (protection & PROT_WRITE);
    if (address == MAP_FAILED || !counted || bytes < LEAST) return address;
    enum kind kind = of_interpreter(caller) ? OBJECT : TENSOR;
    take_lock();
    enter_map((uintptr_t)address, bytes, kind);
    give_lock();
    return address;
}

EXPORT void *mmap(void *wish, size_t bytes, int protection, int flags, int file, off_t offset) {
    return map(wish, bytes, protection, flags, file, offset, __builtin_return_address(0));
}

EXPORT void *mmap64(void *wish, size_t bytes, int protection, int flags, int file, off_t offset) {
    return map(wish, bytes, protection, flags, file, offset, __builtin_return_address(0));
}

/* A call may take back a part of a mapping, or several: what is left on either side stays counted. */
static void leave_maps(uintptr_t from, uintptr_t to) {
    for (unsigned i = 0; i < mapped;) {
        struct block old = maps[i];
        uintptr_t end = old.address + old.bytes;
        if (old.address >= to || end <= from) {
            i++;
            continue;
        }
        maps[i] = maps[--mapped];
        count(-(long)old.bytes, old.kind);
        if (old.address < from) enter_map(old.address, from - old.address, old.kind);
        if (end > to) enter_map(to, end - to, old.kind);
    }
}

EXPORT int munmap(void *address, size_t bytes) {
    if (!next_munmap) find_next();
    take_lock();
    leave_maps((uintptr_t)address, (uintptr_t)address + ((bytes + 4095) & ~(size_t)4095));
    give_lock();
    return next_munmap(address, bytes);
}

/* ---- what a program asks ---- */

static long read_locked(const long *number) {
    take_lock();
    long value = *number;
    give_lock();
    return value;
}

EXPORT long heapcount_live(void) { return read_locked(&live); }
EXPORT long heapcount_peak(void) { return read_locked(&peak); }
EXPORT long heapcount_held(void) { return read_locked(&held); }
EXPORT long heapcount_lost(void) { return read_locked(&lost); }

EXPORT void heapcount_reset(void) {
    take_lock();
    peak = live;
    give_lock();
}
