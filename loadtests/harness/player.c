// Sends each request of a file once, over some connections, and says what came back. Started by player.py.
//
//     player PORT CONNECTIONS FILE SPIN
//
// FILE holds for each request its length (32 bits), the length of the body that must come back (64 bits), and its bytes.
// With SPIN 1 it never sleeps, so that no server pays for waking it; it gives way to others on its core.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 256, HEAD_BYTES = 16384, BODY_BYTES = 1 << 18, PATIENCE_SECONDS = 60 };

struct request {
    uint32_t length;
    uint64_t body_bytes;
    const char *bytes;
};

struct connection {
    int socket;
    struct request *asked; // NULL: idle
    char head[HEAD_BYTES];
    size_t head_bytes;
    int in_body;
    uint64_t left;
    double asked_at;
};

static struct request *requests;
static size_t count, sent, answered;
static double *seconds; // of each answer
static uint64_t received_bytes;
static char body[BODY_BYTES];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what, const char *more) {
    fprintf(stderr, "%s after %zu of %zu answers: %.300s\n", what, answered, count, more);
    exit(1);
}

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) fail("no requests", path);
    long size = ftell(file);
    rewind(file);
    char *all = malloc(size);
    if (!all || fread(all, 1, size, file) != (size_t)size) fail("no requests", path);
    fclose(file);
    requests = malloc((size / 12 + 1) * sizeof *requests); // each has twelve bytes before its own
    for (char *at = all; at < all + size; at += 12 + requests[count++].length) {
        memcpy(&requests[count].length, at, 4);
        memcpy(&requests[count].body_bytes, at + 4, 8);
        requests[count].bytes = at + 12;
    }
    seconds = malloc((count + 1) * sizeof *seconds);
}

static void ask(struct connection *c) {
    if (sent == count) return;
    c->asked = &requests[sent++];
    c->head_bytes = c->in_body = 0;
    c->asked_at = now();
    if (send(c->socket, c->asked->bytes, c->asked->length, MSG_NOSIGNAL) != (ssize_t)c->asked->length)
        fail("cannot send", strerror(errno));
}

static void take_head(struct connection *c) {
    ssize_t got = recv(c->socket, c->head + c->head_bytes, HEAD_BYTES - 1 - c->head_bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0 || !c->asked) fail("a connection is lost", "before or within a head");
    c->head_bytes += got;
    c->head[c->head_bytes] = 0;
    char *end = memmem(c->head, c->head_bytes, "\r\n\r\n", 4);
    if (!end) return;
    size_t begun = c->head + c->head_bytes - (end + 4);
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    if (strncmp(c->head, "HTTP/1.1 20", 11) || !length || strtoull(length + 17, 0, 10) != c->asked->body_bytes)
        fail("a wrong answer", c->head);
    received_bytes += begun;
    c->left = c->asked->body_bytes - begun;
    c->in_body = 1;
}

static void take_body(struct connection *c) {
    while (c->left) {
        ssize_t got = recv(c->socket, body, c->left < BODY_BYTES ? c->left : BODY_BYTES, MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) fail("a connection is lost", "within a body");
        c->left -= got;
        received_bytes += got;
    }
}

static int less(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 5) fail("usage", "player PORT CONNECTIONS FILE SPIN");
    int connections = atoi(argv[2]), spin = atoi(argv[4]), poll = epoll_create1(0), yes = 1;
    load(argv[3]);
    struct connection *all = calloc(connections, sizeof *all);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < connections; i++) {
        all[i].socket = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(all[i].socket, (void *)&address, sizeof address)) fail("cannot connect", strerror(errno));
        setsockopt(all[i].socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        epoll_ctl(poll, EPOLL_CTL_ADD, all[i].socket, &event);
    }
    double began = now(), heard_at = began;
    for (int i = 0; i < connections; i++) ask(&all[i]);
    while (answered < count) {
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(poll, events, EVENTS, spin ? 0 : 1000);
        if (ready > 0) heard_at = now();
        else if (now() - heard_at > PATIENCE_SECONDS) fail("nothing comes", "for a minute");
        else if (spin) sched_yield();
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            if (!c->in_body) take_head(c);
            if (!c->in_body) continue;
            take_body(c);
            if (c->left) continue;
            seconds[answered++] = now() - c->asked_at;
            c->asked = NULL;
            c->in_body = 0;
            ask(c);
        }
    }
    double took = now() - began;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    qsort(seconds, count, sizeof *seconds, less);
    printf("%zu %.9f %lu %.6f %.9f %.9f\n", count, took, (unsigned long)received_bytes,
           used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6,
           seconds[count / 2], seconds[count * 99 / 100]);
}
