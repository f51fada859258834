#include "interpreter.h"

#include <Python.h>

#include <atomic>
#include <unordered_set>

#include "settings.h"

namespace sim {
namespace {

constexpr size_t DEPTH = 20;

std::atomic<bool> usable{true};

bool held() { return Py_IsInitialized() && PyGILState_Check(); }

Stack frames() {
  // A reference to each code object is kept for ever, so that letting go of a stack needs no lock.
  static auto& known = *new std::unordered_set<PyCodeObject*>;
  auto stack = std::make_shared<std::vector<Frame>>();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && stack->size() < DEPTH) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!known.insert(code).second) Py_DECREF(code);
    stack->push_back({code, PyFrame_GetLasti(frame)});
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return stack;
}

std::string utf8(PyObject* text) {
  const char* bytes = PyUnicode_AsUTF8(text);
  return bytes != nullptr ? bytes : "?";
}

}  // namespace

ReleasedInterpreter::ReleasedInterpreter() {
  if (held()) state_ = PyEval_SaveThread();
}

ReleasedInterpreter::~ReleasedInterpreter() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Stack capture_stack() {
  if (!settings.stacks || !usable) return nullptr;
  PyGILState_STATE state = PyGILState_Ensure();
  Stack stack = frames();
  PyGILState_Release(state);
  return stack;
}

Stack capture_stack_if_held() { return settings.stacks && usable && held() ? frames() : nullptr; }

std::string text_of(const Stack& stack) {
  if (stack == nullptr || stack->empty()) return "    (no Python frames)\n";
  std::string text;
  for (const auto& frame : *stack) {
    auto* code = static_cast<PyCodeObject*>(frame.code);
    std::string file = utf8(code->co_filename);
    if (file.find("/pluggy/") != std::string::npos) break;  // what is outside of a test is always the same
    std::string line = std::to_string(PyCode_Addr2Line(code, frame.instruction));
    text = "    " + file + ":" + line + " in " + utf8(code->co_qualname) + "\n" + text;
  }
  return text;
}

void interpreter_ends() { usable = false; }

}  // namespace sim
