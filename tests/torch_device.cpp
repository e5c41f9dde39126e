// A test accelerator for torch's PrivateUse1: memory of its own that is counted, and every operator of PyTorch computed
// on the CPU, at once. There is one stream; who puts work off, as the fake driver does, has it done before PyTorch reads.
// Headers are the few that are needed: all of PyTorch's take half a minute. torch_device_autocast.cpp needs those.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace {
using c10::Device;
using c10::Stream;
constexpr auto kind = c10::DeviceType::PrivateUse1;

int64_t live = 0, peak = 0;
std::mutex lock;
std::map<void*, size_t> pieces;

size_t pages(size_t bytes) { return (bytes + 4095) & ~size_t(4095); }

// Memory that is given back is unmapped: who uses it then ends the process.
struct Memory final : c10::Allocator {
  static void drop(void* piece) {
    if (!piece) return;
    std::lock_guard<std::mutex> guard(lock);
    auto found = pieces.find(piece);
    live -= found->second;
    munmap(piece, pages(found->second));
    pieces.erase(found);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* piece = nullptr;
    if (bytes) {
      piece = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(piece != MAP_FAILED, "out of device memory");
      memset(piece, 0xFF, bytes);  // NaN
      std::lock_guard<std::mutex> guard(lock);
      pieces[piece] = bytes;
      live += bytes;
      peak = std::max(peak, live);
    }
    return {piece, piece, &drop, Device(kind, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
} memory;
REGISTER_ALLOCATOR(kind, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(kind, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device) const override { return getStream(getDevice()); }
  Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
  void record(void**, const Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, keys(), c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& t) {  // the same memory
  return t.device().is_cpu() ? t : at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Scalar number(const at::Tensor& t) { return on_cpu(t).item(); }

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_source(at::Tensor& t, at::Storage source, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, source, offset, size, stride);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", number);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_source);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace

extern "C" {
void begin() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
int64_t bytes_now() { return live; }
int64_t bytes_most() { return peak; }  // since `reset`
void reset() { peak = live; }
}
