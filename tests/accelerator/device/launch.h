// Launches: how a piece of work gets into a stream, after the race detector has been told what it will access.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "memory.h"
#include "races.h"
#include "stream.h"

namespace sim {

// A part of a block that a launch will read or write.
struct Touch {
  Block* block;
  size_t low, high;
  bool write;
  int float_size = 0;  // bytes of an element, if its bits are to be looked at for poison before the work begins
};

// Queued work holds addresses, never references, so memory lives as long as it would on a GPU.
void launch(Stream& stream, const std::string& what, const std::vector<Touch>& touches, std::function<void()> work);

// For whoever holds `launching`: the same without reading poison, and without counting as a launch.
void launch_locked(Stream& stream, const std::string& what, const std::vector<Touch>& touches, const Stack& stack,
                   std::vector<Race>& found, std::function<void()> work);

}  // namespace sim
