/* Preloaded into a process: writes down what it does to files below a directory, in order (strict_disk.py).

   A change is written down when its call has returned, a sync when it begins and when it has returned, and what the
   process says on its standard output before it is said. One kind of sync can be left out: it reports success. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

struct record {        /* as strict_disk.py unpacks it; the name and the data follow */
  uint32_t kind;
  uint32_t thread;
  uint64_t offset;     /* of a write; the new length of a truncation */
  uint32_t name_bytes;
  uint32_t data_bytes;
};

static int trace = -1;
static const char *directory, *left_out;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("DISK_TRACE");
  directory = getenv("DISK_TRACE_DIRECTORY");
  left_out = getenv("DISK_TRACE_WITHOUT");
  if (path && directory) trace = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void note(char kind, const char *name, uint64_t offset, const void *data, size_t count) {
  struct record record = {kind, (uint32_t)syscall(SYS_gettid), offset, strlen(name), count};
  struct iovec pieces[] = {{&record, sizeof record}, {(void *)name, strlen(name)}, {(void *)data, count}};
  if (syscall(SYS_writev, trace, pieces, 3) != (ssize_t)(sizeof record + strlen(name) + count)) abort();
}

/* The name below the directory, "" for itself; NULL for what lies elsewhere. */
static const char *below(const char *path) {
  size_t length = directory ? strlen(directory) : 0;
  if (trace < 0 || !path || strncmp(path, directory, length)) return NULL;
  return path[length] == '/' ? path + length + 1 : path[length] ? NULL : path + length;
}

static const char *name_of(int file, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = trace < 0 ? -1 : readlink(link, path, PATH_BYTES - 1);
  if (length < 0) return NULL;
  path[length] = 0;
  return below(path);
}

static int is_left_out(const char *name) {
  return left_out && !fnmatch(left_out, name, FNM_PATHNAME);
}

static void *real(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  return found;
}

#define REAL(name) static __typeof__(&name) next; if (!next) next = real(#name)

#define SYNC(call)                                              \
  int call(int file) {                                          \
    REAL(call);                                                 \
    char path[PATH_BYTES];                                      \
    const char *name = name_of(file, path);                     \
    if (!name) return next(file);                               \
    if (is_left_out(name)) return 0;                            \
    note('s', name, 0, NULL, 0);                                \
    int result = next(file);                                    \
    if (!result) note('S', name, 0, NULL, 0);                   \
    return result;                                              \
  }

SYNC(fsync)
SYNC(fdatasync)

#define WRITE_AT(call, offset_type)                                                     \
  ssize_t call(int file, const void *data, size_t count, offset_type at) {              \
    REAL(call);                                                                         \
    ssize_t written = next(file, data, count, at);                                      \
    char path[PATH_BYTES];                                                              \
    const char *name = written < 0 ? NULL : name_of(file, path);                        \
    if (name) note('w', name, at, data, written);                                       \
    return written;                                                                     \
  }

WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)

ssize_t write(int file, const void *data, size_t count) {
  REAL(write);
  char path[PATH_BYTES];
  const char *name = name_of(file, path);
  if (file == STDOUT_FILENO && trace >= 0) note('a', "", 0, data, count);
  off_t at = name ? lseek(file, 0, SEEK_CUR) : 0;
  ssize_t written = next(file, data, count);
  if (name && written >= 0) note('w', name, at, data, written);
  return written;
}

#define CUT(call, size_type)                                    \
  int call(int file, size_type size) {                          \
    REAL(call);                                                 \
    int result = next(file, size);                              \
    char path[PATH_BYTES];                                      \
    const char *name = result ? NULL : name_of(file, path);     \
    if (name) note('t', name, size, NULL, 0);                   \
    return result;                                              \
  }

CUT(ftruncate, off_t)
CUT(ftruncate64, off64_t)

int unlink(const char *path) {
  REAL(unlink);
  int result = next(path);
  if (!result && below(path)) note('u', below(path), 0, NULL, 0);
  return result;
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  int result = next(path, mode);
  if (!result && below(path)) note('m', below(path), 0, NULL, 0);
  return result;
}

int rename(const char *from, const char *to) {
  REAL(rename);
  int result = next(from, to);
  if (!result && below(from) && below(to)) note('r', below(from), 0, below(to), strlen(below(to)));
  return result;
}

#define OPEN(call, parameters, arguments)                       \
  int call parameters {                                         \
    REAL(call);                                                 \
    mode_t mode = 0;                                            \
    if (flags & (O_CREAT | O_TMPFILE)) {                        \
      va_list rest;                                             \
      va_start(rest, flags);                                    \
      mode = va_arg(rest, mode_t);                              \
      va_end(rest);                                             \
    }                                                           \
    int file = next arguments;                                  \
    if (file >= 0 && (flags & O_CREAT) && below(path)) {        \
      note('o', below(path), 0, NULL, 0);                       \
      if (flags & O_TRUNC) note('t', below(path), 0, NULL, 0);  \
    }                                                           \
    return file;                                                \
  }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
