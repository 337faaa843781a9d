/* Many processes on one ledger, and some of them killed at any instant: do they ever hold more than there is?
 *
 *     ledger_storm PROCESSES MILLISECONDS SEED
 *
 * A process that has acquired pages also takes as many places out of an array, one place a page, and puts them back
 * before it releases: where the ledger gave out too many there is no place.  Prints one line; exit code 1 when
 * something was wrong. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ledger.h"

#define CAPACITY 100
#define PROCESSES_MAX 32

typedef struct {
    _Atomic int32_t places[CAPACITY]; /* 1 + the process in it */
    _Atomic uint64_t identities;
    _Atomic uint64_t identity[PROCESSES_MAX];
    _Atomic int64_t operations, refusals;
} world;

static void *ledger;
static world *all;

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void fail(const char *what, int64_t number) {
    printf("wrong: %s (%lld)\n", what, (long long)number);
    fflush(stdout);
    _exit(1);
}

static void take_places(int me, int64_t pages) {
    int64_t started_ms = now_ms();
    while (pages > 0) {
        for (int i = 0; i < CAPACITY && pages > 0; i++) {
            int32_t free_place = 0;
            pages -= atomic_compare_exchange_strong(&all->places[i], &free_place, me + 1);
        }
        if (now_ms() > started_ms + 5000) fail("more pages were given out than there are", pages);
    }
}

static void leave_places(int me, int64_t pages) {
    for (int i = 0; i < CAPACITY && pages > 0; i++) {
        int32_t mine = me + 1;
        pages -= atomic_compare_exchange_strong(&all->places[i], &mine, 0);
    }
    if (pages) fail("places", pages);
}

static void work(int me, uint64_t random) {
    for (;;) {
        uint64_t identity = 1 + atomic_fetch_add(&all->identities, 1);
        atomic_store(&all->identity[me], identity);
        int32_t slot = rose_ledger_join(ledger, identity, CAPACITY);
        if (slot < 0) fail("no slot", slot);
        int64_t held = 0;
        for (int turn = 0; turn < 200; turn++) {
            int64_t pages = (int64_t)(next_random(&random) % 40);
            if (held < pages) {
                int64_t taken = rose_ledger_acquire(ledger, slot, identity, pages, pages / 2);
                if (taken < 0 || taken > pages) fail("acquire", taken);
                if (!taken) atomic_fetch_add(&all->refusals, 1);
                take_places(me, taken);
                held += taken;
            } else {
                leave_places(me, pages);
                if (rose_ledger_release(ledger, slot, identity, pages)) fail("release", pages);
                held -= pages;
            }
            atomic_fetch_add(&all->operations, 1);
        }
        leave_places(me, held);
        if (rose_ledger_leave(ledger, slot, identity) != held) fail("leave", held);
    }
}

static pid_t start(int me, uint64_t seed) {
    pid_t pid = fork();
    if (pid == 0) work(me, seed | 1);
    return pid;
}

static void check_counts(void) {
    rose_ledger_view view;
    int64_t sum = 0;
    rose_ledger_look(ledger, &view);
    for (int i = 0; i < ROSE_LEDGER_OWNERS; i++) sum += view.owners[i].held;
    if (view.used < 0 || view.used > CAPACITY) fail("used", view.used);
    if (view.consistent && sum != view.used) fail("the owners do not add up", sum - view.used);
}

/* The process is over: first its places, as its memory would be, then its pages. */
static void reclaim(int me) {
    rose_ledger_view view;
    uint64_t identity = atomic_load(&all->identity[me]);
    for (int i = 0; i < CAPACITY; i++) {
        int32_t its = me + 1;
        atomic_compare_exchange_strong(&all->places[i], &its, 0);
    }
    rose_ledger_look(ledger, &view);
    for (int i = 0; i < ROSE_LEDGER_OWNERS; i++)
        if (view.owners[i].identity == identity) rose_ledger_leave(ledger, i, identity);
}

static void check_alive_or_killed(pid_t pid, int status) {
    if (WIFEXITED(status) || (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)) fail("a process ended", pid);
}

int main(int count, char **arguments) {
    int processes = count > 1 ? atoi(arguments[1]) : 4, status;
    int64_t end_ms = now_ms() + (count > 2 ? atoll(arguments[2]) : 1000), kills = 0;
    uint64_t random = (count > 3 ? (uint64_t)atoll(arguments[3]) : 1) * 2 + 1;
    pid_t pids[PROCESSES_MAX];
    if (processes < 1 || processes > PROCESSES_MAX) return 2;
    ledger = mmap(NULL, ROSE_LEDGER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ledger == MAP_FAILED || all == MAP_FAILED || rose_ledger_init(ledger, CAPACITY, 4096, 0)) return 2;
    for (int i = 0; i < processes; i++) pids[i] = start(i, next_random(&random));
    while (now_ms() < end_ms) {
        usleep((useconds_t)(next_random(&random) % 2000));
        check_counts();
        int victim = (int)(next_random(&random) % (uint64_t)processes);
        kill(pids[victim], SIGKILL);
        waitpid(pids[victim], &status, 0);
        check_alive_or_killed(pids[victim], status);
        reclaim(victim);
        pids[victim] = start(victim, next_random(&random));
        kills++;
    }
    for (int i = 0; i < processes; i++) {
        kill(pids[i], SIGKILL);
        waitpid(pids[i], &status, 0);
        check_alive_or_killed(pids[i], status);
        reclaim(i);
    }
    check_counts();
    if (rose_ledger_used(ledger)) fail("pages of nobody are in use", rose_ledger_used(ledger));
    printf("%lld operations, %lld refused, %lld kills\n", (long long)atomic_load(&all->operations),
           (long long)atomic_load(&all->refusals), (long long)kills);
    return 0;
}
