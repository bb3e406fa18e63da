#include "rounds.h"

#include "frame_file.h"
#include "nccl_frame.h"

static uint64_t g_gpu_newest_ns;  // when a kernel of NCCL last began or ended, by the GPU's clock

static const uint64_t kGpuLate_ns = 60000000000;  // no kernel's stamp arrives as late as this

static coll_round* round_at(communicator* owner, uint32_t seq) {
  coll_round* found = &owner->rounds[seq % ROUNDS_MAX];
  return seq && LOAD(found->seq) == seq ? found : NULL;
}

// Its entry in the slot, null where it has none or a later round's stands there.
static tocsin_round* entry_of(const coll_round* round, tocsin_slot* slot) {
  const uint32_t place = LOAD(round->entry);
  tocsin_round* entry = place ? &slot->rounds[place - 1] : NULL;
  return entry && LOAD(entry->seq) == LOAD(round->seq) ? entry : NULL;
}

static launch* launch_at(communicator* owner, uint32_t number) {
  launch* found = &owner->launch_ring[number % LAUNCHES_MAX];
  return number && LOAD(found->number) == number ? found : NULL;
}

static launch* launch_of(communicator* owner, uint64_t handle) {
  const uint32_t kind = HANDLE_KIND(handle), number = HANDLE_NUMBER(handle);
  if (kind == KIND_KERNEL_P2P || kind == KIND_OP_P2P) {
    return launch_at(owner, number);
  }
  const coll_round* round = round_at(owner, number);
  return round ? launch_at(owner, LOAD(round->launch)) : NULL;
}

// The whole number that these are the low 32 bits of; it was entered a moment ago.
static uint64_t widened(const communicator* owner, uint32_t low) {
  const uint64_t newest = LOAD(owner->enqueued);
  return newest - (uint32_t)((uint32_t)newest - low);
}

