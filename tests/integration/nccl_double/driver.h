/* The parts of the program that plays NCCL. */
#pragma once

#include "profiler_abi.h"

typedef struct plugin {
  int interface;
  const nccl_profiler_v4* v4;
  const nccl_profiler_v5* v5;
  nccl_start_event* start_event;
  nccl_stop_event* stop_event;
  nccl_record_state* record_state;
  nccl_finalize* finalize;
} plugin;

typedef struct comm {
  char name[32];
  void* context;
  uint64_t id;
  int ranks, rank;
  uint64_t colls;
} comm;

/* One collective under way: what NCCL keeps of it. */
typedef struct work {
  int mask;   /* the events that it was called under */
  void* coll;
  int channels, steps;
  uint64_t number;
} work;

extern plugin g_plugin;
extern int g_mask;
extern int g_pid;

/* A descriptor as NCCL makes it; with the oldest interface only the lowest byte of the type is set. */
nccl_event event_of(int type, void* parent, int rank);
void* begin(comm* on, nccl_event* event);
void end(void* handle);

/* The parts of one collective, as the program's thread, the network proxy and the profiler thread do them. */
work launch(comm* on, int channels, int steps);
void transfer(comm* on, const work* of);
void run_kernels(comm* on, const work* of);

/* `collectives` on each of `count` communicators at once, three threads each, and `meanwhile` on this one. */
void pipelines(comm* const* comms, int count, int collectives, int channels, int steps, void (*meanwhile)(void));

/* Collectives without a single call of the kernel; 0 where there was one (and the thread that made it is dead). */
int run_strictly(comm* on, int collectives, int channels, int steps);
