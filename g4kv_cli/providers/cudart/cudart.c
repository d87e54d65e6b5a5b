// A stand-in for libcudart.so: an engine's own launchers run as they are, and what they ask of CUDA goes to one handler in
// Python (runtime.py). It keeps what nvcc's start-up code registers and the error of each thread's last call, nothing else.
//
// Every function of the runtime that is not here is in absent.inc: it tells the handler its name and fails with
// cudaErrorNotSupported, so that a launcher that needs it ends in a message and not in the loader's.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#ifndef CUDART_MAJOR
#error "build.py says of which CUDA the stand-in is: -DCUDART_MAJOR=12"
#endif

// What the handler is asked, by name; runtime.py reads this list.
#define OPERATIONS(X)                                                                                                  \
  X(launch) X(absent) X(malloc) X(free) X(copy) X(fill) X(device_attribute) X(function_attribute)                    \
  X(function_attributes) X(occupancy) X(symbol) X(tensor_map) X(entry_point) X(host_malloc) X(host_free)               \
  X(device_properties) X(pointer_attributes) X(memory_info) X(host_function) X(captures) X(graphs)                   \
  X(host_register) X(host_unregister)

enum operation {
#define X(name) OPERATION_##name,
  OPERATIONS(X)
#undef X
};
EXPORT const char *const g4kv_operations[] = {
#define X(name) #name,
    OPERATIONS(X)
#undef X
        NULL};

enum {
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_PITCH = 12,
  INVALID_SYMBOL = 13,
  INVALID_DEVICE_FUNCTION = 98,
  INVALID_DEVICE = 101,
  INVALID_HANDLE = 400,
  NOT_SUPPORTED = 801,
  UPDATE_FAILURE = 910,
  UNKNOWN = 999
};

// values: operands in, results out. Returns a cudaError_t.
typedef int (*handler_function)(int operation, uint64_t *values);
static handler_function handler;
static __thread int last_error;

EXPORT void g4kv_set_handler(handler_function function) { handler = function; }

static int noted(int error) {
  if (error) last_error = error;
  return error;
}

static int ask(enum operation operation, uint64_t *values) {
  return noted(handler ? handler(operation, values) : UNKNOWN);
}

#define ADDRESS(pointer) ((uint64_t)(uintptr_t)(pointer))
static int absent(const char *name) {
  uint64_t values[] = {ADDRESS(name)};
  const int error = ask(OPERATION_absent, values);
  return noted(error ? error : NOT_SUPPORTED);
}
// Where a result has no place to go, nothing is asked.
#define REQUIRE(pointer)                                                                                               \
  if (!(pointer)) return noted(INVALID_VALUE)
// The name that code built with --default-stream per-thread calls: everything is done in the order of the calls, so that
// it is the same function.
#define SAME(name, other) EXPORT extern __typeof__(name) other __attribute__((alias(#name)))
// In the place of a stream: the call is done when it returns, and cannot be part of a graph.
#define AT_ONCE UINT64_MAX

// --- what nvcc's start-up code and stubs call ----------------------------------------------------------------------

struct registered {
  const void *host;
  const char *name;
  const void *fatbin;
};
enum { MOST = 1 << 16 };
static struct registered functions[MOST], variables[MOST];
static unsigned function_count, variable_count;
static const void *fatbins[MOST];
static unsigned fatbin_count;

// What fatbinary_section.h declares: magic, version, data, file.
struct wrapper {
  int magic, version;
  const void *data;
  void *file;
};

EXPORT void **__cudaRegisterFatBinary(void *wrapper) {
  const unsigned at = fatbin_count < MOST - 1 ? fatbin_count++ : MOST - 1;
  fatbins[at] = ((struct wrapper *)wrapper)->data;
  return (void **)&fatbins[at];
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
EXPORT char __cudaInitModule(void **handle) {
  (void)handle;
  return 1;
}

static void keep(struct registered *all, unsigned *count, const void *host, const char *name, void **handle) {
  if (*count < MOST) all[(*count)++] = (struct registered){host, name, *handle};
}
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                                   void *bid, void *block, void *grid, int *warp) {
  (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
  keep(functions, &function_count, host, name, handle);
}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                              int constant, int global) {
  (void)device, (void)external, (void)size, (void)constant, (void)global;
  keep(variables, &variable_count, host, name, handle);
}

static const struct registered *find(const struct registered *all, unsigned count, const void *host) {
  // The newest first: a library that was opened later may lie where an earlier one was.
  while (count-- > 0)
    if (all[count].host == host) return &all[count];
  return NULL;
}

