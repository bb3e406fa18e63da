// This process's NCCL frame, and which events it asks NCCL for.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "profiler_abi.h"
#include "tocsin_frame.h"

typedef struct nccl_frame {
  tocsin_header header;
  tocsin_slot slots[TOCSIN_FRAME_SLOT_COUNT];
} nccl_frame;

// Null: off in this process. Set once, before anything else is; a forked child has none of its parent's.
extern nccl_frame* g_frame;
extern int32_t g_pid;

// Makes the frame at the first communicator; `rank` and `ranks` are that communicator's. False: this process has none.
bool frame_ready(int32_t rank, int32_t ranks, nccl_log log);

// The events that one communicator's NCCL may deliver. A process can hold two releases of NCCL, and what is safe with
// the one ends the program with the other.
typedef struct events {
  uint32_t standing;
  uint32_t widest;  // what `control` may add
} events;

events events_of(nccl_log log, uint32_t interface);

// Those that NCCL shall deliver now: the standing ones, and what `control` asks for as long as it does.
uint32_t events_wanted(const events* allowed, uint64_t now_ns);

// One line, once in the life of the process: through NCCL's own log where it hands one over, and on stderr where
// TOCSIN_PROBE_DEBUG is set.
void say_once(nccl_log log, const char* text);
