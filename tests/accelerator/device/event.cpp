#include "event.h"

namespace sim {

void Mark::pass() {
  std::lock_guard guard(lock_);
  passed_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

bool Mark::passed() {
  std::lock_guard guard(lock_);
  return passed_;
}

void Mark::wait() {
  std::unique_lock guard(lock_);
  changed_.wait(guard, [this] { return passed_; });
}

Mark::Time Mark::time() {
  std::lock_guard guard(lock_);
  return time_;
}

MarkPtr put_mark(Stream& stream) {
  auto mark = std::make_shared<Mark>(stream.clock);
  stream.submit([mark] { mark->pass(); });
  return mark;
}

void let_wait(Stream& stream, const MarkPtr& mark) {
  join(stream.clock, mark->clock);
  stream.submit([mark] { mark->wait(); });
}

}  // namespace sim
