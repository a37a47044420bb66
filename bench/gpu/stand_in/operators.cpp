// Computes on the host what a GPU would compute: every operator with a CUDA kernel gets one that calls its
// CPU kernel on the same memory.
//
// The device's memory is host memory (runtime.cpp), so the CPU kernel sees a CUDA tensor through a tensor
// over the same bytes, and writes in place. Results move into memory of torch's own CUDA allocator. As on a
// GPU, tensors of two devices in one operator are an error, and random numbers follow the CUDA generator's
// seed and offset. A capture computes nothing, and each replay computes on the recorded memory. Operators
// that launch no kernel (views, allocation, `item`) remain torch's own.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAStream.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CachingHostAllocator.h>
#include <Python.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>

extern "C" {
int stand_in_captures(cudaStream_t);
void stand_in_record(cudaStream_t, void (*)(void*), void*, void (*)(void*));
void stand_in_launch(cudaStream_t);
void stand_in_tell_waits(void (*)(const char*));
}

namespace {

using c10::IValue;
using torch::jit::Stack;

// Separate kernels or none: torch's code for CUDA works, because it only calls the runtime.
const std::set<std::string> OWN = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor", "aten::_local_scalar_dense", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::is_set_to",
    "aten::_resize_output_", "aten::_foobar"};
// Kernels that torch would send to cuDNN or compose of other operators; here they run as a whole.
const std::vector<const char*> WHOLE = {"aten::convolution", "aten::convolution_backward", "aten::nan_to_num", "aten::ldexp.Tensor", "aten::ldexp.out"};
// Operators whose CUDA kernels accept host tensors with more than one element.
const std::set<std::string> TAKES_HOST_TENSORS = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::index.Tensor_out",
                                                  "aten::tensor_split.tensor_indices_or_sections"};

at::Tensor on_host(const at::Tensor& t) {
    auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
    if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
    at::Tensor seen = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) seen.unsafeGetTensorImpl()->set_wrapped_number(true);
    return seen;
}

// A tensor of the device with the values and strides of one on the host.
at::Tensor on_device(const at::Tensor& t, c10::Device device, bool with_values) {
    if (!t.defined()) return t;
    at::Tensor made = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(device));
    // t may be a part of larger memory: what lies behind it does not fit
    if (with_values && t.numel()) memcpy(made.data_ptr(), t.data_ptr(), made.storage().nbytes());
    return made;
}

template <class F>
IValue each_tensor(const IValue& value, F f) {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
        return out;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> out;
        for (std::optional<at::Tensor> t : value.toOptionalTensorVector()) out.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
        return out;
    }
    if (value.isList()) {
        auto list = value.toList();
        bool tensors = false;
        for (const IValue& item : list) tensors = tensors || item.isTensor();
        if (tensors) {
            auto out = c10::impl::GenericList(list.elementType());
            for (const IValue& item : list) out.push_back(each_tensor(item, f));
            return out;
        }
    }
    return value;
}

template <class F>
void look_at_tensors(const IValue& value, F f) {
    each_tensor(value, [&](const at::Tensor& t) {
        f(t);
        return t;
    });
}

// The host's generator instead of the device's, with a state from the device's seed and offset.
struct Randomness {
    at::PhiloxCudaState state;
    bool used = false;
    static uint64_t mixed(uint64_t seed, uint64_t offset) {
        uint64_t z = seed * 0x9e3779b97f4a7c15ull + offset + 0x632be59bd9b4e019ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        return z ^ (z >> 27);
    }
    uint64_t number() const {
        if (state.captured_) return mixed(*state.seed_.ptr, *state.offset_.ptr + state.offset_intragraph_);
        return mixed(state.seed_.val, state.offset_.val);
    }
    template <class F>
    void around(F f) const {
        if (!used) return f();
        auto generator = at::detail::getDefaultCPUGenerator();
        at::Tensor before;
        {
            std::lock_guard<std::mutex> held(generator.mutex());
            before = generator.get_state();
            generator.set_current_seed(number());
        }
        f();
        std::lock_guard<std::mutex> held(generator.mutex());
        generator.set_state(before);
    }
};

struct Launch {  // one operator in a recorded graph
    c10::OperatorHandle op;
    Stack arguments;              // over the device's memory
    std::vector<IValue> results;  // the device's results; undefined where the operator wrote in place
    Randomness random;
};

void call_on_host(const c10::OperatorHandle& op, Stack* stack, const Randomness& random) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    random.around([&] { op.callBoxed(stack); });
}

void replay(void* data) {
    auto& launch = *(Launch*)data;
    Stack stack = launch.arguments;
    call_on_host(launch.op, &stack, launch.random);
    for (size_t at = 0; at < launch.results.size(); at++) {
        std::vector<at::Tensor> to;
        look_at_tensors(launch.results[at], [&](const at::Tensor& t) { to.push_back(t); });
        size_t next = 0;
        look_at_tensors(stack[at], [&](const at::Tensor& t) {
            if (next < to.size() && t.numel()) to[next].copy_(t);
            next++;
        });
    }
}

