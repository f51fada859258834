#include "launch.h"

#include <cstring>

#include "counters.h"

namespace sim {
namespace {

// Whether an element has all bits set. That is a NaN that no arithmetic makes.
template <typename Word>
bool poisoned_words(const char* low, const char* high) {
  for (; low < high; low += sizeof(Word)) {
    Word word;
    std::memcpy(&word, low, sizeof(Word));
    if (word == static_cast<Word>(-1)) return true;
  }
  return false;
}

struct Range {
  const char *low, *high;
  int float_size;

  bool poisoned() const {
    switch (float_size) {
      case 2: return poisoned_words<uint16_t>(low, high);
      case 4: return poisoned_words<uint32_t>(low, high);
      case 8: return poisoned_words<uint64_t>(low, high);
      default: return false;
    }
  }
};

}  // namespace

void launch_locked(Stream& stream, const std::string& what, const std::vector<Touch>& touches, const Stack& stack,
                   std::vector<Race>& found, std::function<void()> work) {
  if (settings.races != 0) {
    join(stream.clock, host_clock());
    uint64_t number = ++stream.clock[stream.number];
    for (const auto& touch : touches) {
      auto& block = *touch.block;
      note_access(block.history, {stream.number, number, touch.low, touch.high, touch.write, what, stack}, stream.clock,
                  block.size, block.stream, found);
    }
  }
  stream.submit(std::move(work));
}

void launch(Stream& stream, const std::string& what, const std::vector<Touch>& touches, std::function<void()> work) {
  counters.count("launches");
  Stack stack = settings.races != 0 || settings.poison != 0 ? capture_stack() : nullptr;
  std::vector<Range> floats;
  if (settings.poison != 0)
    for (const auto& touch : touches)
      if (!touch.write && touch.float_size != 0)
        floats.push_back({touch.block->address + touch.low, touch.block->address + touch.high, touch.float_size});
  if (!floats.empty())
    work = [floats = std::move(floats), what, stack, &stream, work = std::move(work)] {
      for (const auto& range : floats)
        if (range.poisoned()) {
          keep_poison_read(what, stream, stack);
          break;
        }
      work();
    };
  std::vector<Race> found;
  {
    std::lock_guard guard(launching);
    launch_locked(stream, what, touches, stack, found, std::move(work));
  }
  keep_races(std::move(found));
}

}  // namespace sim
