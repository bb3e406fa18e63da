/* A program that plays NCCL: it loads the plugin and calls it, command by command (one line in, one line "ok ..." out).
 *
 *     driver PLUGIN INTERFACE
 *
 * Handles are kept under names; "-" is the null handle, "0x.." any value. Strings in a descriptor live for the call only. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

enum { COMMS_MAX = 256, NAMES_MAX = 512, WORDS_MAX = 16 };

plugin g_plugin;
int g_mask;
int g_pid;
void fake_nccl_log(int level, unsigned long subsystems, const char* file, int line, const char* format, ...);

static comm g_comms[COMMS_MAX];
static int g_comm_count;
static struct {
  char name[32];
  void* handle;
} g_names[NAMES_MAX];

static comm* find_comm(const char* name) {
  for (int i = 0; i < g_comm_count; ++i) {
    if (strcmp(g_comms[i].name, name) == 0) {
      return &g_comms[i];
    }
  }
  fprintf(stderr, "no communicator %s\n", name);
  exit(1);
}

static void* recall(const char* name) {
  if (strcmp(name, "-") == 0) {
    return NULL;
  }
  if (strncmp(name, "0x", 2) == 0) {
    return (void*)strtoull(name, NULL, 16);
  }
  for (int i = 0; i < NAMES_MAX && g_names[i].name[0]; ++i) {
    if (strcmp(g_names[i].name, name) == 0) {
      return g_names[i].handle;
    }
  }
  fprintf(stderr, "no handle %s\n", name);
  exit(1);
}

static void keep(const char* name, void* handle) {
  for (int i = 0; i < NAMES_MAX; ++i) {
    if (!g_names[i].name[0] || strcmp(g_names[i].name, name) == 0) {
      snprintf(g_names[i].name, sizeof g_names[i].name, "%s", name);
      g_names[i].handle = handle;
      return;
    }
  }
}

static void load(const char* path, int interface) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  char symbol[32];
  snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", interface);
  void* found = library ? dlsym(library, symbol) : NULL;
  if (!found) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  g_plugin.interface = interface;
  g_plugin.v4 = found;
  g_plugin.v5 = found;
  const nccl_profiler_v5* same = found; /* what follows init lies alike in all */
  g_plugin.start_event = same->start_event;
  g_plugin.stop_event = same->stop_event;
  g_plugin.record_state = same->record_state;
  g_plugin.finalize = same->finalize;
}

static int init_comm(comm* made) {
  return g_plugin.interface == 4
             ? g_plugin.v4->init(&made->context, &g_mask, "c", made->id, 2, made->ranks, made->rank, fake_nccl_log)
             : g_plugin.v5->init(&made->context, made->id, &g_mask, "c", 2, made->ranks, made->rank, fake_nccl_log);
}

/* comm NAME ID RANKS RANK */
static void make_comm(char** words) {
  comm* made = &g_comms[g_comm_count++];
  *made = (comm){.id = strtoull(words[2], NULL, 0), .ranks = atoi(words[3]), .rank = atoi(words[4])};
  snprintf(made->name, sizeof made->name, "%s", words[1]);
  const int failed = init_comm(made);
  printf("ok %d %d %d\n", failed, made->context != NULL, g_mask);
}

/* begin HANDLE COMM TYPE PARENT [FIELD=VALUE ...] */
static void begin_event(char** words, int count) {
  comm* on = find_comm(words[2]);
  const int type = atoi(words[3]);
  nccl_event event = event_of(type, recall(words[4]), on->rank);
  event.proxy_op.pid = type == NCCL_PROXY_OP ? g_pid : event.proxy_op.pid;
  for (int i = 5; i < count; ++i) {
    char* value = strchr(words[i], '=');
    *value++ = '\0';
    const char* field = words[i];
    const long number = strtol(value, NULL, 0);
    if (strcmp(field, "function") == 0) {
      *(type == NCCL_COLL ? &event.coll.function : &event.coll_api.function) = value;
    } else if (strcmp(field, "datatype") == 0) {
      *(type == NCCL_COLL ? &event.coll.datatype : &event.coll_api.datatype) = value;
    } else if (strcmp(field, "count") == 0) {
      *(type == NCCL_COLL ? &event.coll.count : &event.coll_api.count) = strtoull(value, NULL, 0);
    } else if (strcmp(field, "root") == 0) {
      *(type == NCCL_COLL ? &event.coll.root : &event.coll_api.root) = (int)number;
    } else if (strcmp(field, "captured") == 0) {
      event.coll_api.graph_captured = number != 0;
    } else if (strcmp(field, "channels") == 0) {
      *(type == NCCL_COLL ? &event.coll.channels : &event.p2p.channels) = (uint8_t)number;
    } else if (strcmp(field, "group") == 0) {
      *(type == NCCL_COLL ? &event.coll.group : &event.p2p.group) = recall(value);
    } else if (strcmp(field, "algorithm") == 0) {
      event.coll.algorithm = value;
    } else if (strcmp(field, "protocol") == 0) {
      event.coll.protocol = value;
    } else if (strcmp(field, "pid") == 0) {
      event.proxy_op.pid = (int)number;
    } else if (strcmp(field, "channel") == 0) {
      *(type == NCCL_KERNEL_CH ? &event.kernel_ch.channel : &event.proxy_op.channel) = (uint8_t)number;
    } else if (strcmp(field, "peer") == 0) {
      event.proxy_op.peer = (int)number;
    } else if (strcmp(field, "send") == 0) {
      event.proxy_op.is_send = (int)number;
    } else if (strcmp(field, "gpu_ns") == 0) {
      event.kernel_ch.gpu_ns = strtoull(value, NULL, 0);
    } else {
      fprintf(stderr, "no field %s\n", field);
      exit(1);
    }
  }
  void* handle = begin(on, &event);
  keep(words[1], handle);
  printf("ok %d\n", handle != NULL);
}

