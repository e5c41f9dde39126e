// Autocast of the test accelerator (torch_device.cpp), as the devices of PyTorch have it: the same lists of operators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {
namespace autocast = at::autocast;
using at::autocast::CastPolicy;
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WHOLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(WHOLE)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace
