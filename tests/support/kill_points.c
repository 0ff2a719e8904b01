/* Preloaded into the processes of a gateway: kills one of them, or all, at the n-th durable call or send (kill_points.py).

   Durable calls are those that make, change, sync or remove files below one directory; sends are those on TCP sockets.
   All processes share a page, by which they are armed. The n-th call is counted over all processes of a role. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PIDS_MAX = 16, NAME_BYTES = 32, PATH_BYTES = 256 };

struct page {          /* as kill_points.py packs it */
  int32_t armed;       /* 0: let everything pass */
  int32_t countdown;   /* the call that brings it to 0 is the one */
  int32_t after;       /* 1: when the call has returned; 0: instead of it */
  int32_t pid_count;   /* who dies besides */
  int32_t pids[PIDS_MAX];
  int32_t seen;        /* calls counted since it was armed */
  int32_t fired;       /* the process that died by itself */
  char role[NAME_BYTES];       /* the beginning of the process's name: "worker", "background", "supervisor" */
  char directory[PATH_BYTES];
  char call[NAME_BYTES];       /* the call at which it died, and on what */
  char object[PATH_BYTES];
};

static struct page *page;
static char own_role[NAME_BYTES];
static pid_t role_of; /* the process that own_role was found for: a fork has another */

/* The gateway's processes say in their title what they are; a child of another kind has its name among its arguments.
   What has just been forked has the fork server's title for a moment. */
static void find_role(void) {
  static const char title[] = "forebay: ";
  char line[16384];
  int file = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
  if (file < 0) return;
  ssize_t length = syscall(SYS_read, file, line, sizeof line - 1);
  syscall(SYS_close, file);
  const char *found = "supervisor";
  line[length > 0 ? length : 0] = 0;
  if (!strncmp(line, title, sizeof title - 1))
    found = line + sizeof title - 1;
  else
    for (ssize_t at = 0; at < length; at += strnlen(line + at, length - at) + 1)
      if (!strncmp(line + at, "worker", 6) || !strncmp(line + at, "background", 10)) found = line + at;
  strncpy(own_role, found, NAME_BYTES - 1);
  role_of = strncmp(own_role, "fork server", 11) ? getpid() : 0;
}

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("KILL_POINTS_PAGE");
  if (!path) return;
  int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  if (mapped == MAP_FAILED) return;
  page = mapped;
}

static void die(void) {
  __atomic_store_n(&page->armed, 0, __ATOMIC_SEQ_CST);
  __atomic_store_n(&page->fired, (int32_t)getpid(), __ATOMIC_SEQ_CST);
  for (int i = 0; i < page->pid_count; i++)
    if (page->pids[i] != getpid()) syscall(SYS_kill, page->pids[i], SIGKILL);
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

/* Whether this call is the one, after which to die. Dies here where it is to die before it. */
static int counted(const char *call, const char *object) {
  __atomic_add_fetch(&page->seen, 1, __ATOMIC_SEQ_CST);
  if (__atomic_sub_fetch(&page->countdown, 1, __ATOMIC_SEQ_CST) != 0) return 0;
  strncpy(page->call, call, NAME_BYTES - 1);
  strncpy(page->object, object, PATH_BYTES - 1);
  if (!page->after) die();
  return 1;
}

static int is_armed(void) {
  if (!page || !__atomic_load_n(&page->armed, __ATOMIC_SEQ_CST)) return 0;
  if (role_of != getpid()) find_role();
  return !strncmp(own_role, page->role, strlen(page->role));
}

static int of_path(const char *call, const char *path) {
  return is_armed() && path && !strncmp(path, page->directory, strlen(page->directory)) && counted(call, path);
}

static int of_file(const char *call, int file) {
  if (!is_armed()) return 0;
  char link[64], path[PATH_BYTES];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return of_path(call, path);
}

static int of_socket(const char *call, int file) {
  if (!is_armed()) return 0;
  struct sockaddr_storage name;
  socklen_t length = sizeof name;
  if (getsockname(file, (struct sockaddr *)&name, &length) || name.ss_family == AF_UNIX) return 0;
  return counted(call, "socket");
}

static int of_either(const char *call, int file) {
  struct stat facts;
  if (!is_armed() || fstat(file, &facts)) return 0;
  return S_ISSOCK(facts.st_mode) ? of_socket(call, file) : of_file(call, file);
}

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  return found;
}

#define WRAP(type, name, parameters, arguments, is_it)              \
  type name parameters {                                            \
    static __typeof__(&name) next;                                  \
    if (!next) next = REAL(name);                                   \
    int one = is_it;                                                \
    type result = next arguments;                                   \
    if (one) die();                                                 \
    return result;                                                  \
  }

WRAP(int, fsync, (int file), (file), of_file("fsync", file))
WRAP(int, fdatasync, (int file), (file), of_file("fdatasync", file))
WRAP(int, ftruncate, (int file, off_t size), (file, size), of_file("ftruncate", file))
WRAP(int, ftruncate64, (int file, off64_t size), (file, size), of_file("ftruncate", file))
WRAP(int, fallocate, (int file, int mode, off_t at, off_t size), (file, mode, at, size), of_file("fallocate", file))
WRAP(int, posix_fallocate, (int file, off_t at, off_t size), (file, at, size), of_file("fallocate", file))
WRAP(int, posix_fallocate64, (int file, off64_t at, off64_t size), (file, at, size), of_file("fallocate", file))
WRAP(ssize_t, pwrite, (int file, const void *data, size_t count, off_t at), (file, data, count, at),
     of_file("pwrite", file))
WRAP(ssize_t, pwrite64, (int file, const void *data, size_t count, off64_t at), (file, data, count, at),
     of_file("pwrite", file))
WRAP(ssize_t, pwritev, (int file, const struct iovec *data, int count, off_t at), (file, data, count, at),
     of_file("pwritev", file))
WRAP(ssize_t, write, (int file, const void *data, size_t count), (file, data, count), of_either("write", file))
WRAP(ssize_t, writev, (int file, const struct iovec *data, int count), (file, data, count), of_either("writev", file))
WRAP(ssize_t, send, (int file, const void *data, size_t count, int flags), (file, data, count, flags),
     of_socket("send", file))
WRAP(ssize_t, sendmsg, (int file, const struct msghdr *data, int flags), (file, data, flags), of_socket("send", file))
WRAP(int, unlink, (const char *path), (path), of_path("unlink", path))
WRAP(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), of_path("unlink", path))
WRAP(int, rmdir, (const char *path), (path), of_path("rmdir", path))
WRAP(int, rename, (const char *from, const char *to), (from, to), of_path("rename", to))
WRAP(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), of_path("rename", to))
WRAP(int, link, (const char *from, const char *to), (from, to), of_path("link", to))
WRAP(int, linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags),
     of_path("link", to))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), of_path("mkdir", path))
WRAP(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), of_path("mkdir", path))

#define WRAP_OPEN(name, parameters, arguments)                      \
  int name parameters {                                             \
    static __typeof__(&name) next;                                  \
    if (!next) next = REAL(name);                                   \
    mode_t mode = 0;                                                \
    if (flags & (O_CREAT | O_TMPFILE)) {                            \
      va_list rest;                                                 \
      va_start(rest, flags);                                        \
      mode = va_arg(rest, mode_t);                                  \
      va_end(rest);                                                 \
    }                                                               \
    int one = (flags & O_CREAT) && of_path("open", path);           \
    int file = next arguments;                                      \
    if (one) die();                                                 \
    return file;                                                    \
  }

WRAP_OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
WRAP_OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
