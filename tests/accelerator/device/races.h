// The race detector: two accesses to one piece of memory, one of them a write, that nothing orders.
//
// Every launch has a number on its stream, and a vector clock of the launches that it comes after: those before it on
// its stream, those before the events that the stream waited for, and what the host has waited for. A block of memory
// remembers its accesses. A new access that does not know an earlier one races with it, however the two happen to be
// timed. Accesses are ranges of bytes from a tensor's first element to its last; what lies between in strided tensors
// counts as accessed. CUDA has nothing like this; its compute-sanitizer does not look at streams.
//
// A second kind of report is of kernels that have read poison: memory that was freed or that nobody has written.
#pragma once

#include <string>
#include <vector>

#include "interpreter.h"
#include "stream.h"

namespace sim {

struct Access {
  int stream;
  uint64_t launch;
  size_t low, high;  // bytes of the block
  bool write;
  std::string what;
  Stack stack;
};
using History = std::vector<Access>;

struct Race {
  Access later, earlier;
  size_t block_size;
  int block_stream;
};

// Adds an access by the launch that the stream has just begun; `launching` must be held.
void note_access(History& history, Access access, const Clock& clock, size_t block_size, int block_stream,
                 std::vector<Race>& found);

void keep_races(std::vector<Race> found);
void keep_poison_read(const std::string& what, const Stream& stream, const Stack& stack);

// The reports since the last call, as text; they need the interpreter lock.
std::vector<std::string> take_races();
std::vector<std::string> take_poison_reads();

}  // namespace sim
