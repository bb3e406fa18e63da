#define _GNU_SOURCE
#include "attach.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define LIBRARY_NAME "libtocsin_gloo.so"
#define NCCL_PLUGIN_NAME "libnccl-profiler-tocsin.so"
#define NCCL_PLUGIN_SHORT_NAME "tocsin" // NCCL's own short form of that file name
#define FRAME_ROOT "/dev/shm/tocsin"
#define PLUGIN_VARIABLE "NCCL_PROFILER_PLUGIN"
#define CHAIN_VARIABLE "TOCSIN_NCCL_CHAIN"
#define CONF_BYTES_MAX 65536

#if defined(__x86_64__)
#define GLIBC_LOADER "/lib64/ld-linux-x86-64.so.2"
#elif defined(__aarch64__)
#define GLIBC_LOADER "/lib/ld-linux-aarch64.so.1"
#endif

static const char *const kWords[] = {
    [TOCSIN_FINE] = "it is attached",
    [TOCSIN_BAD_SETTING] = "a setting of tocsin cannot be used",
    [TOCSIN_BAD_JOB] = "the node's name or the job's number is missing or odd",
    [TOCSIN_NO_DIRECTORY] = "the node daemon's frame directory is not there",
    [TOCSIN_FOREIGN] = "the frame directory belongs to somebody else",
    [TOCSIN_NO_LIBRARY] = "the probe's library is not there",
    [TOCSIN_OTHER_LIBC] = "there is no glibc, which the probe needs",
    [TOCSIN_BAD_VALUE] = "LD_PRELOAD, " PLUGIN_VARIABLE " or " CHAIN_VARIABLE " is odd or too long",
};

const char *tocsin_trouble_words(enum tocsin_trouble trouble) { return kWords[trouble]; }

// -- words -----------------------------------------------------------------------------------------------------------

static const char *value_of(const struct tocsin_environment *environment, const char *name) {
  const char *value = environment->get(environment->from, name);
  return value ? value : "";
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static bool is_node_character(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '-' || c == '_';
}

// Neither space nor colon, which part the entries of LD_PRELOAD, nor the $ that ld.so expands.
static bool is_path_character(char c) { return is_node_character(c) || (c != '\0' && strchr("/@+,=~%", c) != NULL); }

static bool is_plain(const char *text, bool (*allowed)(char), size_t length_max) {
  const size_t length = strnlen(text, length_max + 1);
  if (length == 0 || length > length_max || text[0] == '.' || text[0] == '-') {
    return false;
  }
  for (const char *at = text; *at; ++at) {
    if (!allowed(*at)) {
      return false;
    }
  }
  return true;
}

static bool is_plain_path(const char *text) {
  return text[0] == '/' && is_plain(text, is_path_character, TOCSIN_PATH_LENGTH_MAX);
}

static bool is_printable(const char *text) {
  for (const char *at = text; *at; ++at) {
    if (*at < 0x20 || *at > 0x7e) {
      return false;
    }
  }
  return strlen(text) < TOCSIN_VALUE_BYTES / 2;
}

static bool values_printable(const struct tocsin_environment *environment) {
  return is_printable(value_of(environment, "LD_PRELOAD")) &&
         is_printable(value_of(environment, PLUGIN_VARIABLE)) &&
         is_printable(value_of(environment, CHAIN_VARIABLE));
}

static const char *file_name(const char *path, size_t length) {
  const char *slash = memrchr(path, '/', length);
  return slash ? slash + 1 : path;
}

// A path that is ours: the one of the settings, or that of another version of tocsin, told by the file's name.
static bool is_ours(const char *path, size_t length, const char *ours, const char *our_name) {
  const char *name = file_name(path, length);
  const size_t name_length = length - (size_t)(name - path);
  return (length == strlen(ours) && memcmp(path, ours, length) == 0) ||
         (name_length == strlen(our_name) && memcmp(name, our_name, name_length) == 0);
}

// -- settings --------------------------------------------------------------------------------------------------------

static char *trimmed(char *text) {
  text += strspn(text, " \t\r\f\v");
  for (size_t length = strlen(text); length > 0 && strchr(" \t\r\f\v", text[length - 1]); --length) {
    text[length - 1] = '\0';
  }
  return text;
}

static void take_setting(const char *key, const char *value, struct tocsin_settings *settings) {
  char *place = NULL;
  if (strcmp(key, "frame_root") == 0) {
    place = settings->frame_root;
  } else if (strcmp(key, "library") == 0) {
    place = settings->library;
  } else if (strcmp(key, "nccl_plugin") == 0) {
    place = settings->nccl_plugin;
  }
  if (place) {
    snprintf(place, TOCSIN_PATH_BYTES, "%s", value);
  }
}

static enum tocsin_trouble read_conf(const char *path, struct tocsin_settings *settings) {
  static char text[CONF_BYTES_MAX + 1];
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return errno == ENOENT ? TOCSIN_FINE : TOCSIN_BAD_SETTING;
  }
  const ssize_t length = read(fd, text, CONF_BYTES_MAX);
  close(fd);
  if (length < 0) {
    return TOCSIN_BAD_SETTING;
  }
  text[length] = '\0';
  char *rest = text;
  for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
    char *value = strsep(&line, "#");
    char *key = strsep(&value, "=");
    if (value) {
      take_setting(trimmed(key), trimmed(value), settings);
    }
  }
  return TOCSIN_FINE;
}

