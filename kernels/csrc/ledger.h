/* The shared page ledger of ROSE: the interface of the shared library.
 *
 * One file page that several processes map.  It says how many pages of a device's memory each of them holds,
 * and never that all together hold more than there are.  There is no lock: a process may be killed or stopped
 * between any two instructions, and the others go on at once, with counts that are still right.
 *
 * How.  The word `pool` has the number of pages in use, and names the operation that made it so: owner slot and
 * that owner's operation number.  An operation is
 *   1. intent  := what the owner will hold, under the operation's number
 *   2. account := the same for whoever made the present pool word (its last step, in case it died before it)
 *   3. pool    := the new sum and (owner, number), by compare-and-swap    <- here it happens, or not at all
 *   4. account := what the owner holds now
 * So at any instant an owner holds what its account says, except the one named in the pool word, whose account
 * may lag behind its intent by that one operation; and anybody can do step 4 for it.  Operations of one owner come one
 * after the other (the caller sees to that); everything here may be called by all processes at once.
 */
#ifndef ROSE_LEDGER_H
#define ROSE_LEDGER_H

#include <stdint.h>

#define ROSE_SHARED_ABI 2
#define ROSE_LEDGER_BYTES 4096
#define ROSE_LEDGER_OWNERS 62
#define ROSE_LEDGER_PAGES_MAX ((1 << 22) - 1)
#define ROSE_LEDGER_REVISION_MAX ((INT64_C(1) << 34) - 1)

/* Results below zero. */
#define ROSE_LEDGER_GONE (-1)      /* that owner is not, or no longer, in that slot */
#define ROSE_LEDGER_FULL (-2)      /* no slot is free */
#define ROSE_LEDGER_MISUSE (-3)    /* an argument is out of range */

/* Answers to a limit. */
#define ROSE_LIMIT_APPLIED 0
#define ROSE_LIMIT_DEFERRED 1      /* it holds, but the owner has more pages than that and has to release first */
#define ROSE_LIMIT_STALE 2         /* a later revision is in force */
#define ROSE_LIMIT_CONFLICT 3      /* this revision said another number before */

typedef struct {
    uint64_t identity;             /* of the owner in this slot, 0 if there is none */
    int64_t held;                  /* pages */
    int64_t limit;                 /* pages */
    int64_t revision;              /* of the limit; 0 as it came when the owner joined */
} rose_owner;

typedef struct {
    int64_t used;                  /* pages of all owners together */
    int32_t consistent;            /* whether `used` and all owners were read at one instant */
    int32_t reserved;
    rose_owner owners[ROSE_LEDGER_OWNERS];
} rose_ledger_view;

int32_t rose_shared_abi(void);

/* Write an empty ledger over ROSE_LEDGER_BYTES of zeros that nobody else sees yet. */
int32_t rose_ledger_init(void *ledger, int64_t capacity, int64_t page_bytes, uint64_t scope);

/* Whether it is one: 0, or ROSE_LEDGER_MISUSE. */
int32_t rose_ledger_check(const void *ledger);
int64_t rose_ledger_capacity(const void *ledger);
int64_t rose_ledger_page_bytes(const void *ledger);
uint64_t rose_ledger_scope(const void *ledger);
int64_t rose_ledger_used(void *ledger);
void rose_ledger_look(void *ledger, rose_ledger_view *view);

/* A slot for `identity` (not 0, unique among processes for ever), which may hold `limit` pages until
 * rose_ledger_set_limit says otherwise; or ROSE_LEDGER_FULL. */
int32_t rose_ledger_join(void *ledger, uint64_t identity, int64_t limit);

/* Take up to `wanted` pages, at least `least` or none; the number taken.  */
int64_t rose_ledger_acquire(void *ledger, int32_t slot, uint64_t identity, int64_t wanted, int64_t least);

/* Give `pages` back; 0, or ROSE_LEDGER_MISUSE if the owner has fewer. */
int64_t rose_ledger_release(void *ledger, int32_t slot, uint64_t identity, int64_t pages);

/* Give everything of an owner back and free its slot: the number of pages this call gave back.  For the owner itself, or
 * by anybody once that process has provably exited; any number of callers may do it at once. */
int64_t rose_ledger_leave(void *ledger, int32_t slot, uint64_t identity);

/* One of ROSE_LIMIT_*, or a negative result. */
int32_t rose_ledger_set_limit(void *ledger, int32_t slot, uint64_t identity, int64_t revision, int64_t limit);

#endif
