// Plays a training process, one command a line from stdin, and answers each with a line on stdout. Time stands still
// except for `advance`, so that what the probe writes can be told in advance.
#include <dlfcn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "fake_torch.h"
#include "strict.h"

using c10d::ProcessGroupGloo;
using WorkPtr = c10::intrusive_ptr<ProcessGroupGloo::AsyncWork>;
using gloo::transport::tcp::UnboundBuffer;

static std::atomic<uint64_t> g_now_ns{1000000000000};
static std::atomic<bool> g_real_time{false};
static std::atomic<bool> g_clock_calls{false};  // as on a machine whose clock cannot be read without the kernel

static const auto g_real_clock =
    reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));

extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  if (g_clock_calls) {
    return static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  }
  if (g_real_time) {
    return g_real_clock(clock, now);
  }
  now->tv_sec = static_cast<time_t>(g_now_ns / 1000000000);
  now->tv_nsec = static_cast<long>(g_now_ns % 1000000000);
  return 0;
}

// Every operation of torch is a class derived from AsyncWork.
struct Operation : ProcessGroupGloo::AsyncWork {
  using AsyncWork::AsyncWork;
};

// A work object and, while it is executed, the thread that executes what the test hands over step by step.
struct Job {
  at::TensorImpl tensor{};
  std::unique_ptr<Operation> work;
  std::thread thread;
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> next;
  bool ended = false;
  bool leave = false;
  std::string left_with = "nothing";

  void body() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!leave) {
      changed.wait(lock, [this] { return leave || next; });
      if (next) {
        const auto step = std::move(next);
        next = nullptr;
        changed.notify_all();
        lock.unlock();
        step();
        lock.lock();
      }
    }
  }
  void start() {
    work->body = [this] { body(); };
    thread = std::thread([this] {
      try {
        ProcessGroupGloo::AsyncWork::execute(WorkPtr(work.get()));
      } catch (const std::runtime_error& error) {
        left_with = error.what();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      ended = true;
      changed.notify_all();
    });
    hand_over([] {});
  }
  void hand_over(std::function<void()> step) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return ended || !next; });
    next = std::move(step);
    changed.notify_all();
    changed.wait(lock, [this] { return ended || !next; });
  }
  void finish() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      leave = true;
      changed.notify_all();
    }
    if (thread.joinable()) {
      thread.join();
    }
  }
};

static std::map<std::string, std::unique_ptr<ProcessGroupGloo>> g_groups;
static std::map<std::string, std::unique_ptr<Job>> g_jobs;

// A wait that the test ends later: how a step looks in the frame while it is not over.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  std::string outcome;
  bool reached = false;

  bool pass() {
    std::unique_lock<std::mutex> lock(mutex);
    reached = true;
    changed.notify_all();
    changed.wait(lock, [this] { return !outcome.empty(); });
    const std::string how = std::move(outcome);
    outcome.clear();
    reached = false;
    changed.notify_all();
    if (how == "throw") {
      throw std::runtime_error("connection reset by the test");
    }
    return how == "done";
  }
  void wait_reached() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }
  void open(const std::string& how) {
    std::unique_lock<std::mutex> lock(mutex);
    outcome = how;
    changed.notify_all();
    changed.wait(lock, [this] { return !reached; });
  }
};
static Gate g_gate;

static void group(std::istringstream& words) {
  std::string name, ranks;
  int rank = 0, size = 0;
  words >> name >> rank >> size >> ranks;
  auto made = std::make_unique<ProcessGroupGloo>(c10::intrusive_ptr<c10d::Store>(), rank, size,
                                                 c10::intrusive_ptr<ProcessGroupGloo::Options>());
  std::istringstream list(ranks);
  for (std::string one; std::getline(list, one, ',');) {
    made->ranks.push_back(std::stoull(one));
  }
  g_groups[name] = std::move(made);
}

