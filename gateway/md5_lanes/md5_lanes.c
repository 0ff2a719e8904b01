/* MD5 of several streams side by side: up to eight in the lanes of AVX2 registers, by one thread for all of them.

   The steps of one MD5 depend on each other, so that a core does nothing else most of the time: eight at once take hardly
   longer than one. Threads that bring large pieces meet in one room. The first leads: a quantum at a time, it hashes its
   own piece and those of all who have come meanwhile, and the others sleep until theirs is done. It waits for nobody,
   but lets threads that could run go first. When its own is done, one of the others leads on. Where all lanes are taken, the next to come leads eight more.

   What the room holds lies on the stacks of the threads in it: there is nothing to allocate, and nothing that can fail.

   RFC 1321. x86-64 (little-endian), GCC or Clang; ctypes loads it (streams.py), which needs no headers of Python. */

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define BLOCK 64
#define QUANTUM_BLOCKS 512 /* 32 KiB of each stream: who comes, or is done, waits for no more than that */
#define COMPANY 16          /* So many pieces after the last that met another, nobody looks for company any more */
#define ROOM_BYTES_MIN 8192 /* Less is hashed at once: meeting others would cost as much */

typedef struct {
  uint32_t state[4];
  uint64_t length;
  uint8_t tail[BLOCK]; /* length % 64 bytes, which make no block yet */
} Stream;

/* One step after another: function, message word, rotation, constant. B is what the next step waits for: what does not
   depend on it is added first. */
#define STEP(a, b, f, w, s, k) a = ADD(ADD(a, ADD(w, SET(k))), f); a = ADD(ROTATE(a, s), b);
#define F(a, b, c, d, w, s, k) STEP(a, b, XOR(d, AND(b, XOR(c, d))), w, s, k)
#define G(a, b, c, d, w, s, k) a = ADD(a, ANDNOT(d, c)); STEP(a, b, AND(b, d), w, s, k)
#define H(a, b, c, d, w, s, k) STEP(a, b, XOR(b, XOR(c, d)), w, s, k)
#define I(a, b, c, d, w, s, k) STEP(a, b, XOR(c, OR(b, NOT(d))), w, s, k)
#define FOUR(f, i, j, k, l, s, t, u, v, K, L, M, N) \
  f(a, b, c, d, w[i], s, K) f(d, a, b, c, w[j], t, L) f(c, d, a, b, w[k], u, M) f(b, c, d, a, w[l], v, N)
#define STEPS \
  FOUR(F, 0, 1, 2, 3, 7, 12, 17, 22, 0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee) \
  FOUR(F, 4, 5, 6, 7, 7, 12, 17, 22, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501) \
  FOUR(F, 8, 9, 10, 11, 7, 12, 17, 22, 0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be) \
  FOUR(F, 12, 13, 14, 15, 7, 12, 17, 22, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821) \
  FOUR(G, 1, 6, 11, 0, 5, 9, 14, 20, 0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa) \
  FOUR(G, 5, 10, 15, 4, 5, 9, 14, 20, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8) \
  FOUR(G, 9, 14, 3, 8, 5, 9, 14, 20, 0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed) \
  FOUR(G, 13, 2, 7, 12, 5, 9, 14, 20, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a) \
  FOUR(H, 5, 8, 11, 14, 4, 11, 16, 23, 0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c) \
  FOUR(H, 1, 4, 7, 10, 4, 11, 16, 23, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70) \
  FOUR(H, 13, 0, 3, 6, 4, 11, 16, 23, 0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05) \
  FOUR(H, 9, 12, 15, 2, 4, 11, 16, 23, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665) \
  FOUR(I, 0, 7, 14, 5, 6, 10, 15, 21, 0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039) \
  FOUR(I, 12, 3, 10, 1, 6, 10, 15, 21, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1) \
  FOUR(I, 8, 15, 6, 13, 6, 10, 15, 21, 0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1) \
  FOUR(I, 4, 11, 2, 9, 6, 10, 15, 21, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391)

