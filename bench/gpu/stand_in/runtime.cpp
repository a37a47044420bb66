// A CUDA runtime and driver without a GPU, for preloading. Devices are parts of the host's memory; streams
// and events follow CUDA's rules.
//
// torch's own C++ code runs on top of it unchanged: its caching allocators, streams, events, graphs,
// generators and error messages. operators.cpp computes at the launch what a GPU would compute. Behaviour
// that CUDA leaves undefined becomes visible:
//  * an event's time is "not ready" until the host has waited for it;
//  * the result of a copy from the device is NaN in pinned memory until the host has waited for it;
//  * overwriting pinned memory while a copy to the device may still read it is an error at the next wait;
//  * a kernel unknown to operators.cpp is an error, with its name.
// Functions and their meaning: CUDA runtime API 13.0, https://docs.nvidia.com/cuda/cuda-runtime-api.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr double DONE_AFTER_S = 0.002;  // a query reports completion this long after the card has finished

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct Recording {  // the captured work of a stream
    struct Node {
        void (*run)(void*);
        void* data;
        void (*destroy)(void*);
    };
    std::vector<Node> nodes;
    std::vector<std::pair<void*, cudaHostFn_t>> owned;
    unsigned long long id = 0;
    bool broken = false;
    std::set<struct Stream*> streams;
    ~Recording() {
        for (auto& node : nodes)
            if (node.destroy) node.destroy(node.data);
        for (auto& [object, destroy] : owned) destroy(object);
    }
};

struct Stream {
    int device = 0;
    unsigned flags = 0;
    int priority = 0;
    long issued = 0, done = 0;
    double clock = 0;  // time at which the card will have finished the issued work
    std::vector<std::pair<Stream*, long>> waits;
    std::shared_ptr<Recording> capture;
    bool origin = false, joined = true;
};

struct Event {
    int device = -1;
    unsigned flags = 0;
    Stream* stream = nullptr;
    long mark = 0;
    double at = 0;
    std::shared_ptr<Recording> capture;
};

struct Pending {  // a copy between pinned memory and a device that the host has not waited for
    Stream* stream;
    long mark;
    char* host;
    std::vector<char> content;
    bool to_device;
};

struct Block {
    size_t size;
    int device;  // -1: pinned host memory
    bool mapped;
};

std::recursive_mutex lock;
using Held = std::lock_guard<std::recursive_mutex>;
std::map<char*, Block> blocks;
std::map<const void*, std::string> kernels;
std::vector<Pending> pending;
std::map<int, Stream*> null_streams;
std::vector<size_t> used;
unsigned long long captures = 0;
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
void (*on_wait)(const char*) = nullptr;

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

// As the driver reads it: all cards, or the listed ones up to the first unknown one.
const std::vector<int>& cards() {
    static std::vector<int> found = [] {
        std::vector<int> out;
        int all = (int)setting("CUDA_STAND_IN_DEVICES", 2);
        const char* list = getenv("CUDA_VISIBLE_DEVICES");
        if (!list) {
            for (int at = 0; at < all; at++) out.push_back(at);
            return out;
        }
        while (*list) {
            char* end;
            long at = strtol(list, &end, 10);
            if (end == list || at < 0 || at >= all) break;
            out.push_back((int)at);
            list = *end == ',' ? end + 1 : end;
        }
        return out;
    }();
    return found;
}

size_t capacity() { return (size_t)setting("CUDA_STAND_IN_MIB", 2048) << 20; }

// Time for which each kernel or copy keeps the card busy after its launch. 0: none.
double kernel_s() {
    static double found = 1e-6 * setting("CUDA_STAND_IN_KERNEL_US", 0);
    return found;
}

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