// Raises a number that several threads raise.
static void raise_to(uint64_t* field, uint64_t value) {
  uint64_t seen = LOAD(*field);
  while (seen < value &&
         !__atomic_compare_exchange_n(field, &seen, value, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

static uint16_t untold(const communicator* owner, uint32_t events) {
  return (uint16_t)((events & NCCL_KERNEL_CH ? 0 : TOCSIN_UNTOLD_TIMES | TOCSIN_UNTOLD_DONE) |
                    (events & NCCL_PROXY_STEP ? 0 : TOCSIN_UNTOLD_STEPS) |
                    (LOAD(owner->graphs) ? TOCSIN_UNTOLD_GRAPHS : 0) | TOCSIN_UNTOLD_ERRORS);
}

void call_entered(communicator* owner) { STORE(owner->call_events, (uint32_t)LOAD(*owner->mask)); }

// What is set now holds from the program's next call on. Where RAS or another hand has set the mask meanwhile, it stays
// as it is until our own wish changes.
static void mind_events(communicator* owner, uint64_t now_ns) {
  const int* others = LOAD(owner->others_mask);
  const uint32_t wanted = events_wanted(&owner->allowed, now_ns) | (others ? (uint32_t)LOAD(*others) : 0);
  if (wanted != LOAD(owner->told_events)) {
    STORE(owner->told_events, wanted);
    STORE(*owner->mask, (int)wanted);
  }
  STORE(g_frame->header.event_mask, (uint32_t)LOAD(*owner->mask));
}

uint32_t round_entered(communicator* owner, const operation* what) {
  const uint64_t now_ns = tocsin_now_ns();
  tocsin_slot* slot = follow(owner);
  call_entered(owner);
  mind_events(owner, now_ns);
  const uint64_t seq = ADD(owner->enqueued, 1) + 1;
  coll_round* round = &owner->rounds[seq % ROUNDS_MAX];
  STORE(round->seq, 0);
  STORE(round->launch, 0);
  STORE(round->signature, tocsin_signature(what->op, what->dtype, what->count, what->root));
  STORE(round->events, LOAD(owner->call_events));
  STORE(round->kernels_left, 0);
  STORE(round->first_ns, 0);
  STORE(round->last_ns, 0);
  STORE(round->started, 0);
  const tocsin_round* entry = tocsin_record(&owner->recording, slot, seq, now_ns, 0, LOAD(round->signature));
  STORE(round->entry, entry ? (uint32_t)(entry - slot->rounds) + 1 : 0);
  STORE_RELEASE(round->seq, (uint32_t)seq);
  STORE(slot->unknown, untold(owner, LOAD(round->events)));
  STORE(slot->op, what->op);
  STORE(slot->dtype, what->dtype);
  STORE(slot->algo, TOCSIN_ALGO_UNKNOWN);
  STORE(slot->proto, TOCSIN_PROTO_UNKNOWN);
  STORE(slot->root, what->root);
  STORE(slot->count, what->count);
  STORE(slot->t_enqueued_ns, now_ns);
  STORE_RELEASE(slot->enqueued, seq);
  return (uint32_t)seq;
}

uint32_t launch_begun(communicator* owner) {
  uint32_t number = ADD(owner->launches, 1) + 1;
  number = number ? number : ADD(owner->launches, 1) + 1;  // 0 marks "none"
  launch* begun = &owner->launch_ring[number % LAUNCHES_MAX];
  STORE(begun->first, 0);
  STORE(begun->last, 0);
  STORE(begun->kernels_left, 0);
  STORE(begun->transfers, 0);
  STORE(begun->has_kernels, 0);
  STORE_RELEASE(begun->number, number);
  return number;
}

uint32_t task_begun(communicator* owner, uint32_t number, uint32_t seq, uint32_t channels) {
  launch* of = launch_at(owner, number);
  if (!of) {
    number = launch_begun(owner);
    of = launch_at(owner, number);
  }
  coll_round* round = round_at(owner, seq);
  const bool kernels = (round ? LOAD(round->events) : LOAD(owner->call_events)) & NCCL_KERNEL_CH;
  ADD(of->kernels_left, kernels ? (int32_t)channels : 0);
  STORE(of->has_kernels, LOAD(of->has_kernels) | (kernels && channels));
  if (!round) {
    STORE(of->last, (uint32_t)LOAD(owner->enqueued));
    return number;
  }
  const uint32_t first = LOAD(of->first), last = LOAD(of->last);
  STORE(of->first, first && (int32_t)(first - seq) < 0 ? first : seq);
  STORE(of->last, last && (int32_t)(last - seq) > 0 ? last : seq);
  STORE(round->kernels_left, (int32_t)channels);
  STORE(round->launch, number);
  return number;
}

// The first sign that a round runs: one more in `open`, in the place of an older one.
static void round_started(communicator* owner, coll_round* round) {
  if (LOAD(round->started)) {
    return;
  }
  STORE(round->started, 1);
  tocsin_slot* slot = slot_of(owner);
  const uint32_t seq = LOAD(round->seq);
  tocsin_open* open = &slot->open[seq % TOCSIN_FRAME_OPEN_COUNT];
  STORE(open->seq, 0);
  STORE_RELEASE(open->send_steps, 0);
  STORE_RELEASE(open->recv_steps, 0);
  STORE_RELEASE(open->signature, LOAD(round->signature));
  STORE_RELEASE(open->seq, seq);
  STORE(slot->t_started_ns, tocsin_now_ns());
  raise_to(&slot->started, widened(owner, seq));
}

static void launch_over(communicator* owner, launch* of) {
  tocsin_slot* slot = slot_of(owner);
  const uint64_t now_ns = tocsin_now_ns();
  STORE(g_frame->header.last_leave_ns, now_ns);
  const uint32_t last = LOAD(of->last);
  if (!last) {
    return;
  }
  uint64_t over = widened(owner, last);
  // Tasks of one group are sorted by size: the next launch may hold an earlier round, and that one is not over.
  const launch* next = launch_at(owner, LOAD(of->number) + 1);
  const uint32_t first = next ? LOAD(next->first) : 0;
  if (first && (int32_t)(first - last) <= 0) {
    over = widened(owner, first) - 1;
  }
  for (size_t i = 0; i < TOCSIN_FRAME_OPEN_COUNT; ++i) {
    tocsin_open* open = &slot->open[i];
    const uint32_t seq = LOAD(open->seq);
    if (seq && (int32_t)(seq - (uint32_t)over) <= 0) {
      STORE_RELEASE(open->seq, 0);
    }
  }
  STORE(slot->t_done_ns, now_ns);
  raise_to(&slot->started, over);
  raise_to(&slot->done, over);
}

// Stamps arrive a little out of order. One that is far behind the newest says that the newest was none: NCCL hands over
// a wrong one now and then, and a time in the future would take away all own time from then on.
static void note_gpu_time(uint64_t gpu_ns) {
  const uint64_t newest_ns = LOAD(g_gpu_newest_ns);
  if (gpu_ns > newest_ns) {
    raise_to(&g_gpu_newest_ns, gpu_ns);
  } else if (__builtin_expect(newest_ns - gpu_ns > kGpuLate_ns && gpu_ns, 0)) {
    STORE(g_gpu_newest_ns, gpu_ns);
  }
}

// Own time on the GPU before a kernel that began then.
static uint64_t gap_before(uint64_t gpu_ns) {
  const uint64_t newest_ns = LOAD(g_gpu_newest_ns);
  return newest_ns && gpu_ns > newest_ns ? gpu_ns - newest_ns : 0;
}

void kernel_begun(communicator* owner, uint64_t handle, uint64_t gpu_ns) {
  STORE(channel_of(owner, handle)->kernel_us, TOCSIN_FRAME_DUR_OPEN);
  STORE(owner->kernel_ns[HANDLE_CHANNEL(handle)], gpu_ns);
  STORE(owner->kernel_us[HANDLE_CHANNEL(handle)], 0);
  coll_round* round = HANDLE_KIND(handle) == KIND_KERNEL ? round_at(owner, HANDLE_NUMBER(handle)) : NULL;
  if (round && !LOAD(round->first_ns) && gpu_ns) {
    tocsin_slot* slot = slot_of(owner);
    tocsin_round* entry = entry_of(round, slot);
    const uint64_t gap_ns = gap_before(gpu_ns);
    STORE(round->first_ns, gpu_ns);
    ADD(slot->gap_sum_ns, gap_ns);
    if (entry) {
      STORE(entry->gap_us, tocsin_microseconds(gap_ns));
    }
  }
  if (round) {
    round_started(owner, round);
  }
  note_gpu_time(gpu_ns);
}

void kernel_timed(communicator* owner, uint64_t handle, uint64_t gpu_ns) {
  const uint64_t begun_ns = LOAD(owner->kernel_ns[HANDLE_CHANNEL(handle)]);
  const bool sound = begun_ns && gpu_ns >= begun_ns;
  // A kernel of less than a microsecond is told as one, for 0 means that its time is not known.
  const uint32_t us = sound ? tocsin_microseconds(gpu_ns - begun_ns) : 0;
  STORE(owner->kernel_us[HANDLE_CHANNEL(handle)], sound && !us ? 1 : us);
  coll_round* round = HANDLE_KIND(handle) == KIND_KERNEL ? round_at(owner, HANDLE_NUMBER(handle)) : NULL;
  if (round && sound) {
    raise_to(&round->last_ns, gpu_ns);
  }
  note_gpu_time(gpu_ns);
}

static void round_over(communicator* owner, coll_round* round) {
  const uint64_t first_ns = LOAD(round->first_ns), last_ns = LOAD(round->last_ns);
  if (!first_ns || last_ns < first_ns) {
    return;  // untimed: its duration stays unknown
  }
  tocsin_slot* slot = slot_of(owner);
  tocsin_round* entry = entry_of(round, slot);
  ADD(slot->dur_sum_ns, last_ns - first_ns);
  if (entry) {
    STORE_RELEASE(entry->dur_us, tocsin_microseconds(last_ns - first_ns));
  }
}

void kernel_ended(communicator* owner, uint64_t handle) {
  STORE(channel_of(owner, handle)->kernel_us, LOAD(owner->kernel_us[HANDLE_CHANNEL(handle)]));
  coll_round* round = HANDLE_KIND(handle) == KIND_KERNEL ? round_at(owner, HANDLE_NUMBER(handle)) : NULL;
  if (round && ADD(round->kernels_left, -1) == 1) {
    round_over(owner, round);
  }
  launch* of = launch_of(owner, handle);
  if (of && ADD(of->kernels_left, -1) == 1) {
    launch_over(owner, of);
  }
}

void transfer_begun(communicator* owner, uint64_t handle) {
  coll_round* round = HANDLE_KIND(handle) == KIND_OP ? round_at(owner, HANDLE_NUMBER(handle)) : NULL;
  launch* of = round ? launch_at(owner, LOAD(round->launch)) : launch_of(owner, handle);
  if (round) {
    round_started(owner, round);
  }
  if (of) {
    ADD(of->transfers, 1);
  }
  way_taken(owner, way_of(handle), slot_of(owner));
}

void transfer_ended(communicator* owner, uint64_t handle) {
  launch* of = launch_of(owner, handle);
  // Proxies of shared memory end without ever having told a beginning.
  if (of && LOAD(of->transfers) > 0 && ADD(of->transfers, -1) == 1 && !LOAD(of->has_kernels)) {
    launch_over(owner, of);
  }
  way_left(owner, way_of(handle), slot_of(owner));
}
