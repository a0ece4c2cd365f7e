// A CUDA device for a torch without CUDA: its memory is the host's, its operators are the CPU's.
//
// Tensors say that they lie on "cuda", so that everything which asks takes the way that it takes on a GPU. An operator
// that is given tensors of the host and of the device together fails, as it does there; what is read from the device is
// counted.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

namespace c10::impl {

struct PretendedGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)

}  // namespace c10::impl

namespace at {

struct PretendedHooks : public CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendedHooks)

}  // namespace at

namespace {

constexpr size_t kAlignment = 512;  // of torch's allocator of CUDA
const Device kDevice(DeviceType::CUDA, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
int64_t host_reads = 0;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* place = size ? std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment) : nullptr;
    return {place, place, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
} allocator;

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU; of no elements another tensor, which an operator may resize.
at::Tensor host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(DeviceType::CPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* memory = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (!self.is_cuda()) ++host_reads;
  host(self).copy_(host(source));
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  ++host_reads;
  return host(self).item();
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt, /*resize_storage=*/true);
  return self;
}

// Arguments of one call, handed to the CPU's operator as they lie, and what it returns.
class HostCall {
 public:
  explicit HostCall(const c10::OperatorHandle& op) : op_(op) {}

  void run(torch::jit::Stack* stack) {
    const size_t first = stack->size() - op_.schema().arguments().size();
    for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = handed((*stack)[i]);
    TORCH_CHECK(handed_.empty() || !has_host_tensor_, op_.schema().name(), ": expected all tensors on one device");
    op_.callBoxed(stack);
    const size_t results = stack->size() - op_.schema().returns().size();
    for (size_t i = results; i < stack->size(); ++i) (*stack)[i] = returned((*stack)[i]);
  }

 private:
  c10::IValue handed(const c10::IValue& value) {
    if (value.isTensor()) return hand(value.toTensor());
    if (value.isDevice()) return Device(DeviceType::CPU);
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(hand(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional<at::Tensor>(hand(*tensor)) : tensor);
      }
      return list;
    }
    return value;
  }

  at::Tensor hand(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host_tensor_ |= tensor.dim() > 0;  // a number may come as a tensor of the host
      return tensor;
    }
    handed_.emplace_back(tensor, host(tensor));
    return handed_.back().second;
  }

  c10::IValue returned(const c10::IValue& value) {
    if (value.isTensor()) return give(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(give(tensor));
    return list;
  }

  at::Tensor give(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const auto& [original, alias] : handed_) {
      if (!alias.is_same(tensor)) continue;
      if (alias.sizes() != original.sizes()) {
        resize_(original, alias.sizes(), std::nullopt);
        host(original).copy_(alias);
      }
      return original;
    }
    at::Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
    host(result).copy_(tensor);
    return result;
  }

  const c10::OperatorHandle& op_;
  std::vector<std::pair<at::Tensor, at::Tensor>> handed_;  // of the device, and the same memory of the host
  bool has_host_tensor_ = false;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { HostCall(op).run(stack); }

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    return at::native::set_(self, source);
  });
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

}  // namespace

extern "C" int64_t pretended_gpu_host_reads() { return host_reads; }
