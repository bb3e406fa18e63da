// The rules of the SPANK plugin without Slurm: what they make of this process's environment, in a TaskProlog's words.
#include <stdio.h>
#include <stdlib.h>

#include "attach.h"

static const char *from_environment(void *from, const char *name) {
  (void)from;
  return getenv(name);
}

// One argument: the configuration file; the libraries lie in the directory of the second.
int main(int argc, char **argv) {
  static struct tocsin_settings settings;
  static struct tocsin_place place;
  static struct tocsin_changes changes;
  const struct tocsin_environment environment = {.get = from_environment};
  if (argc != 3) {
    return 2;
  }
  enum tocsin_trouble trouble = tocsin_settle(&environment, argv[1], argv[2], &settings);
  if (trouble == TOCSIN_FINE) {
    const bool off = tocsin_disabled(&environment);
    trouble = off ? TOCSIN_FINE : tocsin_prepare(&environment, &settings, NULL, NULL, &place);
    const bool attach = !off && trouble == TOCSIN_FINE;
    const enum tocsin_trouble odd = tocsin_change(&environment, &settings, attach ? &place : NULL, &changes);
    trouble = odd != TOCSIN_FINE ? odd : trouble;
  }
  for (size_t i = 0; i < changes.count; ++i) {
    if (changes.list[i].value) {
      printf("export %s=%s\n", changes.list[i].name, changes.list[i].value);
    } else {
      printf("unset %s\n", changes.list[i].name);
    }
  }
  fprintf(stderr, "%s\n", tocsin_trouble_words(trouble));
  return 0;
}
