// libtocsin_cupti.so: libcuda loads it into a program at cuInit where CUDA_INJECTION64_PATH names it, and calls
// InitializeInjection.
//
// It then does nothing but to look, twice a second and in a thread of its own, whether somebody has asked for a window
// (diagnosis/contracts/kernelwindow.py): CUPTI is not loaded, not called and not in the program's way. When a window is
// asked for, it waits for the round that was named, attaches, records, writes what it has condensed beside the frames,
// and takes CUPTI out of the process again. Whatever is wrong, there is no window and a number that says why.
//
// There is one client of CUPTI in a process. So it keeps away where another was here first, and where the program was
// started with a profiler that will come later.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "client.h"
#include "condenser.h"
#include "frame_file.h"
#include "identity.h"
#include "old_glibc.h"
#include "own_rounds.h"
#include "window_file.h"

namespace tocsin {
namespace {

static_assert(sizeof(tocsin_window_control) == TOCSIN_WINDOW_CONTROL_BYTES, "the control's size");
static_assert(sizeof(tocsin_window_header) == TOCSIN_WINDOW_HEADER_BYTES, "the header's size");

constexpr uint64_t kSecond_ns = 1000000000;
constexpr uint64_t kDormantLook_ns = kSecond_ns / 2;
constexpr uint64_t kFarLook_ns = kSecond_ns / 100, kNearLook_ns = kSecond_ns / 1000;
constexpr uint64_t kNearRounds = 8;
constexpr uint64_t kExitWait_ns = 2 * kSecond_ns;
constexpr size_t kDirectoryBytes = 4096;
constexpr size_t kStackBytes = 256 << 10;

tocsin_window_control* g_control;
char g_directory[kDirectoryBytes];
int32_t g_pid;
uint32_t g_leaving;
uint32_t g_busy;  // a window is under way

template <class T>
T load(const T& from) {
  return __atomic_load_n(&from, __ATOMIC_ACQUIRE);
}

template <class T>
void store(T& into, T value) {
  __atomic_store_n(&into, value, __ATOMIC_RELEASE);
}

void nap(uint64_t ns) {
  const timespec length = {(time_t)(ns / kSecond_ns), (long)(ns % kSecond_ns)};
  nanosleep(&length, nullptr);
}

struct Request {
  uint64_t window, comm_id, warm_round, first_round, end_round, step_rounds, duration_ns, deadline_ns;
  uint32_t collect, number;
};

// The file is the daemon's to write at any time: it is read once, and checked as it was read.
Request read_request(uint32_t number) {
  const tocsin_window_control& from = *g_control;
  return {load(from.window),    load(from.comm_id),     load(from.warm_round),  load(from.first_round),
          load(from.end_round), load(from.step_rounds), load(from.duration_ns), load(from.deadline_ns),
          load(from.collect),   number};
}

bool makes_sense(const Request& request, uint64_t now_ns) {
  const uint64_t longest_ns = TOCSIN_WINDOW_WINDOW_S_MAX * kSecond_ns;
  const bool soon = request.deadline_ns <= now_ns + longest_ns;
  const bool by_time = request.duration_ns > 0 && request.duration_ns <= longest_ns;
  const bool by_round = request.warm_round <= request.first_round && request.first_round < request.end_round;
  return soon && (request.comm_id ? by_round : by_time);
}

// One window from its request to its end.
struct Window {
  Request request;
  OwnRounds own;
  Condenser* condenser;
  tocsin_window_header header;
  uint64_t entered;  // rounds, when looked at last
  bool found;        // a frame knows the communicator, or did

  // Null where nothing hinders it from going on; else what does.
  uint32_t hindered() const {
    if (load(g_leaving) || tocsin_now_ns() >= request.deadline_ns) {
      return request.comm_id && !found ? TOCSIN_WHY_NO_ROUNDS : TOCSIN_WHY_DEADLINE;
    }
    return TOCSIN_WHY_NONE;
  }

  // Waits until so many rounds were entered. Without a communicator every round has been.
  uint32_t await_round(uint64_t round, bool replaceable) {
    for (;;) {
      if (!request.comm_id) {
        return TOCSIN_WHY_NONE;
      }
      found = rounds_entered(own, g_directory, g_pid, request.comm_id, &entered) || found;
      if (entered >= round) {
        return TOCSIN_WHY_NONE;
      }
      const uint32_t why = hindered();
      if (why != TOCSIN_WHY_NONE) {
        return why;
      }
      if (replaceable && load(g_control->asked) != request.number) {
        return TOCSIN_WHY_REPLACED;
      }
      nap(found && round - entered <= kNearRounds ? kNearLook_ns : kFarLook_ns);
    }
  }