// The first query for devices loads operators.cpp, because it registers with torch.
void load_operators() {
    static bool tried = false;
    const char* path = getenv("CUDA_STAND_IN_OPERATORS");
    if (tried || !path) return;
    void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!torch) return;
    tried = true;
    if (!dlopen(path, RTLD_NOW | RTLD_GLOBAL)) {
        fprintf(stderr, "stand-in: %s\n", dlerror());
        abort();
    }
}

std::set<Stream*>& all_streams() {
    static auto* all = new std::set<Stream*>;
    return *all;
}

Stream* stream_of(cudaStream_t handle) {
    if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
    Stream*& found = null_streams[current];
    if (!found) {
        found = new Stream;
        found->device = current;
        all_streams().insert(found);
    }
    return found;
}

void finish(Stream* stream, long mark, std::set<Stream*>& seen) {
    if (stream->done < mark) stream->done = mark;
    if (!seen.insert(stream).second) return;
    for (auto& [other, at] : stream->waits) finish(other, at, seen);
}

// Applies the effects of finished work: results arrive on the host, sources may be overwritten.
cudaError_t settle() {
    cudaError_t result = cudaSuccess;
    std::vector<Pending> rest;
    for (auto& copy : pending) {
        if (copy.stream->done < copy.mark) {
            rest.push_back(std::move(copy));
            continue;
        }
        if (!copy.to_device) {
            memcpy(copy.host, copy.content.data(), copy.content.size());
        } else if (memcmp(copy.host, copy.content.data(), copy.content.size())) {
            fprintf(stderr, "stand-in: pinned memory was overwritten while a copy to the device could still read it (%zu bytes)\n", copy.content.size());
            result = cudaErrorIllegalAddress;
        }
    }
    pending = std::move(rest);
    return result == cudaSuccess ? result : failed(result);
}

// The host waits until the card has reached `until`, as far as `mark`.
cudaError_t wait_for(Stream* stream, long mark, double until) {
    double rest = until - now();
    if (rest > 0) usleep((useconds_t)(1e6 * rest));
    std::set<Stream*> seen;
    finish(stream, mark, seen);
    return settle();
}

bool is_done(Stream* stream, long mark, double at) {
    if (stream->done < mark && now() - at > DONE_AFTER_S) wait_for(stream, mark, 0);
    return stream->done >= mark;
}

void issue(Stream* stream) {
    stream->issued++;
    stream->clock = std::max(stream->clock, now()) + kernel_s();
    stream->joined = false;
}

// A call that CUDA does not permit during a capture of this thread's streams.
cudaError_t forbidden_in_capture(Stream* stream) {
    if (!stream->capture) return cudaSuccess;
    stream->capture->broken = true;
    return failed(cudaErrorStreamCaptureUnsupported);
}

const std::pair<char* const, Block>* block_of(const void* pointer) {
    auto after = blocks.upper_bound((char*)pointer);
    if (after == blocks.begin()) return nullptr;
    auto& found = *std::prev(after);
    return (char*)pointer < found.first + found.second.size ? &found : nullptr;
}

bool is_pinned(const void* pointer) {
    auto* found = block_of(pointer);
    return found && found->second.device < 0;
}

bool is_on_device(const void* pointer) {
    auto* found = block_of(pointer);
    return found && found->second.device >= 0;
}

struct Copy {
    void* to;
    const void* from;
    size_t size;
};

void tell(const char* what) {
    if (on_wait) on_wait(what);
}

