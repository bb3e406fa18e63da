// A SPANK plugin that puts a task into a container the way pyxis does: the mount namespace before the task gives up
// root's rights, the user namespace after it. Acts where the task has CONTAINER=<root directory> in its environment:
//
//   CONTAINER_SCRIPT=<sh script, run with the root's path in the new mount namespace: it mounts>
//   CONTAINER_USER=same|root   a user namespace too, in which the user is itself or root
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

SPANK_PLUGIN(enter_root, 1)

static int failed(const char *what) {
  slurm_error("enter_root: %s: %m", what);
  return ESPANK_ERROR;
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv) {
  char root[1024], script[4096], command[6000];
  (void)argc, (void)argv;
  if (spank_getenv(spank, "CONTAINER", root, sizeof root) != ESPANK_SUCCESS) {
    return ESPANK_SUCCESS;
  }
  if (spank_getenv(spank, "CONTAINER_SCRIPT", script, sizeof script) != ESPANK_SUCCESS) {
    return failed("CONTAINER_SCRIPT");
  }
  snprintf(command, sizeof command, "/bin/sh -e %s %s", script, root);
  if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || system(command) != 0) {
    return failed(command);
  }
  if (chdir(root) != 0 || syscall(SYS_pivot_root, ".", ".") != 0 || umount2(".", MNT_DETACH) != 0 || chdir("/") != 0) {
    return failed("pivot_root");
  }
  return ESPANK_SUCCESS;
}

static int map_one(const char *file, unsigned inside, unsigned outside) {
  char line[64];
  const int length = snprintf(line, sizeof line, "%u %u 1\n", inside, outside);
  const int fd = open(file, O_WRONLY);
  const int written = fd < 0 ? -1 : (int)write(fd, line, (size_t)length);
  close(fd);
  return written == length ? 0 : -1;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
  char who[16];
  (void)argc, (void)argv;
  if (spank_getenv(spank, "CONTAINER_USER", who, sizeof who) != ESPANK_SUCCESS) {
    return ESPANK_SUCCESS;
  }
  const unsigned uid = geteuid(), gid = getegid();
  const int as_root = strcmp(who, "root") == 0;
  // Else the files below belong to root, since this process has changed its user.
  if (prctl(PR_SET_DUMPABLE, 1) != 0 || unshare(CLONE_NEWUSER) != 0) {
    return failed("unshare");
  }
  const int fd = open("/proc/self/setgroups", O_WRONLY);
  const int denied = fd >= 0 && write(fd, "deny", 4) == 4;
  close(fd);
  if (!denied || map_one("/proc/self/uid_map", as_root ? 0 : uid, uid) != 0 ||
      map_one("/proc/self/gid_map", as_root ? 0 : gid, gid) != 0) {
    return failed("the maps of the user namespace");
  }
  return ESPANK_SUCCESS;
}
