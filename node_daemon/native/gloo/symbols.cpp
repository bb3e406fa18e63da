// Python loads libtorch_cpu.so RTLD_LOCAL, so RTLD_NEXT does not see it: it is asked by its name, without loading it.
#include "symbols.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "old_glibc.h"

namespace tocsin {

void* g_real[SYMBOL_COUNT];

namespace {

const char* const kNames[SYMBOL_COUNT] = {
    TOCSIN_NAME_ENQUEUE,   TOCSIN_NAME_EXECUTE,     TOCSIN_NAME_FINISH,    TOCSIN_NAME_FINISH_ERROR,
    TOCSIN_NAME_WORK,      TOCSIN_NAME_GROUP_C1,    TOCSIN_NAME_GROUP_C2,  TOCSIN_NAME_GROUP_D1,
    TOCSIN_NAME_GROUP_D2,  TOCSIN_NAME_SEND,        TOCSIN_NAME_RECV,      TOCSIN_NAME_WAIT_SEND,
    TOCSIN_NAME_WAIT_RECV, TOCSIN_NAME_GROUP_RANKS, TOCSIN_NAME_NUMEL,     TOCSIN_NAME_DTYPE,
    TOCSIN_NAME_BROADCAST, TOCSIN_NAME_GATHER,      TOCSIN_NAME_SCATTER,
};

// True for an address inside this library, which must never be taken for the real function.
bool is_ours(const void* address) {
  Dl_info ours, other;
  return dladdr(reinterpret_cast<const void*>(&resolve_optional), &ours) && dladdr(address, &other) &&
         ours.dli_fbase == other.dli_fbase;
}

void* find_in(const char* file, const char* name) {
  void* library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) {
    return nullptr;
  }
  void* address = dlsym(library, name);
  dlclose(library);  // the handle was a reference only; the caller of the hook keeps the library loaded
  return address && !is_ours(address) ? address : nullptr;
}

void* find(const char* name) {
  void* address = dlsym(RTLD_NEXT, name);
  return address && !is_ours(address) ? address : find_in("libtorch_cpu.so", name);
}

[[noreturn]] void give_up(const char* name) {
  static const char before[] = "tocsin: the probe cannot find ";
  static const char after[] = "; take it out of LD_PRELOAD\n";
  ssize_t written = write(STDERR_FILENO, before, sizeof before - 1);
  written = write(STDERR_FILENO, name, strlen(name));
  written = write(STDERR_FILENO, after, sizeof after - 1);
  (void)written;
  abort();
}

}  // namespace

void* resolve_optional(Symbol symbol) {
  void* address = find(kNames[symbol]);
  store(g_real[symbol], address);
  return address;
}

void* resolve_hooked(Symbol symbol, const void* caller) {
  void* address = resolve_optional(symbol);
  Dl_info info;
  if (!address && dladdr(caller, &info) && info.dli_fname) {
    address = find_in(info.dli_fname, kNames[symbol]);
  }
  if (!address) {
    give_up(kNames[symbol]);
  }
  store(g_real[symbol], address);
  return address;
}

uint32_t symbols_missing() {
  uint32_t missing = 0;
  for (unsigned symbol = 0; symbol < SYMBOL_COUNT; ++symbol) {
    if (!load(g_real[symbol]) && !resolve_optional(static_cast<Symbol>(symbol))) {
      missing |= 1u << symbol;
    }
  }
  return missing;
}

}  // namespace tocsin
