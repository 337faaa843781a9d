/* The ledger, one access to shared memory at a time.  Built together with kernels/csrc/ledger.c, in which each
 * access calls `rose_test_step` first: there a call stops until it is told to go on, or the process is killed. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>

#include "ledger.h"

#define CALLS 16
#define STACK_BYTES (64 << 10)

enum { JOIN, ACQUIRE, RELEASE, LEAVE, SET_LIMIT };

typedef struct {
    ucontext_t context;
    void *stack;
    void *ledger;
    int operation, done;
    int32_t slot;
    uint64_t identity;
    int64_t first, second, result;
} call;

static call calls[CALLS];
static call *current;
static ucontext_t scheduler;
static long fuse;

void rose_test_step(void) {
    if (current)
        swapcontext(&current->context, &scheduler);
    else if (fuse > 0 && --fuse == 0)
        kill(getpid(), SIGKILL);
}

/* Kill this process at its `accesses`-th access from now on. */
void test_kill_at(long accesses) { fuse = accesses; }

static void run(void) {
    call *c = current;
    switch (c->operation) {
    case JOIN: c->result = rose_ledger_join(c->ledger, c->identity, c->first); break;
    case ACQUIRE: c->result = rose_ledger_acquire(c->ledger, c->slot, c->identity, c->first, c->second); break;
    case RELEASE: c->result = rose_ledger_release(c->ledger, c->slot, c->identity, c->first); break;
    case LEAVE: c->result = rose_ledger_leave(c->ledger, c->slot, c->identity); break;
    case SET_LIMIT: c->result = rose_ledger_set_limit(c->ledger, c->slot, c->identity, c->first, c->second); break;
    }
    c->done = 1;
    swapcontext(&c->context, &scheduler);
    abort();
}

/* Prepare a call; the one that was in this place before is over or given up, as if its process had been killed. */
void test_begin(int place, int operation, void *ledger, int32_t slot, uint64_t identity, int64_t first, int64_t second) {
    call *c = &calls[place];
    if (!c->stack) c->stack = malloc(STACK_BYTES);
    c->operation = operation, c->ledger = ledger, c->slot = slot, c->identity = identity;
    c->first = first, c->second = second, c->done = 0;
    getcontext(&c->context);
    c->context.uc_stack.ss_sp = c->stack;
    c->context.uc_stack.ss_size = STACK_BYTES;
    c->context.uc_link = NULL;
    makecontext(&c->context, run, 0);
}

/* Let it make one access, or none before its first; 1 when it is over. */
int test_step(int place) {
    call *c = &calls[place];
    if (!c->done) {
        current = c;
        swapcontext(&scheduler, &c->context);
        current = NULL;
    }
    return c->done;
}

int64_t test_result(int place) { return calls[place].result; }
