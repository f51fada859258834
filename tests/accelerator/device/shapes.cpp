#include "shapes.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <mutex>
#include <unordered_map>

#include "tensors.h"

namespace sim {
namespace {

constexpr size_t MOST = 20000;  // remembered shapes

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Adds a description of a value that is equal for equal shapes; false if there is none.
bool describe(const c10::IValue& value, std::string& key) {
  append(key, static_cast<char>(value.isTensor() ? 'T' : value.isList() ? 'L' : value.isInt() ? 'I' : 'V'));
  if (value.isNone()) {
    key += 'n';
  } else if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined()) return true;
    append(key, tensor.scalar_type());
    append(key, tensor.device().type());
    append(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
    append(key, tensor.dim());
    for (auto size : tensor.sizes()) append(key, size);
    for (auto stride : tensor.strides()) append(key, stride);
  } else if (value.isList()) {
    auto items = value.toListRef();
    append(key, items.size());
    for (const auto& item : items)
      if (!describe(item, key)) return false;
  } else if (value.isInt()) {
    append(key, value.toInt());
  } else if (value.isBool()) {
    append(key, value.toBool());
  } else if (value.isDouble()) {
    key += 'd';
    append(key, value.toDouble());
  } else if (value.isComplexDouble()) {
    key += 'c';
    append(key, value.toComplexDouble());
  } else if (value.isString()) {
    append(key, value.toStringRef().size());
    key += value.toStringRef();
  } else if (value.isDevice()) {
    append(key, value.toDevice().type());
  } else {
    return false;
  }
  return true;
}

std::shared_ptr<const Shapes> asked(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  auto shapes = std::make_shared<Shapes>();
  shapes->arguments = arguments;
  shapes->results = arguments;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&shapes->results);
  } catch (const std::exception&) {
    return nullptr;
  }
  bool known = true;
  for (const auto& value : shapes->results) {
    known = known && (value.isTensor() || value.isTensorList() || value.isNone());
    for_each_tensor(value, [&](const at::Tensor& tensor) { known = known && tensor.is_meta(); });
  }
  return known ? shapes : nullptr;
}

}  // namespace

Signature::Signature(const c10::FunctionSchema& schema) : name(schema.operator_name().name) {
  const auto& overload = schema.operator_name().overload_name;
  if (!overload.empty()) name += "." + overload;
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    written.push_back(alias != nullptr && alias->isWrite());
    out.push_back(written.back() && argument.kwarg_only());
    has_out = has_out || out.back();
    generator.push_back(argument.type()->str().find("Generator") != std::string::npos);
  }
  for (const auto& result : schema.returns()) {
    int same = -1;
    if (const auto* alias = result.alias_info()) {
      TORCH_CHECK(alias->isWrite(), "the simulated accelerator has no kernel for the view ", name);
      for (size_t i = 0; i < schema.arguments().size() && same < 0; ++i)
        if (const auto* other = schema.arguments()[i].alias_info(); other != nullptr && *other == *alias)
          same = static_cast<int>(i);
    }
    returned.push_back(same);
    returns_new = returns_new || same < 0;
  }
}

const Signature& signature_of(const c10::OperatorHandle& op) {
  static auto& lock = *new std::mutex;
  static auto& known = *new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Signature>>;
  std::lock_guard guard(lock);
  auto& signature = known[&op.schema()];
  if (signature == nullptr) signature = std::make_unique<Signature>(op.schema());
  return *signature;
}

std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const Signature& signature,
                                        const std::vector<c10::IValue>& given) {
  static auto& lock = *new std::mutex;
  static auto& known = *new std::unordered_map<std::string, std::shared_ptr<const Shapes>>;

  std::vector<c10::IValue> arguments;
  std::string key = signature.name;
  append(key, at::get_default_dtype_as_scalartype());
  bool described = true;
  auto to_meta = [](const at::Tensor& tensor) { return is_ours(tensor) ? meta_alias(tensor) : tensor; };
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& value = signature.generator[i] ? c10::IValue() : given[i];
    described = described && describe(value, key);
    arguments.push_back(with_tensors(value, to_meta, c10::DeviceType::Meta));
  }
  if (!described) return asked(op, arguments);
  {
    std::lock_guard guard(lock);
    if (auto found = known.find(key); found != known.end()) return found->second;
  }
  auto shapes = asked(op, arguments);  // without the lock: it may take the interpreter's
  std::lock_guard guard(lock);
  if (known.size() >= MOST) known.clear();
  return known[key] = shapes;
}

}  // namespace sim