  // Where the first round was entered before recording could begin: the next step's. False where there is none in the
  // window: ranks are compared over the same steps.
  bool is_in_time() {
    if (!request.comm_id) {
      return true;
    }
    found = rounds_entered(own, g_directory, g_pid, request.comm_id, &entered) || found;
    if (entered < request.first_round) {
      return true;
    }
    if (request.step_rounds == 0 || entered >= request.end_round) {
      return false;
    }
    const uint64_t steps = (entered - request.first_round) / request.step_rounds + 1;
    if (steps > (request.end_round - request.first_round - 1) / request.step_rounds) {
      return false;
    }
    request.first_round += steps * request.step_rounds;
    return true;
  }

  uint32_t await_end() {
    const uint64_t end_ns = header.begin_mono_ns + request.duration_ns;
    while (!request.comm_id && tocsin_now_ns() < end_ns) {
      const uint32_t why = hindered();
      if (why != TOCSIN_WHY_NONE) {
        return why;
      }
      nap(kNearLook_ns);
    }
    return await_round(request.end_round, false);
  }

  void begin() {
    header.first_round = entered;
    header.begin_mono_ns = tocsin_now_ns();
    header.begin_ns = client_now_ns();
    client_begin(header.begin_ns);
    store(g_control->state, (uint32_t)TOCSIN_STATE_RECORDING);
  }

  void end() {
    header.end_ns = client_now_ns();
    header.end_mono_ns = tocsin_now_ns();
    header.end_round = entered;
    client_end(header.end_ns);
    store(g_control->state, (uint32_t)TOCSIN_STATE_CLOSING);
  }

  bool write() {
    sweep(*condenser);
    tocsin_window_header whole = condenser->told;
    whole.magic = TOCSIN_WINDOW_MAGIC_WINDOW;
    whole.version = TOCSIN_WINDOW_VERSION;
    whole.header_bytes = sizeof whole;
    whole.row_bytes = sizeof(tocsin_window_row);
    whole.pid = g_pid;
    whole.rank = g_control->rank;
    whole.pid_start_ticks = g_control->pid_start_ticks;
    whole.window = request.window;
    whole.comm_id = request.comm_id;
    whole.first_round = header.first_round, whole.end_round = header.end_round;
    whole.begin_ns = header.begin_ns, whole.end_ns = header.end_ns;
    whole.begin_mono_ns = header.begin_mono_ns, whole.end_mono_ns = header.end_mono_ns;
    whole.why = header.why, whole.error = header.error;
    whole.cupti_version = client_version();
    char name[TOCSIN_FRAME_NAME_BYTES];
    tocsin_frame_name(name, g_pid, ".cupti.window");
    return write_window(*condenser, whole, g_directory, name, client_call_name);
  }

  Outcome record() {
    store(g_control->state, (uint32_t)TOCSIN_STATE_READY);
    const Outcome attached = client_attach(condenser, request.collect);
    store(g_control->cupti_version, client_version());
    if (attached.why != TOCSIN_WHY_NONE) {
      return attached;
    }
    const uint32_t never = is_in_time() ? await_round(request.first_round, false) : (uint32_t)TOCSIN_WHY_LATE;
    if (never != TOCSIN_WHY_NONE) {
      client_detach(load(g_leaving));
      return {never, 0};
    }
    begin();
    const uint32_t early = await_end();
    end();
    const Outcome detached = client_detach(load(g_leaving));
    header.why = early != TOCSIN_WHY_NONE ? early : detached.why;
    header.error = detached.error;
    if (load(g_leaving) || !write()) {
      return {TOCSIN_WHY_NO_FILE, 0};
    }
    return {header.why, header.error};
  }