typedef struct {
  unsigned x, y, z;
} dim3_;
static __thread struct {
  dim3_ grid, block;
  size_t shared;
  void *stream;
} pushed[32];
static __thread unsigned depth;

EXPORT unsigned __cudaPushCallConfiguration(dim3_ grid, dim3_ block, size_t shared, void *stream) {
  if (depth == 32) return 1;
  pushed[depth].grid = grid;
  pushed[depth].block = block;
  pushed[depth].shared = shared;
  pushed[depth++].stream = stream;
  return 0;
}
EXPORT int __cudaPopCallConfiguration(dim3_ *grid, dim3_ *block, size_t *shared, void *stream) {
  if (depth == 0) return noted(INVALID_VALUE);
  --depth;
  *grid = pushed[depth].grid;
  *block = pushed[depth].block;
  *shared = pushed[depth].shared;
  *(void **)stream = pushed[depth].stream;
  return 0;
}

// --- launches -------------------------------------------------------------------------------------------------------

static int launch(const void *host, dim3_ grid, dim3_ block, void **arguments, size_t shared, void *stream,
                  const void *attributes, unsigned count, int cooperative) {
  const struct registered *found = find(functions, function_count, host);
  if (!found) return noted(INVALID_DEVICE_FUNCTION);
  uint64_t values[] = {ADDRESS(found->name), ADDRESS(found->fatbin), grid.x,  grid.y,
                       grid.z,               block.x,                block.y, block.z,
                       shared,               ADDRESS(arguments),     ADDRESS(attributes), count,
                       (uint64_t)cooperative, ADDRESS(stream)};
  return ask(OPERATION_launch, values);
}

