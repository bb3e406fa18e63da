// Loads the program and with it its torch late and privately (RTLD_LOCAL), as Python does.
#include <dlfcn.h>

#include <cstdio>

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 3;
  }
  return reinterpret_cast<int (*)()>(dlsym(library, "play_main"))();
}