std::optional<c10::Device> device_of(const Stack& arguments, const c10::FunctionSchema& schema, const std::string& name) {
    std::optional<c10::Device> found;
    for (const IValue& value : arguments) {
        look_at_tensors(value, [&](const at::Tensor& t) {
            if (!t.is_cuda()) return;
            TORCH_CHECK(!found || *found == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
                        t.device(), "! (when calling ", name, ")");
            found = t.device();
        });
        if (value.isDevice() && value.toDevice().is_cuda() && !found) found = value.toDevice();
    }
    if (found && !found->has_index()) found = c10::Device(c10::kCUDA, c10::cuda::current_device());
    for (const IValue& value : arguments)
        look_at_tensors(value, [&](const at::Tensor& t) {
            TORCH_CHECK(!t.is_cpu() || t.dim() == 0 || TAKES_HOST_TENSORS.count(name), "Expected all tensors to be on the same device, but found at least two devices, ",
                        *found, " and cpu! (when calling ", name, ")");
        });
    return found;
}

void operate(const c10::OperatorHandle& op, Stack* stack) {
    const auto& schema = op.schema();
    std::string name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
    size_t count = schema.arguments().size();
    Stack given(stack->end() - count, stack->end());
    torch::jit::drop(*stack, count);

    auto device = device_of(given, schema, name);
    TORCH_CHECK(device, "stand-in: ", name, " was sent to CUDA without a CUDA tensor");
    c10::cuda::CUDAGuard guard(*device);
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    bool captures = stand_in_captures(stream);

    Randomness random;
    Stack seen;
    for (size_t at = 0; at < count; at++) {
        const IValue& value = given[at];
        if (value.isDevice()) {
            seen.emplace_back(c10::Device(c10::kCPU));
        } else if (value.isGenerator() || schema.arguments()[at].type()->str() == "Generator?") {
            random.used = true;
            if (value.isGenerator()) {
                auto* generator = at::check_generator<at::CUDAGeneratorImpl>(value.toGenerator());
                std::lock_guard<std::mutex> held(generator->mutex_);
                random.state = generator->philox_cuda_state(4);
            }
            seen.emplace_back();
            if (value.isGenerator()) continue;
            random.used = false;  // decided below
        } else {
            seen.push_back(each_tensor(value, [&](const at::Tensor& t) { return t.is_cuda() ? on_host(t) : t; }));
        }
    }
    bool own_generator = random.used;
    if (!own_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
        auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(std::nullopt, at::cuda::detail::getDefaultCUDAGenerator(device->index()));
        std::lock_guard<std::mutex> held(generator->mutex_);
        random.state = generator->philox_cuda_state(4);
        random.used = true;
    }

    Stack work, written;
    if (captures) {  // shapes only: a capture computes nothing on the device
        for (const IValue& value : seen) work.push_back(each_tensor(value, [](const at::Tensor& t) { return t.clone(); }));
        written = work;
        Randomness unseen;  // keeps the host's generator unchanged
        unseen.used = random.used;
        call_on_host(op, &work, unseen);
    } else {
        stand_in_launch(stream);
        work = written = seen;
        call_on_host(op, &work, random);
    }

    std::vector<IValue> results;
    for (size_t at = 0; at < schema.returns().size(); at++) {
        const auto* alias = schema.returns()[at].alias_info();
        IValue result;
        bool in_place = false;
        if (alias && alias->isWrite()) {
            for (size_t a = 0; a < count; a++)
                if (const auto* other = schema.arguments()[a].alias_info(); other && other->beforeSet() == alias->beforeSet()) {
                    result = given[a];
                    in_place = true;
                }
        }
        if (!in_place) {
            result = each_tensor(work[at], [&](const at::Tensor& t) { return on_device(t, *device, !captures); });
        }
        results.push_back(in_place ? IValue() : result);
        torch::jit::push(*stack, result);
    }
    for (size_t a = 0; a < count; a++) {  // the operator has resized an empty out= on the host
        const auto* alias = schema.arguments()[a].alias_info();
        if (!alias || !alias->isWrite() || !given[a].isTensor() || !given[a].toTensor().is_cuda()) continue;
        const at::Tensor to = given[a].toTensor(), from = written[a].toTensor();
        if (to.numel() != 0 || from.numel() == 0) continue;
        to.resize_(from.sizes());
        if (captures)
            seen[a] = on_host(to);  // where each replay writes
        else
            memcpy(to.data_ptr(), from.contiguous().data_ptr(), to.nbytes());
    }
    if (captures) {
        std::vector<IValue> there;
        for (const IValue& result : results) there.push_back(each_tensor(result, [](const at::Tensor& t) { return on_host(t); }));
        stand_in_record(stream, replay, new Launch{op, seen, there, random}, [](void* data) { delete (Launch*)data; });
    }
}

