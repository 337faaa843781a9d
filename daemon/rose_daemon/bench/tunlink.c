/* A link between two network namespaces, in user space: rate, delay, loss and a finite queue.
 *
 *   tunlink NAMESPACE_A NAMESPACE_B ADDRESS_A ADDRESS_B MTU RATE_MBIT DELAY_US LOSS_PPM QUEUE_BYTES SEED
 *
 * Each end is a TUN device wire0 with the address given, /30.  A packet that comes in at one end waits for its
 * turn on the wire (RATE_MBIT), unless more than QUEUE_BYTES wait already, travels DELAY_US, and comes out at the
 * other end, unless it is among the LOSS_PPM that are lost.  Both directions are alike.  "up" on standard output
 * says that the devices are up; a line "loss PPM" on standard input changes the loss, its end ends the program.
 *
 * As a network card would, the devices take TCP segments in trains (TSO), which saves most of the work.  A train
 * takes the time of all its packets on the wire, and packets of it are lost one by one.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
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
#define RING_BYTES (32u << 20)
#define PACKET_MAX (sizeof(struct virtio_net_hdr) + 65536)
#define BATCH 64

enum { FIN = 0x01, PUSH = 0x08, FLAGS = 13, SEQUENCE = 4, CHECKSUM = 16 }; /* in a TCP header */

struct record { /* in the ring, before the bytes of a packet; length 0: the rest of the ring is skipped */
    uint64_t due_ns;
    uint32_t length;
};

struct direction {
    int in, out;
    uint64_t delay_ns, queue_bytes, random, wire_free_ns;
    double ns_per_byte;
    uint8_t *ring;
    uint64_t head, tail; /* bytes ever taken out and put in */
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

/* Whether the next packet is lost.  xorshift64*: reproducible, and each direction has its own. */
static int is_lost(struct direction *d)
{
    uint32_t ppm = atomic_load_explicit(&loss_ppm, memory_order_relaxed);
    if (!ppm)
        return 0;
    d->random ^= d->random >> 12;
    d->random ^= d->random << 25;
    d->random ^= d->random >> 27;
    return (uint32_t)((d->random * 2685821657736338717ull) >> 32) % 1000000u < ppm;
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
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    strcpy(request.ifr_name, "wire0");
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request) || ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4))
        die("/dev/net/tun");
    snprintf(text, sizeof text,
             "ip addr add %s/30 dev wire0 && ip link set dev wire0 mtu %u txqueuelen 20000 up && "
             "ip link set dev lo up",
             address, mtu);
    if (system(text))
        die("the device cannot be configured");
    return tun;
}

/* ---- the queue ---- */

static struct record *record_at(struct direction *d, uint64_t position)
{
    return (struct record *)(d->ring + position % RING_BYTES);
}

static size_t padded(size_t length)
{
    return (sizeof(struct record) + length + 15) & ~(size_t)15;
}

static void enqueue(struct direction *d, uint64_t due_ns, const uint8_t *packet, uint32_t length)
{
    uint64_t room = RING_BYTES - d->tail % RING_BYTES, skipped = room < padded(PACKET_MAX) ? room : 0;
    if (RING_BYTES - (d->tail - d->head) < skipped + padded(length))
        return; /* full */
    if (skipped >= sizeof(struct record))
        record_at(d, d->tail)->length = 0;
    d->tail += skipped;
    struct record *r = record_at(d, d->tail);
    *r = (struct record){due_ns, length};
    memcpy(r + 1, packet, length);
    d->tail += padded(length);
}

static struct record *oldest(struct direction *d)
{
    while (d->head != d->tail) {
        uint64_t room = RING_BYTES - d->head % RING_BYTES;
        struct record *r = record_at(d, d->head);
        if (room >= sizeof *r && r->length)
            return r;
        d->head += room;
    }
    return NULL;
}

static void deliver(struct direction *d)
{
    struct record *r;
    while ((r = oldest(d)) && r->due_ns <= now_ns()) {
        if (write(d->out, r + 1, r->length) < 0 && errno == EAGAIN)
            return;
        d->head += padded(r->length);
    }
}

/* ---- trains of segments ---- */

struct train {
    uint8_t *ip, *tcp, *payload;
    uint32_t header, size, segment, count; /* bytes of both headers, of the payload, of a segment; segments */
};

/* A train's parts; a packet that is none is a train of one. */
static struct train parse(uint8_t *packet, uint32_t length)
{
    struct virtio_net_hdr *v = (struct virtio_net_hdr *)packet;
    struct train t = {.ip = packet + sizeof *v, .count = 1};
    if ((v->gso_type & ~VIRTIO_NET_HDR_GSO_ECN) != VIRTIO_NET_HDR_GSO_TCPV4 || !v->gso_size)
        return t;
    uint32_t ip_header = (t.ip[0] & 15u) * 4u;
    t.tcp = t.ip + ip_header;
    t.header = ip_header + (uint32_t)(t.tcp[12] >> 4) * 4u;
    t.payload = t.ip + t.header;
    t.size = length - (uint32_t)sizeof *v - t.header;
    t.segment = v->gso_size;
    t.count = (t.size + t.segment - 1) / t.segment;
    return t;
}

