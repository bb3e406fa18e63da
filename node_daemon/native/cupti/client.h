// The one place where CUPTI is called. All of it by the collector's own thread, but for the three functions that CUPTI
// calls: for a buffer, with a full one, and at the end of one of the program's calls, where CUPTI is taken out again.
#pragma once

#include "condenser.h"

namespace tocsin {

struct Outcome {
  uint32_t why;    // TOCSIN_WHY_*; NONE: done
  uint32_t error;  // CUPTI's result behind it
};

// Finds CUPTI and attaches: subscribes, so that no other client can come between, and turns recording on. Records are
// condensed into `condenser` from now on. What it did before it failed it has undone.
Outcome client_attach(Condenser* condenser, uint32_t collect);

// CUPTI's clock, 0 where it does not tell.
uint64_t client_now_ns(void);

// What is not in the window is left out from now on.
void client_begin(uint64_t ns);
void client_end(uint64_t ns);

// Turns recording off, takes what is under way, and detaches. `leaving`: the process is ending, so nothing is waited for.
Outcome client_detach(bool leaving);

// cuptiGetVersion's answer, and a name for a runtime call; 0 and null before the first attaching.
uint32_t client_version(void);
int client_call_name(uint32_t domain, uint32_t id, const char** name);

// In the child of a fork: nothing of the parent's is there any more.
void client_forget(void);

}  // namespace tocsin
