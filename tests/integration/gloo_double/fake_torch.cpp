// A stand-in for libtorch_cpu.so. OLD leaves out what the probe can do without.
#include "fake_torch.h"

namespace gloo::transport::tcp {
void UnboundBuffer::send(int to, uint64_t, uint64_t, uint64_t) { peer = to; }
void UnboundBuffer::recv(int from, uint64_t, uint64_t, uint64_t) { peer = from; }
bool UnboundBuffer::waitSend(int* rank, std::chrono::milliseconds) {
  const bool done = wait ? wait() : true;
  if (done && rank) {
    *rank = peer;
  }
  return done;
}
bool UnboundBuffer::waitRecv(int* rank, std::chrono::milliseconds timeout) {
  const bool done = wait ? wait() : true;
  if (done && rank) {
    *rank = peer;
  }
  (void)timeout;
  return done;
}
}  // namespace gloo::transport::tcp

namespace c10d {

ProcessGroupGloo::AsyncWork::AsyncWork(std::shared_ptr<gloo::Context>, std::vector<std::vector<at::Tensor>>, OpType,
                                       uint64_t, std::chrono::milliseconds, const char*,
                                       const std::optional<std::vector<at::Tensor>>&) {}

void ProcessGroupGloo::AsyncWork::execute(const c10::intrusive_ptr<AsyncWork>& work) {
  if (work.get()->throws_through) {
    work.get()->body();
    return;
  }
  try {
    if (work.get()->body) {
      work.get()->body();
    }
  } catch (...) {
#ifndef OLD
    work.get()->finishWorkGlooError(std::current_exception());
#endif
    return;
  }
#ifndef OLD
  work.get()->finishWorkGloo();
#endif
}

#ifndef OLD
void ProcessGroupGloo::AsyncWork::finishWorkGloo() {}
void ProcessGroupGloo::AsyncWork::finishWorkGlooError(const std::exception_ptr&) { failed = true; }
#endif

ProcessGroupGloo::ProcessGroupGloo(const c10::intrusive_ptr<Store>&, int, int, c10::intrusive_ptr<Options>) {}
ProcessGroupGloo::~ProcessGroupGloo() {}
void ProcessGroupGloo::enqueue(c10::intrusive_ptr<AsyncWork>) {}

#ifndef OLD
const std::vector<uint64_t>& ProcessGroupGloo::groupRanks() const { return ranks; }
#endif

c10::intrusive_ptr<Work> ProcessGroupGloo::broadcast(std::vector<at::Tensor>&, const BroadcastOptions&) {
  return c10::intrusive_ptr<Work>();
}
c10::intrusive_ptr<Work> ProcessGroupGloo::gather(std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
                                                  const GatherOptions&) {
  return c10::intrusive_ptr<Work>();
}
c10::intrusive_ptr<Work> ProcessGroupGloo::scatter(std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&,
                                                   const ScatterOptions&) {
  return c10::intrusive_ptr<Work>();
}

}  // namespace c10d

#ifndef OLD
extern "C" int32_t aoti_torch_get_numel(void* tensor, int64_t* elements) {
  *elements = static_cast<at::Tensor*>(tensor)->impl->elements;
  return 0;
}
extern "C" int32_t aoti_torch_get_dtype(void* tensor, int32_t* dtype) {
  *dtype = static_cast<at::Tensor*>(tensor)->impl->dtype;
  return 0;
}
#endif
