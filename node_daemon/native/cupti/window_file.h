// The condensed window as a file: laid out as diagnosis/contracts/kernelwindow.py says, whole or not there at all.
#pragma once

#include "condenser.h"

namespace tocsin {

constexpr size_t kFileNameBytes = 96;

// Names of runtime calls by number; may be null.
using CallName = int (*)(uint32_t domain, uint32_t id, const char** name);

// Writes `name` in `directory`, in place of one that is there. `header` tells what is not the condenser's own. False
// where that was not possible.
bool write_window(Condenser& condenser, const tocsin_window_header& header, const char* directory, const char* name,
                  CallName call_name);

}  // namespace tocsin
