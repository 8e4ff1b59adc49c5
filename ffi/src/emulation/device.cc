#include "device.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace muse::emulation {
namespace {

constexpr size_t kStackBytes = 96 << 10;

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier together;
  uint32_t words[2][32 * 16];  // of two exchanges, in turn
  uint64_t exchanges = 0;
};

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes, barrier;
  CopyDone done;
  uint64_t when;  // not before
};

struct Cta {
  std::vector<uint8_t> memory;
  std::vector<Copy> copies;  // on their way
  Barrier all, named[16];
  std::vector<Warp> warps;
};

// ---- Switching from one stack to another ----------------------------------------------------------------------------

void enter_kernel();

#if defined(__x86_64__)

// The registers that a call keeps are on the stack, and only the stack pointer changes.
extern "C" void muse_switch_stack(void** from, void* to);
asm(R"(
.text
.globl muse_switch_stack
.hidden muse_switch_stack
.type muse_switch_stack, @function
muse_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Context {
  void* stack_pointer = nullptr;

  // As muse_switch_stack leaves it: six registers, then where to return to.
  void prepare(uint8_t* stack) {
    auto* top = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(stack + kStackBytes) / 16 * 16) - 1;
    *--top = reinterpret_cast<uintptr_t>(&enter_kernel);
    for (int i = 0; i < 6; ++i) *--top = 0;
    stack_pointer = top;
  }
  void switch_to(Context& other) { muse_switch_stack(&stack_pointer, other.stack_pointer); }
};

#else

struct Context {
  ucontext_t context;

  void prepare(uint8_t* stack) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &enter_kernel, 0);
  }
  void switch_to(Context& other) { swapcontext(&context, &other.context); }
};

#endif

// ---- The device -----------------------------------------------------------------------------------------------------

struct Fiber {
  Thread thread;
  Cta* cta;
  Warp* warp;
  Context context;
  bool done = false;
  const Barrier* waits = nullptr;  // for a barrier's next generation
  uint64_t generation = 0;
  bool idle = false;  // it has yielded since anybody did anything
};

struct Device {
  std::vector<Fiber> fibers;
  Fiber* now = nullptr;
  Context scheduler;
  const std::function<void()>* kernel = nullptr;
  uint64_t random = settings.seed * 0x9e3779b97f4a7c15u + 1;
  const char* failure = nullptr;

  uint32_t draw() {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(random >> 33);
  }
};
Device* device = nullptr;
uint64_t switches = 0;  // of all kernels so far

void leave() { device->now->context.switch_to(device->scheduler); }

void enter_kernel() {
  (*device->kernel)();
  device->now->done = true;
  leave();
}

}  // namespace

uint64_t time_ns() { return switches * kSwitchNs; }

Thread& current() { return device->now->thread; }

void yield() {
  device->now->idle = true;
  leave();
}

void wait_at(int barrier, int threads) {
  Fiber& fiber = *device->now;
  Barrier& at = barrier == -1 ? fiber.cta->all : barrier == -2 ? fiber.warp->together : fiber.cta->named[barrier];
  if (++at.arrived == threads) {
    at.arrived = 0;
    ++at.generation;
    return;
  }
  fiber.waits = &at;
  fiber.generation = at.generation;
  leave();
  fiber.waits = nullptr;
}

void fail(const char* what) {
  device->failure = what;
  leave();
  std::abort();  // nobody comes back here
}

void copy_later(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, CopyDone done) {
  const uint64_t longest = 4 * device->fibers.size();  // in which every thread is there a few times
  device->now->cta->copies.push_back({to, from, bytes, barrier, done, switches + device->draw() % longest});
}

void finish_copies() {
  std::vector<Copy>& copies = device->now->cta->copies;
  for (size_t i = 0; i < copies.size();) {
    const Copy copy = copies[i];
    if (copy.when > switches) {
      ++i;
      continue;
    }
    copies[i] = copies.back();
    copies.pop_back();
    std::memcpy(current().shared + copy.to, copy.from, copy.bytes);
    copy.done(copy.barrier, copy.bytes);
  }
}

