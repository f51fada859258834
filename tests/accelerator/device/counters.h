// How often each thing was asked of the device, for tests that count; and why the host had to wait.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace sim {

struct Counters {
  std::mutex lock;
  std::map<std::string, uint64_t> counts;      // "launches", "events_recorded", ...
  std::map<std::string, uint64_t> host_waits;  // by reason: an operator, "item", "stream.synchronize", ...

  void count(const char* what) {
    std::lock_guard guard(lock);
    ++counts[what];
  }
  void host_wait(const std::string& why) {
    std::lock_guard guard(lock);
    ++counts["host_waits"];
    ++host_waits[why];
  }
  void reset() {
    std::lock_guard guard(lock);
    counts.clear();
    host_waits.clear();
  }
};

inline Counters& counters = *new Counters;  // never destroyed: streams run until the process ends

}  // namespace sim