#define ADD(x, y) ((x) + (y))
#define AND(x, y) ((x) & (y))
#define OR(x, y) ((x) | (y))
#define XOR(x, y) ((x) ^ (y))
#define NOT(x) (~(x))
#define ANDNOT(x, y) (~(x) & (y))
#define ROTATE(x, s) ((x) << (s) | (x) >> (32 - (s)))
#define SET(k) (k)

static void hash_one(uint32_t state[4], const uint8_t *data, size_t blocks) {
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3], w[16];
  for (; blocks; blocks--, data += BLOCK) {
    const uint32_t a0 = a, b0 = b, c0 = c, d0 = d;
    memcpy(w, data, BLOCK);
    STEPS
    a += a0, b += b0, c += c0, d += d0;
  }
  state[0] = a, state[1] = b, state[2] = c, state[3] = d;
}

#undef SET
#define SET(k) ((Words){k, k, k, k, k, k, k, k})
typedef uint32_t Words __attribute__((vector_size(32)));

/* Eight words of each of eight streams, turned: the first word of all, the second of all, ... */
__attribute__((target("avx2"))) static inline void turn(Words w[8], const uint8_t *const data[LANES], size_t offset) {
  __m256i r[8], p[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i *)(data[i] + offset));
  for (int i = 0; i < 8; i += 2) {
    p[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    p[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(p[i], p[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(p[i], p[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(p[i + 1], p[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(p[i + 1], p[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    w[i] = (Words)_mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    w[i + 4] = (Words)_mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
}

__attribute__((target("avx2"))) static void hash_eight(uint32_t *const state[LANES], const uint8_t *const data[LANES], size_t blocks) {
  Words v[4], w[16];
  for (int i = 0; i < 4; i++)
    for (int n = 0; n < LANES; n++) v[i][n] = state[n][i];
  Words a = v[0], b = v[1], c = v[2], d = v[3];
  for (size_t offset = 0; offset < blocks * BLOCK; offset += BLOCK) {
    const Words a0 = a, b0 = b, c0 = c, d0 = d;
    turn(w, data, offset);
    turn(w + 8, data, offset + 32);
    STEPS
    a += a0, b += b0, c += c0, d += d0;
  }
  v[0] = a, v[1] = b, v[2] = c, v[3] = d;
  for (int i = 0; i < 4; i++)
    for (int n = 0; n < LANES; n++) state[n][i] = v[i][n];
}

/* How many streams are hashed at once here; 0 where this processor cannot do it. */
__attribute__((visibility("default"))) int md5_lanes(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") ? LANES : 0;
}

/* What a thread has brought. */
typedef struct Piece Piece;
struct Piece {
  uint32_t *state;
  const uint8_t *data;
  size_t blocks; /* still to be hashed */
  pthread_cond_t woken;
  int leads, done;
  Piece *lanes[LANES]; /* of who leads: its own among them */
  int count;
  Piece *next; /* who waits for a lane */
};

static pthread_mutex_t room = PTHREAD_MUTEX_INITIALIZER;
static Piece *first, **last = &first; /* in the room, not in a lane yet */
static int inside, leaders, company;

static void take_waiting(Piece *lead) {
  while (first && lead->count < LANES) {
    lead->lanes[lead->count++] = first;
    company = COMPANY;
    if (!(first = first->next)) last = &first;
  }
}

static void hash_quantum(Piece *const lanes[], int count) {
  uint32_t *state[LANES], idle[4] = {0};
  const uint8_t *data[LANES];
  size_t blocks = QUANTUM_BLOCKS;
  for (int n = 0; n < LANES; n++) {
    state[n] = n < count ? lanes[n]->state : idle;
    data[n] = lanes[n < count ? n : 0]->data;
    if (n < count && lanes[n]->blocks < blocks) blocks = lanes[n]->blocks;
  }
  if (count == 1)
    hash_one(state[0], data[0], blocks);
  else
    hash_eight(state, data, blocks);
  for (int n = 0; n < count; n++) lanes[n]->data += blocks * BLOCK, lanes[n]->blocks -= blocks;
}

/* With the room locked. */
static void lead_until_done(Piece *me) {
  if (company && me->count < LANES) { /* threads that could run are likely to bring pieces: they go first, once */
    company--;
    pthread_mutex_unlock(&room);
    sched_yield();
    pthread_mutex_lock(&room);
  }
  while (!me->done) {
    take_waiting(me);
    pthread_mutex_unlock(&room);
    hash_quantum(me->lanes, me->count);
    pthread_mutex_lock(&room);
    int left = 0;
    for (int n = 0; n < me->count; n++) {
      Piece *one = me->lanes[n];
      if (one->blocks)
        me->lanes[left++] = one;
      else {
        one->done = 1; /* from the moment that the room is unlocked, it may be gone */
        pthread_cond_signal(&one->woken);
      }
    }
    inside -= me->count - left;
    me->count = left;
  }
  if (!me->count) take_waiting(me);
  if (!me->count) {
    leaders--;
    return;
  }
  Piece *heir = me->lanes[0];
  memcpy(heir->lanes, me->lanes, sizeof me->lanes);
  heir->count = me->count;
  heir->leads = 1;
  pthread_cond_signal(&heir->woken);
}

static void hash_with_others(uint32_t state[4], const uint8_t *data, size_t blocks) {
  Piece me = {.state = state, .data = data, .blocks = blocks, .woken = PTHREAD_COND_INITIALIZER};
  pthread_mutex_lock(&room);
  if (inside++ < LANES * leaders) {
    *last = &me;
    last = &me.next;
    while (!me.done && !me.leads) pthread_cond_wait(&me.woken, &room);
  } else {
    leaders++;
    me.leads = 1;
    me.lanes[me.count++] = &me;
  }
  if (!me.done) lead_until_done(&me);
  pthread_mutex_unlock(&room);
  pthread_cond_destroy(&me.woken);
}

static void hash_blocks(uint32_t state[4], const uint8_t *data, size_t blocks) {
  if (blocks * BLOCK < ROOM_BYTES_MIN)
    hash_one(state, data, blocks);
  else
    hash_with_others(state, data, blocks);
}

__attribute__((visibility("default"))) void md5_begin(Stream *stream) {
  *stream = (Stream){.state = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476}};
}

/* The next bytes of a stream; not two of the same one at once. */
__attribute__((visibility("default"))) void md5_update(Stream *stream, const uint8_t *data, size_t size) {
  const size_t filled = stream->length % BLOCK;
  if (!size) return;
  stream->length += size;
  if (filled) {
    const size_t missing = BLOCK - filled < size ? BLOCK - filled : size;
    memcpy(stream->tail + filled, data, missing);
    if (filled + missing < BLOCK) return;
    hash_one(stream->state, stream->tail, 1);
    data += missing, size -= missing;
  }
  hash_blocks(stream->state, data, size / BLOCK);
  memcpy(stream->tail, data + size / BLOCK * BLOCK, size % BLOCK);
}

/* Of what has come so far; more may come. */
__attribute__((visibility("default"))) void md5_digest(const Stream *stream, uint8_t digest[16]) {
  const size_t filled = stream->length % BLOCK;
  const uint64_t bits = stream->length * 8;
  const size_t size = filled < BLOCK - 8 ? BLOCK : 2 * BLOCK;
  uint8_t end[2 * BLOCK] = {0};
  uint32_t state[4];
  memcpy(end, stream->tail, filled);
  end[filled] = 0x80;
  memcpy(end + size - 8, &bits, 8);
  memcpy(state, stream->state, 16);
  hash_one(state, end, size / BLOCK);
  memcpy(digest, state, 16);
}
