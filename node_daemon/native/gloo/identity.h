// Who this process is in its job, from its environment and /proc. Read once, when the frame is made.
#pragma once

#include <stdint.h>

namespace tocsin {

struct Identity {
  int32_t rank = -1;
  int32_t world_size = -1;
  int32_t local_rank = -1;
  int32_t gpu = -1;
  int32_t step_id = -1;
};

// `rank` and `world_size` of the first process group count for more than RANK and WORLD_SIZE (-1: no group seen).
Identity read_identity(int32_t rank, int32_t world_size);

// Field 22 of /proc/self/stat, 0 where it cannot be read.
uint64_t read_start_ticks();

// The environment variable as a number from 0 to 2^31-2, or -1.
int32_t env_number(const char* name);

}  // namespace tocsin
