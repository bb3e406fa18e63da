// Another plugin behind this one; see chain.c. The interfaces that NCCL finds, which the chain may lead elsewhere before
// NCCL has looked.
#pragma once

#include "profiler_abi.h"

#define EXPORTED __attribute__((visibility("default"))) extern
EXPORTED nccl_profiler_v4 ncclProfiler_v4;
EXPORTED nccl_profiler_v5 ncclProfiler_v5, ncclProfiler_v6, ncclProfiler_v7;
