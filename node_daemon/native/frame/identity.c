#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kNumberMax = 0x7FFFFFFE };
static const uint32_t kFirstNamespace = 0xEFFFFFFC;  // the inode of the node's own pid namespace, the same everywhere

// Reads a decimal number at `text` and moves it behind it; -1 and unmoved where there is none or it is too great.
static int32_t take_number(const char** text) {
  const char* at = *text;
  int64_t value = 0;
  while (*at >= '0' && *at <= '9' && value <= kNumberMax) {
    value = value * 10 + (*at++ - '0');
  }
  if (at == *text || value > kNumberMax) {
    return -1;
  }
  *text = at;
  return (int32_t)value;
}

// Entry `index` of a comma-separated list of numbers, -1 where it is absent or no number.
static int32_t list_entry(const char* list, int32_t index) {
  for (; index > 0; --index) {
    list = strchr(list, ',');
    if (!list) {
      return -1;
    }
    ++list;
  }
  const int32_t value = take_number(&list);
  return *list == ',' || *list == '\0' ? value : -1;
}

static int32_t read_local_rank(int32_t world_size) {
  const int32_t local_rank = tocsin_env_number("LOCAL_RANK");
  if (local_rank >= 0) {
    return local_rank;
  }
  // Slurm's own number means the same only where every rank is a task.
  const bool rank_per_task = world_size > 0 && tocsin_env_number("SLURM_NTASKS") == world_size;
  return rank_per_task ? tocsin_env_number("SLURM_LOCALID") : -1;
}

static bool list_holds(const char* list, int32_t number) {
  int32_t entry = 0;
  for (int32_t i = 0; entry >= 0; ++i) {
    entry = list_entry(list, i);
    if (entry == number) {
      return entry >= 0;
    }
  }
  return false;
}

// CUDA_VISIBLE_DEVICES counts the node's GPUs or, inside Slurm's device cgroup, those granted to the job from 0. A list
// with a number that was not granted must be of the second kind; where both readings are possible and differ, nobody
// knows.
static int32_t on_node(const char* visible, int32_t number) {
  const char* step_gpus = getenv("SLURM_STEP_GPUS");
  const char* granted = step_gpus ? step_gpus : getenv("SLURM_JOB_GPUS");
  const int32_t renumbered = granted ? list_entry(granted, number) : -1;
  if (renumbered < 0 || renumbered == number) {
    return number;
  }
  for (int32_t i = 0, entry = list_entry(visible, 0); entry >= 0; entry = list_entry(visible, ++i)) {
    if (!list_holds(granted, entry)) {
      return renumbered;
    }
  }
  return -1;
}

static int32_t read_gpu(int32_t local_rank) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible || !*visible) {
    return local_rank;
  }
  const bool only_one = !strchr(visible, ',');  // a task that sees one GPU, whatever its number among the tasks
  const int32_t number = local_rank < 0 && !only_one ? -1 : list_entry(visible, only_one ? 0 : local_rank);
  return number < 0 ? -1 : on_node(visible, number);
}

int32_t tocsin_env_number(const char* name) {
  const char* text = getenv(name);
  if (!text) {
    return -1;
  }
  const int32_t value = take_number(&text);
  return *text == '\0' ? value : -1;
}

tocsin_identity tocsin_read_identity(int32_t rank, int32_t world_size) {
  tocsin_identity who;
  who.rank = rank >= 0 ? rank : tocsin_env_number("RANK");
  who.world_size = world_size > 0 ? world_size : tocsin_env_number("WORLD_SIZE");
  who.local_rank = read_local_rank(who.world_size);
  who.gpu = read_gpu(who.local_rank);
  who.step_id = tocsin_env_number("SLURM_STEP_ID");
  return who;
}

// 0: the node's own, or not known. (Not by sscanf: newer C libraries bind it to a function that older ones lack.)
static uint32_t pid_namespace(void) {
  char text[64];
  const ssize_t length = readlink("/proc/self/ns/pid", text, sizeof text - 1);
  if (length <= 0) {
    return 0;
  }
  text[length] = '\0';
  uint32_t inode = 0;
  for (const char* at = strchr(text, '['); at && *++at >= '0' && *at <= '9';) {
    inode = inode * 10 + (uint32_t)(*at - '0');
  }
  return inode == kFirstNamespace ? 0 : inode;
}

void tocsin_frame_name(char name[TOCSIN_FRAME_NAME_BYTES], int32_t pid, const char* suffix) {
  const uint32_t inode = pid_namespace();
  if (inode) {
    snprintf(name, TOCSIN_FRAME_NAME_BYTES, "%" PRId32 "-%" PRIu32 "%s", pid, inode, suffix);
  } else {
    snprintf(name, TOCSIN_FRAME_NAME_BYTES, "%" PRId32 "%s", pid, suffix);
  }
}

uint64_t tocsin_read_start_ticks(void) {
  char text[1024];
  const int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return 0;
  }
  const ssize_t length = read(fd, text, sizeof text - 1);
  close(fd);
  if (length <= 0) {
    return 0;
  }
  text[length] = '\0';
  const char* at = strrchr(text, ')');  // the command name may hold anything, spaces and brackets included
  for (int field = 2; at && field < 22; ++field) {
    at = strchr(at + 1, ' ');
  }
  if (!at) {
    return 0;
  }
  uint64_t ticks = 0;
  for (++at; *at >= '0' && *at <= '9'; ++at) {
    ticks = ticks * 10 + (uint64_t)(*at - '0');
  }
  return ticks;
}

const char* tocsin_frame_directory(void) {
  const char* directory = getenv("TOCSIN_FRAME_DIR");
  const char* disabled = getenv("TOCSIN_DISABLE");
  const bool off = disabled && strcmp(disabled, "") != 0 && strcmp(disabled, "0") != 0;
  return directory && *directory && !off ? directory : NULL;
}

static void say(const char* prefix, const char* text) {
  char line[512];
  const int length = snprintf(line, sizeof line, "%s%s\n", prefix, text);
  const size_t kept = length < (int)sizeof line ? (size_t)length : sizeof line - 1;
  const ssize_t written = write(STDERR_FILENO, line, kept);
  (void)written;
}

void tocsin_say_absent(const char* directory) {
  const bool first = tocsin_env_number("RANK") <= 0 && tocsin_env_number("LOCAL_RANK") <= 0 &&
                     tocsin_env_number("SLURM_PROCID") <= 0;
  if (first && access(directory, F_OK) != 0 && errno == ENOENT) {
    say("tocsin: not watched: not there (in a container: not mounted): ", directory);
  }
}

void tocsin_debug_line(const char* text) {
  if (getenv("TOCSIN_PROBE_DEBUG")) {
    char prefix[64];
    snprintf(prefix, sizeof prefix, "tocsin probe[%d]: ", getpid());
    say(prefix, text);
  }
}
