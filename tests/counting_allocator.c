/* A counting allocator, to be preloaded: it keeps the size of every live block of posix_memalign, from which torch takes
 * the memory of its CPU tensors, and tells the most bytes that were live at once. It counts what was asked for.
 *
 *     cc -shared -fPIC -O2 -o counting_allocator.so counting_allocator.c -ldl -lpthread
 *     LD_PRELOAD=./counting_allocator.so python ...
 *
 * Blocks asked for by torch's allocator, which lives in libc10.so, are counted apart from everybody else's.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum owner { TORCH, OTHERS };

static struct {
    long long live, at_reset, highest;
} counts[2];

/* A hash table with open addressing and linear probing; an empty slot holds NULL. */
#define SLOTS ((size_t)1 << 18)
static struct {
    void *pointer;
    size_t bytes;
    enum owner owner;
} slots[SLOTS];
static size_t used;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* torch allocates in worker threads too */
static int (*real_posix_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

__attribute__((constructor)) static void find_real_functions(void) {
    real_posix_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    real_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
}

/* Who calls from there. dladdr goes through all symbols of a library, which takes milliseconds: each place is asked
 * about once, or again after another one has taken its slot; without the lock, as the loader, which it waits for, may
 * itself wait for our `free`. */
static enum owner owner_of(const void *code) {
    static struct {
        const void *code;
        enum owner owner;
    } known[256];
    size_t slot = ((uintptr_t)code * 0x9E3779B97F4A7C15u) >> 56;
    pthread_mutex_lock(&lock);
    int is_known = known[slot].code == code;
    enum owner owner = known[slot].owner;
    pthread_mutex_unlock(&lock);
    if (is_known)
        return owner;
    Dl_info library;
    owner = dladdr(code, &library) && library.dli_fname && strstr(library.dli_fname, "libc10.so") ? TORCH : OTHERS;
    pthread_mutex_lock(&lock);
    known[slot].code = code;
    known[slot].owner = owner;
    pthread_mutex_unlock(&lock);
    return owner;
}

static size_t home(const void *pointer) {
    return (size_t)(((uint64_t)(uintptr_t)pointer * 0x9E3779B97F4A7C15u) >> 40) & (SLOTS - 1);
}

/* The slot that holds `pointer`, or the empty one where it would go. */
static size_t find(const void *pointer) {
    size_t slot = home(pointer);
    while (slots[slot].pointer && slots[slot].pointer != pointer)
        slot = (slot + 1) & (SLOTS - 1);
    return slot;
}

static void enter(void *pointer, size_t bytes, enum owner owner) {
    size_t slot = find(pointer);
    if (slots[slot].pointer) { /* released unseen, by realloc */
        counts[slots[slot].owner].live -= (long long)slots[slot].bytes;
    } else if (++used > SLOTS / 2) {
        fputs("counting_allocator: too many live blocks, raise SLOTS\n", stderr);
        abort();
    }
    slots[slot].pointer = pointer;
    slots[slot].bytes = bytes;
    slots[slot].owner = owner;
    counts[owner].live += (long long)bytes;
    if (counts[owner].live > counts[owner].highest)
        counts[owner].highest = counts[owner].live;
}

static void leave(const void *pointer) {
    size_t hole = find(pointer);
    if (!slots[hole].pointer)
        return; /* from malloc */
    counts[slots[hole].owner].live -= (long long)slots[hole].bytes;
    used--;
    /* Close the gap: an entry further on moves into the hole unless its home lies behind the hole. */
    for (size_t next = (hole + 1) & (SLOTS - 1); slots[next].pointer; next = (next + 1) & (SLOTS - 1)) {
        size_t from_home = (next - home(slots[next].pointer)) & (SLOTS - 1);
        size_t from_hole = (next - hole) & (SLOTS - 1);
        if (from_home >= from_hole) {
            slots[hole] = slots[next];
            hole = next;
        }
    }
    slots[hole].pointer = NULL;
}

int posix_memalign(void **pointer, size_t alignment, size_t bytes) {
    if (!real_posix_memalign)
        find_real_functions();
    int error = real_posix_memalign(pointer, alignment, bytes);
    if (error || !*pointer)
        return error;
    enum owner owner = owner_of(__builtin_return_address(0));
    pthread_mutex_lock(&lock);
    enter(*pointer, bytes, owner);
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *pointer) {
    if (!pointer)
        return;
    if (!real_free)
        find_real_functions();
    pthread_mutex_lock(&lock);
    leave(pointer); /* before the block can be handed out again */
    pthread_mutex_unlock(&lock);
    real_free(pointer);
}

/* What follows is for the test, through ctypes; `who` is 0 for torch's allocator, 1 for everybody else. */

void counting_reset(void) {
    pthread_mutex_lock(&lock);
    for (int who = TORCH; who <= OTHERS; who++)
        counts[who].at_reset = counts[who].highest = counts[who].live;
    pthread_mutex_unlock(&lock);
}

/* The most bytes live at once since the reset, above those that were live then. */
long long counting_peak(int who) {
    pthread_mutex_lock(&lock);
    long long bytes = counts[who].highest - counts[who].at_reset;
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* The bytes live now, above those that were live at the reset; negative where some of those are gone. */
long long counting_left(int who) {
    pthread_mutex_lock(&lock);
    long long bytes = counts[who].live - counts[who].at_reset;
    pthread_mutex_unlock(&lock);
    return bytes;
}
