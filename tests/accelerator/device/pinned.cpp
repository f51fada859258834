#include "pinned.h"

#include <cstring>
#include <map>
#include <vector>

#include "event.h"
#include "memory.h"

namespace sim {
namespace {

struct Pinned {
  char* address;
  size_t size;
  std::vector<MarkPtr> marks;
};

// All under `launching`.
std::map<const char*, Pinned*>& all = *new std::map<const char*, Pinned*>;
std::map<size_t, std::vector<Pinned*>>& cached = *new std::map<size_t, std::vector<Pinned*>>;
std::vector<Pinned*>& pending = *new std::vector<Pinned*>;

Pinned* find_locked(const void* data) {
  auto* address = static_cast<const char*>(data);
  auto after = all.upper_bound(address);
  if (after == all.begin()) return nullptr;
  auto* block = std::prev(after)->second;
  return address < block->address + block->size ? block : nullptr;
}

void sweep_locked() {
  std::erase_if(pending, [](Pinned* block) {
    for (const auto& mark : block->marks)
      if (!mark->passed()) return false;
    block->marks.clear();
    if (settings.poison != 0) poison(block->address, block->size);
    cached[block->size].push_back(block);
    return true;
  });
}

void release(void* context) {
  std::lock_guard guard(launching);
  pending.push_back(static_cast<Pinned*>(context));
  sweep_locked();
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    size_t size = rounded(bytes);
    std::lock_guard guard(launching);
    sweep_locked();
    auto& free = cached[size];
    Pinned* block;
    if (free.empty()) {
      block = new Pinned{aligned_memory(size), size, {}};
      all[block->address] = block;
    } else {
      block = free.back();
      free.pop_back();
    }
    return {block->address, block, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

}  // namespace

c10::Allocator& pinned_allocator() {
  static auto& allocator = *new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* address) {
  std::lock_guard guard(launching);
  return find_locked(address) != nullptr;
}

void record_pinned(const void* address, Stream& stream) {
  std::lock_guard guard(launching);
  if (auto* block = find_locked(address)) block->marks.push_back(put_mark(stream));
}

}  // namespace sim
