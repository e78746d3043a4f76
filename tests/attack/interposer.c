/* A library to preload: it kills, fails, shortens or logs the n-th call on files below a folder.
 *
 * Which call and what becomes of it stands in a `struct attack`, in memory that the attacker shares
 * with the process: the attacker calls `attack_with` in a forked child, and can count afterwards,
 * when the child is dead. A process that is started in the ordinary way takes it from the
 * environment: ATTACK_ROOT, ATTACK_AT, ATTACK_ACTION, ATTACK_ERROR, ATTACK_READS, as the numbers
 * below. `interposing.py` is the other half of this file.
 *
 * Counted are either the calls that change the file system or, if `reads` is set, those that read
 * from files. Without an attack a call is what it always was.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { COUNT, KILL_BEFORE, KILL_AFTER, FAIL, SHORTEN };

struct attack {
    long at;       /* which call, from 1 on; 0 is none */
    long seen;     /* calls so far */
    long happened; /* whether the call came */
    int action;
    int error;     /* errno of FAIL */
    int reads;     /* count reads, not changes */
    int log;       /* a file that changes and their data are written to, or -1 */
    char root[PATH_MAX];
    char what[PATH_MAX + 64]; /* the call that was attacked */
};

/* What a call is, on the way from `begin` to `end`. */
struct turn {
    const char *call;
    char first[PATH_MAX], second[PATH_MAX];
    int counts; /* lies below the root */
    int now;    /* is the one */
    int saved_errno;
};

static struct attack *attack;
static struct attack own; /* of a process that was not forked by an attacker */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

void attack_with(struct attack *given) { attack = given; }

__attribute__((constructor)) static void take_environment(void) {
    const char *root = getenv("ATTACK_ROOT");
    if (root == NULL || strlen(root) >= PATH_MAX)
        return;
    const char *names[] = {"ATTACK_AT", "ATTACK_ACTION", "ATTACK_ERROR", "ATTACK_READS"};
    long numbers[4];
    for (int i = 0; i < 4; i++)
        numbers[i] = getenv(names[i]) == NULL ? 0 : atol(getenv(names[i]));
    own = (struct attack){.at = numbers[0], .action = (int)numbers[1], .error = (int)numbers[2],
                          .reads = (int)numbers[3], .log = -1};
    strcpy(own.root, root);
    attack = &own;
}

#define REAL(name)                                                                                 \
    static __typeof__(&name) real;                                                                 \
    if (real == NULL)                                                                              \
    real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* ---------------------------------------------------------------- where a call goes */

static void path_of(int descriptor, char *into) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, into, PATH_MAX - 1);
    into[length < 0 ? 0 : length] = 0;
}

static void resolve(int folder, const char *path, char *into) {
    char start[PATH_MAX] = "";
    if (path == NULL) {
        path_of(folder, into);
        return;
    }
    if (path[0] == '/')
        start[0] = 0;
    else if (folder != AT_FDCWD)
        path_of(folder, start);
    else if (getcwd(start, sizeof start) == NULL)
        start[0] = 0;
    if (snprintf(into, PATH_MAX, "%s%s%s", start, path[0] == '/' ? "" : "/", path) >= PATH_MAX)
        into[0] = 0;
}

