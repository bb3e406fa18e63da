// What tocsin puts into a task's environment, and when it keeps out of it. slurm_plugins/task_prolog.py has the same
// rules and is their home in words; tests/attach_cases.py holds both to one table.
//
// Nothing here knows Slurm: the environment is a function, the changes are a list. No allocation, no output. The texts
// and paths live as long as the struct that they were written to.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define TOCSIN_PATH_BYTES 4096
// The kernel takes no longer string into an environment (MAX_ARG_STRLEN).
#define TOCSIN_VALUE_BYTES 131072
// Longer paths are refused.
#define TOCSIN_PATH_LENGTH_MAX 4000
#define TOCSIN_CONF_PATH "/etc/tocsin/attach.conf"

// The value of a variable in the task's environment; NULL where it is not set. Valid until the next call.
typedef const char *(*tocsin_getenv)(void *from, const char *name);

struct tocsin_environment {
  tocsin_getenv get;
  void *from;
};

// Why a task is not attached.
enum tocsin_trouble {
  TOCSIN_FINE = 0,
  TOCSIN_BAD_SETTING,  // the configuration cannot be read, or a path in it is not plain and absolute
  TOCSIN_BAD_JOB,      // the node's name, the job's number or its restart count is missing or odd
  TOCSIN_NO_DIRECTORY, // the node daemon's directory is not there, or cannot be written
  TOCSIN_FOREIGN,      // a directory in the way of ours belongs to somebody else
  TOCSIN_NO_LIBRARY,   // none of the probes' libraries can be read
  TOCSIN_OTHER_LIBC,   // the root file system has no glibc: a preloaded library would keep every program from starting
  TOCSIN_BAD_VALUE,    // LD_PRELOAD or a name of a profiler plugin holds what is not printable ASCII, or too much
};

// A plain sentence for each.
const char *tocsin_trouble_words(enum tocsin_trouble trouble);

struct tocsin_settings {
  char frame_root[TOCSIN_PATH_BYTES];
  char library[TOCSIN_PATH_BYTES];     // the gloo probe, to be preloaded
  char nccl_plugin[TOCSIN_PATH_BYTES]; // the NCCL profiler plugin
};

// From the environment, else the file, else the defaults: the libraries lie in `own_directory`.
enum tocsin_trouble tocsin_settle(const struct tocsin_environment *environment, const char *conf_path,
                                  const char *own_directory, struct tocsin_settings *settings);

// True where TOCSIN_DISABLE says so.
bool tocsin_disabled(const struct tocsin_environment *environment);

// Where the frames of one job attempt on one node go: `<parent>/<name>`.
struct tocsin_place {
  char parent[2 * TOCSIN_PATH_BYTES];
  char name[32];
};

// Looks whether the probes can be attached from where this process stands, and makes the directory for the frames as
// the calling user, following no link. `node` counts for more than SLURMD_NODENAME where it is not NULL. `made` is NULL
// or what an earlier call has made: that one is only looked for, since in a container's user namespace nobody can tell
// whom the daemon's directory belongs to.
enum tocsin_trouble tocsin_prepare(const struct tocsin_environment *environment,
                                   const struct tocsin_settings *settings, const char *node,
                                   const struct tocsin_place *made, struct tocsin_place *place);

// The changes to an environment. A NULL value takes the variable away.
struct tocsin_changes {
  size_t count;
  struct {
    const char *name;
    const char *value;
  } list[4];
  char directory[2 * TOCSIN_PATH_BYTES + 40];
  char preload[TOCSIN_VALUE_BYTES];
  char other_plugin[TOCSIN_VALUE_BYTES]; // the user's own profiler plugin
};

// Attaches a task to a place; where that is NULL, takes away what an outer step (the batch script) has attached. No
// changes where it returns a trouble.
enum tocsin_trouble tocsin_change(const struct tocsin_environment *environment, const struct tocsin_settings *settings,
                                  const struct tocsin_place *place, struct tocsin_changes *changes);
