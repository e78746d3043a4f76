/* A file system that shows a folder, read-only, and takes its time: each read is answered after a
   delay, and all of them together get a limited number of bytes per second, as a network file
   system would. Linux, libfuse 3.12 or newer.

     cc -O2 -Wall bench/slow_files.c -o slow_files $(pkg-config --cflags --libs fuse3)
     DELAY_MS=5 MB_PER_SECOND=3000 FOLDER=bench/data ./slow_files -f /mnt/slow -o max_threads=512
     fusermount3 -u /mnt/slow

   IN_FLIGHT is how many reads ahead the kernel has under way at once: 12 unless a FUSE file system
   says otherwise, 64 or more for NFS. What it reads ahead, 128 KiB, is set while it is mounted, in
   /sys/class/bdi/MAJOR:MINOR/read_ahead_kb. */

#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int folder;
static double delay_seconds, bytes_per_second, free_from;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double setting(const char *name, double otherwise) {
    const char *given = getenv(name);
    return given ? atof(given) : otherwise;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Until the bytes have had their turn on the line, and the delay has passed. */
static void wait_for(size_t bytes) {
    double until, begun = now();
    pthread_mutex_lock(&lock);
    if (free_from < begun) free_from = begun;
    free_from += bytes / bytes_per_second;
    until = free_from + delay_seconds;
    pthread_mutex_unlock(&lock);
    struct timespec time = {(time_t)until, (long)(1e9 * (until - (time_t)until))};
    if (until > begun) while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR);
}

static const char *below(const char *path) { return path[1] ? path + 1 : "."; }

static int slow_getattr(const char *path, struct stat *found, struct fuse_file_info *info) {
    (void)info;
    return fstatat(folder, below(path), found, AT_SYMLINK_NOFOLLOW) ? -errno : 0;
}

static int slow_readdir(const char *path, void *into, fuse_fill_dir_t fill, off_t offset,
                        struct fuse_file_info *info, enum fuse_readdir_flags flags) {
    (void)offset, (void)info, (void)flags;
    DIR *opened = fdopendir(openat(folder, below(path), O_RDONLY | O_DIRECTORY));
    if (!opened) return -errno;
    for (struct dirent *entry; (entry = readdir(opened));) fill(into, entry->d_name, NULL, 0, 0);
    closedir(opened);
    return 0;
}

static int slow_open(const char *path, struct fuse_file_info *info) {
    if ((info->flags & O_ACCMODE) != O_RDONLY) return -EROFS;
    info->fh = openat(folder, below(path), O_RDONLY);
    return (int)info->fh < 0 ? -errno : 0;
}

static int slow_read(const char *path, char *into, size_t size, off_t offset,
                     struct fuse_file_info *info) {
    (void)path;
    ssize_t count = pread(info->fh, into, size, offset);
    if (count < 0) return -errno;
    wait_for(count);
    return count;
}

static int slow_release(const char *path, struct fuse_file_info *info) {
    (void)path;
    close(info->fh);
    return 0;
}

static void *slow_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    connection->max_background = setting("IN_FLIGHT", 64);
    connection->congestion_threshold = connection->max_background;
    config->entry_timeout = config->attr_timeout = 1e6;
    return NULL;
}

int main(int count, char **arguments) {
    const struct fuse_operations operations = {
        .init = slow_init, .getattr = slow_getattr, .readdir = slow_readdir, .open = slow_open,
        .read = slow_read, .release = slow_release,
    };
    delay_seconds = 1e-3 * setting("DELAY_MS", 5);
    bytes_per_second = 1e6 * setting("MB_PER_SECOND", 3000);
    folder = open(getenv("FOLDER") ? getenv("FOLDER") : ".", O_RDONLY | O_DIRECTORY);
    if (folder < 0) return perror("FOLDER"), 1;
    return fuse_main(count, arguments, &operations, NULL);
}
