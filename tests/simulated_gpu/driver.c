/* A simulated GPU: the parts of the CUDA runtime, of its driver and of NVML that PyTorch calls, in host memory.
 *
 * Memory is the host's, with the capacity of the GPU that SIMULATED_GPU names. Copies and events are done at once. A
 * kernel is an error: kernels.py has the CPU do PyTorch's operations before one is launched. Built by __main__.py, and
 * loaded before the real libraries (LD_PRELOAD), or in their place where PyTorch loads them by name.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define CONTEXT ((size_t)300 << 20) /* bytes that CUDA itself takes */
#define WATTS 70
#define MEGAHERTZ 1410
#define DRIVER 13000

static const char *given(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static size_t capacity(void) { return strtoull(given("SIMULATED_GPU_BYTES", "15636365312"), NULL, 10); }

static int hidden(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible && (!*visible || *visible == '-');
}

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

/* The device */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = !hidden();
    return hidden() ? cudaErrorNoDevice : cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = DRIVER, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = DRIVER, cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) { return *value = 0, cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "Simulated %s", given("SIMULATED_GPU", "T4"));
    memset(&properties->uuid, 0x5a, sizeof properties->uuid);
    sscanf(given("SIMULATED_GPU_CAPABILITY", "7.5"), "%d.%d", &properties->major, &properties->minor);
    properties->totalGlobalMem = capacity();
    properties->multiProcessorCount = 40;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = properties->maxThreadsPerMultiProcessor = 1024;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 1 << 16;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = properties->sharedMemPerMultiprocessor = 64 << 10;
    properties->l2CacheSize = 4 << 20;
    return cudaSuccess;
}

/* Errors. A launched kernel leaves one for the check that PyTorch makes after it. */

static _Thread_local cudaError_t last = cudaSuccess;

cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return last = cudaErrorNotSupported;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **arguments) {
    return last = cudaErrorNotSupported;
}

/* Memory */

struct range {
    char *start;
    size_t size;
    enum cudaMemoryType type;
};
static struct range *ranges;
static size_t count, room, used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void note(void *start, size_t size, enum cudaMemoryType type) {
    pthread_mutex_lock(&lock);
    if (count == room) ranges = realloc(ranges, (room = 2 * room + 64) * sizeof *ranges);
    ranges[count++] = (struct range){start, size, type};
    if (type == cudaMemoryTypeDevice) used += size;
    pthread_mutex_unlock(&lock);
}

static size_t forget(void *start) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++)
        if (ranges[i].start == (char *)start) {
            size = ranges[i].size;
            if (ranges[i].type == cudaMemoryTypeDevice) used -= size;
            ranges[i] = ranges[--count];
            break;
        }
    pthread_mutex_unlock(&lock);
    return size;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = capacity();
    *available = used + CONTEXT < *total ? *total - used - CONTEXT : 0;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **start, size_t size) {
    *start = NULL;
    if (used + CONTEXT + size > capacity()) return cudaErrorMemoryAllocation;
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
    note(*start = mapped, size, cudaMemoryTypeDevice);
    return cudaSuccess;
}
cudaError_t cudaFree(void *start) {
    if (start) munmap(start, forget(start));
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
    if (posix_memalign(start, 4096, size ? size : 1)) return cudaErrorMemoryAllocation;
    note(*start, size, cudaMemoryTypeHost);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *start) { return forget(start), free(start), cudaSuccess; }
cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
    return note(start, size, cudaMemoryTypeHost), cudaSuccess;
}
cudaError_t cudaHostUnregister(void *start) { return forget(start), cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++)
        if ((char *)pointer >= ranges[i].start && (char *)pointer < ranges[i].start + ranges[i].size) {
            attributes->type = ranges[i].type;
            attributes->device = 0;
            attributes->devicePointer = attributes->hostPointer = (void *)pointer;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return memmove(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return memmove(to, from, size), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
    return memset(start, value, size), cudaSuccess;
}

/* Events and streams: whatever is asked for is done already. */

struct event {
    double at;
    int recorded, untimed;
};

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    struct event *made = calloc(1, sizeof *made);
    made->untimed = flags & cudaEventDisableTiming;
    *event = (cudaEvent_t)made;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((struct event *)event)->at = milliseconds();
    ((struct event *)event)->recorded = 1;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float *elapsed, cudaEvent_t before, cudaEvent_t after) {
    struct event *a = (struct event *)before, *b = (struct event *)after;
    if (!a->recorded || !b->recorded || a->untimed || b->untimed) return cudaErrorInvalidResourceHandle;
    *elapsed = b->at - a->at;
    return cudaSuccess;
}

static cudaError_t make_stream(cudaStream_t *stream) { return *stream = calloc(1, 64), cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return make_stream(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return make_stream(stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }

/* CUDA graphs: nothing is ever captured. */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *number) {
    if (id) *id = 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (number) *number = 0;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) { return cudaErrorNotSupported; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* The driver: PyTorch looks its functions up by name, and needs an answer from one of them. */

static int nothing(void) { return 0; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
    int asked = !strcmp(name, "cuDevicePrimaryCtxGetState");
    *function = asked ? (void *)cuDevicePrimaryCtxGetState : (void *)nothing;
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* NVML: a board that always draws the same power, with a counter that moves every 50 ms. */

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **board) { return *board = (void *)1, 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **board) { return *board = (void *)1, 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *board, unsigned long long *millijoules) {
    return *millijoules = (unsigned long long)(milliseconds() / 50) * 50 * WATTS, 0;
}
int nvmlDeviceGetPowerUsage(void *board, unsigned *milliwatts) { return *milliwatts = WATTS * 1000, 0; }
int nvmlDeviceGetClockInfo(void *board, int which, unsigned *clock) { return *clock = MEGAHERTZ, 0; }
int nvmlDeviceGetUtilizationRates(void *board, unsigned *percent) { return percent[0] = 90, percent[1] = 30, 0; }
int nvmlDeviceGetMemoryInfo(void *board, unsigned long long *bytes) {
    bytes[0] = capacity(), bytes[2] = used + CONTEXT, bytes[1] = bytes[0] - bytes[2];
    return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *board, unsigned long long *reasons) { return *reasons = 0, 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *board, unsigned long long *reasons) { return *reasons = 0, 0; }
int nvmlDeviceGetComputeRunningProcesses(void *board, unsigned *number, void *processes) { return *number = 0, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = DRIVER, 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { return snprintf(text, length, "580.0"), 0; }
const char *nvmlErrorString(int error) { return "the simulated board does not answer this"; }
