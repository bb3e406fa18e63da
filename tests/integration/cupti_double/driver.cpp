// Plays a CUDA program, command by command: `driver COLLECTOR FAKE_CUPTI`. It loads the collector as libcuda does at
// cuInit, and the stand-in for CUPTI only where it is told to (the collector finds it by its path).
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "fake_cupti.h"

namespace {

void* g_fake;
std::atomic<bool> g_storm;
std::vector<std::thread>& g_threads = *new std::vector<std::thread>;  // may run when the program ends
const char* const kNames[] = {"gemm", "softmax", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"};

template <class F>
F* call(F*, const char* name) {
  return reinterpret_cast<F*>(dlsym(g_fake, name));
}
#define FAKE(name_) call(&name_, #name_)

uint64_t processor_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void storm() {
  while (g_storm) {
    for (const char* name : kNames) {
      FAKE(fake_launch)(name, 1000);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::string forked(std::istringstream&) {
  const pid_t child = fork();
  if (child == 0) {
    exit(7);  // by the handlers too
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? std::to_string(WEXITSTATUS(status)) : "signal " + std::to_string(WTERMSIG(status));
}

std::string obey(const std::string& what, std::istringstream& rest) {
  std::string name;
  uint64_t number = 0;
  if (what == "launch") {
    rest >> name >> number;
    for (uint64_t times = number; times--;) {
      FAKE(fake_launch)(kNames[atoi(name.c_str())], 1000);
    }
  } else if (what == "call") {
    FAKE(fake_call)();
  } else if (what == "fail") {
    rest >> name >> number;
    FAKE(fake_fail)(name.c_str(), (int)number);
  } else if (what == "calls") {
    rest >> name;
    return std::to_string(FAKE(fake_calls)(name.c_str()));
  } else if (what == "other") {
    rest >> number;
    FAKE(fake_other_client)((int)number);
  } else if (what == "hold") {
    rest >> number;
    FAKE(fake_hold)((int)number);
  } else if (what == "version") {
    rest >> number;
    FAKE(fake_version)((uint32_t)number);
  } else if (what == "storm") {
    g_storm = true;
    rest >> number;
    while (number--) {
      g_threads.emplace_back(storm);
    }
  } else if (what == "calm") {
    g_storm = false;
    for (std::thread& one : g_threads) {
      one.join();
    }
    g_threads.clear();
  } else if (what == "fork") {
    return forked(rest);
  } else if (what == "processor") {  // of the whole process
    return std::to_string(processor_ns(CLOCK_PROCESS_CPUTIME_ID));
  }
  return "ok";
}

}  // namespace

int main(int, char** arguments) {
  g_fake = dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL);
  void* const collector = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!g_fake || !collector) {
    std::cerr << dlerror() << std::endl;
    return 1;
  }
  const auto initialize = reinterpret_cast<int (*)()>(dlsym(collector, "InitializeInjection"));
  std::cout << initialize() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream rest(line);
    std::string what;
    rest >> what;
    if (what == "exit") {
      break;
    }
    std::cout << obey(what, rest) << std::endl;
  }
  if (g_storm) {  // as programs end: with threads that still work
    exit(0);
  }
  return 0;
}
