// Events: marks that a stream passes when the work before them is done. The host or another stream waits for them.
//
// As on CUDA, an event stands for its last record, a wait is for the record that was there when the wait was asked for,
// and an event that was never recorded is waited for by nobody.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "clock.h"
#include "stream.h"

namespace sim {

class Mark {
 public:
  using Time = std::chrono::steady_clock::time_point;

  Mark(Clock clock) : clock(std::move(clock)) {}
  const Clock clock;  // what comes before it

  void pass();
  bool passed();
  void wait();
  Time time();

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool passed_ = false;
  Time time_;
};
using MarkPtr = std::shared_ptr<Mark>;

// Both are launches: `launching` must be held.
MarkPtr put_mark(Stream& stream);
void let_wait(Stream& stream, const MarkPtr& mark);

}  // namespace sim
