/* A link between two network namespaces, in user space: rate, delay, loss and a finite queue.
 *
 *   tunlink NAMESPACE_A NAMESPACE_B ADDRESS_A ADDRESS_B MTU RATE_MBIT DELAY_US LOSS_PPM QUEUE_BYTES SEED
 *
 * Each end is a TUN device wire0 with the address given, /30.  A packet that comes in at one end waits for its
 * turn on the wire (RATE_MBIT), unless more than QUEUE_BYTES wait already, travels DELAY_US, and comes out at the
 * other end, unless it is among the LOSS_PPM that are lost.  Both directions are alike.  "up" on standard output
 * says that the devices are up; a line "loss PPM" on standard input changes the loss, its end ends the program.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull
#define SLOTS (1u << 16) /* a power of two; 64 Ki packets are 98 MB at an MTU of 1500 */
#define BATCH 64

struct packet {
    uint64_t due_ns;
    uint32_t length;
};

struct direction {
    int in, out;
    uint32_t mtu;
    uint64_t delay_ns, queue_bytes, random;
    double ns_per_byte;
    struct packet *packets; /* ring of SLOTS, with the bytes at the same index */
    uint8_t *bytes;
    uint64_t head, tail; /* oldest packet, and where the next one goes; they only grow */
};

static _Atomic uint32_t loss_ppm;

static void die(const char *what)
{
    fprintf(stderr, "tunlink: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

/* xorshift64*: reproducible, and each direction has its own. */
static uint32_t chance(struct direction *d)
{
    d->random ^= d->random >> 12;
    d->random ^= d->random << 25;
    d->random ^= d->random >> 27;
    return (uint32_t)((d->random * 2685821657736338717ull) >> 32) % 1000000u;
}

static int open_end(const char *namespace, const char *address, uint32_t mtu)
{
    char text[256];
    snprintf(text, sizeof text, "/var/run/netns/%s", namespace);
    int file = open(text, O_RDONLY | O_CLOEXEC);
    if (file < 0 || setns(file, CLONE_NEWNET))
        die(text);
    close(file);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request;
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strcpy(request.ifr_name, "wire0");
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request))
        die("/dev/net/tun");
    snprintf(text, sizeof text,
             "ip addr add %s/30 dev wire0 && ip link set dev wire0 mtu %u txqueuelen 20000 up && ip link set dev lo up",
             address, mtu);
    if (system(text))
        die("the device cannot be configured");
    return tun;
}

static void deliver(struct direction *d)
{
    while (d->head != d->tail && d->packets[d->head % SLOTS].due_ns <= now_ns()) {
        struct packet *p = &d->packets[d->head % SLOTS];
        if (write(d->out, d->bytes + (d->head % SLOTS) * d->mtu, p->length) < 0 && errno == EAGAIN)
            return;
        d->head++;
    }
}

/* Take what has come in; answers whether there may be more. */
static int accept_some(struct direction *d, uint64_t *wire_free_ns)
{
    for (int i = 0; i < BATCH; i++) {
        if (d->tail - d->head == SLOTS)
            return 0;
        ssize_t length = read(d->in, d->bytes + (d->tail % SLOTS) * d->mtu, d->mtu);
        if (length <= 0)
            return 0;
        uint64_t now = now_ns(), start = *wire_free_ns > now ? *wire_free_ns : now;
        if (chance(d) < atomic_load_explicit(&loss_ppm, memory_order_relaxed))
            continue;
        if ((double)(start - now) > (double)d->queue_bytes * d->ns_per_byte)
            continue; /* the queue is full: drop at its tail */
        *wire_free_ns = start + (uint64_t)((double)length * d->ns_per_byte);
        d->packets[d->tail % SLOTS] = (struct packet){*wire_free_ns + d->delay_ns, (uint32_t)length};
        d->tail++;
    }
    return 1;
}

static void *run(void *argument)
{
    struct direction *d = argument;
    uint64_t wire_free_ns = 0;
    for (;;) {
        deliver(d);
        if (accept_some(d, &wire_free_ns))
            continue;
        uint64_t wait_ns = NS_PER_S, now = now_ns();
        if (d->head != d->tail) {
            uint64_t due = d->packets[d->head % SLOTS].due_ns;
            wait_ns = due > now ? due - now : 0;
        }
        struct timespec wait = {(time_t)(wait_ns / NS_PER_S), (long)(wait_ns % NS_PER_S)};
        struct pollfd in = {d->in, POLLIN, 0};
        if (wait_ns)
            ppoll(&in, 1, &wait, NULL);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 11) {
        fprintf(stderr, "usage: see the source\n");
        return 2;
    }
    uint32_t mtu = (uint32_t)atoi(arguments[5]);
    int a = open_end(arguments[1], arguments[3], mtu), b = open_end(arguments[2], arguments[4], mtu);
    atomic_store(&loss_ppm, (uint32_t)atoi(arguments[8]));
    struct direction ways[2] = {{.in = a, .out = b}, {.in = b, .out = a}};
    for (int i = 0; i < 2; i++) {
        struct direction *d = &ways[i];
        d->mtu = mtu;
        d->ns_per_byte = 8000.0 / atof(arguments[6]);
        d->delay_ns = strtoull(arguments[7], NULL, 10) * 1000;
        d->queue_bytes = strtoull(arguments[9], NULL, 10);
        d->random = strtoull(arguments[10], NULL, 10) * 2 + (uint64_t)i + 88172645463325252ull;
        d->packets = calloc(SLOTS, sizeof *d->packets);
        d->bytes = malloc((size_t)SLOTS * mtu);
        pthread_t thread;
        if (!d->packets || !d->bytes || pthread_create(&thread, NULL, run, d))
            die("no memory");
    }
    printf("up\n");
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        unsigned ppm;
        if (sscanf(line, "loss %u", &ppm) == 1)
            atomic_store(&loss_ppm, ppm);
    }
    return 0;
}
