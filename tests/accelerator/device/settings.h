// What a test chooses: how many devices there are, how unfriendly their streams are, and what is looked for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sim {

constexpr int MAX_DEVICES = 8;

struct Settings {
  int devices = 4;
  double delay_probability = 0;  // of a delay before a piece of a stream's work
  int delay_us = 0;              // at most
  uint64_t seed = 0;             // of the delays
  int races = 1;   // 0: not looked for; 1: what one host thread has waited for, all know; 2: each knows its own
  int poison = 1;  // 0: never; 1: when memory is freed; 2: when it is handed out again, as late as on CUDA
  bool stacks = true;                                // reports show the Python frames of both accesses
  std::array<size_t, MAX_DEVICES> memory_limits{};  // bytes; 0: none
};

// Changed only while no stream has work.
inline Settings settings;

}  // namespace sim