EXPORT int cudaLaunchKernel(const void *host, dim3_ grid, dim3_ block, void **arguments, size_t shared, void *stream) {
  return launch(host, grid, block, arguments, shared, stream, NULL, 0, 0);
}
SAME(cudaLaunchKernel, cudaLaunchKernel_ptsz);
EXPORT int __cudaGetKernel(const void **kernel, const void *host) {
  *kernel = host;
  return 0;
}
EXPORT int __cudaLaunchKernel(const void *kernel, dim3_ grid, dim3_ block, void **arguments, size_t shared, void *stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
SAME(__cudaLaunchKernel, __cudaLaunchKernel_ptsz);
EXPORT int cudaLaunchCooperativeKernel(const void *host, dim3_ grid, dim3_ block, void **arguments, size_t shared,
                                       void *stream) {
  return launch(host, grid, block, arguments, shared, stream, NULL, 0, 1);
}
SAME(cudaLaunchCooperativeKernel, cudaLaunchCooperativeKernel_ptsz);
struct configuration {  // cudaLaunchConfig_t
  dim3_ grid, block;
  size_t shared;
  void *stream;
  void *attributes;
  unsigned count;
};
EXPORT int cudaLaunchKernelExC(const struct configuration *all, const void *host, void **arguments) {
  return launch(host, all->grid, all->block, arguments, all->shared, all->stream, all->attributes, all->count, 0);
}
SAME(cudaLaunchKernelExC, cudaLaunchKernelExC_ptsz);

// --- memory ---------------------------------------------------------------------------------------------------------

static int allocate(void **pointer, size_t bytes, uint64_t stream) {
  REQUIRE(pointer);
  uint64_t values[] = {bytes, stream};
  const int error = ask(OPERATION_malloc, values);
  *pointer = (void *)(uintptr_t)(error ? 0 : values[0]);
  return error;
}
static int give_back(void *pointer, uint64_t stream) {
  uint64_t values[] = {ADDRESS(pointer), stream};
  return pointer ? ask(OPERATION_free, values) : 0;
}
EXPORT int cudaMalloc(void **pointer, size_t bytes) { return allocate(pointer, bytes, AT_ONCE); }
EXPORT int cudaMallocAsync(void **pointer, size_t bytes, void *stream) {
  return allocate(pointer, bytes, ADDRESS(stream));
}
SAME(cudaMallocAsync, cudaMallocAsync_ptsz);
EXPORT int cudaMallocFromPoolAsync(void **pointer, size_t bytes, void *pool, void *stream) {
  (void)pool;
  return allocate(pointer, bytes, ADDRESS(stream));
}
SAME(cudaMallocFromPoolAsync, cudaMallocFromPoolAsync_ptsz);
EXPORT int cudaFree(void *pointer) { return give_back(pointer, AT_ONCE); }
EXPORT int cudaFreeAsync(void *pointer, void *stream) { return give_back(pointer, ADDRESS(stream)); }
SAME(cudaFreeAsync, cudaFreeAsync_ptsz);
EXPORT int cudaMallocHost(void **pointer, size_t bytes) {
  REQUIRE(pointer);
  uint64_t values[] = {bytes};
  const int error = ask(OPERATION_host_malloc, values);
  *pointer = (void *)(uintptr_t)(error ? 0 : values[0]);
  return error;
}
EXPORT int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  (void)flags;
  return cudaMallocHost(pointer, bytes);
}
EXPORT int cudaFreeHost(void *pointer) {
  uint64_t values[] = {ADDRESS(pointer)};
  return pointer ? ask(OPERATION_host_free, values) : 0;
}
static int copy(void *to, const void *from, size_t bytes, int kind, uint64_t stream) {
  uint64_t values[] = {ADDRESS(to), ADDRESS(from), bytes, (uint64_t)kind, stream};
  return bytes ? ask(OPERATION_copy, values) : 0;
}
static int copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                     int kind, uint64_t stream) {
  if (height && (width > to_pitch || width > from_pitch)) return noted(INVALID_PITCH);
  for (size_t row = 0; row < height; row++) {
    const int error = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream);
    if (error) return error;
  }
  return 0;
}
static int fill(void *to, int value, size_t bytes, uint64_t stream) {
  uint64_t values[] = {ADDRESS(to), (uint64_t)(value & 255), bytes, stream};
  return bytes ? ask(OPERATION_fill, values) : 0;
}
static int fill_rows(void *to, size_t pitch, int value, size_t width, size_t height, uint64_t stream) {
  if (height && width > pitch) return noted(INVALID_PITCH);
  for (size_t row = 0; row < height; row++) {
    const int error = fill((char *)to + row * pitch, value, width, stream);
    if (error) return error;
  }
  return 0;
}
EXPORT int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  return copy(to, from, bytes, kind, AT_ONCE);
}
SAME(cudaMemcpy, cudaMemcpy_ptds);
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  return copy(to, from, bytes, kind, ADDRESS(stream));
}
SAME(cudaMemcpyAsync, cudaMemcpyAsync_ptsz);
EXPORT int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                        int kind) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, kind, AT_ONCE);
}
SAME(cudaMemcpy2D, cudaMemcpy2D_ptds);
EXPORT int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                             int kind, void *stream) {
  return copy_rows(to, to_pitch, from, from_pitch, width, height, kind, ADDRESS(stream));
}
SAME(cudaMemcpy2DAsync, cudaMemcpy2DAsync_ptsz);
EXPORT int cudaMemset(void *to, int value, size_t bytes) { return fill(to, value, bytes, AT_ONCE); }
SAME(cudaMemset, cudaMemset_ptds);
EXPORT int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
  return fill(to, value, bytes, ADDRESS(stream));
}
SAME(cudaMemsetAsync, cudaMemsetAsync_ptsz);
EXPORT int cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height) {
  return fill_rows(to, pitch, value, width, height, AT_ONCE);
}
SAME(cudaMemset2D, cudaMemset2D_ptds);
EXPORT int cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, void *stream) {
  return fill_rows(to, pitch, value, width, height, ADDRESS(stream));
}
SAME(cudaMemset2DAsync, cudaMemset2DAsync_ptsz);
EXPORT int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  (void)flags;
  REQUIRE(pointer && bytes);
  uint64_t values[] = {ADDRESS(pointer), bytes};
  return ask(OPERATION_host_register, values);
}
EXPORT int cudaHostUnregister(void *pointer) {
  uint64_t values[] = {ADDRESS(pointer)};
  return ask(OPERATION_host_unregister, values);
}
EXPORT int cudaMemGetInfo(size_t *unused, size_t *total) {
  REQUIRE(unused && total);
  uint64_t values[2] = {0, 0};
  const int error = ask(OPERATION_memory_info, values);
  *unused = values[0];
  *total = values[1];
  return error;
}
EXPORT int cudaPointerGetAttributes(void *attributes, const void *pointer) {
  REQUIRE(attributes);
  uint64_t values[] = {ADDRESS(attributes), ADDRESS(pointer), CUDART_MAJOR};
  return ask(OPERATION_pointer_attributes, values);
}
static int symbol_at(const void *symbol, uint64_t *values) {
  const struct registered *found = find(variables, variable_count, symbol);
  if (!found) return noted(INVALID_SYMBOL);
  values[0] = ADDRESS(found->name);
  values[1] = ADDRESS(found->fatbin);
  return ask(OPERATION_symbol, values);
}
EXPORT int cudaGetSymbolAddress(void **pointer, const void *symbol) {
  REQUIRE(pointer);
  uint64_t values[2];
  const int error = symbol_at(symbol, values);
  *pointer = (void *)(uintptr_t)(error ? 0 : values[0]);
  return error;
}
EXPORT int cudaGetSymbolSize(size_t *bytes, const void *symbol) {
  REQUIRE(bytes);
  uint64_t values[2];
  const int error = symbol_at(symbol, values);
  *bytes = error ? 0 : values[1];
  return error;
}
// Of a variable's bytes [offset, offset + bytes); null where they are not all its own.
static char *part_of(const void *symbol, size_t bytes, size_t offset, int *error) {
  uint64_t values[2];
  *error = symbol_at(symbol, values);
  if (!*error && (offset > values[1] || bytes > values[1] - offset)) *error = noted(INVALID_VALUE);
  return *error ? NULL : (char *)(uintptr_t)values[0] + offset;
}
EXPORT int cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes, size_t offset, int kind,
                                   void *stream) {
  int error;
  char *to = part_of(symbol, bytes, offset, &error);
  return error ? error : copy(to, from, bytes, kind, ADDRESS(stream));
}
SAME(cudaMemcpyToSymbolAsync, cudaMemcpyToSymbolAsync_ptsz);
EXPORT int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) {
  int error;
  char *to = part_of(symbol, bytes, offset, &error);
  return error ? error : copy(to, from, bytes, kind, AT_ONCE);
}
SAME(cudaMemcpyToSymbol, cudaMemcpyToSymbol_ptds);
EXPORT int cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t bytes, size_t offset, int kind, void *stream) {
  int error;
  const char *from = part_of(symbol, bytes, offset, &error);
  return error ? error : copy(to, from, bytes, kind, ADDRESS(stream));
}
SAME(cudaMemcpyFromSymbolAsync, cudaMemcpyFromSymbolAsync_ptsz);
EXPORT int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset, int kind) {
  int error;
  const char *from = part_of(symbol, bytes, offset, &error);
  return error ? error : copy(to, from, bytes, kind, AT_ONCE);
}
SAME(cudaMemcpyFromSymbol, cudaMemcpyFromSymbol_ptds);

