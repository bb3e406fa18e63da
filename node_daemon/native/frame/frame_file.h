// The file of a frame: made with real space behind it, mapped for the life of the process.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Makes `name` in `directory`, `bytes` long, zeroed and mapped. Null where anything prevents it, and then nothing stays
// behind. A file of that name that this user left (a dead namesake, or this process before an exec) is replaced.
void* tocsin_map_frame_file(const char* directory, const char* name, size_t bytes);

// CLOCK_MONOTONIC.
uint64_t tocsin_now_ns(void);

#ifdef __cplusplus
}
#endif