cudaError_t copy_async(void* to, const void* from, size_t size, Stream* stream) {
    if (stream->capture) {
        stream->capture->nodes.push_back({[](void* data) { auto* c = (Copy*)data; memcpy(c->to, c->from, c->size); },
                                          new Copy{to, from, size}, [](void* data) { delete (Copy*)data; }});
        return cudaSuccess;
    }
    for (auto& copy : pending)  // on one stream a later copy sees the result of an earlier one
        if (!copy.to_device && (char*)from < copy.host + copy.content.size() && (char*)from + size > copy.host) {
            memcpy(copy.host, copy.content.data(), copy.content.size());
        }
    issue(stream);
    bool up = is_on_device(to) && is_pinned(from), down = is_on_device(from) && is_pinned(to);
    bool waits = (is_on_device(to) && !is_on_device(from) && !up) || (is_on_device(from) && !is_on_device(to) && !down);
    if (down) {
        pending.push_back({stream, stream->issued, (char*)to, std::vector<char>((char*)from, (char*)from + size), false});
        memset(to, 0xff, size);
        return cudaSuccess;
    }
    memcpy(to, from, size);
    if (up) pending.push_back({stream, stream->issued, (char*)from, std::vector<char>((char*)from, (char*)from + size), true});
    return waits ? wait_for(stream, stream->issued, stream->clock) : cudaSuccess;  // pageable memory: the call returns after the copy
}

cudaError_t unknown_kernel(const void* function) {
    static const bool empty = getenv("CUDA_STAND_IN_EMPTY_KERNELS");
    if (empty) return cudaSuccess;
    Held held(lock);
    auto found = kernels.find(function);
    fprintf(stderr, "stand-in: no operator stands in for the kernel %s\n", found == kernels.end() ? "(unnamed)" : found->second.c_str());
    return failed(cudaErrorNotSupported);
}

}  // namespace

extern "C" {

// ---- for operators.cpp ----
int stand_in_captures(cudaStream_t handle) {
    Held held(lock);
    return stream_of(handle)->capture != nullptr;
}
void stand_in_record(cudaStream_t handle, void (*run)(void*), void* data, void (*destroy)(void*)) {
    Held held(lock);
    stream_of(handle)->capture->nodes.push_back({run, data, destroy});
}
void stand_in_launch(cudaStream_t handle) {
    Held held(lock);
    issue(stream_of(handle));
}
void stand_in_tell_waits(void (*told)(const char*)) { on_wait = told; }

// ---- devices ----
cudaError_t cudaGetDeviceCount(int* count) {
    load_operators();
    *count = (int)cards().size();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= (int)cards().size()) return failed(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "Stand-in card %d", device);
    memcpy(prop->uuid.bytes, "flatout-stand-in", 16);
    prop->uuid.bytes[15] = (char)cards()[device];
    prop->totalGlobalMem = capacity();
    prop->major = 9;
    prop->multiProcessorCount = 132;
    prop->warpSize = 32;
    prop->maxThreadsPerBlock = 1024;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->sharedMemPerBlock = 48 << 10;
    prop->sharedMemPerBlockOptin = 227 << 10;
    prop->sharedMemPerMultiprocessor = 228 << 10;
    prop->regsPerMultiprocessor = prop->regsPerBlock = 65536;
    prop->l2CacheSize = 50 << 20;
    prop->memoryBusWidth = 5120;
    prop->unifiedAddressing = 1;
    for (int at = 0; at < 3; at++) prop->maxGridSize[at] = prop->maxThreadsDim[at] = 1024;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : attribute == cudaDevAttrWarpSize ? 32 : 0;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
    snprintf(text, room, "0000:%02x:00.0", cards()[device] + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return failed(cudaErrorNotSupported); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    Held held(lock);
    tell("cudaDeviceSynchronize");
    Stream* stream = stream_of(nullptr);
    if (auto error = forbidden_in_capture(stream)) return error;

    double until = 0;
    for (Stream* other : all_streams())
        if (other->device == current && !other->capture) {
            other->done = other->issued;
            until = std::max(until, other->clock);
        }
    return wait_for(stream, stream->issued, until);
}

// ---- memory ----
cudaError_t cudaMalloc(void** pointer, size_t size) {
    Held held(lock);
    used.resize(cards().size());
    *pointer = nullptr;
    if (used[current] + size > capacity()) return failed(cudaErrorMemoryAllocation);
    void* made = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    used[current] += size;
    blocks[(char*)made] = {size, current, true};
    *pointer = made;
    return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
    Held held(lock);
    if (!pointer) return cudaSuccess;
    auto found = blocks.find((char*)pointer);
    if (found == blocks.end() || found->second.device < 0) return failed(cudaErrorInvalidValue);
    used[found->second.device] -= found->second.size;
    munmap(pointer, found->second.size ? found->second.size : 1);
    blocks.erase(found);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    Held held(lock);
    used.resize(cards().size());
    *total = capacity();
    *available = capacity() - used[current];
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
    Held held(lock);
    void* made = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    blocks[(char*)made] = {size, -1, true};
    *pointer = made;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
    Held held(lock);
    auto found = blocks.find((char*)pointer);
    if (found == blocks.end() || found->second.device >= 0) return failed(cudaErrorInvalidValue);
    for (auto& copy : pending)  // freeing waits for the device
        if (copy.host >= found->first && copy.host < found->first + found->second.size) copy.stream->done = copy.stream->issued;
    cudaError_t result = settle();
    if (found->second.mapped) munmap(pointer, found->second.size ? found->second.size : 1);
    blocks.erase(found);
    return result;
}
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
    Held held(lock);
    blocks[(char*)pointer] = {size, -1, false};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) { return cudaFreeHost(pointer); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
    Held held(lock);
    memset(found, 0, sizeof *found);
    auto* block = block_of(pointer);
    found->type = !block ? cudaMemoryTypeUnregistered : block->second.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->device = block && block->second.device >= 0 ? block->second.device : current;
    found->devicePointer = block ? (void*)pointer : nullptr;
    found->hostPointer = block && block->second.device >= 0 ? nullptr : (void*)pointer;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t handle) {
    Held held(lock);
    return copy_async(to, from, size, stream_of(handle));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t handle) {
    Held held(lock);
    return copy_async(to, from, size, stream_of(handle));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    Held held(lock);
    Stream* stream = stream_of(nullptr);
    if (auto error = forbidden_in_capture(stream)) return error;
    tell("cudaMemcpy");
    copy_async(to, from, size, stream);
    return wait_for(stream, stream->issued, stream->clock);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t handle) {
    Held held(lock);
    Stream* stream = stream_of(handle);
    if (stream->capture) {
        struct Fill {
            void* to;
            int value;
            size_t size;
        };
        stream->capture->nodes.push_back({[](void* data) { auto* f = (Fill*)data; memset(f->to, f->value, f->size); },
                                          new Fill{to, value, size}, [](void* data) { delete (Fill*)data; }});
        return cudaSuccess;
    }
    issue(stream);
    memset(to, value, size);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }

// ---- streams ----
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
    Held held(lock);
    auto* stream = new Stream;
    stream->device = current;
    stream->flags = flags;
    stream->priority = priority;
    all_streams().insert(stream);
    *made = (cudaStream_t)stream;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // kept: events may point to it
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Held held(lock);
    Stream* stream = stream_of(handle);
    if (auto error = forbidden_in_capture(stream)) return error;
    tell("cudaStreamSynchronize");
    return wait_for(stream, stream->issued, stream->clock);
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Held held(lock);
    Stream* stream = stream_of(handle);
    if (auto error = forbidden_in_capture(stream)) return error;
    return is_done(stream, stream->issued, stream->clock) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t which, unsigned) {
    Held held(lock);
    Stream* stream = stream_of(handle);
    auto* event = (Event*)which;
    if (!event->stream) return cudaSuccess;
    if (event->capture) {
        if (!stream->capture) {
            stream->capture = event->capture;
            stream->capture->streams.insert(stream);
            stream->joined = false;
        } else if (stream->capture != event->capture) {
            return failed(cudaErrorStreamCaptureMerge);
        }
        if (event->mark == event->stream->issued) event->stream->joined = true;
        return cudaSuccess;
    }
    if (stream->capture) return failed(cudaErrorStreamCaptureIsolation);
    if (event->stream != stream) stream->clock = std::max(stream->clock, event->at);
    if (event->stream != stream && event->stream->done < event->mark) stream->waits.push_back({event->stream, event->mark});
    if (stream->waits.size() > 256) stream->waits.erase(stream->waits.begin(), stream->waits.begin() + 128);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t run, void* data) {
    {
        Held held(lock);
        Stream* stream = stream_of(handle);
        if (stream->capture) {
            stream->capture->nodes.push_back({run, data, nullptr});
            return cudaSuccess;
        }
        issue(stream);
    }
    run(data);
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t run, void* data, unsigned) {
    run(handle, cudaSuccess, data);
    return cudaSuccess;
}