// --- one device, streams that are always idle unless they capture ---------------------------------------------------

EXPORT int cudaGetDevice(int *device) {
  REQUIRE(device);
  *device = 0;
  return 0;
}
EXPORT int cudaSetDevice(int device) { return noted(device == 0 ? 0 : INVALID_DEVICE); }
EXPORT int cudaGetDeviceCount(int *count) {
  REQUIRE(count);
  *count = 1;
  return 0;
}
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  REQUIRE(value);
  if (device != 0) return noted(INVALID_DEVICE);
  uint64_t values[] = {(uint64_t)attribute};
  const int error = ask(OPERATION_device_attribute, values);
  *value = (int)values[0];
  return error;
}
static int properties(void *to, int device, unsigned layout) {
  REQUIRE(to);
  uint64_t values[] = {ADDRESS(to), layout};
  return device == 0 ? ask(OPERATION_device_properties, values) : noted(INVALID_DEVICE);
}
// CUDA 12's headers call it by its second name; the first is then of a layout that came before.
EXPORT int cudaGetDeviceProperties_v2(void *to, int device) { return properties(to, device, 12); }
#if CUDART_MAJOR >= 13
EXPORT int cudaGetDeviceProperties(void *to, int device) { return properties(to, device, 13); }
#endif
EXPORT int cudaRuntimeGetVersion(int *version) {
  REQUIRE(version);
  *version = CUDART_MAJOR == 12 ? 12090 : 13000;  // whose functions absent.inc names
  return 0;
}
EXPORT int cudaDriverGetVersion(int *version) {
  REQUIRE(version);
  *version = 13000;
  return 0;
}

// Of caches, heaps and profilers: no result depends on them.
EXPORT int cudaDeviceSetCacheConfig(int config) {
  (void)config;
  return 0;
}
EXPORT int cudaDeviceSetSharedMemConfig(int config) {
  (void)config;
  return 0;
}
EXPORT int cudaDeviceSetLimit(int limit, size_t value) {
  (void)limit, (void)value;
  return 0;
}
EXPORT int cudaCtxResetPersistingL2Cache(void) { return 0; }
EXPORT int cudaProfilerStart(void) { return 0; }
EXPORT int cudaProfilerStop(void) { return 0; }

