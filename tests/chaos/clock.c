/* A wall clock that jumps, for Python code alone: LD_PRELOAD it, and write seconds (int64) to the file CHAOS_CLOCK.

   Libraries see the true time: they wait for absolute times in the kernel, whose clock does not jump with this one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *jump_s;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *jump_s, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) jump_s = page;
    close(file);
}

static int in_interpreter(const void *caller) {
    Dl_info found;
    if (!dladdr(caller, &found) || !found.dli_fname) return 0;
    const char *slash = strrchr(found.dli_fname, '/');
    const char *name = slash ? slash + 1 : found.dli_fname;
    return strncmp(name, "python", 6) == 0 || strncmp(name, "libpython", 9) == 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    int wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (!failed && wall && jump_s && in_interpreter(__builtin_return_address(0))) now->tv_sec += *jump_s;
    return (int)failed;
}