static void enqueue(std::istringstream& words) {
  std::string group_name, job_name, side;
  int op = 0, dtype = 0;
  auto job = std::make_unique<Job>();
  words >> group_name >> job_name >> op >> dtype >> job->tensor.elements >> side;
  job->tensor.dtype = dtype;
  const std::vector<at::Tensor> tensors{at::Tensor{&job->tensor}};
  const bool outputs_only = side == "outputs";
  job->work = std::make_unique<Operation>(
      std::make_shared<gloo::Context>(), std::vector<std::vector<at::Tensor>>{tensors},
      static_cast<c10d::OpType>(op), 1, std::chrono::milliseconds(1000), "fake",
      outputs_only ? std::nullopt : std::optional<std::vector<at::Tensor>>(tensors));
  g_groups.at(group_name)->enqueue(WorkPtr(job->work.get()));
  g_jobs[job_name] = std::move(job);
}

static void rooted(std::istringstream& words) {
  std::string group_name, which;
  int64_t root = 0;
  words >> group_name >> which >> root;
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<at::Tensor>> lists;
  ProcessGroupGloo& asked = *g_groups.at(group_name);
  if (which == "broadcast") {
    asked.broadcast(tensors, c10d::BroadcastOptions{root});
  } else if (which == "gather") {
    asked.gather(lists, tensors, c10d::GatherOptions{root});
  } else {
    asked.scatter(tensors, lists, c10d::ScatterOptions{root});
  }
}

static void step(std::istringstream& words) {
  std::string name, direction, how;
  int peer = 0;
  uint64_t bytes = 0;
  words >> name >> direction >> peer >> bytes >> how;
  const bool held = how == "held";
  const auto body = [=] {
    UnboundBuffer buffer;
    buffer.wait = held ? std::function<bool()>([] { return g_gate.pass(); }) : nullptr;
    if (direction == "send") {
      buffer.send(peer, 0, 0, bytes);
      buffer.waitSend(nullptr, std::chrono::milliseconds(0));
    } else {
      buffer.recv(peer, 0, 0, bytes);
      buffer.waitRecv(nullptr, std::chrono::milliseconds(0));
    }
  };
  if (name == "-") {  // point-to-point: outside of any round, on the program's own thread
    body();
    return;
  }
  g_jobs.at(name)->hand_over(body);
  if (held) {
    g_gate.wait_reached();
  } else {
    g_jobs.at(name)->hand_over([] {});
  }
}

static uint64_t thread_cpu_ns() {
  timespec used;
  g_real_clock(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<uint64_t>(used.tv_sec) * 1000000000 + static_cast<uint64_t>(used.tv_nsec);
}

static std::vector<ProcessGroupGloo*> named_groups(const std::string& names) {
  std::vector<ProcessGroupGloo*> found;
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    found.push_back(g_groups.at(name).get());
  }
  return found;
}

// Whole rounds on this thread, each with `steps` sends and receives, on the groups in turn.
static void play_rounds(const std::vector<ProcessGroupGloo*>& groups, int rounds, int steps) {
  const auto body = [steps] {
    UnboundBuffer buffer;
    for (int i = 0; i < steps; ++i) {
      buffer.send(1, 0, 0, 8);
      buffer.waitSend(nullptr, std::chrono::milliseconds(0));
      buffer.recv(2, 0, 0, 8);
      buffer.waitRecv(nullptr, std::chrono::milliseconds(0));
    }
  };
  at::TensorImpl tensor{8, 6};
  const std::optional<std::vector<at::Tensor>> inputs(std::vector<at::Tensor>{at::Tensor{&tensor}});
  const std::shared_ptr<gloo::Context> context;
  for (int i = 0; i < rounds; ++i) {
    Operation work(context, {}, static_cast<c10d::OpType>(1), 1, std::chrono::milliseconds(0), "storm", inputs);
    work.body = body;
    groups[static_cast<size_t>(i) % groups.size()]->enqueue(WorkPtr(&work));
    ProcessGroupGloo::AsyncWork::execute(WorkPtr(&work));
  }
}

// Rounds from several threads at once, on the named groups (comma between them). The threads' CPU time in all, in ns.
static uint64_t storm(std::istringstream& words) {
  std::string names;
  int threads = 0, rounds = 0, steps = 0;
  words >> names >> threads >> rounds >> steps;
  const auto groups = named_groups(names);
  std::atomic<uint64_t> used_ns{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&groups, &used_ns, rounds, steps] {
      const uint64_t begin_ns = thread_cpu_ns();
      play_rounds(groups, rounds, steps);
      used_ns += thread_cpu_ns() - begin_ns;
    });
  }
  for (std::thread& one : all) {
    one.join();
  }
  return used_ns;
}