  Outcome run() {
    if (!makes_sense(request, tocsin_now_ns())) {
      return {TOCSIN_WHY_REQUEST, 0};
    }
    if (tocsin_now_ns() >= request.deadline_ns) {
      return {TOCSIN_WHY_LATE, 0};
    }
    store(g_control->state, (uint32_t)TOCSIN_STATE_WAITING);
    const uint32_t why = await_round(request.warm_round, true);
    if (why != TOCSIN_WHY_NONE) {
      return {why, 0};
    }
    if (!is_in_time()) {
      return {TOCSIN_WHY_LATE, 0};
    }
    condenser = condenser_make();
    if (!condenser) {
      return {TOCSIN_WHY_REFUSED, ENOMEM};
    }
    const Outcome outcome = record();
    condenser_free(condenser);
    return outcome;
  }
};

void take_up(uint32_t number) {
  Window window = {read_request(number), {}, nullptr, {}, 0, false};
  store(g_control->taken, number);
  const Outcome outcome = window.run();
  forget_rounds(window.own);
  store(g_control->why, outcome.why);
  store(g_control->error, outcome.error);
  store(g_control->state, (uint32_t)TOCSIN_STATE_DORMANT);
  store(g_control->done, number);
}

void* look_out(void*) {
  while (!load(g_leaving)) {
    const uint32_t asked = load(g_control->asked);
    if (asked && asked != load(g_control->taken)) {
      store(g_busy, 1u);
      take_up(asked);
      store(g_busy, 0u);
    } else {
      nap(kDormantLook_ns);
    }
  }
  return nullptr;
}

// CUPTI takes itself down at the process's end; nobody may be in it then.
void leave(void) {
  store(g_leaving, 1u);
  const uint64_t give_up_ns = tocsin_now_ns() + kExitWait_ns;
  while (load(g_busy) && tocsin_now_ns() < give_up_ns) {
    nap(kNearLook_ns);
  }
}

// In the child of a fork there is no thread of ours, and CUDA works in none.
void forget_parent(void) {
  if (g_control) {
    mmap(g_control, TOCSIN_WINDOW_CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
  store(g_leaving, 1u);
  store(g_busy, 0u);
  client_forget();
}

// -- beginning ----------------------------------------------------------------------------------------------------------

const char* file_of(const char* path) {
  const char* const slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

uint32_t why_off(void) {
  const char* const injected = getenv("CUDA_INJECTION64_PATH");
  Dl_info self;
  if (injected && *injected && dladdr((const void*)&g_control, &self) && self.dli_fname &&
      strcmp(file_of(injected), file_of(self.dli_fname)) != 0) {
    return TOCSIN_WHY_OTHER_INJECTION;
  }
  const char* const kineto = getenv("KINETO_USE_DAEMON");
  return kineto && *kineto && strcmp(kineto, "0") != 0 ? TOCSIN_WHY_KINETO : TOCSIN_WHY_NONE;
}

bool start_looking(void) {
  sigset_t all, before;
  pthread_attr_t attributes;
  pthread_t thread;
  if (pthread_attr_init(&attributes) != 0) {
    return false;
  }
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  sigfillset(&all);  // the program's signals are for its own threads
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const bool started = pthread_create(&thread, &attributes, look_out, nullptr) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return started;
}

void write_control(tocsin_window_control& control, uint32_t why) {
  control.version = TOCSIN_WINDOW_VERSION;
  control.bytes = TOCSIN_WINDOW_CONTROL_BYTES;
  control.pid = g_pid;
  control.rank = tocsin_read_identity(-1, -1).rank;
  control.pid_start_ticks = tocsin_read_start_ticks();
  control.created_ns = tocsin_now_ns();
  control.why = why;
  control.state = why == TOCSIN_WHY_NONE ? TOCSIN_STATE_DORMANT : TOCSIN_STATE_OFF;
  store(control.magic, (uint64_t)TOCSIN_WINDOW_MAGIC_CONTROL);
}

void set_up(void) {
  const char* const directory = tocsin_frame_directory();
  if (!directory || strlen(directory) >= sizeof g_directory) {
    tocsin_debug_line("cupti: off, without a directory for frames");
    return;
  }
  strcpy(g_directory, directory);
  g_pid = getpid();
  char name[TOCSIN_FRAME_NAME_BYTES];
  tocsin_frame_name(name, g_pid, ".cupti.control");
  tocsin_window_control* const made =
      (tocsin_window_control*)tocsin_map_frame_file(directory, name, TOCSIN_WINDOW_CONTROL_BYTES);
  if (!made) {
    tocsin_debug_line("cupti: off, its control file could not be made");
    return;
  }
  const uint32_t why = why_off();
  write_control(*made, why);
  g_control = made;
  if (why != TOCSIN_WHY_NONE) {
    return;
  }
  if (pthread_atfork(nullptr, nullptr, forget_parent) != 0 || atexit(leave) != 0 || !start_looking()) {
    store(made->state, (uint32_t)TOCSIN_STATE_OFF);
  }
}

}  // namespace
}  // namespace tocsin

extern "C" __attribute__((visibility("default"))) int InitializeInjection(void) {
  static uint32_t once;
  if (__atomic_exchange_n(&once, 1, __ATOMIC_ACQ_REL) == 0) {
    const int saved_errno = errno;
    tocsin::set_up();
    errno = saved_errno;
  }
  return 1;
}
