// Python's interpreter as the device sees it: its lock, and the frames that asked for a piece of work.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace sim {

// Whoever waits for a stream lets go of the interpreter lock. A kernel may need it: tests wrap random operators in
// Python, and these wrappers run on the stream's thread.
class ReleasedInterpreter {
 public:
  ReleasedInterpreter();
  ~ReleasedInterpreter();
  ReleasedInterpreter(const ReleasedInterpreter&) = delete;

 private:
  void* state_ = nullptr;
};

// Frames are kept as code object and instruction, which costs about a microsecond; lines are looked up in reports only.
struct Frame {
  void* code;
  int instruction;
};
using Stack = std::shared_ptr<const std::vector<Frame>>;

// The innermost frames of this thread; nothing if `settings.stacks` is off. Takes the interpreter lock.
Stack capture_stack();

// The same, but nothing in a thread without the interpreter lock: a destructor may run while other locks are held.
Stack capture_stack_if_held();

// One line for each frame, the innermost last. Needs the interpreter lock.
std::string text_of(const Stack& stack);

// From now on no thread may take the interpreter lock.
void interpreter_ends();

}  // namespace sim
