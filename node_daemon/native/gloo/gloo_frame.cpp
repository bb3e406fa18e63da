#include "gloo_frame.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "communicators.h"
#include "frame_file.h"
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

bool g_fork_handler_set;

// In the child of a fork: the mapping is the parent's frame, and its groups and rounds are the parent's too. The child
// makes a frame of its own when it uses a collective itself.
void forget_parent() {
  if (communicators_untouched() && load(g_frame_state) == FRAME_UNSET) {
    return;  // bash, and every other program without a collective
  }
  if (g_frame) {
    munmap(g_frame, sizeof(Frame));
    g_frame = nullptr;
  }
  forget_communicators();
  forget_rounds();
  store_release(g_frame_state, FRAME_UNSET);
}

// While the process has one thread yet: later another thread could fork while it is being set, and whatever it is
// there to undo in the child (a lock that is held, a frame that is being made) would stay.
__attribute__((constructor)) void watch_forks() {
  g_fork_handler_set = pthread_atfork(nullptr, nullptr, forget_parent) == 0;
}

Frame* map_frame(const char* directory, int32_t pid) {
  char name[TOCSIN_FRAME_NAME_BYTES];
  tocsin_frame_name(name, pid, ".frame");
  void* memory = tocsin_map_frame_file(directory, name, sizeof(Frame));
  if (!memory) {
    tocsin_say_absent(directory);
    tocsin_debug_line("no frame: the file could not be made");
  }
  return static_cast<Frame*>(memory);
}

void write_header(tocsin_header& header, int32_t pid, uint32_t missing) {
  const FirstGroup first = first_group();
  const tocsin_identity who = tocsin_read_identity(first.rank, first.size);
  header.version = TOCSIN_FRAME_VERSION;
  header.header_bytes = TOCSIN_FRAME_HEADER_BYTES;
  header.slot_bytes = TOCSIN_FRAME_SLOT_BYTES;
  header.slot_count = TOCSIN_FRAME_SLOT_COUNT;
  header.pid = pid;
  header.rank = who.rank;
  header.pid_start_ticks = tocsin_read_start_ticks();
  header.world_size = who.world_size;
  header.local_rank = who.local_rank;
  header.gpu = who.gpu;
  header.step_id = who.step_id;
  header.created_ns = tocsin_now_ns();
  header.symbols_missing = missing;
  header.transport = TOCSIN_TRANSPORT_GLOO;
  strcpy(header.library, "torch gloo");
  store_release(header.magic, TOCSIN_FRAME_MAGIC);
}

Frame* set_up() {
  const char* directory = tocsin_frame_directory();
  if (!directory) {
    tocsin_debug_line("no frame: TOCSIN_FRAME_DIR is not set, or TOCSIN_DISABLE is");
    return nullptr;
  }
  const uint32_t missing = symbols_missing();
  if (missing & (1u << SYMBOL_ENQUEUE | 1u << SYMBOL_EXECUTE)) {
    tocsin_debug_line("no frame: this torch lacks a function that the probe must see");
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
  if (swap_if<uint32_t>(g_frame_state, FRAME_UNSET, FRAME_BUSY)) {
    g_frame = g_fork_handler_set ? set_up() : nullptr;
    store_release(g_frame_state, g_frame ? FRAME_ON : FRAME_OFF);
  }
  // Another thread may be making it, once in the life of the process; no job ever waits longer for us than this.
  const uint64_t give_up_ns = tocsin_now_ns() + kOtherThreadWait_ns;
  while (load_acquire(g_frame_state) == FRAME_BUSY && tocsin_now_ns() < give_up_ns) {
    sched_yield();
  }
  errno = saved_errno;
  return load_acquire(g_frame_state) == FRAME_ON ? g_frame : nullptr;
}

}  // namespace tocsin
