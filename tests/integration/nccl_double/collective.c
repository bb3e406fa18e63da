/* A whole collective as NCCL drives a plugin through it, by the mask, and several at once in NCCL's threads. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/filter.h>
#include <linux/seccomp.h>

#include "driver.h"

enum { GROUP_MASK = 0x77DF, COLL_MASK = NCCL_COLL | NCCL_PROXY_OP | NCCL_PROXY_STEP | NCCL_KERNEL_CH | NCCL_NET_PLUGIN };
enum { STEP_BYTES = 1 << 19, GPU_NS = 2000 };

nccl_event event_of(int type, void* parent, int rank) {
  nccl_event event;
  memset(&event, 0, sizeof event);
  event.type = g_plugin.interface == 4 ? 0xABCDEF0123456700u | (uint8_t)type : (uint64_t)type;
  event.parent = parent;
  event.rank = rank;
  return event;
}

void* begin(comm* on, nccl_event* event) {
  void* handle = NULL;
  g_plugin.start_event(on->context, &handle, event);
  return handle;
}

void end(void* handle) {
  if (handle) {
    g_plugin.stop_event(handle);
  }
}

work launch(comm* on, int channels, int steps) {
  work made = {__atomic_load_n(&g_mask, __ATOMIC_RELAXED), NULL, channels, steps, on->colls++};
  void *api_group = NULL, *api = NULL, *group = NULL;
  nccl_event event;
  if (g_plugin.interface > 4 && (made.mask & GROUP_MASK)) {
    event = event_of(NCCL_GROUP_API, NULL, on->rank);
    api_group = begin(on, &event);
    event = event_of(NCCL_COLL_API, api_group, on->rank);
    event.coll_api.function = "AllReduce";
    event.coll_api.datatype = "ncclFloat32";
    event.coll_api.count = 1 << 20;
    api = begin(on, &event);
    end(api);
  }
  if (made.mask & COLL_MASK) {
    event = event_of(NCCL_GROUP, NULL, on->rank);
    group = begin(on, &event);
    event = event_of(NCCL_COLL, g_plugin.interface > 4 ? api : group, on->rank);
    event.coll.number = made.number;
    event.coll.function = "AllReduce";
    event.coll.count = 1 << 20;
    event.coll.datatype = "ncclFloat32";
    event.coll.channels = (uint8_t)channels;
    event.coll.algorithm = "RING";
    event.coll.protocol = "SIMPLE";
    if (g_plugin.interface > 4) {
      event.coll.group = group;
    }
    made.coll = begin(on, &event);
    end(made.coll);
  }
  end(api_group);
  return made;
}

static void one_step(comm* on, void* op, int step, int send) {
  nccl_event event = event_of(NCCL_PROXY_STEP, op, on->rank);
  event.proxy_step.step = step;
  void* handle = begin(on, &event);
  if (!handle) {
    return;
  }
  nccl_state_args args = {STEP_BYTES};
  static const int states[2][3] = {{10, 11, 12}, {8, 20, 9}};
  for (int i = 0; i < 3; ++i) {
    g_plugin.record_state(handle, states[send][i], &args);
  }
  g_plugin.stop_event(handle);
}

void transfer(comm* on, const work* of) {
  if (!(of->mask & (NCCL_PROXY_OP | NCCL_PROXY_STEP | NCCL_NET_PLUGIN))) {
    return;
  }
  void* ops[64][2];
  nccl_state_args args = {0};
  for (int channel = 0; channel < of->channels; ++channel) {
    for (int send = 0; send < 2; ++send) {
      nccl_event event = event_of(NCCL_PROXY_OP, of->coll, on->rank);
      event.proxy_op.pid = g_pid;
      event.proxy_op.channel = (uint8_t)channel;
      event.proxy_op.peer = (on->rank + (send ? 1 : on->ranks - 1)) % on->ranks;
      event.proxy_op.steps = of->steps;
      event.proxy_op.chunk_bytes = STEP_BYTES;
      event.proxy_op.is_send = send;
      ops[channel][send] = begin(on, &event);
      g_plugin.record_state(ops[channel][send], NCCL_STATE_PROXY_OP_IN_PROGRESS, &args);
    }
  }
  for (int step = 0; step < of->steps && (of->mask & NCCL_PROXY_STEP); ++step) {
    for (int channel = 0; channel < of->channels; ++channel) {
      one_step(on, ops[channel][0], step, 0);
      one_step(on, ops[channel][1], step, 1);
    }
  }
  for (int channel = 0; channel < of->channels; ++channel) {
    end(ops[channel][0]);
    end(ops[channel][1]);
  }
}

void run_kernels(comm* on, const work* of) {
  if (!(of->mask & NCCL_KERNEL_CH)) {
    return;
  }
  void* kernels[64];
  const uint64_t begun_ns = 1000000 + of->number * 3 * GPU_NS;
  for (int channel = 0; channel < of->channels; ++channel) {
    nccl_event event = event_of(NCCL_KERNEL_CH, of->coll, on->rank);
    event.kernel_ch.channel = (uint8_t)channel;
    event.kernel_ch.gpu_ns = begun_ns;
    kernels[channel] = begin(on, &event);
  }
  for (int channel = 0; channel < of->channels; ++channel) {
    nccl_state_args args = {begun_ns + GPU_NS};
    if (kernels[channel]) {
      g_plugin.record_state(kernels[channel], NCCL_STATE_KERNEL_CH_STOP, &args);
      g_plugin.stop_event(kernels[channel]);
    }
  }
}

/* -- threads ---------------------------------------------------------------------------------------------------------- */

