// The rounds of a communicator as this process's own probe counts them, read from its frame beside ours.
#pragma once

#include <stdint.h>

#include "tocsin_frame.h"

namespace tocsin {

struct FrameFile {
  tocsin_header header;
  tocsin_slot slots[TOCSIN_FRAME_SLOT_COUNT];
};

struct OwnRounds {
  const FrameFile* frames[2];  // NCCL's and gloo's; null while there is none
};

// How many rounds the process has entered on it; false where no frame of this process knows it (now). Cheap enough for
// every poll.
bool rounds_entered(OwnRounds& own, const char* directory, int32_t pid, uint64_t comm_id, uint64_t* rounds);

void forget_rounds(OwnRounds& own);

}  // namespace tocsin
