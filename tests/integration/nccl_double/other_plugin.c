/* Another profiler plugin, of the usual kind: it makes an object for each event, trusts every parent to be one of its
 * own, and counts. OTHER_MASK: what it asks for. OTHER_OUT: the file that its counts go to when a communicator ends
 * (kind, started, stopped, states). OTHER_FAILS: its init does. Compiled with ONLY_V5 it has no other interface. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "profiler_abi.h"

enum { MAGIC = 0x0B1EC7, KINDS = 16 };

typedef struct object {
  uint32_t magic;
  int kind;
  struct object* next;
} object;

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static object* g_all;
static long g_counts[KINDS][3];

static object* checked(void* pointer) {
  object* found = pointer;
  if (found && found->magic != MAGIC) {
    abort();
  }
  return found;
}

static int made(void** context, int* mask) {
  if (getenv("OTHER_FAILS")) {
    return 3;
  }
  *context = &g_all;
  *mask = atoi(getenv("OTHER_MASK"));
  return 0;
}

static int init_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank,
                   nccl_log log) {
  (void)name, (void)id, (void)nodes, (void)ranks, (void)rank, (void)log;
  return made(context, mask);
}

static int init(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, nccl_log log) {
  return init_v4(context, mask, name, id, nodes, ranks, rank, log);
}

static int start(void* context, void** handle, nccl_event* event, uint64_t type, int interface) {
  if (context != &g_all) {
    abort();
  }
  checked(event->parent);
  if (interface > 4 && (type == NCCL_COLL || type == NCCL_P2P)) {
    checked(type == NCCL_COLL ? event->coll.group : event->p2p.group);
  }
  object* one = malloc(sizeof *one);
  pthread_mutex_lock(&g_lock);
  *one = (object){MAGIC, __builtin_ctzll(type), g_all};
  g_all = one;
  ++g_counts[one->kind][0];
  pthread_mutex_unlock(&g_lock);
  *handle = one;
  return 0;
}

static int start_v4(void* context, void** handle, nccl_event* event) {
  return start(context, handle, event, (uint8_t)event->type, 4);
}

static int start_v5(void* context, void** handle, nccl_event* event) {
  return start(context, handle, event, event->type, 5);
}

static int count(void* handle, int which) {
  pthread_mutex_lock(&g_lock);
  ++g_counts[checked(handle)->kind][which];
  pthread_mutex_unlock(&g_lock);
  return 0;
}

static int stop(void* handle) { return count(handle, 1); }

static int record(void* handle, int state, nccl_state_args* args) {
  (void)state, (void)args;
  return count(handle, 2);
}

static int finalize(void* context) {
  (void)context;
  FILE* out = fopen(getenv("OTHER_OUT"), "w");
  for (int kind = 0; out && kind < KINDS; ++kind) {
    fprintf(out, "%d %ld %ld %ld\n", 1 << kind, g_counts[kind][0], g_counts[kind][1], g_counts[kind][2]);
  }
  if (out) {
    fclose(out);
  }
  while (g_all) {
    object* one = g_all;
    g_all = one->next;
    free(one);
  }
  return 0;
}

#ifdef ONLY_V5
#define ncclProfiler_v4 other_v4
#define ncclProfiler_v6 other_v6
#define ncclProfiler_v7 other_v7
#endif
const nccl_profiler_v4 ncclProfiler_v4 = {"other", init_v4, start_v4, stop, record, finalize};
const nccl_profiler_v5 ncclProfiler_v5 = {"other", init, start_v5, stop, record, finalize};
const nccl_profiler_v5 ncclProfiler_v6 = {"other", init, start_v5, stop, record, finalize};
const nccl_profiler_v5 ncclProfiler_v7 = {"other", init, start_v5, stop, record, finalize};