enum { QUEUE = 64 };

typedef struct pipeline {
  comm* on;
  int collectives, channels, steps;
  int launched, transferred, run; /* how far each thread is */
  work queue[QUEUE];
} pipeline;

static int reached(const int* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
static void advance(int* counter, int to) { __atomic_store_n(counter, to, __ATOMIC_RELEASE); }

static void* program_thread(void* argument) {
  pipeline* line = argument;
  for (int i = 0; i < line->collectives; ++i) {
    while (i - reached(&line->transferred) >= QUEUE || i - reached(&line->run) >= QUEUE) {
      sched_yield();
    }
    line->queue[i % QUEUE] = launch(line->on, line->channels, line->steps);
    advance(&line->launched, i + 1);
  }
  return NULL;
}

static void follow_up(pipeline* line, int* mine, void (*part)(comm*, const work*)) {
  for (int i = 0; i < line->collectives; ++i) {
    while (reached(&line->launched) <= i) {
      sched_yield();
    }
    part(line->on, &line->queue[i % QUEUE]);
    advance(mine, i + 1);
  }
}

static void* proxy_thread(void* argument) {
  follow_up(argument, &((pipeline*)argument)->transferred, transfer);
  return NULL;
}

static void* profiler_thread(void* argument) {
  follow_up(argument, &((pipeline*)argument)->run, run_kernels);
  return NULL;
}

void pipelines(comm* const* comms, int count, int collectives, int channels, int steps, void (*meanwhile)(void)) {
  pipeline* lines = calloc((size_t)count, sizeof *lines);
  pthread_t* threads = calloc((size_t)count * 3, sizeof *threads);
  void* (*const parts[3])(void*) = {program_thread, proxy_thread, profiler_thread};
  for (int i = 0; i < count; ++i) {
    lines[i] = (pipeline){.on = comms[i], .collectives = collectives, .channels = channels, .steps = steps};
    for (int part = 0; part < 3; ++part) {
      pthread_create(&threads[i * 3 + part], NULL, parts[part], &lines[i]);
    }
  }
  meanwhile();
  for (int i = 0; i < count * 3; ++i) {
    pthread_join(threads[i], NULL);
  }
  free(threads);
  free(lines);
}

/* In a thread that may not call the kernel for anything but its exit. (Not seccomp's strict mode: that takes away the
 * time stamp counter, and with it the clock that needs no call.) */
typedef struct strict {
  comm* on;
  int collectives, channels, steps, finished;
} strict;

static void* strict_thread(void* argument) {
  strict* job = argument;
  struct sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_THREAD),
  };
  struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0) {
    for (int i = 0; i < job->collectives; ++i) {
      const work of = launch(job->on, job->channels, job->steps);
      transfer(job->on, &of);
      run_kernels(job->on, &of);
    }
    __atomic_store_n(&job->finished, 1, __ATOMIC_RELEASE);
  }
  syscall(SYS_exit, 0); /* of this thread: the way that pthreads end calls more */
  return NULL;
}

int run_strictly(comm* on, int collectives, int channels, int steps) {
  strict job = {on, collectives, channels, steps, 0};
  pthread_t thread;
  pthread_create(&thread, NULL, strict_thread, &job);
  pthread_join(thread, NULL);
  return __atomic_load_n(&job.finished, __ATOMIC_ACQUIRE);
}