// What runtime.py is asked of streams that capture; where none does, nothing is asked.
enum capture_step { BEGIN, END, STATUS, RECORD, WAIT, LOOK_AT_STREAM, LOOK_AT_EVENT, LOOK_AT_DEVICE, EXCHANGE_MODE };
static unsigned open_captures;

static int capturing(enum capture_step step, uint64_t first, uint64_t second) {
  uint64_t values[] = {step, first, second};
  return open_captures ? ask(OPERATION_captures, values) : 0;
}

EXPORT int cudaDeviceSynchronize(void) { return capturing(LOOK_AT_DEVICE, 0, 0); }
EXPORT int cudaStreamSynchronize(void *stream) { return capturing(LOOK_AT_STREAM, ADDRESS(stream), 0); }
SAME(cudaStreamSynchronize, cudaStreamSynchronize_ptsz);
EXPORT int cudaStreamQuery(void *stream) { return capturing(LOOK_AT_STREAM, ADDRESS(stream), 0); }
SAME(cudaStreamQuery, cudaStreamQuery_ptsz);
EXPORT int cudaStreamIsCapturing(void *stream, int *status) {
  REQUIRE(status);
  *status = 0;
  return capturing(STATUS, ADDRESS(stream), ADDRESS(status));
}
SAME(cudaStreamIsCapturing, cudaStreamIsCapturing_ptsz);
// What is asked of the nodes that a capture has so far, which are none of the runtime's here, is not there.
static int capture_info(void *stream, int *status, uint64_t *id, int asks_for_nodes) {
  REQUIRE(status);
  if (asks_for_nodes) return absent("cudaStreamGetCaptureInfo for a graph or its nodes");
  *status = 0;
  if (id) *id = 0;
  uint64_t values[] = {STATUS, ADDRESS(stream), ADDRESS(status)};
  const int error = open_captures ? ask(OPERATION_captures, values) : 0;
  if (id && *status) *id = values[2];
  return error;
}
EXPORT int cudaStreamGetCaptureInfo_v3(void *stream, int *status, uint64_t *id, void **graph, void **nodes, void **edges,
                                       size_t *count) {
  return capture_info(stream, status, id, graph || nodes || edges || count);
}
SAME(cudaStreamGetCaptureInfo_v3, cudaStreamGetCaptureInfo_v3_ptsz);
EXPORT int cudaStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, void **graph, void **nodes, size_t *count) {
  return capture_info(stream, status, id, graph || nodes || count);
}
SAME(cudaStreamGetCaptureInfo_v2, cudaStreamGetCaptureInfo_v2_ptsz);
#if CUDART_MAJOR >= 13
SAME(cudaStreamGetCaptureInfo_v3, cudaStreamGetCaptureInfo);
SAME(cudaStreamGetCaptureInfo_v3, cudaStreamGetCaptureInfo_ptsz);
#else
EXPORT int cudaStreamGetCaptureInfo(void *stream, int *status, uint64_t *id) {
  return capture_info(stream, status, id, 0);
}
SAME(cudaStreamGetCaptureInfo, cudaStreamGetCaptureInfo_ptsz);
#endif
EXPORT int cudaStreamBeginCapture(void *stream, int mode) {
  uint64_t values[] = {BEGIN, ADDRESS(stream), (uint64_t)mode};
  const int error = ask(OPERATION_captures, values);
  open_captures += !error;
  return error;
}
EXPORT int cudaStreamBeginCapture_ptsz(void *stream, int mode) {
  // Its default stream can be captured, and is not told apart from the legacy one in other calls.
  return stream ? cudaStreamBeginCapture(stream, mode) : absent("cudaStreamBeginCapture of the per-thread default stream");
}
EXPORT int cudaStreamEndCapture(void *stream, void **graph) {
  REQUIRE(graph);
  *graph = NULL;
  uint64_t values[] = {END, ADDRESS(stream), 0, 0};
  const int error = ask(OPERATION_captures, values);
  *graph = (void *)(uintptr_t)values[2];
  open_captures -= (unsigned)values[3];
  return error;
}
SAME(cudaStreamEndCapture, cudaStreamEndCapture_ptsz);
EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) {
  REQUIRE(mode);
  uint64_t values[] = {EXCHANGE_MODE, ADDRESS(mode), 0};
  return ask(OPERATION_captures, values);
}

