// NCCL's names as the frame's numbers. All are strings that NCCL hands over; one it has not had so far is "other".
#pragma once

#include <stdbool.h>
#include <stdint.h>

uint8_t op_of(const char* function);
uint8_t dtype_of(const char* datatype);
uint8_t algo_of(const char* algorithm);
uint8_t proto_of(const char* protocol);

// Whether the root that NCCL tells means anything for this operation.
bool has_root(uint8_t op);
