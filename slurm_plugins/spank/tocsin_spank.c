// tocsin_spank.so: attaches the probes to the tasks of srun, sbatch and salloc, without a change to the user's script.
//
// plugstack.conf:  optional /path/tocsin_spank.so [conf=/etc/tocsin/attach.conf] [default=on|off]
//
// A job never fails and never waits because of this: every function returns ESPANK_SUCCESS, whatever happened, and what
// went wrong is one line. What is decided, and how, stands in attach.c; this file is the way between it and Slurm.
//
// When. slurmstepd calls user_init as the user, on the node as it is, before any task exists: there the settings are
// read and the directory for the frames is made. It calls task_init in each task, just before its exec. By then a
// container plugin such as pyxis has moved the task into the container's mount namespace (task_init_privileged), and
// perhaps into a user namespace where the daemon's directory seems to belong to nobody; so task_init makes nothing, it
// looks whether what the task needs is to be seen from where the task stands. A task that would not see it is left
// alone, and its user is told once in a step; a fault of the node itself goes to slurmd's log.
//
// Compile it against the Slurm that loads it: Slurm refuses a plugin of another version.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

#include "attach.h"

SPANK_PLUGIN(tocsin, 1)

enum mode { MODE_UNSAID, MODE_OFF, MODE_ON, MODE_VERBOSE };

static struct {
  enum mode site;      // default= in plugstack.conf
  enum mode user;      // --tocsin=
  const char *conf_path;
  struct tocsin_settings settings; // read in user_init: a container need not show the file
  bool settled;
  struct tocsin_place place; // that user_init made
  bool made;
  enum tocsin_trouble on_node; // what user_init found wrong
} g = {.site = MODE_ON, .conf_path = TOCSIN_CONF_PATH};

static enum mode mode_named(const char *word) {
  static const char *const names[] = {[MODE_OFF] = "off", [MODE_ON] = "on", [MODE_VERBOSE] = "verbose"};
  for (enum mode mode = MODE_OFF; mode <= MODE_VERBOSE; ++mode) {
    if (strcmp(word, names[mode]) == 0) {
      return mode;
    }
  }
  return MODE_UNSAID;
}

// Whoever uses the option wants less than usual or to look closer; a word that nobody knows must not be the reason why
// a job is touched, nor why it does not start.
static int take_option(int value, const char *word, int remote) {
  (void)value;
  g.user = word && *word ? mode_named(word) : MODE_ON;
  if (g.user == MODE_UNSAID) {
    g.user = MODE_OFF;
    if (!remote) {
      slurm_error("tocsin: --tocsin=%s: off, on and verbose are known; this job runs without the probe", word);
    }
  }
  return ESPANK_SUCCESS;
}

static struct spank_option option = {
    .name = "tocsin",
    .arginfo = "off|on|verbose",
    .usage = "Watch this job for slow and hung ranks (tocsin); verbose: say what is attached",
    .has_arg = 2, // optional: --tocsin alone is on
    .cb = take_option,
};

// -- between Slurm and attach.c --------------------------------------------------------------------------------------

static const char *get_from_spank(void *spank, const char *name) {
  static char value[TOCSIN_VALUE_BYTES];
  const spank_err_t error = spank_getenv((spank_t)spank, name, value, sizeof value);
  if (error == ESPANK_NOSPACE) {
    return "\n"; // too long is not unset, and nothing may take its place: told as a value that is left alone
  }
  return error == ESPANK_SUCCESS ? value : NULL;
}

static struct tocsin_environment environment_of(spank_t spank) {
  return (struct tocsin_environment){.get = get_from_spank, .from = spank};
}

// The directory of this plugin, where the probes' libraries lie beside it.
static const char *own_directory(void) {
  static char path[TOCSIN_PATH_BYTES];
  Dl_info info;
  if (dladdr((const void *)&option, &info) && info.dli_fname) {
    snprintf(path, sizeof path, "%s", info.dli_fname);
    char *slash = strrchr(path, '/');
    *(slash ? slash : path) = '\0';
  }
  return path;
}

static bool is_off(const struct tocsin_environment *environment) {
  if (g.user != MODE_UNSAID) {
    return g.user == MODE_OFF;
  }
  return g.site == MODE_OFF || tocsin_disabled(environment);
}

static void set_variable(spank_t spank, const char *name, const char *value) {
  const spank_err_t error = value ? spank_setenv(spank, name, value, 1) : spank_unsetenv(spank, name);
  if (error != ESPANK_SUCCESS && error != ESPANK_ENV_NOEXIST) {
    slurm_info("tocsin: %s: %s", name, spank_strerror(error));
  }
}

