/* The shared page ledger.  See ledger.h for the idea; why each step is safe is said where it is done. */
#include "ledger.h"

#include <stdatomic.h>
#include <stddef.h>

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT
#endif

/* The tests build this file with a function of theirs called before each access to shared memory: it stops or
 * kills the caller there. */
#ifdef ROSE_LEDGER_STEP
void ROSE_LEDGER_STEP(void);
#define STEP() ROSE_LEDGER_STEP()
#else
#define STEP() ((void)0)
#endif

#define MAGIC UINT64_C(0x315245474445534F) /* "OSEDGER1" */
#define LAYOUT 1
#define NOBODY 63

typedef _Atomic uint64_t word;

typedef struct {
    word identity;
    word account;
    word intent;
    word limit;
    uint64_t unused[4];
} slot_words;

typedef struct {
    uint64_t magic;
    uint32_t layout;
    uint32_t owners;
    int64_t capacity;
    int64_t page_bytes;
    uint64_t scope;
    uint64_t unused[3];
    word pool;
    uint64_t unused_too[7];
    slot_words slots[ROSE_LEDGER_OWNERS];
} ledger_words;

_Static_assert(sizeof(ledger_words) == ROSE_LEDGER_BYTES, "a ledger is one page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock inside one process would not keep out another");

/* Words, each changed as a whole.  Numbers of operations wrap around: they are only compared for equality, and
 * a process would have to stop between two instructions for 2^24 operations of one owner to be fooled. */
#define PAGES_BITS 22
#define NUMBER_BITS 24
#define MASK(bits) ((UINT64_C(1) << (bits)) - 1)

typedef struct { uint64_t used, slot, number, touched; } pool_word;             /* 22 | 6 | 24 | 12 bits */
typedef struct { uint64_t held, number, tenant, left; } account_word;           /* 22 | 24 | 8 | 1 */
typedef struct { uint64_t held, number, leave; } intent_word;                   /* 22 | 24 | 1 */
typedef struct { uint64_t pages, tenant, revision; } limit_word;                /* 22 | 8 | 34 */

static uint64_t load(word *at) { STEP(); return atomic_load(at); }
static void store(word *at, uint64_t value) { STEP(); atomic_store(at, value); }
static int swap(word *at, uint64_t from, uint64_t to) {
    STEP();
    return atomic_compare_exchange_strong(at, &from, to);
}

static uint64_t of_pool(pool_word p) {
    return p.used | p.slot << 22 | (p.number & MASK(24)) << 28 | (p.touched & MASK(12)) << 52;
}
static pool_word to_pool(uint64_t w) {
    return (pool_word){w & MASK(22), w >> 22 & MASK(6), w >> 28 & MASK(24), w >> 52};
}
static uint64_t of_account(account_word a) {
    return a.held | (a.number & MASK(24)) << 22 | (a.tenant & MASK(8)) << 46 | a.left << 54;
}
static account_word to_account(uint64_t w) {
    return (account_word){w & MASK(22), w >> 22 & MASK(24), w >> 46 & MASK(8), w >> 54 & 1};
}
static uint64_t of_intent(intent_word i) { return i.held | (i.number & MASK(24)) << 22 | i.leave << 46; }
static intent_word to_intent(uint64_t w) {
    return (intent_word){w & MASK(22), w >> 22 & MASK(24), w >> 46 & 1};
}
static uint64_t of_limit(limit_word l) { return l.pages | (l.tenant & MASK(8)) << 22 | l.revision << 30; }
static limit_word to_limit(uint64_t w) { return (limit_word){w & MASK(22), w >> 22 & MASK(8), w >> 30}; }

static uint64_t next(uint64_t number) { return (number + 1) & MASK(NUMBER_BITS); }

/* Step 4 of the operation that the pool word names, for whoever made it.  The intent is that operation's, or the
 * account has moved on, as its owner writes another only then: the swap fails. */
