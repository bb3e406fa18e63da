// Which rounds of a communicator are recorded in its slot, and how they are described: one home for all probes.
//
// Recorded rounds are multiples of `stride`, a power of two that follows the rate so that the entries span at least two
// seconds; see `stride` in diagnosis/contracts/probeframe.py.
#pragma once

#include <stdint.h>

#include "tocsin_frame.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a probe remembers of the entries of one slot. Zeroed: nothing recorded.
typedef struct tocsin_recording {
  uint64_t recorded;    // entries written
  uint64_t restrided;   // `recorded` when the stride last changed
  uint64_t newest_ns;   // when the newest of them entered
  uint64_t entered_ns[TOCSIN_FRAME_ROUND_COUNT];
} tocsin_recording;

// Writes the entry of round `seq` that was entered at `entered_ns`, its duration "open". The entry, or null where this
// round is not recorded. The caller admits it afterwards by raising `enqueued`.
tocsin_round* tocsin_record(tocsin_recording* recording, tocsin_slot* slot, uint64_t seq, uint64_t entered_ns,
                            uint64_t gap_ns, uint32_t signature);

// As `signatures` in diagnosis/contracts/probeframe.py. An all-to-all may have another count on each member.
uint32_t tocsin_signature(uint8_t op, uint8_t dtype, uint64_t count, int32_t root);

// Saturates below "open".
uint32_t tocsin_microseconds(uint64_t ns);

#ifdef __cplusplus
}
#endif
