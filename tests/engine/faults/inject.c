/* Makes one file operation of a process fail, or kills the process there: LD_PRELOAD=…/inject.so.
 *
 * FAULT_UNDER  operations on files below this directory are counted, from 1, in each process
 * FAULT_AT     the number of the operation that fails; none where it is not set
 * FAULT_LACKS  "links" or "syncs": all symbolic links fail with EPERM, all fsyncs of directories with EINVAL; "both"
 * FAULT_HOW    "kill", "tear" (half of what is written reaches the file, then the process is killed) or an errno
 * FAULT_RANK   the RANK, or the SLURM_PROCID, of the process that is meant; any where it is not set
 * FAULT_LOG    a file outside of that directory, to which "<rank> <number> <operation> <path>" is appended
 *
 * The variables are read at each operation, as a process that was forked may set them later.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int count;

static const char *of_descriptor(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0) return "";
    buffer[length] = 0;
    return buffer;
}

static const char *full(int folder, const char *path, char *buffer) {
    if (path[0] == '/') return path;
    char start[PATH_MAX];
    if (folder != AT_FDCWD) of_descriptor(folder, start);
    else if (!getcwd(start, sizeof start)) return path;
    snprintf(buffer, PATH_MAX, "%.2000s/%.2000s", start, path);
    return buffer;
}

/* Returns 0 to go on, an errno to fail with, -1 to write a half first; does not return where the process is killed. */
static int meet(const char *operation, const char *path) {
    const char *under = getenv("FAULT_UNDER"), *rank = getenv("FAULT_RANK"), *own = getenv("RANK");
    if (!own) own = getenv("SLURM_PROCID");
    if (!under || strncmp(path, under, strlen(under)) != 0) return 0;
    if (rank && own && strcmp(rank, own) != 0) return 0;
    const char *lacks = getenv("FAULT_LACKS");
    struct stat found;
    if (lacks && strcmp(lacks, "syncs") != 0 && strcmp(operation, "symlink") == 0) return EPERM;
    if (lacks && strcmp(lacks, "links") != 0 && strcmp(operation, "fsync") == 0 && stat(path, &found) == 0 &&
        S_ISDIR(found.st_mode))
        return EINVAL;
    int number = ++count, saved = errno;
    const char *log = getenv("FAULT_LOG"), *at = getenv("FAULT_AT"), *how = getenv("FAULT_HOW");
    if (log) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%s %d %s %s\n", own ? own : "0", number, operation, path);
        int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
        if (fd >= 0) {
            syscall(SYS_write, fd, line, length);
            syscall(SYS_close, fd);
        }
    }
    errno = saved;
    if (!at || atoi(at) != number || !how) return 0;
    if (strcmp(how, "tear") == 0 && strcmp(operation, "write") == 0) return -1;
    if (strcmp(how, "kill") == 0 || strcmp(how, "tear") == 0) kill(getpid(), SIGKILL);
    return atoi(how);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(error) do { int found = (error); if (found > 0) { errno = found; return -1; } } while (0)
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT))

#define OPEN(name, first, arguments, folder)                                                                     \
    int name(first const char *path, int flags, ...) {                                                           \
        char buffer[PATH_MAX];                                                                                   \
        va_list rest;                                                                                            \
        va_start(rest, flags);                                                                                   \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                \
        va_end(rest);                                                                                            \
        if (WRITES(flags)) FAIL_IF(meet("open", full(folder, path, buffer)));                                    \
        return REAL(name) arguments;                                                                             \
    }
#define COMMA ,
OPEN(open, , (path, flags, mode), AT_FDCWD)
OPEN(open64, , (path, flags, mode), AT_FDCWD)
OPEN(openat, int folder COMMA, (folder, path, flags, mode), folder)
OPEN(openat64, int folder COMMA, (folder, path, flags, mode), folder)

static ssize_t written(int fd, const void *data, size_t size) {
    char buffer[PATH_MAX];
    int found = meet("write", of_descriptor(fd, buffer));
    if (found == -1) {
        syscall(SYS_write, fd, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    return found;
}
ssize_t write(int fd, const void *data, size_t size) {
    if (getenv("FAULT_UNDER")) FAIL_IF(written(fd, data, size));
    return syscall(SYS_write, fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    if (getenv("FAULT_UNDER")) FAIL_IF(written(fd, parts[0].iov_base, parts[0].iov_len));
    return syscall(SYS_writev, fd, parts, n);
}
int fsync(int fd) {
    char buffer[PATH_MAX];
    if (getenv("FAULT_UNDER")) FAIL_IF(meet("fsync", of_descriptor(fd, buffer)));
    return syscall(SYS_fsync, fd);
}
int ftruncate(int fd, off_t length) {
    char buffer[PATH_MAX];
    FAIL_IF(meet("truncate", of_descriptor(fd, buffer)));
    return syscall(SYS_ftruncate, fd, length);
}
int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }

#define PATH1(name, operation)                                                                                   \
    int name(const char *path) {                                                                                 \
        char buffer[PATH_MAX];                                                                                   \
        FAIL_IF(meet(operation, full(AT_FDCWD, path, buffer)));                                                  \
        return REAL(name)(path);                                                                                 \
    }
PATH1(unlink, "unlink")
PATH1(rmdir, "rmdir")
int unlinkat(int folder, const char *path, int flags) {
    char buffer[PATH_MAX];
    FAIL_IF(meet(flags & AT_REMOVEDIR ? "rmdir" : "unlink", full(folder, path, buffer)));
    return REAL(unlinkat)(folder, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    FAIL_IF(meet("mkdir", full(AT_FDCWD, path, buffer)));
    return REAL(mkdir)(path, mode);
}
#define PATH2(name, operation)                                                                                   \
    int name(const char *from, const char *to) {                                                                 \
        char buffer[PATH_MAX];                                                                                   \
        FAIL_IF(meet(operation, full(AT_FDCWD, to, buffer)));                                                    \
        return REAL(name)(from, to);                                                                             \
    }
PATH2(rename, "rename")
PATH2(link, "link")
PATH2(symlink, "symlink")