static void settle(ledger_words *ledger, pool_word pool) {
    if (pool.slot >= ROSE_LEDGER_OWNERS) return;
    slot_words *slot = &ledger->slots[pool.slot];
    uint64_t seen = load(&slot->account);
    account_word account = to_account(seen);
    if (next(account.number) != pool.number) return;
    intent_word intent = to_intent(load(&slot->intent));
    account_word settled = {intent.held, pool.number, account.tenant + intent.leave, intent.leave};
    swap(&slot->account, seen, of_account(settled));
}

/* What an owner may hold.  A word of an earlier tenant of the slot counts as none: nothing is allowed. */
static limit_word limit_of(slot_words *slot, uint64_t tenant) {
    limit_word limit = to_limit(load(&slot->limit));
    if (limit.tenant != tenant) return (limit_word){0, tenant, 0};
    return limit;
}

static slot_words *slot_at(ledger_words *ledger, int32_t slot) {
    return slot >= 0 && slot < ROSE_LEDGER_OWNERS ? &ledger->slots[slot] : NULL;
}

EXPORT int32_t rose_shared_abi(void) { return ROSE_SHARED_ABI; }

EXPORT int32_t rose_ledger_init(void *memory, int64_t capacity, int64_t page_bytes, uint64_t scope) {
    ledger_words *ledger = memory;
    if (capacity < 0 || capacity > ROSE_LEDGER_PAGES_MAX || page_bytes < 1) return ROSE_LEDGER_MISUSE;
    ledger->layout = LAYOUT;
    ledger->owners = ROSE_LEDGER_OWNERS;
    ledger->capacity = capacity;
    ledger->page_bytes = page_bytes;
    ledger->scope = scope;
    atomic_store(&ledger->pool, of_pool((pool_word){.slot = NOBODY}));
    for (int i = 0; i < ROSE_LEDGER_OWNERS; i++)
        atomic_store(&ledger->slots[i].account, of_account((account_word){.tenant = 1, .left = 1}));
    ledger->magic = MAGIC;
    return 0;
}

EXPORT int32_t rose_ledger_check(const void *memory) {
    const ledger_words *ledger = memory;
    int known = ledger->magic == MAGIC && ledger->layout == LAYOUT && ledger->owners == ROSE_LEDGER_OWNERS &&
                ledger->capacity >= 0 && ledger->capacity <= ROSE_LEDGER_PAGES_MAX && ledger->page_bytes >= 1;
    return known ? 0 : ROSE_LEDGER_MISUSE;
}

EXPORT int64_t rose_ledger_capacity(const void *memory) { return ((const ledger_words *)memory)->capacity; }
EXPORT int64_t rose_ledger_page_bytes(const void *memory) { return ((const ledger_words *)memory)->page_bytes; }
EXPORT uint64_t rose_ledger_scope(const void *memory) { return ((const ledger_words *)memory)->scope; }
EXPORT int64_t rose_ledger_used(void *memory) {
    return (int64_t)to_pool(load(&((ledger_words *)memory)->pool)).used;
}

static rose_owner look_at(slot_words *slot) {
    uint64_t identity = load(&slot->identity);
    if (!identity) return (rose_owner){0};
    account_word account = to_account(load(&slot->account));
    limit_word limit = limit_of(slot, account.tenant);
    return (rose_owner){identity, (int64_t)account.held, (int64_t)limit.pages, (int64_t)limit.revision};
}

EXPORT void rose_ledger_look(void *memory, rose_ledger_view *view) {
    ledger_words *ledger = memory;
    view->consistent = 0;
    for (int attempt = 0; attempt < 8 && !view->consistent; attempt++) {
        uint64_t before = load(&ledger->pool);
        settle(ledger, to_pool(before));
        for (int i = 0; i < ROSE_LEDGER_OWNERS; i++) view->owners[i] = look_at(&ledger->slots[i]);
        view->used = (int64_t)to_pool(before).used;
        view->consistent = load(&ledger->pool) == before;
    }
}

