// Who this process is in its job, from its environment and /proc. Read once, when the frame is made.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// -1: unknown.
typedef struct tocsin_identity {
  int32_t rank;
  int32_t world_size;
  int32_t local_rank;
  int32_t gpu;
  int32_t step_id;
} tocsin_identity;

// `rank` and `world_size` as the library told them count for more than RANK and WORLD_SIZE (-1: not told).
tocsin_identity tocsin_read_identity(int32_t rank, int32_t world_size);

// Field 22 of /proc/self/stat, 0 where it cannot be read.
uint64_t tocsin_read_start_ticks(void);

enum { TOCSIN_FRAME_NAME_BYTES = 48 };

// The name of this process's frame: `<pid><suffix>`, and `<pid>-<namespace><suffix>` in a pid namespace of its own, where
// another container's process may have the same number. The daemon finds by it which of the node's processes is meant.
void tocsin_frame_name(char name[TOCSIN_FRAME_NAME_BYTES], int32_t pid, const char* suffix);

// The environment variable as a number from 0 to 2^31-2, or -1.
int32_t tocsin_env_number(const char* name);

// The directory for frames, or null where the environment names none or turns the probes off.
const char* tocsin_frame_directory(void);

// One line on the job's stderr, from its first rank, where there is no such directory: the process has entered a container
// after the last moment when anybody could look, and its user cannot know why the job is not watched.
void tocsin_say_absent(const char* directory);

// A line on stderr where TOCSIN_PROBE_DEBUG is set.
void tocsin_debug_line(const char* text);

#ifdef __cplusplus
}
#endif
