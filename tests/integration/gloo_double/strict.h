// A thread that may not call the kernel for anything but its exit. (Not seccomp's strict mode: that takes away the time
// stamp counter, and with it the clock that needs no call.)
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

// From here on any other call ends this thread, and this thread alone. False where the kernel does not do this.
inline bool forbid_calls() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_THREAD),
  };
  const sock_fprog program = {sizeof rules / sizeof *rules, rules};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// The way that threads usually end calls more.
[[noreturn]] inline void end_thread() {
  for (;;) {
    syscall(SYS_exit, 0);
  }
}