static int is_below(const char *path) {
    size_t length = strlen(attack->root);
    return strncmp(path, attack->root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* ---------------------------------------------------------------- before and after */

/* Returns whether the call must not be made, because it fails. */
static int begin(struct turn *turn, const char *call, int reads, int folder, const char *path,
                 int other_folder, const char *other) {
    turn->counts = turn->now = 0;
    if (attack == NULL || reads != attack->reads)
        return 0;
    turn->saved_errno = errno;
    turn->call = call;
    turn->second[0] = 0;
    resolve(folder, path, turn->first);
    if (other != NULL)
        resolve(other_folder, other, turn->second);
    turn->counts = is_below(turn->first) || is_below(turn->second);
    if (!turn->counts)
        return 0;
    long number = __atomic_add_fetch(&attack->seen, 1, __ATOMIC_SEQ_CST);
    turn->now = number == attack->at && attack->action != COUNT;
    if (turn->now) {
        snprintf(attack->what, sizeof attack->what, "%.32s %s", call, turn->first);
        attack->happened = 1;
        if (attack->action == KILL_BEFORE)
            kill(getpid(), SIGKILL);
        if (attack->action == FAIL) {
            errno = attack->error;
            return 1;
        }
    }
    errno = turn->saved_errno;
    return 0;
}

static int is_shortened(const struct turn *turn) { return turn->now && attack->action == SHORTEN; }

static void log_call(const struct turn *turn, const char *call, long offset, const void *data,
                     long length) {
    long lengths[] = {(long)strlen(call), (long)strlen(turn->first), (long)strlen(turn->second),
                      offset, data == NULL ? 0 : length};
    struct iovec parts[] = {{lengths, sizeof lengths},
                            {(void *)call, (size_t)lengths[0]},
                            {(void *)turn->first, (size_t)lengths[1]},
                            {(void *)turn->second, (size_t)lengths[2]},
                            {(void *)data, (size_t)lengths[4]}};
    pthread_mutex_lock(&log_lock);
    long total = 0;
    for (int i = 0; i < 5; i++)
        total += (long)parts[i].iov_len;
    if (syscall(SYS_writev, attack->log, parts, 5) != total)
        abort();
    pthread_mutex_unlock(&log_lock);
}

static int logs(const struct turn *turn) { return turn->counts && attack->log >= 0; }

static void end(struct turn *turn, int is_done, long offset, const void *data, long length) {
    int kept = errno;
    if (turn->counts && is_done && logs(turn) && !attack->reads)
        log_call(turn, turn->call, offset, data, length);
    if (turn->now && attack->action == KILL_AFTER)
        kill(getpid(), SIGKILL);
    errno = kept;
}

/* ---------------------------------------------------------------- files are opened */

#define CREATES(flags) ((flags) & (O_CREAT | O_TRUNC) || ((flags) & O_TMPFILE) == O_TMPFILE)

static int open_with(int (*real)(int, const char *, int, ...), int folder, const char *path,
                     int flags, mode_t mode) {
    struct turn turn;
    if (!CREATES(flags))
        return real(folder, path, flags, mode);
    if (begin(&turn, "create", 0, folder, path, 0, NULL))
        return -1;
    int is_new = 0;
    if (turn.counts) {
        struct stat status;
        is_new = fstatat(folder, path, &status, AT_SYMLINK_NOFOLLOW) != 0;
        errno = turn.saved_errno;
    }
    int result = real(folder, path, flags, mode);
    if (turn.counts && !is_new)
        turn.call = flags & O_TRUNC ? "truncate" : "open";
    end(&turn, result >= 0 && (flags & O_TMPFILE) != O_TMPFILE, 0, NULL, 0);
    return result;
}

#define MODE(flags)                                                                                \
    mode_t mode = 0;                                                                               \
    if (CREATES(flags)) {                                                                          \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode = (mode_t)va_arg(more, int);                                                          \
        va_end(more);                                                                              \
    }

static int (*real_openat(void))(int, const char *, int, ...) {
    REAL(openat);
    return real;
}

int open(const char *path, int flags, ...) {
    MODE(flags)
    return open_with(real_openat(), AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    return open_with(real_openat(), AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return open_with(real_openat(), folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return open_with(real_openat(), folder, path, flags | O_LARGEFILE, mode);
}

/* ---------------------------------------------------------------- data is written */

/* Where a write without a position will land, for the log. */
static long place_of_write(int descriptor) {
    struct stat status;
    int flags = fcntl(descriptor, F_GETFL);
    if (flags >= 0 && flags & O_APPEND)
        return fstat(descriptor, &status) == 0 ? (long)status.st_size : 0;
    return (long)lseek(descriptor, 0, SEEK_CUR);
}

ssize_t write(int descriptor, const void *data, size_t length) {
    REAL(write);
    struct turn turn;
    if (begin(&turn, "write", 0, descriptor, NULL, 0, NULL))
        return -1;
    long place = logs(&turn) ? place_of_write(descriptor) : 0;
    ssize_t result = real(descriptor, data, is_shortened(&turn) ? (length + 1) / 2 : length);
    end(&turn, result >= 0, place, data, result);
    return result;
}

ssize_t pwrite64(int descriptor, const void *data, size_t length, off64_t place) {
    REAL(pwrite64);
    struct turn turn;
    if (begin(&turn, "write", 0, descriptor, NULL, 0, NULL))
        return -1;
    /* Half of a direct write would have to be aligned, as no disk makes it. */
    int is_direct = is_shortened(&turn) && fcntl(descriptor, F_GETFL) & O_DIRECT;
    size_t half = is_direct ? length / 2 / 4096 * 4096 : (length + 1) / 2;
    ssize_t result =
        real(descriptor, data, is_shortened(&turn) && half ? half : length, place);
    end(&turn, result >= 0, place, data, result);
    return result;
}
ssize_t pwrite(int descriptor, const void *data, size_t length, off_t place) {
    return pwrite64(descriptor, data, length, place);
}

/* Writes of several pieces become one write of the first: fewer bytes than asked for, which a
 * caller must be able to bear. */
ssize_t writev(int descriptor, const struct iovec *pieces, int count) {
    REAL(writev);
    if (attack == NULL || count < 1)
        return real(descriptor, pieces, count);
    return write(descriptor, pieces[0].iov_base, pieces[0].iov_len);
}
ssize_t pwritev64v2(int descriptor, const struct iovec *pieces, int count, off64_t place,
                    int flags) {
    REAL(pwritev64v2);
    if (attack == NULL || count < 1)
        return real(descriptor, pieces, count, place, flags);
    return pwrite64(descriptor, pieces[0].iov_base, pieces[0].iov_len, place);
}
ssize_t pwritev2(int descriptor, const struct iovec *pieces, int count, off_t place, int flags) {
    return pwritev64v2(descriptor, pieces, count, place, flags);
}
ssize_t pwritev64(int descriptor, const struct iovec *pieces, int count, off64_t place) {
    return pwritev64v2(descriptor, pieces, count, place, 0);
}
ssize_t pwritev(int descriptor, const struct iovec *pieces, int count, off_t place) {
    return pwritev64v2(descriptor, pieces, count, place, 0);
}

/* Copies in the kernel are refused while an attack is on; callers then read and write. */
ssize_t sendfile64(int into, int from, off64_t *place, size_t length) {
    REAL(sendfile64);
    if (attack == NULL)
        return real(into, from, place, length);
    errno = EINVAL;
    return -1;
}
ssize_t sendfile(int into, int from, off_t *place, size_t length) {
    return sendfile64(into, from, place, length);
}
ssize_t copy_file_range(int from, off64_t *start, int into, off64_t *place, size_t length,
                        unsigned flags) {
    REAL(copy_file_range);
    if (attack == NULL)
        return real(from, start, into, place, length, flags);
    errno = EXDEV;
    return -1;
}

int ftruncate64(int descriptor, off64_t size) {
    REAL(ftruncate64);
    struct turn turn;
    if (begin(&turn, "resize", 0, descriptor, NULL, 0, NULL))
        return -1;
    int result = real(descriptor, size);
    end(&turn, result == 0, size, NULL, 0);
    return result;
}
int ftruncate(int descriptor, off_t size) { return ftruncate64(descriptor, size); }

int truncate64(const char *path, off64_t size) {
    REAL(truncate64);
    struct turn turn;
    if (begin(&turn, "resize", 0, AT_FDCWD, path, 0, NULL))
        return -1;
    int result = real(path, size);
    end(&turn, result == 0, size, NULL, 0);
    return result;
}
int truncate(const char *path, off_t size) { return truncate64(path, size); }

int posix_fallocate64(int descriptor, off64_t place, off64_t length) {
    REAL(posix_fallocate64);
    struct turn turn;
    if (begin(&turn, "allocate", 0, descriptor, NULL, 0, NULL))
        return attack->error;
    int result = real(descriptor, place, length);
    end(&turn, result == 0, place + length, NULL, 0);
    return result;
}
int posix_fallocate(int descriptor, off_t place, off_t length) {
    return posix_fallocate64(descriptor, place, length);
}

/* ---------------------------------------------------------------- data reaches the disk */

int fsync(int descriptor) {
    REAL(fsync);
    struct turn turn;
    if (begin(&turn, "sync", 0, descriptor, NULL, 0, NULL))
        return -1;
    int result = real(descriptor);
    end(&turn, result == 0, 0, NULL, 0);
    return result;
}

int fdatasync(int descriptor) {
    REAL(fdatasync);
    struct turn turn;
    if (begin(&turn, "sync", 0, descriptor, NULL, 0, NULL))
        return -1;
    int result = real(descriptor);
    end(&turn, result == 0, 0, NULL, 0);
    return result;
}

/* ---------------------------------------------------------------- names change */

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    REAL(renameat2);
    struct turn turn;
    const char *call = flags & RENAME_EXCHANGE ? "exchange" : "rename";
    if (begin(&turn, call, 0, from_folder, from, to_folder, to))
        return -1;
    int result = real(from_folder, from, to_folder, to, flags);
    end(&turn, result == 0, 0, NULL, 0);
    return result;
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renameat2(from_folder, from, to_folder, to, 0);
}
int rename(const char *from, const char *to) {
    return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    REAL(linkat);
    struct turn turn;
    if (begin(&turn, "link", 0, from_folder, from, to_folder, to))
        return -1;
    int result = real(from_folder, from, to_folder, to, flags);
    end(&turn, result == 0, 0, NULL, 0);
    return result;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int symlinkat(const char *content, int folder, const char *path) {
    REAL(symlinkat);
    struct turn turn;
    if (begin(&turn, "symlink", 0, folder, path, 0, NULL))
        return -1;
    int result = real(content, folder, path);
    end(&turn, result == 0, 0, content, (long)strlen(content));
    return result;
}
int symlink(const char *content, const char *path) { return symlinkat(content, AT_FDCWD, path); }

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    struct turn turn;
    if (begin(&turn, flags & AT_REMOVEDIR ? "rmdir" : "unlink", 0, folder, path, 0, NULL))
        return -1;
    int result = real(folder, path, flags);
    end(&turn, result == 0, 0, NULL, 0);
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    struct turn turn;
    if (begin(&turn, "mkdir", 0, folder, path, 0, NULL))
        return -1;
    int result = real(folder, path, mode);
    end(&turn, result == 0, 0, NULL, 0);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* ---------------------------------------------------------------- data is read */

static int is_file(int descriptor) {
    struct stat status;
    return attack != NULL && attack->reads && fstat(descriptor, &status) == 0 &&
           S_ISREG(status.st_mode);
}

ssize_t read(int descriptor, void *data, size_t length) {
    REAL(read);
    struct turn turn;
    if (!is_file(descriptor))
        return real(descriptor, data, length);
    if (begin(&turn, "read", 1, descriptor, NULL, 0, NULL))
        return -1;
    ssize_t result = real(descriptor, data, is_shortened(&turn) ? (length + 1) / 2 : length);
    end(&turn, 0, 0, NULL, 0);
    return result;
}

ssize_t pread64(int descriptor, void *data, size_t length, off64_t place) {
    REAL(pread64);
    struct turn turn;
    if (!is_file(descriptor))
        return real(descriptor, data, length, place);
    if (begin(&turn, "read", 1, descriptor, NULL, 0, NULL))
        return -1;
    ssize_t result =
        real(descriptor, data, is_shortened(&turn) ? (length + 1) / 2 : length, place);
    end(&turn, 0, 0, NULL, 0);
    return result;
}
ssize_t pread(int descriptor, void *data, size_t length, off_t place) {
    return pread64(descriptor, data, length, place);
}

ssize_t preadv64v2(int descriptor, const struct iovec *pieces, int count, off64_t place,
                   int flags) {
    REAL(preadv64v2);
    if (count < 1 || !is_file(descriptor))
        return real(descriptor, pieces, count, place, flags);
    return pread64(descriptor, pieces[0].iov_base, pieces[0].iov_len, place);
}
ssize_t preadv2(int descriptor, const struct iovec *pieces, int count, off_t place, int flags) {
    return preadv64v2(descriptor, pieces, count, place, flags);
}
ssize_t preadv64(int descriptor, const struct iovec *pieces, int count, off64_t place) {
    return preadv64v2(descriptor, pieces, count, place, 0);
}
ssize_t preadv(int descriptor, const struct iovec *pieces, int count, off_t place) {
    return preadv64v2(descriptor, pieces, count, place, 0);
}

/* ---------------------------------------------------------------- calls without a wrapper */

long syscall(long number, ...) {
    REAL(syscall);
    long given[6];
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; i++)
        given[i] = va_arg(more, long);
    va_end(more);
    if (number == SYS_renameat2)
        return renameat2((int)given[0], (const char *)given[1], (int)given[2],
                         (const char *)given[3], (unsigned)given[4]);
    return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