static void settle_one(const struct tocsin_environment *environment, const char *variable, const char *directory,
                       const char *name, char *setting) {
  const char *told = value_of(environment, variable);
  if (*told) {
    snprintf(setting, TOCSIN_PATH_BYTES, "%s", told);
  } else if (!*setting) {
    snprintf(setting, TOCSIN_PATH_BYTES, "%s%s", directory, name);
  }
}

enum tocsin_trouble tocsin_settle(const struct tocsin_environment *environment, const char *conf_path,
                                  const char *own_directory, struct tocsin_settings *settings) {
  settings->frame_root[0] = settings->library[0] = settings->nccl_plugin[0] = '\0';
  const enum tocsin_trouble trouble = read_conf(conf_path, settings);
  settle_one(environment, "TOCSIN_FRAME_ROOT", FRAME_ROOT, "", settings->frame_root);
  settle_one(environment, "TOCSIN_PROBE_LIBRARY", own_directory, "/" LIBRARY_NAME, settings->library);
  settle_one(environment, "TOCSIN_NCCL_PLUGIN", own_directory, "/" NCCL_PLUGIN_NAME, settings->nccl_plugin);
  if (trouble != TOCSIN_FINE) {
    return trouble;
  }
  const bool plain = is_plain_path(settings->frame_root) && is_plain_path(settings->library) &&
                     is_plain_path(settings->nccl_plugin);
  return plain ? TOCSIN_FINE : TOCSIN_BAD_SETTING;
}

bool tocsin_disabled(const struct tocsin_environment *environment) {
  const char *told = value_of(environment, "TOCSIN_DISABLE");
  return *told && strcmp(told, "0") != 0;
}

// -- the directory ---------------------------------------------------------------------------------------------------

static enum tocsin_trouble find_place(const struct tocsin_environment *environment,
                                      const struct tocsin_settings *settings, const char *node,
                                      struct tocsin_place *place) {
  char job[16];
  char restart[8];
  snprintf(job, sizeof job, "%s", value_of(environment, "SLURM_JOB_ID"));
  snprintf(restart, sizeof restart, "%s", value_of(environment, "SLURM_RESTART_COUNT"));
  node = node ? node : value_of(environment, "SLURMD_NODENAME");
  if (!is_plain(job, is_digit, 10) || (*restart && !is_plain(restart, is_digit, 5)) ||
      !is_plain(node, is_node_character, 255)) {
    return TOCSIN_BAD_JOB;
  }
  size_t root_length = strlen(settings->frame_root);
  while (root_length > 0 && settings->frame_root[root_length - 1] == '/') {
    --root_length;
  }
  snprintf(place->parent, sizeof place->parent, "%.*s/%s", (int)root_length, settings->frame_root, node);
  snprintf(place->name, sizeof place->name, "%s.%s", job, *restart ? restart : "0");
  return TOCSIN_FINE;
}

static bool is_own_and_private(const struct stat *about) {
  return S_ISDIR(about->st_mode) && about->st_uid == geteuid() && (about->st_mode & 0077) == 0;
}

static enum tocsin_trouble make_in(int parent_fd, const char *name) {
  struct stat about;
  // The daemon is root on a cluster, and the user where somebody tries tocsin out.
  if (fstat(parent_fd, &about) != 0 || (about.st_uid != 0 && about.st_uid != geteuid())) {
    return TOCSIN_FOREIGN;
  }
  if (mkdirat(parent_fd, name, 0700) != 0 && errno != EEXIST) {
    return TOCSIN_NO_DIRECTORY;
  }
  const bool known = fstatat(parent_fd, name, &about, AT_SYMLINK_NOFOLLOW) == 0;
  return known && is_own_and_private(&about) ? TOCSIN_FINE : TOCSIN_FOREIGN;
}

