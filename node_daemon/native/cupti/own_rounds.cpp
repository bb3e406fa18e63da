#include "own_rounds.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <unistd.h>

#include "identity.h"

namespace tocsin {
namespace {

static_assert(sizeof(FrameFile) == TOCSIN_FRAME_HEADER_BYTES + TOCSIN_FRAME_SLOT_COUNT * TOCSIN_FRAME_SLOT_BYTES,
              "a frame is a header and its slots, without padding");

const char* const kSuffixes[] = {".nccl.frame", ".frame"};

bool has_size(int fd) {
  struct statx about;  // past glibc, as in frame_file.c
  return syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_TYPE | STATX_SIZE, &about) == 0 && S_ISREG(about.stx_mode) &&
         about.stx_size >= sizeof(FrameFile);
}

const FrameFile* map_frame(const char* directory, int32_t pid, const char* suffix) {
  char name[TOCSIN_FRAME_NAME_BYTES];
  tocsin_frame_name(name, pid, suffix);
  const int directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory_fd < 0) {
    return nullptr;
  }
  const int fd = openat(directory_fd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  close(directory_fd);
  if (fd < 0) {
    return nullptr;
  }
  void* memory = has_size(fd) ? mmap(nullptr, sizeof(FrameFile), PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  const FrameFile* const frame = (const FrameFile*)memory;
  // A dead namesake's frame stays until this process makes its own.
  if (__atomic_load_n(&frame->header.magic, __ATOMIC_ACQUIRE) == TOCSIN_FRAME_MAGIC &&
      frame->header.version == TOCSIN_FRAME_VERSION && frame->header.pid_start_ticks == tocsin_read_start_ticks()) {
    return frame;
  }
  munmap(memory, sizeof(FrameFile));
  return nullptr;
}

}  // namespace

bool rounds_entered(OwnRounds& own, const char* directory, int32_t pid, uint64_t comm_id, uint64_t* rounds) {
  for (uint32_t which = 0; which < 2; ++which) {
    const FrameFile*& frame = own.frames[which];
    if (!frame) {
      frame = map_frame(directory, pid, kSuffixes[which]);
    }
    for (uint32_t at = 0; frame && at < TOCSIN_FRAME_SLOT_COUNT; ++at) {
      const tocsin_slot& slot = frame->slots[at];
      if (__atomic_load_n(&slot.comm_id, __ATOMIC_ACQUIRE) != comm_id) {
        continue;
      }
      const uint64_t entered = __atomic_load_n(&slot.enqueued, __ATOMIC_ACQUIRE);
      if (__atomic_load_n(&slot.comm_id, __ATOMIC_ACQUIRE) == comm_id) {  // else it was taken away meanwhile
        *rounds = entered;
        return true;
      }
    }
  }
  return false;
}

void forget_rounds(OwnRounds& own) {
  for (const FrameFile*& frame : own.frames) {
    if (frame) {
      munmap((void*)frame, sizeof(FrameFile));
      frame = nullptr;
    }
  }
}

}  // namespace tocsin
