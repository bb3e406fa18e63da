#include "recording.h"


#include "atomic_fields.h"

enum { kStrideMax = 1 << 20 };

static const uint64_t kSpan_ns = 2000000000;     // what the recorded rounds must span at least
static const uint64_t kSpacing_ns = 1000000000;  // and how far apart two of them may be
static const uint64_t kNanosecondsPerMicrosecond = 1000;

static void adapt_stride(tocsin_recording* recording, tocsin_slot* slot, uint64_t now) {
  const uint32_t stride = LOAD(slot->stride);
  const uint64_t recorded = LOAD(recording->recorded);
  if (stride > 1 && now - LOAD(recording->newest_ns) > kSpacing_ns) {
    STORE(slot->stride, stride / 2);
    STORE(recording->restrided, recorded);
    return;
  }
  const uint64_t oldest_ns = LOAD(recording->entered_ns[recorded % TOCSIN_FRAME_ROUND_COUNT]);
  if (recorded - LOAD(recording->restrided) >= TOCSIN_FRAME_ROUND_COUNT && now - oldest_ns < kSpan_ns &&
      stride < kStrideMax) {
    STORE(slot->stride, stride * 2);
    STORE(recording->restrided, recorded);
  }
}

// The entry's duration says "open" before anything else of it changes, and its seq comes last.
tocsin_round* tocsin_record(tocsin_recording* recording, tocsin_slot* slot, uint64_t seq, uint64_t entered_ns,
                            uint64_t gap_ns, uint32_t signature) {
  adapt_stride(recording, slot, entered_ns);
  const uint32_t low = (uint32_t)seq;
  if (low == 0 || (low & (LOAD(slot->stride) - 1))) {  // 0 marks an unused entry
    return NULL;
  }
  const uint64_t position = ADD(recording->recorded, 1) % TOCSIN_FRAME_ROUND_COUNT;
  STORE(recording->entered_ns[position], entered_ns);
  STORE(recording->newest_ns, entered_ns);
  tocsin_round* entry = &slot->rounds[position];
  STORE_RELEASE(entry->dur_us, TOCSIN_FRAME_DUR_OPEN);
  STORE_RELEASE(entry->gap_us, tocsin_microseconds(gap_ns));
  STORE_RELEASE(entry->signature, signature);
  STORE_RELEASE(entry->seq, low);
  return entry;
}

static inline uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
  return hash ^ hash >> 32;
}

uint32_t tocsin_signature(uint8_t op, uint8_t dtype, uint64_t count, int32_t root) {
  uint64_t hash = mixed(0x9E3779B97F4A7C15u, op);
  hash = mixed(hash, dtype);
  hash = mixed(hash, op == TOCSIN_OP_ALL_TO_ALL ? 0 : count);
  hash = mixed(hash, (uint64_t)(int64_t)root);
  const uint32_t low = (uint32_t)hash;
  return low == TOCSIN_FRAME_SIGNATURE_UNKNOWN ? 1 : low;
}

uint32_t tocsin_microseconds(uint64_t ns) {
  const uint64_t us = ns / kNanosecondsPerMicrosecond;
  return us < TOCSIN_FRAME_DUR_OPEN ? (uint32_t)us : TOCSIN_FRAME_DUR_OPEN - 1;
}
