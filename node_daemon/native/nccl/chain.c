// Another profiler plugin behind this one. NCCL loads only one, so where a user wants another too, TOCSIN_NCCL_CHAIN names
// it as NCCL_PROFILER_PLUGIN would, and both get what each has asked for. What v5, v6 and v7 share lies at the same
// places, so one that was made for an older of them hears of the kinds that it knows.
//
// NCCL keeps one handle for an event, and two plugins have two. A handle is then a place in a ring of pairs with its
// turn: one ring for what ends within its parent (steps, kernels), one for what is a parent for long (calls, tasks), each
// far longer than all that can be under way. A handle whose place was taken over is recognised by its turn and dropped.
// Without the variable nothing of this is in the way: the interfaces then lead to this plugin's own functions.
#define _GNU_SOURCE
#include "chain.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "atomic_fields.h"
#include "communicators.h"
#include "identity.h"
#include "old_glibc.h"

enum { CONTEXTS_MAX = 2 * COMMUNICATORS_MAX, RING = 1 << 16, INTERFACES = 4, OLDEST = 4 };

typedef struct chained {
  uint32_t used;
  int mask;  // what the other asks for
  uint64_t known;
  void* ours;
  void* theirs;
  const nccl_profiler_v5* own;
  const nccl_profiler_v5* other;
} chained;

typedef struct pair {
  uint32_t turn;  // 0: never used
  void* ours;
  void* theirs;
  const nccl_profiler_v5* other;
} pair;

static chained g_contexts[CONTEXTS_MAX];
static pair g_pairs[2][RING];
static uint64_t g_taken[2];
static nccl_profiler_v4 g_own_v4;
static nccl_profiler_v5 g_own[INTERFACES];      // by interface, from 4; of v4 what follows init
static const nccl_profiler_v5* g_others[INTERFACES];  // likewise; null: the other has none that fits
static uint64_t g_known[INTERFACES];                  // likewise: the kinds of events that the other's interface has
static int32_t g_process;

// -- handles ------------------------------------------------------------------------------------------------------------

static bool is_short(uint64_t type) {
  return type & (NCCL_PROXY_STEP | NCCL_PROXY_CTRL | NCCL_KERNEL_CH | NCCL_NET_PLUGIN | NCCL_CE_SYNC | NCCL_CE_BATCH |
                 NCCL_KERNEL_PHASE);
}

static void* keep(uint64_t type, void* ours, void* theirs, const nccl_profiler_v5* other) {
  if (!ours && !theirs) {
    return NULL;
  }
  const uint32_t ring = is_short(type);
  const uint64_t place = ADD(g_taken[ring], 1);
  const uint32_t turn = (uint32_t)(place / RING) + 1;
  pair* taken = &g_pairs[ring][place % RING];
  STORE(taken->turn, 0);
  STORE_RELEASE(taken->ours, ours);
  STORE_RELEASE(taken->theirs, theirs);
  STORE_RELEASE(taken->other, other);
  STORE_RELEASE(taken->turn, turn);
  return (void*)(uintptr_t)((uint64_t)turn << 20 | (place % RING) << 2 | ring << 1 | 1);
}

// Both parts of a handle, nulls where it is none of ours or its place is another's.
static pair both_of(const void* handle) {
  const uint64_t value = (uint64_t)(uintptr_t)handle;
  const pair* kept = &g_pairs[value >> 1 & 1][value >> 2 & (RING - 1)];
  const uint32_t turn = (uint32_t)(value >> 20);
  if (!(value & 1) || !turn || LOAD_ACQUIRE(kept->turn) != turn) {
    return (pair){0};
  }
  const pair found = {turn, LOAD_ACQUIRE(kept->ours), LOAD_ACQUIRE(kept->theirs), LOAD_ACQUIRE(kept->other)};
  return LOAD(kept->turn) == turn ? found : (pair){0};
}

// -- events -------------------------------------------------------------------------------------------------------------