EXPORT int32_t rose_ledger_join(void *memory, uint64_t identity, int64_t limit) {
    ledger_words *ledger = memory;
    if (!identity || limit < 0 || limit > ROSE_LEDGER_PAGES_MAX) return ROSE_LEDGER_MISUSE;
    for (int32_t i = 0; i < ROSE_LEDGER_OWNERS; i++) {
        slot_words *slot = &ledger->slots[i];
        if (load(&slot->identity) || !swap(&slot->identity, 0, identity)) continue;
        /* The account was left with nothing held before the slot was freed.  It becomes this owner's here; one
         * that died before this line is known by `left` to have done nothing. */
        account_word account = to_account(load(&slot->account));
        account.left = 0;
        store(&slot->account, of_account(account));
        for (;;) { /* a limit that somebody has set since then is this owner's, and stands */
            uint64_t seen = load(&slot->limit), first = of_limit((limit_word){(uint64_t)limit, account.tenant, 0});
            if (to_limit(seen).tenant == account.tenant || swap(&slot->limit, seen, first)) return i;
        }
    }
    return ROSE_LEDGER_FULL;
}

EXPORT int64_t rose_ledger_acquire(void *memory, int32_t index, uint64_t identity, int64_t wanted, int64_t least) {
    ledger_words *ledger = memory;
    slot_words *slot = slot_at(ledger, index);
    if (!slot || wanted < 0 || least < 0 || least > wanted) return ROSE_LEDGER_MISUSE;
    if (load(&slot->identity) != identity) return ROSE_LEDGER_GONE;
    account_word account = to_account(load(&slot->account));
    int64_t held = (int64_t)account.held;
    for (;;) {
        /* The pool before the limit: whoever changes a limit touches the pool afterwards, so that a sum based on
         * the former limit can no longer be swapped in. */
        uint64_t seen = load(&ledger->pool);
        pool_word pool = to_pool(seen);
        int64_t free_pages = ledger->capacity - (int64_t)pool.used;
        int64_t allowed = (int64_t)limit_of(slot, account.tenant).pages - held;
        int64_t room = free_pages < allowed ? free_pages : allowed;
        int64_t taken = wanted < room ? wanted : room;
        if (taken < least || taken <= 0) return 0;
        uint64_t number = next(account.number);
        store(&slot->intent, of_intent((intent_word){(uint64_t)(held + taken), number, 0}));
        settle(ledger, pool);
        pool_word after = {pool.used + (uint64_t)taken, (uint64_t)index, number, pool.touched};
        if (!swap(&ledger->pool, seen, of_pool(after))) continue;
        settle(ledger, after);
        return taken;
    }
}

EXPORT int64_t rose_ledger_release(void *memory, int32_t index, uint64_t identity, int64_t pages) {
    ledger_words *ledger = memory;
    slot_words *slot = slot_at(ledger, index);
    if (!slot || pages < 0) return ROSE_LEDGER_MISUSE;
    if (load(&slot->identity) != identity) return ROSE_LEDGER_GONE;
    account_word account = to_account(load(&slot->account));
    if (pages > (int64_t)account.held) return ROSE_LEDGER_MISUSE;
    if (pages == 0) return 0;
    uint64_t number = next(account.number);
    store(&slot->intent, of_intent((intent_word){account.held - (uint64_t)pages, number, 0}));
    for (;;) {
        uint64_t seen = load(&ledger->pool);
        pool_word pool = to_pool(seen);
        settle(ledger, pool);
        pool_word after = {pool.used - (uint64_t)pages, (uint64_t)index, number, pool.touched};
        if (!swap(&ledger->pool, seen, of_pool(after))) continue;
        settle(ledger, after);
        return 0;
    }
}

/* Announce, in the name of an owner that does nothing any more, that it will hold nothing.  Answers the account
 * that this follows on; one that has already been left means that nothing is to be done. */
