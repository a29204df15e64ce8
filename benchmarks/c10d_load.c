/* SPDX-License-Identifier: Apache-2.0
 *
 * Drives a TCPStore server in a closed loop: each connection keeps `depth` operations under way
 * and sends the next one when an answer has come back whole. One thread, epoll. Reads spin, so that
 * the server never waits for the generator to be woken; writes, which wait for a disk, sleep.
 *
 *   c10d_load PORT OPERATION CONNECTIONS DEPTH VALUE_BYTES SECONDS
 *
 * OPERATION: get, wait_get, check, set, cas, add. Prints one line of JSON.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SET = 1, COMPARE_SET = 2, GET = 3, ADD = 4, CHECK = 5, WAIT = 6, PING = 13 };
enum { CONNECTIONS_MAX = 1024, DEPTH_MAX = 64, SAMPLES_MAX = 1 << 21, READ_SIZE = 1 << 18 };

struct connection {
    int fd;
    size_t answered;             /* bytes of the oldest unanswered operation that have come */
    unsigned first;              /* place of that operation in sent_at */
    int64_t sent_at[DEPTH_MAX];  /* nanoseconds */
};

struct message {
    char *bytes;
    size_t size;
};

static struct connection connections[CONNECTIONS_MAX];
static uint32_t samples[SAMPLES_MAX]; /* latencies in nanoseconds */

