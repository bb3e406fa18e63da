/* What the plugin asks of the NCCL that loads it: its release, found by way of its logger. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

int ncclGetVersion(int* version) {
  const char* told = getenv("FAKE_NCCL_VERSION");
  *version = told ? atoi(told) : 0;
  return told ? 0 : 1;
}

void fake_nccl_log(int level, unsigned long subsystems, const char* file, int line, const char* format, ...) {
  (void)level, (void)subsystems, (void)file, (void)line;
  va_list arguments;
  va_start(arguments, format);
  fputs("log: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}