static int announce_leave(ledger_words *ledger, slot_words *slot, int32_t index, uint64_t identity,
                          account_word *account) {
    for (;;) {
        /* The owner may have died between its steps 3 and 4.  If the pool word does not name it, then the account is
         * read after the pool, and therefore shows what anybody has settled before overwriting that word. */
        pool_word pool = to_pool(load(&ledger->pool));
        if (pool.slot == (uint64_t)index) settle(ledger, pool);
        *account = to_account(load(&slot->account));
        uint64_t seen = load(&slot->intent);
        uint64_t leave = of_intent((intent_word){0, next(account->number), 1});
        /* Still the same tenant, so what was read is of it.  From here on another can only have come after a
         * leave, which changes the intent. */
        if (load(&slot->identity) != identity) return ROSE_LEDGER_GONE;
        if (account->left || seen == leave || swap(&slot->intent, seen, leave)) return 0;
    }
}

EXPORT int64_t rose_ledger_leave(void *memory, int32_t index, uint64_t identity) {
    ledger_words *ledger = memory;
    slot_words *slot = slot_at(ledger, index);
    account_word account;
    int64_t given_back = 0;
    if (!slot || !identity) return ROSE_LEDGER_MISUSE;
    if (announce_leave(ledger, slot, index, identity, &account) < 0) return ROSE_LEDGER_GONE;
    if (!account.left) {
        uint64_t number = next(account.number);
        for (;;) {
            uint64_t seen = load(&ledger->pool);
            pool_word pool = to_pool(seen);
            /* Another caller may have done it: then the pool word names it, or it was settled before that word was
             * overwritten. */
            if (pool.slot == (uint64_t)index && pool.number == number) break;
            if (to_account(load(&slot->account)).number != account.number) break;
            settle(ledger, pool);
            pool_word after = {pool.used - account.held, (uint64_t)index, number, pool.touched};
            if (!swap(&ledger->pool, seen, of_pool(after))) continue;
            given_back = (int64_t)account.held;
            break;
        }
        settle(ledger, (pool_word){0, (uint64_t)index, number, 0});
    }
    swap(&slot->identity, identity, 0);
    return given_back;
}

EXPORT int32_t rose_ledger_set_limit(void *memory, int32_t index, uint64_t identity, int64_t revision,
                                     int64_t pages) {
    ledger_words *ledger = memory;
    slot_words *slot = slot_at(ledger, index);
    if (!slot || revision < 1 || revision > ROSE_LEDGER_REVISION_MAX || pages < 0 || pages > ROSE_LEDGER_PAGES_MAX)
        return ROSE_LEDGER_MISUSE;
    for (;;) {
        account_word account = to_account(load(&slot->account));
        uint64_t seen = load(&slot->limit), tenant = account.tenant;
        if (account.left || load(&slot->identity) != identity) return ROSE_LEDGER_GONE;
        limit_word limit = to_limit(seen), wanted = {(uint64_t)pages, tenant, (uint64_t)revision};
        if (limit.tenant == tenant && limit.revision > (uint64_t)revision) return ROSE_LIMIT_STALE;
        if (limit.tenant == tenant && limit.revision == (uint64_t)revision && limit.pages != wanted.pages)
            return ROSE_LIMIT_CONFLICT;
        if (seen == of_limit(wanted) || swap(&slot->limit, seen, of_limit(wanted))) break;
    }
    for (;;) { /* so that no acquisition under the former limit can end from now on */
        uint64_t seen = load(&ledger->pool);
        pool_word pool = to_pool(seen);
        settle(ledger, pool);
        pool.touched++;
        if (swap(&ledger->pool, seen, of_pool(pool))) break;
    }
    int64_t held = (int64_t)to_account(load(&slot->account)).held;
    if (load(&slot->identity) != identity) return ROSE_LEDGER_GONE;
    return held <= pages ? ROSE_LIMIT_APPLIED : ROSE_LIMIT_DEFERRED;
}