// Rounds on a thread that may not call the kernel. Whether it came through.
static bool strict(std::istringstream& words) {
  std::string names;
  int rounds = 0, steps = 0;
  words >> names >> rounds >> steps;
  std::atomic<bool> finished{false};
  const auto groups = named_groups(names);
  std::thread([&finished, &groups, rounds, steps] {
    play_rounds(groups, 1, steps);  // the double has its memory now
    if (forbid_calls()) {
      play_rounds(groups, rounds, steps);
      finished = true;
    }
    end_thread();
  }).join();
  return finished;
}

static int g_child_in = -1, g_child_out = -1;

static std::string play(std::istringstream& words, const std::string& command);

// A child that obeys commands too: `child <command>`. `fork` alone starts it, `reap` ends it.
static std::string fork_child() {
  int to_child[2], to_parent[2];
  if (pipe(to_child) != 0 || pipe(to_parent) != 0) {
    return "error pipe";
  }
  const pid_t child = fork();
  if (child == 0) {
    dup2(to_child[0], STDIN_FILENO);
    dup2(to_parent[1], STDOUT_FILENO);
    close(to_child[1]);
    close(to_parent[0]);
    std::cin.clear();
    return "";  // goes on reading commands, now the parent's
  }
  close(to_child[0]);
  close(to_parent[1]);
  g_child_in = to_child[1];
  g_child_out = to_parent[0];
  return "ok " + std::to_string(child);
}

static std::string ask_child(const std::string& rest) {
  const std::string line = rest + "\n";
  if (write(g_child_in, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return "error write";
  }
  std::string answer;
  for (char c; read(g_child_out, &c, 1) == 1 && c != '\n';) {
    answer += c;
  }
  return answer;
}

static std::string play(std::istringstream& words, const std::string& command) {
  std::string name;
  if (command == "group") {
    group(words);
  } else if (command == "end") {
    words >> name;
    g_groups.erase(name);
  } else if (command == "enqueue") {
    enqueue(words);
  } else if (command == "rooted") {
    rooted(words);
  } else if (command == "start") {
    words >> name;
    std::string mode;
    words >> mode;
    g_jobs.at(name)->work->throws_through = mode == "through";
    g_jobs.at(name)->start();
  } else if (command == "step") {
    step(words);
  } else if (command == "gate") {
    words >> name;
    g_gate.open(name);
  } else if (command == "throw") {
    words >> name;
    g_jobs.at(name)->hand_over([] { throw std::runtime_error("thrown by the test"); });
    g_jobs.at(name)->finish();
    return "ok " + g_jobs.at(name)->left_with;
  } else if (command == "finish") {
    words >> name;
    g_jobs.at(name)->finish();
    return "ok " + g_jobs.at(name)->left_with;
  } else if (command == "advance") {
    uint64_t microseconds = 0;
    words >> microseconds;
    g_now_ns += microseconds * 1000;
  } else if (command == "storm") {
    return "ok " + std::to_string(storm(words));
  } else if (command == "strict") {
    return "ok " + std::to_string(strict(words));
  } else if (command == "realtime") {
    g_real_time = true;
  } else if (command == "calling_clock") {
    g_clock_calls = true;
  } else if (command == "fork") {
    return fork_child();
  } else if (command == "child") {
    std::string rest;
    std::getline(words, rest);
    return ask_child(rest);
  } else if (command == "pid") {
    return "ok " + std::to_string(getpid());
  } else {
    return "error unknown command " + command;
  }
  return "ok";
}

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    const std::string answer = play(words, command);
    if (!answer.empty()) {
      std::cout << answer << std::endl;
    }
  }
  for (auto& [name, job] : g_jobs) {
    job->finish();
  }
  if (g_child_in >= 0) {
    close(g_child_in);
    wait(nullptr);
  }
  return 0;
}
