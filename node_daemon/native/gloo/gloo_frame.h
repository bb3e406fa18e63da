// The frame of this process: made at its first collective, mapped for its life, dropped in a forked child.
#pragma once

#include <stdint.h>

#include "atomics.h"
#include "tocsin_frame.h"

namespace tocsin {

struct Frame {
  tocsin_header header;
  tocsin_slot slots[TOCSIN_FRAME_SLOT_COUNT];
};

extern Frame* g_frame;
extern uint32_t g_frame_state;

enum FrameState : uint32_t { FRAME_UNSET, FRAME_BUSY, FRAME_OFF, FRAME_ON };

// Makes the frame, or finds out that there will be none. At most once in a process.
Frame* make_frame();

// The frame, or null where the probe is off in this process.
inline Frame* frame() {
  const uint32_t state = load_acquire(g_frame_state);
  if (state == FRAME_ON) {
    return g_frame;
  }
  return state == FRAME_OFF ? nullptr : make_frame();
}

}  // namespace tocsin
