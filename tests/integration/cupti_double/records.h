/* The bytes of records as a release of CUPTI lays them out, and a walk over them by the sizes of that release. */
#pragma once

#include "condenser.h"

namespace tocsin_test {

struct Sizes {
  uint32_t of_kind[64];
};

// One step over a buffer, as cuptiActivityGetNextRecord does it.
inline int next_by_size(const Sizes& sizes, uint8_t* buffer, size_t valid, uint8_t** record) {
  uint8_t* at = buffer;
  if (*record) {
    const uint32_t kind = tocsin::field<uint32_t>(*record, 0);
    at = *record + (kind < 64 && sizes.of_kind[kind] ? sizes.of_kind[kind] : valid);
  }
  const uint32_t kind = at + sizeof(uint32_t) <= buffer + valid ? tocsin::field<uint32_t>(at, 0) : 0;
  if (kind >= 64 || !sizes.of_kind[kind] || at + sizes.of_kind[kind] > buffer + valid) {
    return 12;  // CUPTI_ERROR_MAX_LIMIT_REACHED
  }
  *record = at;
  return tocsin::kSuccess;
}

}  // namespace tocsin_test