// ---- events ----
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
    auto* event = new Event;
    event->device = current;
    event->flags = flags;
    *made = (cudaEvent_t)event;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t which) {
    delete (Event*)which;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t which, cudaStream_t handle, unsigned) {
    Held held(lock);
    auto* event = (Event*)which;
    Stream* stream = stream_of(handle);
    if (event->device != stream->device) return failed(cudaErrorInvalidResourceHandle);
    if (!stream->capture) stream->issued++;
    event->stream = stream;
    event->mark = stream->issued;
    event->at = std::max(stream->clock, now());
    event->capture = stream->capture;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t which, cudaStream_t handle) { return cudaEventRecordWithFlags(which, handle, 0); }
cudaError_t cudaEventSynchronize(cudaEvent_t which) {
    Held held(lock);
    auto* event = (Event*)which;
    if (event->capture) return failed(cudaErrorCapturedEvent);
    tell("cudaEventSynchronize");
    return event->stream ? wait_for(event->stream, event->mark, event->at) : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t which) {
    Held held(lock);
    auto* event = (Event*)which;
    if (event->capture) return failed(cudaErrorCapturedEvent);
    if (!event->stream || is_done(event->stream, event->mark, event->at)) return cudaSuccess;
    return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    Held held(lock);
    auto *a = (Event*)from, *b = (Event*)to;
    if (!a->stream || !b->stream || a->device != b->device || ((a->flags | b->flags) & cudaEventDisableTiming)) return failed(cudaErrorInvalidResourceHandle);
    if (a->stream->done < a->mark || b->stream->done < b->mark) return failed(cudaErrorNotReady);
    *ms = (float)(1e3 * (b->at - a->at));
    return cudaSuccess;
}

// ---- graphs ----
struct Graph {
    std::shared_ptr<Recording> recording;
};
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, capture_mode);
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    Held held(lock);
    if (!handle || handle == cudaStreamLegacy) return failed(cudaErrorStreamCaptureUnsupported);
    Stream* stream = stream_of(handle);
    if (stream->capture) return failed(cudaErrorIllegalState);
    stream->capture = std::make_shared<Recording>();
    stream->capture->id = ++captures;
    stream->capture->streams.insert(stream);
    stream->origin = true;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
    Held held(lock);
    Stream* stream = stream_of(handle);
    *made = nullptr;
    if (!stream->capture || !stream->origin) return failed(cudaErrorIllegalState);
    auto recording = stream->capture;
    cudaError_t result = recording->broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (Stream* other : recording->streams) {
        if (!other->origin && !other->joined && result == cudaSuccess) result = cudaErrorStreamCaptureUnjoined;
        other->capture = nullptr;
        other->origin = false;
    }
    if (result != cudaSuccess) return failed(result);
    *made = (cudaGraph_t) new Graph{recording};
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    Held held(lock);
    auto& capture = stream_of(handle)->capture;
    *status = !capture ? cudaStreamCaptureStatusNone : capture->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
    Held held(lock);
    auto& capture = stream_of(handle)->capture;
    cudaStreamIsCapturing(handle, status);
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = nullptr;
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = (cudaGraphExec_t) new Graph{((Graph*)graph)->recording};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
    std::shared_ptr<Recording> recording = ((Graph*)graph)->recording;
    {
        Held held(lock);
        Stream* stream = stream_of(handle);
        if (stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
        issue(stream);
    }
    for (auto& node : recording->nodes) node.run(node.data);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete (Graph*)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete (Graph*)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    *count = ((Graph*)graph)->recording->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* object, cudaHostFn_t destroy, unsigned, unsigned) {
    *made = (cudaUserObject_t) new std::pair<void*, cudaHostFn_t>(object, destroy);
    return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
    ((Graph*)graph)->recording->owned.push_back(*(std::pair<void*, cudaHostFn_t>*)object);
    return cudaSuccess;
}

