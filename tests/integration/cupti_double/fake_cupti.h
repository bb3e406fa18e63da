// What a program does to the stand-in for CUPTI.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {
// A kernel runs for `ns` and has just ended; then the call that launched it ends.
void fake_launch(const char* name, uint64_t ns);
// A call of the runtime ends.
void fake_call(void);
// `function` (without "cupti") returns `result` from now on, and does nothing; 0: works again.
void fake_fail(const char* function, int result);
// How often it was called.
uint64_t fake_calls(const char* function);
// Another client subscribes, or leaves.
void fake_other_client(int there);
// Full buffers are given back at the next flush only.
void fake_hold(int hold);
void fake_version(uint32_t version);
}