// The kinds that NCCL delivers to who asks for these: parents come along.
static uint64_t delivered(uint64_t mask) {
  mask |= mask & NCCL_NET_PLUGIN ? NCCL_PROXY_STEP : 0;
  mask |= mask & NCCL_PROXY_STEP ? NCCL_PROXY_OP : 0;
  mask |= mask & NCCL_KERNEL_PHASE ? NCCL_KERNEL_CH : 0;
  mask |= mask & (NCCL_PROXY_OP | NCCL_KERNEL_CH) ? NCCL_COLL | NCCL_P2P : 0;
  mask |= mask & (NCCL_CE_SYNC | NCCL_CE_BATCH) ? NCCL_CE_COLL : 0;
  mask |= mask & (NCCL_COLL | NCCL_P2P) ? NCCL_GROUP : 0;
  mask |= mask & (NCCL_COLL | NCCL_CE_COLL) ? NCCL_COLL_API : 0;
  mask |= mask & NCCL_P2P ? NCCL_P2P_API : 0;
  return mask & (NCCL_COLL_API | NCCL_P2P_API | NCCL_KERNEL_LAUNCH) ? mask | NCCL_GROUP_API : mask;
}

static chained* context_of(void* context) {
  const uintptr_t offset = (uintptr_t)context - (uintptr_t)g_contexts;
  return offset < sizeof g_contexts && offset % sizeof(chained) == 0 ? context : NULL;
}

static int start_both(void* context, void** handle, nccl_event* event, uint64_t type, bool v4) {
  chained* to = context_of(context);
  // Of work for another process (PXN) neither context nor parents mean anything here.
  if (!to || (type == NCCL_PROXY_OP && event->proxy_op.pid != LOAD(g_process))) {
    *handle = NULL;
    return 0;
  }
  void** group = v4 ? NULL : type == NCCL_COLL ? &event->coll.group : type == NCCL_P2P ? &event->p2p.group : NULL;
  void *parent_before = event->parent, *group_before = group ? *group : NULL;
  const pair parent = both_of(parent_before), of_group = both_of(group_before);
  void *ours = NULL, *theirs = NULL;
  event->parent = parent.ours;
  if (group) {
    *group = of_group.ours;
  }
  if (to->ours) {
    to->own->start_event(to->ours, &ours, event);
  }
  event->parent = parent.theirs;
  if (group) {
    *group = of_group.theirs;
  }
  if (to->theirs && (delivered((uint32_t)LOAD(to->mask)) & to->known & type)) {
    to->other->start_event(to->theirs, &theirs, event);
  }
  event->parent = parent_before;
  if (group) {
    *group = group_before;
  }
  *handle = keep(type, ours, theirs, to->other);
  return 0;
}

static int start_both_v4(void* context, void** handle, nccl_event* event) {
  return start_both(context, handle, event, (uint8_t)event->type, true);
}

static int start_both_v5(void* context, void** handle, nccl_event* event) {
  return start_both(context, handle, event, event->type, false);
}

static int stop_both(void* handle) {
  const pair both = both_of(handle);
  if (both.ours) {
    g_own[0].stop_event(both.ours);
  }
  if (both.theirs) {
    both.other->stop_event(both.theirs);
  }
  return 0;
}

static int record_both(void* handle, int state, nccl_state_args* args) {
  const pair both = both_of(handle);
  if (both.ours) {
    g_own[0].record_state(both.ours, state, args);
  }
  if (both.theirs) {
    both.other->record_state(both.theirs, state, args);
  }
  return 0;
}

// -- communicators ------------------------------------------------------------------------------------------------------

static chained* claim_context(void) {
  for (size_t i = 0; i < CONTEXTS_MAX; ++i) {
    if (!LOAD(g_contexts[i].used) && SWAP_IF(g_contexts[i].used, 0, 1)) {
      return &g_contexts[i];
    }
  }
  return NULL;
}

static int finalize_both(void* context) {
  chained* gone = context_of(context);
  if (gone) {
    if (gone->ours) {
      gone->own->finalize(gone->ours);
    }
    if (gone->theirs) {
      gone->other->finalize(gone->theirs);
    }
    gone->ours = gone->theirs = NULL;
    STORE_RELEASE(gone->used, 0);
  }
  return 0;
}