void operate_boxed(const c10::OperatorHandle& op, Stack* stack) { operate(op, stack); }

// copy_ between host and device through the runtime, with its rules for pinned memory and waiting.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    if (to.numel() == 0) return to;
    if (to.is_cuda() && from.is_cuda()) {
        c10::cuda::CUDAGuard guard(from.device());
        cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
        at::Tensor to_seen = on_host(to), from_seen = on_host(from);
        if (stand_in_captures(stream)) {
            using Pair = std::pair<at::Tensor, at::Tensor>;
            stand_in_record(stream, [](void* data) { auto& [a, b] = *(Pair*)data; a.copy_(b); }, new Pair(to_seen, from_seen), [](void* data) { delete (Pair*)data; });
        } else {
            stand_in_launch(stream);
            to_seen.copy_(from_seen);
        }
        return to;
    }
    at::Device device = to.is_cuda() ? to.device() : from.device();
    c10::cuda::CUDAGuard guard(device);
    auto stream = c10::cuda::getCurrentCUDAStream();
    bool same = to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.strides() == from.strides() && to.is_non_overlapping_and_dense();
    if (!same) {
        at::Tensor there;
        if (to.is_cuda()) {  // dtype and strides change on the device
            at::Tensor source = from.expand_as(to).contiguous();
            there = at::empty(to.sizes(), source.options().device(device));
            copy(there, source, non_blocking);
            return to.copy_(there);
        }
        at::Tensor source = from.expand_as(to).to(to.scalar_type()).contiguous();
        if (to.is_contiguous()) return copy(to, source, non_blocking);
        there = at::empty(to.sizes(), to.options());
        copy(there, source, false);
        return to.copy_(there);
    }
    const at::Tensor& host = to.is_cuda() ? from : to;
    bool pinned = host.is_pinned();
    auto kind = to.is_cuda() ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    if (non_blocking) {
        C10_CUDA_CHECK(cudaMemcpyAsync(to.data_ptr(), from.data_ptr(), to.nbytes(), kind, stream));
        if (pinned) at::cuda::CachingHostAllocator_recordEvent(host.data_ptr(), host.storage().data_ptr().get_context(), stream);
    } else {
        c10::cuda::memcpy_and_sync(to.data_ptr(), from.data_ptr(), to.nbytes(), kind, stream);
    }
    return to;
}

// ---- waits of the host, with the line of Python that waited ----
std::mutex waits_lock;
std::map<std::string, long>& waits() {
    static auto* found = new std::map<std::string, long>;
    return *found;
}

void told(const char* what) {
    std::string line = "(outside Python)";
    if (Py_IsInitialized()) {
        PyGILState_STATE held = PyGILState_Ensure();
        if (PyFrameObject* frame = PyEval_GetFrame()) {
            PyCodeObject* code = PyFrame_GetCode(frame);
            const char* file = PyUnicode_AsUTF8(code->co_filename);
            line = std::string(file ? file : "?") + ":" + std::to_string(PyFrame_GetLineNumber(frame));
            Py_DECREF(code);
        }
        PyGILState_Release(held);
    }
    std::lock_guard<std::mutex> mutex(waits_lock);
    waits()[std::string(what) + "\t" + line]++;
}

void write_waits() {
    FILE* file = fopen(getenv("CUDA_STAND_IN_WAITS"), "a");
    if (!file) return;
    for (auto& [line, count] : waits()) fprintf(file, "%ld\t%s\n", count, line.c_str());
    fclose(file);
}

const bool registered = [] {
    auto& context = at::globalContext();
    context.setUserEnabledCuDNN(false);
    context.setSDPUseFlash(false);  // attention from operators that the CPU also has
    context.setSDPUseMemEfficient(false);
    context.setSDPUseCuDNN(false);
    auto& dispatcher = c10::Dispatcher::singleton();
    static torch::Library library(torch::Library::IMPL, "aten", std::make_optional(c10::DispatchKey::CUDA), __FILE__, __LINE__);
    std::set<std::string> whole(WHOLE.begin(), WHOLE.end());
    c10::WarningUtils::WarningHandlerGuard quiet(nullptr);
    for (const c10::OperatorName& found : dispatcher.getAllOpNames()) {
        std::string name = found.name + (found.overload_name.empty() ? "" : "." + found.overload_name);
        if (found.name.rfind("aten::", 0) != 0 || OWN.count(name)) continue;
        if (name == "aten::copy_") continue;
        auto op = dispatcher.findSchema(found);
        if (!op || !(op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || whole.count(name))) continue;
        bool view = false;
        for (const auto& result : op->schema().returns()) view = view || (result.alias_info() && !result.alias_info()->isWrite());
        if (view) continue;
        library.impl(name.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&operate_boxed>());
    }
    library.impl("copy_", TORCH_FN(copy));
    if (getenv("CUDA_STAND_IN_WAITS")) {
        stand_in_tell_waits(told);
        atexit(write_waits);
    }
    return true;
}();

}  // namespace