static enum tocsin_trouble make_directory(const struct tocsin_place *place) {
  const int parent_fd = open(place->parent, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (parent_fd < 0) {
    return TOCSIN_NO_DIRECTORY;
  }
  const enum tocsin_trouble trouble = make_in(parent_fd, place->name);
  close(parent_fd);
  return trouble;
}

static bool directory_stands(const struct tocsin_place *place) {
  struct stat about;
  char path[sizeof place->parent + sizeof place->name];
  snprintf(path, sizeof path, "%s/%s", place->parent, place->name);
  return lstat(path, &about) == 0 && is_own_and_private(&about);
}

// By the effective user: slurmstepd, which calls us as the user for a moment, stays root at heart.
static bool readable(const char *path) { return euidaccess(path, R_OK) == 0; }

static enum tocsin_trouble look_around(const struct tocsin_settings *settings) {
  if (!readable(settings->library) && !readable(settings->nccl_plugin)) {
    return TOCSIN_NO_LIBRARY;
  }
#ifdef GLIBC_LOADER
  if (access(GLIBC_LOADER, F_OK) != 0) {
    return TOCSIN_OTHER_LIBC;
  }
#endif
  return TOCSIN_FINE;
}

enum tocsin_trouble tocsin_prepare(const struct tocsin_environment *environment,
                                   const struct tocsin_settings *settings, const char *node,
                                   const struct tocsin_place *made, struct tocsin_place *place) {
  enum tocsin_trouble trouble = values_printable(environment) ? look_around(settings) : TOCSIN_BAD_VALUE;
  if (trouble == TOCSIN_FINE) {
    trouble = find_place(environment, settings, node, place);
  }
  if (trouble != TOCSIN_FINE) {
    return trouble;
  }
  if (made && strcmp(place->parent, made->parent) == 0 && strcmp(place->name, made->name) == 0) {
    return directory_stands(place) ? TOCSIN_FINE : TOCSIN_NO_DIRECTORY;
  }
  return make_directory(place);
}

// -- the environment -------------------------------------------------------------------------------------------------

static void change(struct tocsin_changes *changes, const char *name, const char *value) {
  changes->list[changes->count].name = name;
  changes->list[changes->count].value = value;
  ++changes->count;
}

// The user's own list, in its order, with the probe once at its end; without the probe where `library` is NULL. True
// where the probe was in it.
static bool merge_preload(const char *preload, const char *library, const char *ours, char *merged) {
  bool was_in = false;
  size_t used = 0;
  for (const char *at = preload; *at;) {
    const size_t length = strcspn(at, " :");
    if (length > 0 && is_ours(at, length, ours, LIBRARY_NAME)) {
      was_in = true;
    } else if (length > 0) {
      used += (size_t)sprintf(merged + used, "%s%.*s", used ? ":" : "", (int)length, at);
    }
    at += length + (at[length] != '\0');
  }
  if (library) {
    used += (size_t)sprintf(merged + used, "%s%s", used ? ":" : "", library);
  }
  merged[used] = '\0';
  return was_in;
}

static bool is_our_plugin(const char *plugin, const struct tocsin_settings *settings) {
  return strcmp(plugin, NCCL_PLUGIN_SHORT_NAME) == 0 ||
         is_ours(plugin, strlen(plugin), settings->nccl_plugin, NCCL_PLUGIN_NAME);
}

static void change_preload(const struct tocsin_environment *environment, const struct tocsin_settings *settings,
                           bool attach, struct tocsin_changes *changes) {
  const char *preload = value_of(environment, "LD_PRELOAD");
  const char *library = attach && readable(settings->library) ? settings->library : NULL;
  if (merge_preload(preload, library, settings->library, changes->preload) || library) {
    change(changes, "LD_PRELOAD", *changes->preload ? changes->preload : NULL);
  }
}

// NCCL loads one profiler plugin, and ours loads the one that the user names behind itself. `none` stays none. Taking
// ours away gives the user's back.
static void change_plugin(const struct tocsin_environment *environment, const struct tocsin_settings *settings,
                          bool attach, struct tocsin_changes *changes) {
  char *other = changes->other_plugin;
  snprintf(other, sizeof changes->other_plugin, "%s", value_of(environment, PLUGIN_VARIABLE));
  const bool is_there = is_our_plugin(other, settings);
  if (attach && readable(settings->nccl_plugin) && strcasecmp(other, "none") != 0) {
    change(changes, PLUGIN_VARIABLE, settings->nccl_plugin);
    if (*other && !is_there) {
      change(changes, CHAIN_VARIABLE, other);
    }
  } else if (is_there) {
    snprintf(other, sizeof changes->other_plugin, "%s", value_of(environment, CHAIN_VARIABLE));
    change(changes, PLUGIN_VARIABLE, *other && !is_our_plugin(other, settings) ? other : NULL);
    if (*other) {
      change(changes, CHAIN_VARIABLE, NULL);
    }
  }
}

enum tocsin_trouble tocsin_change(const struct tocsin_environment *environment, const struct tocsin_settings *settings,
                                  const struct tocsin_place *place, struct tocsin_changes *changes) {
  changes->count = 0;
  if (!values_printable(environment)) {
    return TOCSIN_BAD_VALUE;
  }
  if (place) {
    snprintf(changes->directory, sizeof changes->directory, "%s/%s", place->parent, place->name);
    change(changes, "TOCSIN_FRAME_DIR", changes->directory);
  } else if (environment->get(environment->from, "TOCSIN_FRAME_DIR")) {
    change(changes, "TOCSIN_FRAME_DIR", NULL);
  }
  change_preload(environment, settings, place != NULL, changes);
  change_plugin(environment, settings, place != NULL, changes);
  return TOCSIN_FINE;
}