// ---- errors ----
cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "cudaError %d", (int)error);
    return text;
}
const char* cudaGetErrorString(cudaError_t error) {
    switch ((int)error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
        case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
        case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
        case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
        default: return "error of the stand-in";
    }
}

// ---- kernels: known by name, never run ----
void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
    Held held(lock);
    kernels[function] = name ? name : "(unnamed)";
}
char __cudaInitModule(void**) { return 0; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return unknown_kernel((const void*)kernel); }
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return unknown_kernel(function); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return unknown_kernel(function); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks_out, const void*, int, size_t, unsigned) {
    *blocks_out = 1;
    return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
// ---- the driver: queries for devices ----
int cuInit(unsigned) { return cards().empty() ? 100 : 0; }
int cuDriverGetVersion(int* version) { return (int)cudaDriverGetVersion(version); }
int cuDeviceGetCount(int* count) {
    *count = (int)cards().size();
    return 0;
}
int cuDeviceGet(int* device, int at) {
    *device = at;
    return at < 0 || at >= (int)cards().size() ? 101 : 0;
}
int cuDeviceGetName(char* name, int room, int device) {
    snprintf(name, room, "Stand-in card %d", device);
    return 0;
}
int cuDeviceTotalMem_v2(size_t* size, int) {
    *size = capacity();
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 9 : 0;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return 0;
}
int cuGetErrorString(int error, const char** text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return 0;
}

// Address ranges, separate from their memory, for growing segments.
int cuMemGetAllocationGranularity(size_t* size, const void*, int) {
    *size = 2 << 20;
    return 0;
}
int cuMemAddressReserve(void** pointer, size_t size, size_t, void*, unsigned long long) {
    *pointer = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *pointer == MAP_FAILED ? 2 : 0;
}
int cuMemAddressFree(void* pointer, size_t size) { return munmap(pointer, size) ? 1 : 0; }
int cuMemCreate(unsigned long long* handle, size_t size, const int* properties, unsigned long long) {
    Held held(lock);
    int device = properties[3];  // CUmemAllocationProp: type, handle types, location type, location
    used.resize(cards().size());
    if (used[device] + size > capacity()) return 2;
    used[device] += size;
    *handle = (unsigned long long)new Block{size, device, true};
    return 0;
}
int cuMemRelease(unsigned long long handle) {
    Held held(lock);
    auto* block = (Block*)handle;
    used[block->device] -= block->size;
    delete block;
    return 0;
}
int cuMemMap(char* pointer, size_t size, size_t, unsigned long long handle, unsigned long long) {
    Held held(lock);
    blocks[pointer] = {size, ((Block*)handle)->device, true};
    return 0;
}
int cuMemSetAccess(void* pointer, size_t size, const void*, size_t) { return mprotect(pointer, size, PROT_READ | PROT_WRITE) ? 1 : 0; }
int cuMemUnmap(char* pointer, size_t size) {
    Held held(lock);
    for (auto at = blocks.lower_bound(pointer); at != blocks.end() && at->first < pointer + size;) at = blocks.erase(at);
    return mmap(pointer, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED ? 1 : 0;
}
int stand_in_lacks() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
    *found = dlsym(RTLD_DEFAULT, symbol);
    if (!*found) *found = (void*)stand_in_lacks;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
}