static void die(const char *what)
{
    fprintf(stderr, "c10d_load: %s: %s\n", what, errno ? strerror(errno) : "unexpected");
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void put(struct message *message, const void *bytes, size_t size)
{
    message->bytes = realloc(message->bytes, message->size + size);
    if (!message->bytes) die("memory");
    memcpy(message->bytes + message->size, bytes, size);
    message->size += size;
}

static void put_code(struct message *message, uint8_t code) { put(message, &code, 1); }

static void put_u64(struct message *message, uint64_t number) { put(message, &number, 8); }

static void put_string(struct message *message, const char *bytes, size_t size)
{
    put_u64(message, size);
    put(message, bytes, size);
}

static void write_all(int fd, const char *bytes, size_t size)
{
    while (size) {
        ssize_t written = write(fd, bytes, size);
        if (written < 0 && errno == EAGAIN) continue;
        if (written <= 0) die("write");
        bytes += written;
        size -= (size_t)written;
    }
}

static int connect_to(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    const char hello[10] = {0, (char)0xce, (char)0xf7, (char)0x85, 0x3c, PING, 1, 2, 3, 4};
    char echo[4];
    write_all(fd, hello, sizeof hello);
    if (recv(fd, echo, sizeof echo, MSG_WAITALL) != 4 || memcmp(echo, hello + 6, 4)) die("ping");
    return fd;
}

/* Build one operation; return the size of its answer, 0 if it has none. */
static size_t build(struct message *message, const char *operation, size_t value_size)
{
    const char key[] = "/benchmark/value", counter[] = "/benchmark/counter";
    size_t key_size = sizeof key - 1, answer = 8 + value_size;
    char *value = malloc(value_size + 1);
    if (!value) die("memory");
    memset(value, 'v', value_size);
    if (!strcmp(operation, "get")) {
        put_code(message, GET);
        put_string(message, key, key_size);
    } else if (!strcmp(operation, "wait_get")) {
        put_code(message, WAIT);
        put_u64(message, 1);
        put_string(message, key, key_size);
        put_code(message, GET);
        put_string(message, key, key_size);
        answer += 1;
    } else if (!strcmp(operation, "check")) {
        put_code(message, CHECK);
        put_u64(message, 1);
        put_string(message, key, key_size);
        answer = 1;
    } else if (!strcmp(operation, "set")) { /* no answer of its own: the ping's tells its end */
        put_code(message, SET);
        put_string(message, key, key_size);
        put_string(message, value, value_size);
        put(message, "\x0d\x01\x02\x03\x04", 5);
        answer = 4;
    } else if (!strcmp(operation, "cas")) {
        put_code(message, COMPARE_SET);
        put_string(message, key, key_size);
        put_string(message, value, value_size);
        put_string(message, value, value_size);
    } else if (!strcmp(operation, "add")) {
        put_code(message, ADD);
        put_string(message, counter, sizeof counter - 1);
        put_u64(message, 1);
        answer = 8;
    } else {
        die("no such operation");
    }
    free(value);
    return answer;
}

static void store_value(int fd, size_t value_size)
{
    struct message message = {0};
    char echo[4];
    size_t answer = build(&message, "set", value_size);
    write_all(fd, message.bytes, message.size);
    if (recv(fd, echo, answer, MSG_WAITALL) != (ssize_t)answer) die("set");
    free(message.bytes);
}

static int by_size(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

int main(int argc, char **argv)
{
    if (argc != 7) die("usage: c10d_load PORT OPERATION CONNECTIONS DEPTH VALUE_BYTES SECONDS");
    int port = atoi(argv[1]), count = atoi(argv[3]);
    unsigned depth = (unsigned)atoi(argv[4]);
    size_t value_size = (size_t)atol(argv[5]);
    if (count < 1 || count > CONNECTIONS_MAX || depth < 1 || depth > DEPTH_MAX) die("range");

    struct message operation = {0};
    size_t answer = build(&operation, argv[2], value_size);
    char *incoming = malloc(READ_SIZE);
    int epoll = epoll_create1(0);
    if (!incoming || epoll < 0) die("start");
    for (int i = 0; i < count; i++) {
        connections[i].fd = connect_to(port);
        struct epoll_event interest = {.events = EPOLLIN, .data.ptr = &connections[i]};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, connections[i].fd, &interest)) die("epoll_ctl");
    }
    store_value(connections[0].fd, value_size);

    struct message burst = {0};
    for (unsigned i = 0; i < depth; i++) put(&burst, operation.bytes, operation.size);
    int64_t start = now_ns(), end = start + (int64_t)(atof(argv[6]) * 1e9), now = start;
    for (int i = 0; i < count; i++) {
        for (unsigned j = 0; j < depth; j++) connections[i].sent_at[j] = start;
        write_all(connections[i].fd, burst.bytes, burst.size);
    }
    int writes = !strcmp(argv[2], "set") || !strcmp(argv[2], "cas") || !strcmp(argv[2], "add");
    int patience_ms = writes ? 10 : 0;
    uint64_t done = 0;
    struct epoll_event events[64];
    while ((now = now_ns()) < end) {
        int ready = epoll_wait(epoll, events, 64, patience_ms);
        if (ready < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < ready; i++) {
            struct connection *connection = events[i].data.ptr;
            ssize_t got = recv(connection->fd, incoming, READ_SIZE, MSG_DONTWAIT);
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (got <= 0) die("the server closed a connection");
            connection->answered += (size_t)got;
            now = now_ns();
            unsigned completed = 0;
            for (; connection->answered >= answer; connection->answered -= answer, completed++) {
                int64_t *sent_at = &connection->sent_at[connection->first];
                samples[done++ % SAMPLES_MAX] = (uint32_t)(now - *sent_at);
                *sent_at = now;
                connection->first = (connection->first + 1) % depth;
            }
            if (completed) write_all(connection->fd, burst.bytes, completed * operation.size);
        }
    }
    size_t kept = done < SAMPLES_MAX ? done : SAMPLES_MAX;
    if (!kept) die("no operation was answered");
    qsort(samples, kept, sizeof *samples, by_size);
    printf("{\"operations\": %llu, \"seconds\": %.6f, \"p50_us\": %.1f, \"p99_us\": %.1f}\n",
           (unsigned long long)done, (double)(now - start) / 1e9, samples[kept / 2] / 1e3,
           samples[kept * 99 / 100] / 1e3);
    return 0;
}