// A stream's first word says whether the legacy default stream waits for it; an event is a place alone.
EXPORT int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  REQUIRE(stream);
  (void)priority;
  unsigned *made = malloc(sizeof *made);
  if (made) *made = !(flags & 1);  // cudaStreamNonBlocking
  *stream = made;
  return made ? 0 : noted(OUT_OF_MEMORY);
}
EXPORT int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT int cudaStreamGetFlags(void *stream, unsigned *flags) {
  REQUIRE(flags);
  *flags = ADDRESS(stream) > 2 && !*(unsigned *)stream;
  return 0;
}
SAME(cudaStreamGetFlags, cudaStreamGetFlags_ptsz);
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = 0;
  return 0;
}
EXPORT int cudaStreamGetPriority(void *stream, int *priority) {
  REQUIRE(priority);
  (void)stream;
  *priority = 0;
  return 0;
}
SAME(cudaStreamGetPriority, cudaStreamGetPriority_ptsz);
EXPORT int cudaStreamSetAttribute(void *stream, int attribute, const void *value) {
  (void)stream;
  REQUIRE(value);
  // Where rows stay in the L2 cache, how the host waits, priorities: no result depends on them.
  return attribute == 1 || attribute == 3 || attribute == 8 ? 0 : absent("cudaStreamSetAttribute");
}
SAME(cudaStreamSetAttribute, cudaStreamSetAttribute_ptsz);
EXPORT int cudaStreamDestroy(void *stream) {
  if (ADDRESS(stream) <= 2) return noted(INVALID_HANDLE);  // cudaStreamLegacy, cudaStreamPerThread
  free(stream);
  return 0;
}
EXPORT int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
  (void)flags;
  return capturing(WAIT, ADDRESS(stream), ADDRESS(event));
}
SAME(cudaStreamWaitEvent, cudaStreamWaitEvent_ptsz);
EXPORT int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  if (!open_captures) {
    function(data);
    return 0;
  }
  uint64_t values[] = {(uint64_t)(uintptr_t)function, ADDRESS(data), ADDRESS(stream)};
  return ask(OPERATION_host_function, values);
}
SAME(cudaLaunchHostFunc, cudaLaunchHostFunc_ptsz);
EXPORT int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data, unsigned flags) {
  (void)flags;
  const int error = capturing(LOOK_AT_STREAM, ADDRESS(stream), 0);
  if (!error) function(stream, 0, data);
  return error;
}
SAME(cudaStreamAddCallback, cudaStreamAddCallback_ptsz);
EXPORT int cudaEventCreateWithFlags(void **event, unsigned flags) {
  REQUIRE(event);
  (void)flags;
  *event = malloc(1);
  return *event ? 0 : noted(OUT_OF_MEMORY);
}
EXPORT int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT int cudaEventRecord(void *event, void *stream) { return capturing(RECORD, ADDRESS(stream), ADDRESS(event)); }
SAME(cudaEventRecord, cudaEventRecord_ptsz);
EXPORT int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
  (void)flags;
  return cudaEventRecord(event, stream);
}
SAME(cudaEventRecordWithFlags, cudaEventRecordWithFlags_ptsz);
EXPORT int cudaEventSynchronize(void *event) { return capturing(LOOK_AT_EVENT, ADDRESS(event), 0); }
EXPORT int cudaEventQuery(void *event) { return capturing(LOOK_AT_EVENT, ADDRESS(event), 0); }
EXPORT int cudaEventDestroy(void *event) {
  free(event);
  return 0;
}

// --- graphs ---------------------------------------------------------------------------------------------------------

enum graph_step { INSTANTIATE, LAUNCH, UPDATE, CLONE, NODES, NODE_TYPE, DESTROY };

