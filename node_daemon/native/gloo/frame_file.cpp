#include "frame_file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "communicators.h"
#include "identity.h"
#include "rounds.h"
#include "symbols.h"

namespace tocsin {

static_assert(sizeof(Frame) == TOCSIN_FRAME_HEADER_BYTES + TOCSIN_FRAME_SLOT_COUNT * TOCSIN_FRAME_SLOT_BYTES,
              "the frame is a header and its slots, without padding");

Frame* g_frame;
uint32_t g_frame_state;

namespace {

constexpr uint64_t kOtherThreadWait_ns = 1000000000;

uint32_t g_fork_handler_set;

// In the child of a fork: the mapping is the parent's frame, and its groups and rounds are the parent's too. The child
// makes a frame of its own when it uses a collective itself.
void forget_parent() {
  if (g_frame) {
    munmap(g_frame, sizeof(Frame));
    g_frame = nullptr;
  }
  forget_communicators();
  forget_rounds();
  store_release(g_frame_state, FRAME_UNSET);
}

// A file beyond this limit would not only fail: the kernel would end the program by SIGXFSZ.
bool may_write_frame() {
  rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= sizeof(Frame));
}

// Creates the file with real space behind it: on a full tmpfs a sparse file would kill the job by SIGBUS later.
int create_file(const char* directory, int32_t pid) {
  const int directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory_fd < 0) {
    return -1;
  }
  char name[32];
  snprintf(name, sizeof name, "%d.frame", pid);
  constexpr int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  int fd = openat(directory_fd, name, flags, 0600);
  struct stat about;
  // A file with our process number and our user is what a dead namesake left, or this process before an exec.
  if (fd < 0 && errno == EEXIST && fstatat(directory_fd, name, &about, AT_SYMLINK_NOFOLLOW) == 0 &&
      S_ISREG(about.st_mode) && about.st_uid == geteuid() && unlinkat(directory_fd, name, 0) == 0) {
    fd = openat(directory_fd, name, flags, 0600);
  }
  if (fd >= 0 && posix_fallocate(fd, 0, sizeof(Frame)) != 0) {
    close(fd);
    unlinkat(directory_fd, name, 0);
    fd = -1;
  }
  close(directory_fd);
  return fd;
}

Frame* map_frame(const char* directory, int32_t pid) {
  const int fd = may_write_frame() ? create_file(directory, pid) : -1;
  if (fd < 0) {
    debug_line("no frame: the file could not be made");
    return nullptr;
  }
  void* memory = mmap(nullptr, sizeof(Frame), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) {
    debug_line("no frame: the file could not be mapped");
    return nullptr;
  }
  return static_cast<Frame*>(memory);
}

void write_header(tocsin_header& header, int32_t pid, uint32_t missing) {
  const FirstGroup first = first_group();
  const Identity who = read_identity(first.rank, first.size);
  header.version = TOCSIN_FRAME_VERSION;
  header.header_bytes = TOCSIN_FRAME_HEADER_BYTES;
  header.slot_bytes = TOCSIN_FRAME_SLOT_BYTES;
  header.slot_count = TOCSIN_FRAME_SLOT_COUNT;
  header.pid = pid;
  header.rank = who.rank;
  header.pid_start_ticks = read_start_ticks();
  header.world_size = who.world_size;
  header.local_rank = who.local_rank;
  header.gpu = who.gpu;
  header.step_id = who.step_id;
  header.created_ns = now_ns();
  header.symbols_missing = missing;
  header.transport = TOCSIN_TRANSPORT_GLOO;
  strcpy(header.library, "torch gloo");
  store_release(header.magic, TOCSIN_FRAME_MAGIC);
}

Frame* set_up() {
  const char* directory = getenv("TOCSIN_FRAME_DIR");
  const char* disabled = getenv("TOCSIN_DISABLE");
  if (!directory || !*directory || (disabled && strcmp(disabled, "") != 0 && strcmp(disabled, "0") != 0)) {
    debug_line("no frame: TOCSIN_FRAME_DIR is not set, or TOCSIN_DISABLE is");
    return nullptr;
  }
  const uint32_t missing = symbols_missing();
  if (missing & (1u << SYMBOL_ENQUEUE | 1u << SYMBOL_EXECUTE)) {
    debug_line("no frame: this torch lacks a function that the probe must see");
    return nullptr;
  }
  const int32_t pid = getpid();
  Frame* made = map_frame(directory, pid);
  if (made) {
    write_header(made->header, pid, missing);
  }
  return made;
}

}  // namespace

Frame* make_frame() {
  const int saved_errno = errno;
  // Before anything that a forked child would have to undo.
  const bool handler_set = !swap_if<uint32_t>(g_fork_handler_set, 0, 1) ||
                           pthread_atfork(nullptr, nullptr, forget_parent) == 0;
  if (swap_if<uint32_t>(g_frame_state, FRAME_UNSET, FRAME_BUSY)) {
    g_frame = handler_set ? set_up() : nullptr;
    store_release(g_frame_state, g_frame ? FRAME_ON : FRAME_OFF);
  }
  // Another thread may be making it, once in the life of the process; no job ever waits longer for us than this.
  const uint64_t give_up_ns = now_ns() + kOtherThreadWait_ns;
  while (load_acquire(g_frame_state) == FRAME_BUSY && now_ns() < give_up_ns) {
    sched_yield();
  }
  errno = saved_errno;
  return load_acquire(g_frame_state) == FRAME_ON ? g_frame : nullptr;
}

void debug_line(const char* text) {
  if (!getenv("TOCSIN_PROBE_DEBUG")) {
    return;
  }
  char line[256];
  const int length = snprintf(line, sizeof line, "tocsin probe[%d]: %s\n", getpid(), text);
  const ssize_t written = write(STDERR_FILENO, line, length);
  (void)written;
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace tocsin