static int init_both(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank,
                     nccl_log log, int interface) {
  *context = NULL;
  chained* made = claim_context();
  if (!made) {
    return 0;
  }
  const int at = interface - OLDEST;
  STORE(g_process, getpid());
  made->mask = 0;
  made->own = &g_own[at];
  made->other = g_others[at];
  made->known = g_known[at];
  const nccl_profiler_v4* other_v4 = (const nccl_profiler_v4*)made->other;  // as v5, but for init
  const int failed =
      interface == OLDEST
          ? other_v4->init(&made->theirs, &made->mask, name, id, nodes, ranks, rank, log)
          : made->other->init(&made->theirs, id, &made->mask, name, nodes, ranks, rank, log);
  if (failed) {
    made->theirs = NULL;
    made->mask = 0;
  }
  if (interface == OLDEST) {
    g_own_v4.init(&made->ours, mask, name, id, nodes, ranks, rank, log);
  } else {
    made->own->init(&made->ours, id, mask, name, nodes, ranks, rank, log);
  }
  if (!made->ours && !made->theirs) {
    STORE_RELEASE(made->used, 0);
    return 0;
  }
  STORE(*mask, LOAD(*mask) | LOAD(made->mask));
  if (made->ours) {
    STORE(communicator_of((uint64_t)(uintptr_t)made->ours)->others_mask, &made->mask);
  }
  *context = made;
  return 0;
}

static int init_both_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank,
                        nccl_log log) {
  return init_both(context, mask, name, id, nodes, ranks, rank, log, 4);
}

#define INIT(version)                                                                                              \
  static int init_both_v##version(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks,  \
                                  int rank, nccl_log log) {                                                        \
    return init_both(context, mask, name, id, nodes, ranks, rank, log, version);                                   \
  }
INIT(5)
INIT(6)
INIT(7)

// -- loading ------------------------------------------------------------------------------------------------------------

// As NCCL looks for the plugin that NCCL_PROFILER_PLUGIN names.
static void* open_other(const char* named) {
  if (strcasecmp(named, "STATIC_PLUGIN") == 0) {
    return dlopen(NULL, RTLD_NOW | RTLD_LOCAL);
  }
  void* library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
  if (!library && !strchr(named, '/')) {
    char path[4096];
    snprintf(path, sizeof path, "libnccl-profiler-%s.so", named);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  return library;
}

// The other's interface for what NCCL has chosen of ours: the same, else the newest before it of those that are alike.
static void find_other(void* library, int at) {
  static const uint64_t kinds[INTERFACES] = {NCCL_GROUP_API - 1, NCCL_CE_COLL - 1, NCCL_KERNEL_PHASE - 1, ~0ull};
  const int oldest = at == 0 ? 0 : 1;
  for (int older = at; older >= oldest && !g_others[at]; --older) {
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", older + OLDEST);
    g_others[at] = dlsym(library, symbol);
    g_known[at] = kinds[older];
  }
}

// Before NCCL looks for an interface. One that the other has nothing for stays this plugin's alone.
__attribute__((constructor)) static void chain_other(void) {
  const char* named = getenv("TOCSIN_NCCL_CHAIN");
  void* library = named && *named ? open_other(named) : NULL;
  if (!library) {
    if (named && *named) {
      tocsin_debug_line("the plugin that TOCSIN_NCCL_CHAIN names could not be loaded");
    }
    return;
  }
  nccl_profiler_v5* const shown[INTERFACES] = {(nccl_profiler_v5*)&ncclProfiler_v4, &ncclProfiler_v5, &ncclProfiler_v6,
                                               &ncclProfiler_v7};
  int (*const inits[])(void**, uint64_t, int*, const char*, int, int, int, nccl_log) = {init_both_v5, init_both_v6,
                                                                                        init_both_v7};
  g_own_v4 = ncclProfiler_v4;
  for (int at = 0; at < INTERFACES; ++at) {
    g_own[at] = *shown[at];
    find_other(library, at);
    if (!g_others[at] || g_others[at] == shown[at]) {
      continue;
    }
    if (at == 0) {
      ncclProfiler_v4 = (nccl_profiler_v4){"tocsin+",   init_both_v4, start_both_v4,
                                           stop_both,   record_both,  finalize_both};
    } else {
      *shown[at] = (nccl_profiler_v5){"tocsin+", inits[at - 1], start_both_v5, stop_both, record_both, finalize_both};
    }
  }
}
