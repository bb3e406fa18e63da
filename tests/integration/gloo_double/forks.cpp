// A training process that forks again and again while its threads are in the middle of collectives, as data loaders and
// subprocesses do. Every child makes a group and a round of its own. Ends with 0 when every child did.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "fake_torch.h"

using c10d::ProcessGroupGloo;
using WorkPtr = c10::intrusive_ptr<ProcessGroupGloo::AsyncWork>;

struct Operation : ProcessGroupGloo::AsyncWork {
  using AsyncWork::AsyncWork;
};

static std::unique_ptr<ProcessGroupGloo> make_group() {
  auto made = std::make_unique<ProcessGroupGloo>(c10::intrusive_ptr<c10d::Store>(), 1, 4,
                                                 c10::intrusive_ptr<ProcessGroupGloo::Options>());
  made->ranks = {0, 1, 2, 3};
  return made;
}

static void round(ProcessGroupGloo& group) {
  at::TensorImpl tensor{8, 6};
  const std::optional<std::vector<at::Tensor>> inputs(std::vector<at::Tensor>{at::Tensor{&tensor}});
  Operation work(std::shared_ptr<gloo::Context>(), {}, static_cast<c10d::OpType>(1), 1, std::chrono::milliseconds(0),
                 "forks", inputs);
  group.enqueue(WorkPtr(&work));
  ProcessGroupGloo::AsyncWork::execute(WorkPtr(&work));
}

int main(int, char** arguments) {
  const int forks = atoi(arguments[1]);
  std::atomic<bool> leave{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&leave] {
      const auto kept = make_group();
      while (!leave) {
        const auto group = make_group();  // groups come and go: that is where the probe takes its lock
        round(*group);
        round(*kept);
      }
    });
  }
  int failed = 0;
  for (int i = 0; i < forks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a lock that a thread of the parent held would hold up the child for ever
      const auto group = make_group();
      round(*group);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  leave = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  printf("%d of %d children failed\n", failed, forks);
  return failed != 0;
}
