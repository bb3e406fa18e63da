#define _GNU_SOURCE
#include "frame_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// A file beyond this limit would not only fail: the kernel would end the program by SIGXFSZ.
static bool may_write(size_t bytes) {
  struct rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes);
}

static bool is_own_file(int directory_fd, const char* name) {
  struct statx about;
  // Past glibc, whose statx() came with 2.28: a preloaded library that asks for a newer glibc than the container has
  // keeps every program in it from starting.
  return syscall(SYS_statx, directory_fd, name, AT_SYMLINK_NOFOLLOW, STATX_TYPE | STATX_UID, &about) == 0 &&
         S_ISREG(about.stx_mode) && about.stx_uid == geteuid();
}

// On a full tmpfs a sparse file would kill the job by SIGBUS later, hence the allocation.
static int create(int directory_fd, const char* name, size_t bytes) {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  int fd = openat(directory_fd, name, flags, 0600);
  if (fd < 0 && errno == EEXIST && is_own_file(directory_fd, name) && unlinkat(directory_fd, name, 0) == 0) {
    fd = openat(directory_fd, name, flags, 0600);
  }
  if (fd >= 0 && posix_fallocate(fd, 0, (off_t)bytes) != 0) {
    close(fd);
    unlinkat(directory_fd, name, 0);
    return -1;
  }
  return fd;
}

void* tocsin_map_frame_file(const char* directory, const char* name, size_t bytes) {
  if (!may_write(bytes)) {
    return NULL;
  }
  const int directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory_fd < 0) {
    return NULL;
  }
  const int fd = create(directory_fd, name, bytes);
  void* memory = MAP_FAILED;
  if (fd >= 0) {
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
      unlinkat(directory_fd, name, 0);
    }
    close(fd);
  }
  close(directory_fd);
  return memory == MAP_FAILED ? NULL : memory;
}

uint64_t tocsin_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
