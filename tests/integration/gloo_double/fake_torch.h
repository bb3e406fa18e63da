// Just enough of torch's and gloo's classes that a compiler gives their functions the real mangled names and the real
// calling conventions. A test compares the names with those of the installed torch.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace at {
struct TensorImpl {
  int64_t elements;
  int32_t dtype;
};
struct Tensor {
  TensorImpl* impl;
};
}  // namespace at

namespace c10 {
namespace detail {
template <class T>
struct intrusive_target_default_null_type {};
}  // namespace detail

// Owns nothing; what counts is that it is no trivial type, so that it travels by address.
template <class T, class Null = detail::intrusive_target_default_null_type<T>>
class intrusive_ptr {
 public:
  explicit intrusive_ptr(T* target = nullptr) : target_(target) {}
  intrusive_ptr(const intrusive_ptr& other) : target_(other.target_) {}
  ~intrusive_ptr() {}
  T* get() const { return target_; }

 private:
  T* target_;
};
}  // namespace c10

namespace gloo {
class Context {};
namespace transport::tcp {
class UnboundBuffer {
 public:
  // What a wait does: true (done), false (aborted) or an exception. Set by the test's driver.
  std::function<bool()> wait;
  int peer = -1;

  virtual ~UnboundBuffer() = default;
  virtual void send(int peer, uint64_t slot, uint64_t offset, uint64_t bytes);
  virtual void recv(int peer, uint64_t slot, uint64_t offset, uint64_t bytes);
  virtual bool waitSend(int* rank, std::chrono::milliseconds timeout);
  virtual bool waitRecv(int* rank, std::chrono::milliseconds timeout);
};
}  // namespace transport::tcp
}  // namespace gloo

namespace c10d {

enum class OpType : uint8_t {};
class Store {};
class Work {};

struct BroadcastOptions {
  int64_t rootRank = 0;
};
struct GatherOptions {
  int64_t rootRank = 0;
};
struct ScatterOptions {
  int64_t rootRank = 0;
};

class ProcessGroupGloo {
 public:
  class AsyncWork : public Work {
   public:
    std::function<void()> body;
    bool throws_through = false;  // whether `execute` lets exceptions out, which the real one does not
    bool failed = false;

    AsyncWork(std::shared_ptr<gloo::Context> context, std::vector<std::vector<at::Tensor>> outputs, OpType op,
              uint64_t seq, std::chrono::milliseconds timeout, const char* title,
              const std::optional<std::vector<at::Tensor>>& inputs);
    virtual ~AsyncWork() = default;
    static void execute(const c10::intrusive_ptr<AsyncWork>& work);
    void finishWorkGloo();
    void finishWorkGlooError(const std::exception_ptr& error);
  };

  struct Options {};

  std::vector<uint64_t> ranks;

  ProcessGroupGloo(const c10::intrusive_ptr<Store>& store, int rank, int size, c10::intrusive_ptr<Options> options);
  virtual ~ProcessGroupGloo();
  void enqueue(c10::intrusive_ptr<AsyncWork> work);
  const std::vector<uint64_t>& groupRanks() const;
  virtual c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors, const BroadcastOptions& options);
  virtual c10::intrusive_ptr<Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                          std::vector<at::Tensor>& inputs, const GatherOptions& options);
  virtual c10::intrusive_ptr<Work> scatter(std::vector<at::Tensor>& outputs,
                                           std::vector<std::vector<at::Tensor>>& inputs,
                                           const ScatterOptions& options);
};

}  // namespace c10d
