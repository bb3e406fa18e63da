#define _GNU_SOURCE
#include "nccl_frame.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "atomic_fields.h"
#include "communicators.h"
#include "frame_file.h"
#include "identity.h"
#include "masks.h"
#include "old_glibc.h"

_Static_assert(sizeof(nccl_frame) == TOCSIN_FRAME_HEADER_BYTES + TOCSIN_FRAME_SLOT_COUNT * TOCSIN_FRAME_SLOT_BYTES,
               "the frame is a header and its slots, without padding");

nccl_frame* g_frame;
int32_t g_pid;

enum { STATE_UNSET, STATE_BUSY, STATE_OFF, STATE_ON };

static uint32_t g_state;
static uint32_t g_fork_handler_set;
static uint32_t g_said;

static const uint64_t kOtherThreadWait_ns = 1000000000;
static const uint64_t kNanosecondsPerSecond = 1000000000;
static const uint64_t kShmBytesMin = 512u << 20;  // free in /dev/shm, for up to 16 ranks at NCCL's 32 MiB

// In the child of a fork: private memory takes the place of the parent's frame, so that no pointer dangles and nothing
// that the child still does is told as the parent's.
static void forget_parent(void) {
  if (g_frame) {
    mmap(g_frame, sizeof(nccl_frame), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
  forget_communicators();
  STORE_RELEASE(g_state, STATE_UNSET);
}

void say_once(nccl_log log, const char* text) {
  if (!SWAP_IF(g_said, 0, 1)) {
    return;
  }
  tocsin_debug_line(text);
  if (log) {
    log(NCCL_LOG_INFO, NCCL_LOG_PROFILE, "tocsin", 0, "%s", text);
  }
}

// The release of the NCCL that called: asked of the library that its logger lies in, 0 where that does not tell. Python
// loads libnccl RTLD_LOCAL, so it is looked up by file, without loading it.
static uint32_t ask_version(nccl_log log) {
  Dl_info info;
  if (!log || !dladdr((const void*)(uintptr_t)log, &info) || !info.dli_fname) {
    return 0;
  }
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) {
    return 0;
  }
  int (*get_version)(int*) = (int (*)(int*))(uintptr_t)dlsym(library, "ncclGetVersion");
  dlclose(library);
  int version = 0;
  return get_version && get_version(&version) == 0 && version > 0 ? (uint32_t)version : 0;
}

static tocsin_safe_masks safe_masks(uint32_t version, uint32_t interface) {
  tocsin_safe_masks row = {0};
  const bool known = version >= kSafeMasks[0].since;
  const tocsin_safe_masks* table = known ? kSafeMasks : kSafeMasksUnknown;
  const size_t rows = known ? sizeof kSafeMasks / sizeof *kSafeMasks : sizeof kSafeMasksUnknown / sizeof *kSafeMasks;
  for (size_t i = 0; i < rows; ++i) {
    if (known ? table[i].since <= version : table[i].since == interface) {
      row = table[i];
    }
  }
  struct statvfs shm;
  if (statvfs("/dev/shm", &shm) != 0 || (uint64_t)shm.f_bavail * shm.f_frsize < kShmBytesMin) {
    row.standing &= ~row.needs_shm;
    row.widest &= ~row.needs_shm;
  }
  return row;
}

// TOCSIN_NCCL_EVENTS, a mask as a decimal number, is the user's own word and counts for more than the table.
events events_of(nccl_log log, uint32_t interface) {
  const int saved_errno = errno;
  const tocsin_safe_masks row = safe_masks(ask_version(log), interface);
  const int32_t asked = tocsin_env_number("TOCSIN_NCCL_EVENTS");
  const uint32_t standing = asked >= 0 ? (uint32_t)asked & 0xFFFF : row.standing;
  errno = saved_errno;
  return (events){standing, row.widest | standing};
}

static void write_header(tocsin_header* header, int32_t rank, int32_t ranks, uint32_t version) {
  // torchrun's words are about the job; a communicator need not be the world.
  const bool told = tocsin_env_number("RANK") >= 0 && tocsin_env_number("WORLD_SIZE") > 0;
  const tocsin_identity who = tocsin_read_identity(told ? -1 : rank, told ? -1 : ranks);
  header->version = TOCSIN_FRAME_VERSION;
  header->header_bytes = TOCSIN_FRAME_HEADER_BYTES;
  header->slot_bytes = TOCSIN_FRAME_SLOT_BYTES;
  header->slot_count = TOCSIN_FRAME_SLOT_COUNT;
  header->pid = g_pid;
  header->pid_start_ticks = tocsin_read_start_ticks();
  header->rank = who.rank;
  header->world_size = who.world_size;
  header->local_rank = who.local_rank;
  header->gpu = who.gpu;
  header->step_id = who.step_id;
  header->created_ns = tocsin_now_ns();
  header->transport = TOCSIN_TRANSPORT_NCCL;
  header->library_version = version;
  strcpy(header->library, "NCCL");
  STORE_RELEASE(header->magic, TOCSIN_FRAME_MAGIC);
}

static bool set_up(int32_t rank, int32_t ranks, nccl_log log) {
  const char* directory = tocsin_frame_directory();
  if (!directory) {
    say_once(log, "tocsin is off: TOCSIN_FRAME_DIR is not set, or TOCSIN_DISABLE is");
    return false;
  }
  char name[TOCSIN_FRAME_NAME_BYTES];
  g_pid = getpid();
  tocsin_frame_name(name, g_pid, ".nccl.frame");
  nccl_frame* made = tocsin_map_frame_file(directory, name, sizeof *made);
  if (!made) {
    tocsin_say_absent(directory);
    say_once(log, "tocsin is off: its frame could not be made");
    return false;
  }
  write_header(&made->header, rank, ranks, ask_version(log));
  STORE_RELEASE(g_frame, made);
  return true;
}

bool frame_ready(int32_t rank, int32_t ranks, nccl_log log) {
  const int saved_errno = errno;
  const bool handler_set =
      !SWAP_IF(g_fork_handler_set, 0, 1) || pthread_atfork(NULL, NULL, forget_parent) == 0;
  if (SWAP_IF(g_state, STATE_UNSET, STATE_BUSY)) {
    const bool made = handler_set && set_up(rank, ranks, log);
    STORE_RELEASE(g_state, made ? STATE_ON : STATE_OFF);
  }
  // Communicators are made by several threads at once; none waits longer than this for another.
  const uint64_t give_up_ns = tocsin_now_ns() + kOtherThreadWait_ns;
  while (LOAD_ACQUIRE(g_state) == STATE_BUSY && tocsin_now_ns() < give_up_ns) {
    sched_yield();
  }
  errno = saved_errno;
  return LOAD_ACQUIRE(g_state) == STATE_ON;
}

uint32_t events_wanted(const events* allowed, uint64_t now_ns) {
  const uint64_t control = LOAD(g_frame->header.control);
  const uint64_t until_s = control >> 32, now_s = now_ns / kNanosecondsPerSecond;
  const bool asked = until_s > now_s && until_s - now_s <= TOCSIN_FRAME_WIDEN_S_MAX;
  return allowed->standing | (asked ? (uint32_t)control & allowed->widest : 0);
}
