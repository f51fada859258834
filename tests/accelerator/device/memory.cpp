#include "memory.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>

#include "counters.h"
#include "event.h"
#include "launch.h"

namespace sim {
namespace {

struct Pending {  // freed, but other streams may still use it
  Block* block;
  std::vector<MarkPtr> marks;
};

struct Heap {  // of one device; under `launching`
  std::map<std::pair<int, size_t>, std::vector<Block*>> cached;  // by stream and size
  std::vector<Pending> pending;
  size_t allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0, blocks = 0, failures = 0;
};

std::array<Heap, MAX_DEVICES>& heaps = *new std::array<Heap, MAX_DEVICES>;

// Poison is a write on the block's stream, as that of its next user: whoever still uses the block races with it.
void poison_locked(Block* block, const Stack& stack, std::vector<Race>& found) {
  launch_locked(stream_number(block->stream), "the next user of freed memory", {{block, 0, block->size, true}}, stack,
                found, [address = block->address, size = block->size] { poison(address, size); });
}

void cache_locked(Block* block, const Stack& stack, std::vector<Race>& found) {
  if (settings.poison == 1) poison_locked(block, stack, found);
  heaps[block->device].cached[{block->stream, block->size}].push_back(block);
}

// Caches the pending blocks that all their streams have passed.
void sweep_locked(Heap& heap, const Stack& stack, std::vector<Race>& found) {
  std::vector<Pending> still;
  for (auto& pending : heap.pending) {
    bool passed = true;
    for (const auto& mark : pending.marks) passed = passed && mark->passed();
    if (!passed) {
      still.push_back(std::move(pending));
      continue;
    }
    // What came before the marks is over, also what a recorded stream has waited for. Nobody but the allocator knows,
    // so no clock learns of it.
    auto* block = pending.block;
    std::erase_if(block->history, [&](const Access& access) {
      for (const auto& mark : pending.marks)
        if (knows(mark->clock, access.stream, access.launch)) return true;
      return false;
    });
    block->uses.clear();
    cache_locked(block, stack, found);
  }
  heap.pending = std::move(still);
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Stack stack = settings.races != 0 ? capture_stack_if_held() : nullptr;
  std::vector<Race> found;
  {
    std::lock_guard guard(launching);
    auto& heap = heaps[block->device];
    heap.allocated -= block->size;
    --heap.blocks;
    if (block->uses.empty()) {
      cache_locked(block, stack, found);
    } else {
      std::vector<MarkPtr> marks;
      for (int use : block->uses) marks.push_back(put_mark(stream_number(use)));
      heap.pending.push_back({block, std::move(marks)});
    }
  }
  keep_races(std::move(found));
}

void free_nothing(void*) {}

// A cached block, or a new one if the limit allows for it.
Block* take(int device, size_t size) {
  auto& stream = current_stream(device);
  auto& heap = heaps[device];
  Stack stack = settings.races != 0 ? capture_stack_if_held() : nullptr;
  std::vector<Race> found;
  Block* block = nullptr;
  {
    std::lock_guard guard(launching);
    sweep_locked(heap, stack, found);
    auto& cached = heap.cached[{stream.number, size}];
    size_t limit = settings.memory_limits[device];
    if (!cached.empty()) {
      block = cached.back();
      cached.pop_back();
      if (settings.poison == 2) poison_locked(block, stack, found);
    } else if (limit == 0 || heap.reserved + size <= limit) {
      block = new Block{aligned_memory(size), size, device, stream.number, {}, {}};
      if (settings.poison != 0) poison(block->address, size);
      heap.reserved += size;
      heap.peak_reserved = std::max(heap.peak_reserved, heap.reserved);
    }
    if (block != nullptr) {
      heap.allocated += size;
      heap.peak_allocated = std::max(heap.peak_allocated, heap.allocated);
      ++heap.blocks;
    }
  }
  keep_races(std::move(found));
  return block;
}

// Gives cached memory back, after the device has done all its work. As cudaFree waits, so does this; but no clock
// learns of it, because no program should count on an empty cache.
void empty_cache(int device) {
  for (int id = 0; id <= POOL; ++id) stream_of(device, id).wait();
  std::vector<Race> found;
  std::map<std::pair<int, size_t>, std::vector<Block*>> cached;
  {
    std::lock_guard guard(launching);
    sweep_locked(heaps[device], nullptr, found);
    cached.swap(heaps[device].cached);
    for (const auto& [key, blocks] : cached) heaps[device].reserved -= key.second * blocks.size();
  }
  keep_races(std::move(found));
  for (int id = 0; id <= POOL; ++id) stream_of(device, id).wait();  // for the poison of what was swept
  for (const auto& [key, blocks] : cached)
    for (auto* block : blocks) {
      std::free(block->address);
      delete block;
    }
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    c10::Device place(DEVICE_TYPE, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, place};
    counters.count("allocations");
    size_t size = rounded(bytes);
    Block* block = take(device, size);
    if (block == nullptr) {
      empty_cache(device);
      block = take(device, size);
    }
    if (block == nullptr) refuse(device, size);
    return {block->address, block, &free_block, place};
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = static_cast<Block*>(data.get_context());
    if (block == nullptr) return;
    counters.count("record_streams");
    int number = stream_of(stream).number;
    std::lock_guard guard(launching);
    if (number != block->stream) block->uses.insert(number);
  }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < settings.devices; ++device) empty_cache(device);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard guard(launching);
    const auto& heap = heaps[device];
    stats.allocation[0].current = static_cast<int64_t>(heap.blocks);
    stats.allocated_bytes[0].current = static_cast<int64_t>(heap.allocated);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(heap.peak_allocated);
    stats.reserved_bytes[0].current = static_cast<int64_t>(heap.reserved);
    stats.reserved_bytes[0].peak = static_cast<int64_t>(heap.peak_reserved);
    stats.num_ooms = static_cast<int64_t>(heap.failures);
    return stats;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard guard(launching);
    heaps[device].peak_allocated = heaps[device].allocated;
    heaps[device].peak_reserved = heaps[device].reserved;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard guard(launching);
    heaps[device].failures = 0;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard guard(launching);
    size_t total = settings.memory_limits[device] != 0 ? settings.memory_limits[device] : size_t{16} << 30;
    return {total - std::min(total, heaps[device].reserved), total};
  }

  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }

 private:
  [[noreturn]] static void refuse(int device, size_t size) {
    size_t allocated, reserved;
    {
      std::lock_guard guard(launching);
      allocated = heaps[device].allocated;
      reserved = heaps[device].reserved;
      ++heaps[device].failures;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes. Device ", device,
                     " has a capacity of ", settings.memory_limits[device], " bytes, of which ", allocated,
                     " bytes are allocated and ", reserved, " bytes are reserved");
    std::abort();  // not reached: the line above raises
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto& allocator = *new DeviceAllocator;
  return allocator;
}

void poison(void* address, size_t size) { std::memset(address, 0xFF, size); }

char* aligned_memory(size_t size) {
  auto* address = static_cast<char*>(std::aligned_alloc(512, size));
  TORCH_CHECK(address != nullptr, "the host has no ", size, " bytes for the simulated accelerator");
  return address;
}

size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

}  // namespace sim