static int graph_operation(enum graph_step step, const void *first, uint64_t second, uint64_t *result) {
  uint64_t values[] = {step, ADDRESS(first), second};
  const int error = ask(OPERATION_graphs, values);
  if (result) *result = error ? 0 : values[0];
  return error;
}
EXPORT int cudaGraphInstantiate(void **ready, void *graph, uint64_t flags) {
  REQUIRE(ready && graph);
  (void)flags;
  return graph_operation(INSTANTIATE, graph, 0, (uint64_t *)ready);
}
EXPORT int cudaGraphInstantiateWithFlags(void **ready, void *graph, uint64_t flags) {
  return cudaGraphInstantiate(ready, graph, flags);
}
struct instantiation {  // cudaGraphInstantiateParams
  uint64_t flags;
  void *stream, *failed;
  int result;
};
EXPORT int cudaGraphInstantiateWithParams(void **ready, void *graph, struct instantiation *how) {
  REQUIRE(how);
  how->failed = NULL;
  const int error = cudaGraphInstantiate(ready, graph, how->flags);
  how->result = error ? 1 : 0;  // cudaGraphInstantiateError, cudaGraphInstantiateSuccess
  return error;
}
SAME(cudaGraphInstantiateWithParams, cudaGraphInstantiateWithParams_ptsz);
EXPORT int cudaGraphLaunch(void *ready, void *stream) {
  REQUIRE(ready);
  return graph_operation(LAUNCH, ready, ADDRESS(stream), NULL);
}
SAME(cudaGraphLaunch, cudaGraphLaunch_ptsz);
EXPORT int cudaGraphUpload(void *ready, void *stream) {
  (void)stream;
  REQUIRE(ready);
  return 0;
}
SAME(cudaGraphUpload, cudaGraphUpload_ptsz);
struct update {  // cudaGraphExecUpdateResultInfo
  int result;
  void *node, *from_node;
};
EXPORT int cudaGraphExecUpdate(void *ready, void *graph, struct update *told) {
  REQUIRE(ready && graph && told);
  uint64_t result;
  const int error = graph_operation(UPDATE, ready, ADDRESS(graph), &result);
  told->node = told->from_node = NULL;
  told->result = error ? 1 : (int)result;  // cudaGraphExecUpdateError
  return error ? error : result ? noted(UPDATE_FAILURE) : 0;
}
EXPORT int cudaGraphClone(void **clone, void *graph) {
  REQUIRE(clone && graph);
  return graph_operation(CLONE, graph, 0, (uint64_t *)clone);
}
EXPORT int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
  REQUIRE(graph && count);
  uint64_t values[] = {NODES, ADDRESS(graph), ADDRESS(nodes), *count};
  const int error = ask(OPERATION_graphs, values);
  if (!error) *count = values[0];
  return error;
}
EXPORT int cudaGraphNodeGetType(void *node, int *type) {
  REQUIRE(node && type);
  uint64_t result;
  const int error = graph_operation(NODE_TYPE, node, 0, &result);
  *type = (int)result;
  return error;
}
EXPORT int cudaGraphDestroy(void *graph) { return graph_operation(DESTROY, graph, 0, NULL); }
EXPORT int cudaGraphExecDestroy(void *ready) { return graph_operation(DESTROY, ready, 0, NULL); }

// --- memory pools: all memory is of one -----------------------------------------------------------------------------

static uint64_t release_threshold;
static int the_pool(void **pool) {
  REQUIRE(pool);
  *pool = &release_threshold;
  return 0;
}
EXPORT int cudaDeviceGetDefaultMemPool(void **pool, int device) {
  return device == 0 ? the_pool(pool) : noted(INVALID_DEVICE);
}
EXPORT int cudaDeviceGetMemPool(void **pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
EXPORT int cudaDeviceSetMemPool(int device, void *pool) {
  (void)pool;
  return noted(device == 0 ? 0 : INVALID_DEVICE);
}
EXPORT int cudaMemPoolCreate(void **pool, const void *properties) {
  REQUIRE(properties);
  return the_pool(pool);
}
EXPORT int cudaMemPoolDestroy(void *pool) {
  REQUIRE(pool);
  return 0;
}
EXPORT int cudaMemPoolTrimTo(void *pool, size_t bytes) {
  (void)bytes;
  REQUIRE(pool);
  return 0;
}
// cudaMemPoolAttr: 1 to 3 say when memory is used again (an int), 4 when it is given back; the others are statistics.
EXPORT int cudaMemPoolSetAttribute(void *pool, int attribute, const void *value) {
  REQUIRE(pool && value);
  if (attribute == 4) release_threshold = *(const uint64_t *)value;
  return noted(attribute >= 1 && attribute <= 4 ? 0 : INVALID_VALUE);
}
EXPORT int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  REQUIRE(pool && value);
  if (attribute == 4)
    *(uint64_t *)value = release_threshold;
  else if (attribute >= 1 && attribute <= 3)
    *(int *)value = 1;
  else
    return absent("cudaMemPoolGetAttribute with a statistic");
  return 0;
}

// --- functions ------------------------------------------------------------------------------------------------------