static uint16_t folded(uint32_t sum)
{
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

static uint32_t sum_of(const uint8_t *bytes, size_t length)
{
    uint32_t sum = 0;
    for (size_t i = 0; i < length; i += 2)
        sum += (uint32_t)bytes[i] << 8 | bytes[i + 1];
    return sum;
}

static void store16(uint8_t *at, uint16_t value)
{
    value = htons(value);
    memcpy(at, &value, 2);
}

/* Segments [first, stop) of a train as a train of their own, in `packet`; answers its length. */
static uint32_t cut(const uint8_t *whole, const struct train *t, uint32_t first, uint32_t stop, uint8_t *packet)
{
    uint32_t start = first * t->segment;
    uint32_t size = (stop == t->count ? t->size : stop * t->segment) - start;
    uint32_t ip_header = (uint32_t)(t->tcp - t->ip), tcp_size = t->header - ip_header + size;
    memcpy(packet, whole, sizeof(struct virtio_net_hdr) + t->header);
    struct virtio_net_hdr *v = (struct virtio_net_hdr *)packet;
    uint8_t *ip = packet + sizeof *v, *tcp = ip + ip_header;
    memcpy(ip + t->header, t->payload + start, size);
    if (stop - first == 1)
        v->gso_type = VIRTIO_NET_HDR_GSO_NONE, v->gso_size = 0;
    uint32_t sequence;
    memcpy(&sequence, tcp + SEQUENCE, 4);
    sequence = htonl(ntohl(sequence) + start);
    memcpy(tcp + SEQUENCE, &sequence, 4);
    if (stop != t->count)
        tcp[FLAGS] &= (uint8_t) ~(FIN | PUSH);
    /* The receiving kernel completes TCP's checksum, from the sum over the pseudo header. */
    store16(tcp + CHECKSUM, folded(sum_of(ip + 12, 8) + IPPROTO_TCP + tcp_size));
    store16(ip + 2, (uint16_t)(ip_header + tcp_size));
    store16(ip + 4, (uint16_t)((ip[4] << 8 | ip[5]) + first));
    store16(ip + 10, 0);
    store16(ip + 10, (uint16_t)~folded(sum_of(ip, ip_header)));
    return (uint32_t)sizeof *v + t->header + size;
}

/* Send a packet or train on its way, without what is lost of it. */
static void transmit(struct direction *d, uint8_t *packet, uint32_t length)
{
    static _Thread_local uint8_t part[PACKET_MAX];
    struct train t = parse(packet, length);
    uint64_t now = now_ns(), start = d->wire_free_ns > now ? d->wire_free_ns : now;
    if ((double)(start - now) > (double)d->queue_bytes * d->ns_per_byte)
        return; /* the queue is full: drop at its tail */
    double on_wire = length - sizeof(struct virtio_net_hdr) + (double)(t.count - 1) * t.header;
    d->wire_free_ns = start + (uint64_t)(on_wire * d->ns_per_byte);
    uint64_t due = d->wire_free_ns + d->delay_ns;
    uint32_t first = 0, lost = 0;
    for (uint32_t i = 0; i < t.count; i++) {
        if (!is_lost(d))
            continue;
        lost++;
        if (i > first)
            enqueue(d, due, part, cut(packet, &t, first, i, part));
        first = i + 1;
    }
    if (!lost)
        enqueue(d, due, packet, length);
    else if (first < t.count)
        enqueue(d, due, part, cut(packet, &t, first, t.count, part));
}

static void *run(void *argument)
{
    static _Thread_local uint8_t packet[PACKET_MAX];
    struct direction *d = argument;
    for (;;) {
        deliver(d);
        int taken = 0;
        ssize_t length;
        while (taken < BATCH && (length = read(d->in, packet, sizeof packet)) > 0) {
            transmit(d, packet, (uint32_t)length);
            taken++;
        }
        if (taken)
            continue;
        uint64_t wait_ns = NS_PER_S, now = now_ns();
        struct record *next = oldest(d);
        if (next)
            wait_ns = next->due_ns > now ? next->due_ns - now : 0;
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
        d->ns_per_byte = 8000.0 / atof(arguments[6]);
        d->delay_ns = strtoull(arguments[7], NULL, 10) * 1000;
        d->queue_bytes = strtoull(arguments[9], NULL, 10);
        d->random = strtoull(arguments[10], NULL, 10) * 2 + (uint64_t)i + 88172645463325252ull;
        d->ring = aligned_alloc(16, RING_BYTES);
        pthread_t thread;
        if (!d->ring || pthread_create(&thread, NULL, run, d))
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