const uint32_t* exchange(const uint32_t* words, int count) {
  Fiber& fiber = *device->now;
  Warp& warp = *fiber.warp;
  const int lane = static_cast<int>(fiber.thread.thread.x % 32);
  uint32_t* place = warp.words[warp.exchanges % 2];
  std::copy(words, words + count, place + lane * count);
  if (warp.together.arrived == 31) ++warp.exchanges;  // the last one turns to the other place
  wait_at(-2, 32);
  return place;
}

void run(dim3 grid, uint32_t threads, size_t shared_bytes, const std::function<void()>& kernel) {
  const uint32_t ctas = grid.x * grid.y * grid.z, warps = (threads + 31) / 32;
  Device emulated;
  device = &emulated;
  emulated.kernel = &kernel;
  std::vector<Cta> all(ctas);
  // Not cleared: most of it is never touched.
  const std::unique_ptr<uint8_t[]> stacks(new uint8_t[static_cast<size_t>(ctas) * threads * kStackBytes]);
  emulated.fibers.resize(static_cast<size_t>(ctas) * threads);
  for (uint32_t c = 0; c < ctas; ++c) {
    all[c].memory.assign(shared_bytes + 1024, 0xcd);
    all[c].warps.resize(warps);
    uint8_t* shared = all[c].memory.data();
    shared += -reinterpret_cast<uintptr_t>(shared) % 1024;
    for (uint32_t t = 0; t < threads; ++t) {
      Fiber& fiber = emulated.fibers[c * threads + t];
      fiber.thread = {{t}, {c % grid.x, c / grid.x % grid.y, c / grid.x / grid.y}, {threads}, grid, shared};
      fiber.cta = &all[c];
      fiber.warp = &all[c].warps[t / 32];
      fiber.context.prepare(stacks.get() + (static_cast<size_t>(c) * threads + t) * kStackBytes);
    }
  }
  // Warps in an order that changes with the seed; the lanes of a warp one after the other.
  size_t left = emulated.fibers.size(), idle_rounds = 0;
  // Kernels of one CTA, and those that do not wait for each other, are not stalled.
  const int64_t stalled = ctas > 1 && shared_bytes > 0 ? settings.stalled_cta : -1;
  while (left > 0) {
    bool progress = false;
    for (uint32_t turn = 0; turn < ctas * warps; ++turn) {
      const uint32_t which = emulated.draw() % (ctas * warps), c = which / warps, w = which % warps;
      if (c == stalled && left > threads) continue;
      for (uint32_t t = 32 * w; t < std::min(32 * w + 32, threads); ++t) {
        Fiber& fiber = emulated.fibers[c * threads + t];
        if (fiber.done || (fiber.waits != nullptr && fiber.waits->generation == fiber.generation)) continue;
        fiber.idle = false;
        emulated.now = &fiber;
        ++switches;
        emulated.scheduler.switch_to(fiber.context);
        if (emulated.failure != nullptr) {
          device = nullptr;
          throw std::runtime_error(std::string("emulated device: ") + emulated.failure);
        }
        if (fiber.done) --left;
        if (fiber.done || !fiber.idle) progress = true;
      }
    }
    idle_rounds = progress ? 0 : idle_rounds + 1;
    if (idle_rounds > 20000) {
      std::string where;
      for (size_t i = 0; i < emulated.fibers.size(); i += 32) {  // the first lane of each warp
        const Fiber& fiber = emulated.fibers[i];
        if (fiber.done) continue;
        where += " " + std::to_string(fiber.thread.block.x) + "." + std::to_string(fiber.thread.thread.x / 32);
        where += fiber.waits == nullptr                 ? ""
                 : fiber.waits == &fiber.cta->all       ? "b"
                 : fiber.waits == &fiber.warp->together ? "w"
                                                        : "n";
      }
      device = nullptr;
      throw std::runtime_error(
          "emulated device: nobody can go on; waiting (CTA.warp; at a barrier of the CTA: b, of some threads: n, of "
          "the warp: w):" +
          where);
    }
  }
  device = nullptr;
  for (const Cta& cta : all) {
    if (!cta.copies.empty())
      throw std::runtime_error("emulated device: a CTA ended while something was copied into it");
  }
}

}  // namespace muse::emulation
