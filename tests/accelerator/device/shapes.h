// The shapes of an operator's results, from its kernel for the meta device.
//
// Memory for the results is needed at the launch, long before the kernel runs. Many meta kernels are Python functions
// that take up to a millisecond, so their answers are remembered for each operator, shapes of tensors and other
// arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

namespace sim {

// What a schema says of an operator's arguments.
struct Signature {
  explicit Signature(const c10::FunctionSchema& schema);

  std::string name;
  std::vector<bool> generator;  // whether an argument is a generator
  std::vector<bool> written;
  std::vector<bool> out;            // whether it is written and need not have the right shape
  std::vector<int> returned;        // for each result the argument that it is, or -1 for a new tensor
  bool returns_new = false;
  bool has_out = false;
};
const Signature& signature_of(const c10::OperatorHandle& op);

struct Shapes {
  std::vector<c10::IValue> results;    // with meta tensors
  std::vector<c10::IValue> arguments;  // as the kernel left them: those that are `out` may have been resized
};

// Nothing if the shapes depend on values, if a result is no tensor, or if the meta kernel refuses the arguments.
std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const Signature& signature,
                                        const std::vector<c10::IValue>& given);

}  // namespace sim
