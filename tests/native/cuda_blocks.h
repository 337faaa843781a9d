/* Enough of CUDA to run a kernel on the host, to test its logic: the threads of a block are fibers that take turns,
 * and each runs up to its next collective.  So all threads of a block must meet the same collectives in the same
 * order, or have returned.  Contexts make the stacks, jumps change between them: those need no system call. */
#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__ static
#define __shared__ static

struct index3 {
    unsigned x;
};
static index3 blockIdx, blockDim, threadIdx;

namespace fibers {
constexpr unsigned kWarp = 32, kThreadsMax = 256;
constexpr size_t kStackBytes = 1 << 16;

struct fiber {
    ucontext_t context;
    jmp_buf here;
    std::vector<char> stack = std::vector<char>(kStackBytes);
    bool begun = false, running = false;
};

static fiber threads[kThreadsMax];
static ucontext_t outer;
static jmp_buf scheduler;
static std::function<void()> body;
static unsigned slots[2][kThreadsMax], turn[kThreadsMax];

static void start() {
    body();
    threads[threadIdx.x].running = false;
    _longjmp(scheduler, 1);
}

/* Let every other thread of the block come here too. */
static void meet() {
    const unsigned me = threadIdx.x;
    if (_setjmp(threads[me].here) == 0) _longjmp(scheduler, 1);
    threadIdx.x = me;
}

/* Let a thread run up to its next collective, or its end. */
static void resume(fiber *f) {
    if (_setjmp(scheduler)) return;
    if (f->begun) _longjmp(f->here, 1);
    f->begun = true;
    swapcontext(&outer, &f->context);
}

/* Show a value to the lanes of this warp; returns theirs, of this turn. */
static unsigned *show(unsigned value) {
    const unsigned me = threadIdx.x, side = turn[me]++ & 1;
    slots[side][me] = value;
    meet();
    return slots[side] + me / kWarp * kWarp;
}

template <typename Kernel> void launch(unsigned blocks, unsigned count, Kernel kernel) {
    body = kernel;
    blockDim.x = count;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned t = 0; t < count; t++) {
            getcontext(&threads[t].context);
            threads[t].context.uc_stack = {threads[t].stack.data(), 0, kStackBytes};
            threads[t].context.uc_link = nullptr;
            threads[t].begun = false;
            threads[t].running = true;
            turn[t] = 0;
            makecontext(&threads[t].context, start, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (unsigned t = 0; t < count; t++) {
                if (!threads[t].running) continue;
                threadIdx.x = t;
                resume(&threads[t]);
                any |= threads[t].running;
            }
        }
    }
}
} // namespace fibers

static inline void __syncthreads() { fibers::meet(); }
static inline void __syncwarp() { fibers::meet(); }
static inline unsigned __popc(unsigned v) { return (unsigned)__builtin_popcount(v); }

static inline unsigned __match_any_sync(unsigned, unsigned value) {
    const unsigned *lanes = fibers::show(value);
    unsigned alike = 0;
    for (unsigned k = 0; k < fibers::kWarp; k++) alike |= (unsigned)(lanes[k] == value) << k;
    return alike;
}

static inline unsigned __ballot_sync(unsigned, bool holds) {
    const unsigned *lanes = fibers::show(holds);
    unsigned who = 0;
    for (unsigned k = 0; k < fibers::kWarp; k++) who |= (lanes[k] & 1) << k;
    return who;
}
