// Vector clocks: for each stream, how many of its launches something comes after.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

inline bool knows(const Clock& clock, int stream, uint64_t launch) {
  return static_cast<size_t>(stream) < clock.size() && clock[stream] >= launch;
}

// What the host has waited for; under `launching`. The setting `races` says whether all of its threads share it.
Clock& host_clock();

}  // namespace sim