static int function_of(const void *host, uint64_t *values) {
  const struct registered *found = find(functions, function_count, host);
  if (!found) return noted(INVALID_DEVICE_FUNCTION);
  values[0] = ADDRESS(found->name);
  values[1] = ADDRESS(found->fatbin);
  return 0;
}
EXPORT int cudaFuncSetAttribute(const void *host, int attribute, int value) {
  uint64_t values[4] = {0, 0, (uint64_t)attribute, (uint64_t)(int64_t)value};
  const int error = function_of(host, values);
  return error ? error : ask(OPERATION_function_attribute, values);
}
EXPORT int cudaFuncSetCacheConfig(const void *host, int config) {
  uint64_t values[4];
  (void)config;
  return function_of(host, values);
}
EXPORT int cudaFuncSetSharedMemConfig(const void *host, int config) { return cudaFuncSetCacheConfig(host, config); }
EXPORT int cudaGetKernel(const void **kernel, const void *host) {
  REQUIRE(kernel);
  if (!find(functions, function_count, host)) return noted(INVALID_DEVICE_FUNCTION);
  *kernel = host;
  return 0;
}
EXPORT int cudaFuncGetAttributes(void *attributes, const void *host) {
  REQUIRE(attributes);
  uint64_t values[4] = {0, 0, ADDRESS(attributes)};
  const int error = function_of(host, values);
  return error ? error : ask(OPERATION_function_attributes, values);
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads,
                                                                  size_t shared, unsigned flags) {
  REQUIRE(blocks);
  uint64_t values[4] = {0, 0, (uint64_t)threads, shared};
  (void)flags;
  int error = function_of(host, values);
  error = error ? error : ask(OPERATION_occupancy, values);
  *blocks = error ? 0 : (int)values[0];
  return error;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0);
}

// --- the driver's tensor maps ---------------------------------------------------------------------------------------

static int encode_tiled(void *map, int type, unsigned rank, void *address, const uint64_t *extents,
                        const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave, int swizzle,
                        int promotion, int fill) {
  uint64_t values[] = {ADDRESS(map),   (uint64_t)type,       rank,           ADDRESS(address),
                       ADDRESS(extents), ADDRESS(strides),   ADDRESS(box),   ADDRESS(steps),
                       (uint64_t)interleave, (uint64_t)swizzle, (uint64_t)promotion, (uint64_t)fill};
  return handler ? handler(OPERATION_tensor_map, values) : UNKNOWN;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, uint64_t flags,
                                            int *status) {
  REQUIRE(symbol && function);
  (void)version, (void)flags;
  const int known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? (void *)(uintptr_t)encode_tiled : NULL;
  if (status) *status = known ? 0 : 1;  // cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound
  if (known) return 0;
  uint64_t values[] = {ADDRESS(symbol)};
  return ask(OPERATION_entry_point, values);
}
SAME(cudaGetDriverEntryPointByVersion, cudaGetDriverEntryPointByVersion_ptsz);
EXPORT int cudaGetDriverEntryPoint(const char *symbol, void **function, uint64_t flags, int *status) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, status);
}
SAME(cudaGetDriverEntryPoint, cudaGetDriverEntryPoint_ptsz);

// --- errors ---------------------------------------------------------------------------------------------------------

EXPORT int cudaGetLastError(void) {
  const int error = last_error;
  last_error = 0;
  return error;
}
EXPORT int cudaPeekAtLastError(void) { return last_error; }

static const struct {
  int number;
  const char *name, *text;
} errors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {12, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {13, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {910, "cudaErrorGraphExecUpdateFailure",
     "the graph update was not performed because it included changes which violated constraints specific to "
     "instantiated graph update"},
};
static const char *described(int error, int as_name) {
  for (size_t at = 0; at < sizeof errors / sizeof *errors; at++)
    if (errors[at].number == error) return as_name ? errors[at].name : errors[at].text;
  return as_name ? "cudaErrorUnknown" : "unknown error";
}
EXPORT const char *cudaGetErrorString(int error) { return described(error, 0); }
EXPORT const char *cudaGetErrorName(int error) { return described(error, 1); }

// --- everything else ------------------------------------------------------------------------------------------------

#define ABSENT(name)                                                                                                   \
  EXPORT int name(void);                                                                                               \
  int name(void) { return absent(#name); }
#include "absent.inc"
#if CUDART_MAJOR < 13
ABSENT(cudaGetDeviceProperties)
#endif