/* state HANDLE STATE [VALUE] ; without a value NCCL hands over no arguments at all */
static void record(char** words, int count) {
  nccl_state_args args = {count > 3 ? strtoull(words[3], NULL, 0) : 0};
  printf("ok %d\n", g_plugin.record_state(recall(words[1]), atoi(words[2]), count > 3 ? &args : NULL));
}

/* allreduce COMM COLLECTIVES CHANNELS STEPS */
static void allreduce(char** words) {
  comm* on = find_comm(words[1]);
  for (int i = 0; i < atoi(words[2]); ++i) {
    const work of = launch(on, atoi(words[3]), atoi(words[4]));
    transfer(on, &of);
    run_kernels(on, &of);
  }
  puts("ok");
}

static void nothing(void) {}

/* More communicators than a frame has slots come, work and go, in turn and over one another. */
static void come_and_go(void) {
  enum { TURNS = 60, ALIVE = 20 };
  comm alive[ALIVE] = {0};
  for (int turn = 0; turn < TURNS + ALIVE; ++turn) {
    comm* one = &alive[turn % ALIVE];
    if (one->context) {
      g_plugin.finalize(one->context);
    }
    *one = (comm){.id = 100000 + (uint64_t)turn, .ranks = 4, .rank = 1};
    if (turn < TURNS && init_comm(one) == 0) {
      const work of = launch(one, 2, 2);
      transfer(one, &of);
      run_kernels(one, &of);
    }
  }
}

/* lives COUNT: so many communicators, one after the other, each with a collective */
static void live_often(char** words) {
  const int count = atoi(words[1]);
  int followed = 0;
  for (int life = 0; life < count; ++life) {
    comm one = {.id = 1000000 + (uint64_t)life, .ranks = 4, .rank = 1};
    init_comm(&one);
    followed += one.context != NULL;
    const work of = launch(&one, 2, 2);
    transfer(&one, &of);
    run_kernels(&one, &of);
    g_plugin.finalize(one.context);
  }
  printf("ok %d\n", followed);
}

/* pipelines COLLECTIVES CHANNELS STEPS COMM ..., or churn likewise: while communicators come and go */
static void run_pipelines(char** words, int count) {
  comm* comms[WORDS_MAX];
  for (int i = 4; i < count; ++i) {
    comms[i - 4] = find_comm(words[i]);
  }
  const int churn = strcmp(words[0], "churn") == 0;
  pipelines(comms, count - 4, atoi(words[1]), atoi(words[2]), atoi(words[3]), churn ? come_and_go : nothing);
  puts("ok");
}

/* fork COMM: a child goes on with the parent's communicator, then makes one of its own; answers with its number */
static void fork_child(char** words) {
  const pid_t child = fork();
  if (child == 0) {
    g_pid = getpid();
    const work of = launch(find_comm(words[1]), 2, 2);
    transfer(find_comm(words[1]), &of);
    char* own[] = {"comm", "own", "0x77", "4", "2", NULL};
    fclose(stdout);
    make_comm(own);
    const work mine = launch(find_comm("own"), 2, 2);
    run_kernels(find_comm("own"), &mine);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  printf("ok %d %d\n", child, status);
}

static void obey(char** words, int count) {
  if (strcmp(words[0], "comm") == 0) {
    make_comm(words);
  } else if (strcmp(words[0], "finalize") == 0) {
    printf("ok %d\n", g_plugin.finalize(find_comm(words[1])->context));
  } else if (strcmp(words[0], "begin") == 0) {
    begin_event(words, count);
  } else if (strcmp(words[0], "end") == 0) {
    printf("ok %d\n", g_plugin.stop_event(recall(words[1])));
  } else if (strcmp(words[0], "state") == 0) {
    record(words, count);
  } else if (strcmp(words[0], "mask") == 0) {
    g_mask = count > 1 ? atoi(words[1]) : g_mask;
    printf("ok %d\n", g_mask);
  } else if (strcmp(words[0], "allreduce") == 0) {
    allreduce(words);
  } else if (strcmp(words[0], "pipelines") == 0 || strcmp(words[0], "churn") == 0) {
    run_pipelines(words, count);
  } else if (strcmp(words[0], "strict") == 0) { /* strict COMM COLLECTIVES CHANNELS STEPS */
    printf("ok %d\n", run_strictly(find_comm(words[1]), atoi(words[2]), atoi(words[3]), atoi(words[4])));
  } else if (strcmp(words[0], "lives") == 0) {
    live_often(words);
  } else if (strcmp(words[0], "release") == 0) { /* release VERSION: the next communicator is of another NCCL */
    setenv("FAKE_NCCL_VERSION", words[1], 1);
    puts("ok");
  } else if (strcmp(words[0], "fork") == 0) {
    fork_child(words);
  } else {
    printf("unknown command %s\n", words[0]);
  }
}

int main(int count, char** arguments) {
  if (count != 3) {
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  g_pid = getpid();
  load(arguments[1], atoi(arguments[2]));
  char line[1024];
  while (fgets(line, sizeof line, stdin)) {
    char* words[WORDS_MAX + 1] = {NULL};
    int found = 0;
    for (char* word = strtok(line, " \n"); word && found < WORDS_MAX; word = strtok(NULL, " \n")) {
      words[found++] = word;
    }
    if (found) {
      obey(words, found);
    }
  }
  return 0;
}
