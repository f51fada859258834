#include "races.h"

namespace sim {
namespace {

constexpr size_t MOST = 1000;  // reports that are kept

struct PoisonRead {
  std::string what;
  Stack stack;
};

std::mutex& report_lock = *new std::mutex;
std::vector<Race>& races = *new std::vector<Race>;
std::vector<PoisonRead>& poison_reads = *new std::vector<PoisonRead>;

// A launch that reads and writes what an earlier one wrote is one report.
bool same_launches(const Race& race, const Access& later, const Access& earlier) {
  return race.later.stream == later.stream && race.later.launch == later.launch &&
      race.earlier.stream == earlier.stream && race.earlier.launch == earlier.launch;
}

std::string kind_of(const Access& access) { return access.write ? "write" : "read"; }

std::string text_of(const Race& race) {
  const auto &later = race.later, &earlier = race.earlier;
  return kind_of(later) + " by " + later.what + " on " + stream_number(later.stream).name() +
      " is not ordered after " + kind_of(earlier) + " by " + earlier.what + " on " +
      stream_number(earlier.stream).name() + " (a block of " + std::to_string(race.block_size) + " bytes of " +
      stream_number(race.block_stream).name() + ")\n  the later access:\n" + text_of(later.stack) +
      "  the earlier access:\n" + text_of(earlier.stack);
}

template <typename T>
std::vector<T> taken(std::vector<T>& kept) {
  std::lock_guard guard(report_lock);
  return std::exchange(kept, {});
}

}  // namespace

void note_access(History& history, Access access, const Clock& clock, size_t block_size, int block_stream,
                 std::vector<Race>& found) {
  History still;
  for (auto& past : history) {
    bool overlaps = past.low < access.high && access.low < past.high;
    bool ordered = past.stream == access.stream || knows(clock, past.stream, past.launch);
    bool known = std::any_of(found.begin(), found.end(), [&](const Race& r) { return same_launches(r, access, past); });
    if (overlaps && (past.write || access.write) && !ordered && !known)
      found.push_back({access, past, block_size, block_stream});
    // A write comes after all that it covers. Of one stream's reads the last one stands for those before it.
    bool covered = access.low <= past.low && past.high <= access.high;
    bool replaced = covered && (access.write || (!past.write && past.stream == access.stream));
    if (!replaced) still.push_back(std::move(past));
  }
  still.push_back(std::move(access));
  history = std::move(still);
}

void keep_races(std::vector<Race> found) {
  std::lock_guard guard(report_lock);
  for (auto& race : found)
    if (races.size() < MOST) races.push_back(std::move(race));
}

void keep_poison_read(const std::string& what, const Stream& stream, const Stack& stack) {
  std::lock_guard guard(report_lock);
  if (poison_reads.size() < MOST) poison_reads.push_back({what + " on " + stream.name(), stack});
}

std::vector<std::string> take_races() {
  std::vector<std::string> texts;
  for (const auto& race : taken(races)) texts.push_back(text_of(race));
  return texts;
}

std::vector<std::string> take_poison_reads() {
  std::vector<std::string> texts;
  for (const auto& [what, stack] : taken(poison_reads))
    texts.push_back(what + " has read memory that was freed or never written\n  launched by:\n" + text_of(stack));
  return texts;
}

}  // namespace sim