static bool is_first_of_step(spank_t spank) {
  uint32_t task = UINT32_MAX;
  return spank_get_item(spank, S_TASK_GLOBAL_ID, &task) == ESPANK_SUCCESS && task == 0;
}

static bool is_first_of_node(spank_t spank) {
  int task = -1;
  return spank_get_item(spank, S_TASK_ID, &task) == ESPANK_SUCCESS && task == 0;
}

// slurmd knows the node's name before a task has it in its environment.
static const char *node_name(void) { return getenv("SLURMD_NODENAME"); }

// On the user's stderr: in verbose mode a line from each node; else one from the whole step, and only where the node is
// in order and the task cannot see what is on it.
static void tell_user(spank_t spank, enum tocsin_trouble trouble, const char *directory) {
  const char *node = node_name();
  if (g.user == MODE_VERBOSE && is_first_of_node(spank)) {
    if (trouble == TOCSIN_FINE) {
      slurm_spank_log("tocsin: %s: attached, frames in %s", node ? node : "?", directory);
    } else {
      slurm_spank_log("tocsin: %s: not attached: %s", node ? node : "?", tocsin_trouble_words(trouble));
    }
  } else if (g.user != MODE_VERBOSE && trouble != TOCSIN_FINE && g.on_node == TOCSIN_FINE && is_first_of_step(spank)) {
    slurm_spank_log("tocsin: not watched: in the container %s", tocsin_trouble_words(trouble));
  }
}

// -- what Slurm calls ------------------------------------------------------------------------------------------------

int slurm_spank_init(spank_t spank, int argc, char **argv) {
  for (int i = 0; i < argc; ++i) {
    if (strncmp(argv[i], "conf=", 5) == 0) {
      g.conf_path = argv[i] + 5;
    } else if (strcmp(argv[i], "default=on") == 0 || strcmp(argv[i], "default=off") == 0) {
      g.site = mode_named(argv[i] + 8);
    } else if (spank_remote(spank) == 1) {
      slurm_info("tocsin: plugstack.conf: %s: not known, ignored", argv[i]);
    }
  }
  const spank_context_t context = spank_context();
  if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR || context == S_CTX_REMOTE) {
    if (spank_option_register(spank, &option) != ESPANK_SUCCESS) {
      slurm_error("tocsin: --tocsin cannot be offered");
    }
  }
  return ESPANK_SUCCESS;
}

// On the node as it is, as the user: the settings, the directory, and what is wrong with the node.
int slurm_spank_user_init(spank_t spank, int argc, char **argv) {
  (void)argc, (void)argv;
  const struct tocsin_environment environment = environment_of(spank);
  if (spank_remote(spank) != 1) {
    return ESPANK_SUCCESS;
  }
  g.on_node = tocsin_settle(&environment, g.conf_path, own_directory(), &g.settings);
  g.settled = g.on_node == TOCSIN_FINE;
  if (is_off(&environment)) {
    return ESPANK_SUCCESS;
  }
  if (g.settled) {
    g.on_node = tocsin_prepare(&environment, &g.settings, node_name(), NULL, &g.place);
    g.made = g.on_node == TOCSIN_FINE;
  }
  if (g.on_node != TOCSIN_FINE) {
    slurm_info("tocsin: not watched: %s (frames in %s, library %s)", tocsin_trouble_words(g.on_node),
               g.settings.frame_root, g.settings.library);
  }
  return ESPANK_SUCCESS;
}

// In the task, as the user, where the task stands.
int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
  (void)argc, (void)argv;
  static struct tocsin_place place;
  static struct tocsin_changes changes;
  const struct tocsin_environment environment = environment_of(spank);
  const bool off = is_off(&environment);
  enum tocsin_trouble trouble = g.settled ? TOCSIN_FINE : TOCSIN_BAD_SETTING;
  if (g.settled) {
    if (!off) {
      trouble = tocsin_prepare(&environment, &g.settings, node_name(), g.made ? &g.place : NULL, &place);
    }
    const bool attach = !off && trouble == TOCSIN_FINE;
    const enum tocsin_trouble odd = tocsin_change(&environment, &g.settings, attach ? &place : NULL, &changes);
    trouble = odd != TOCSIN_FINE ? odd : trouble;
  }
  for (size_t i = 0; i < changes.count; ++i) {
    set_variable(spank, changes.list[i].name, changes.list[i].value);
  }
  // What the option says counts for more than what an outer step, or the user's profile, has exported.
  if (g.user != MODE_UNSAID) {
    set_variable(spank, "TOCSIN_DISABLE", off ? "1" : NULL);
  }
  if (g.user == MODE_VERBOSE) {
    set_variable(spank, "TOCSIN_PROBE_DEBUG", "1");
  }
  if (!off) {
    tell_user(spank, trouble, changes.directory);
  }
  return ESPANK_SUCCESS;
}
