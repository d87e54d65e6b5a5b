// Functions that are called: out of line, recursive, through pointers, virtual, from libdevice; printf and assert.
#include <cuda/std/cassert>


__device__ __noinline__ int gcd(int a, int b) {
  while (b != 0) {
    int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}
extern "C" __global__ void noinline_gcd(int* out, const int* a, const int* b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = gcd(a[i], b[i]) + 1000 * gcd(b[i], 12);
}

struct Pair {
  float low, high;
  int count;
};
__device__ __noinline__ Pair widen(Pair p, const float* extra) {
  p.low -= extra[0];
  p.high += extra[1];
  p.count++;
  return p;
}
extern "C" __global__ void noinline_struct(float* out, const float* in) {
  Pair p = {in[threadIdx.x], in[threadIdx.x] + 1, (int)threadIdx.x};
  p = widen(p, in);
  p = widen(p, in + 2);
  out[3 * threadIdx.x] = p.low;
  out[3 * threadIdx.x + 1] = p.high;
  out[3 * threadIdx.x + 2] = p.count;
}

__device__ __noinline__ void shared_sum(int* row, int value, int* result) {
  row[threadIdx.x] = value;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) row[threadIdx.x] += row[threadIdx.x + half];
    __syncthreads();
  }
  *result = row[0];
  __syncthreads();
}
extern "C" __global__ void noinline_barrier(int* out, const int* in) {
  __shared__ int row[128];
  int first, second;
  shared_sum(row, in[threadIdx.x], &first);
  shared_sum(row, in[threadIdx.x] * (int)threadIdx.x, &second);
  out[threadIdx.x] = first - second;
}

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
extern "C" __global__ void recursion(int* out) { out[threadIdx.x] = fibonacci(threadIdx.x % 13); }

__device__ int odd(int n);
__device__ __noinline__ int even(int n) { return n == 0 ? 1 : 2 * odd(n - 1) - n; }
__device__ __noinline__ int odd(int n) { return n == 0 ? 0 : 3 * even(n - 1) + n; }
extern "C" __global__ void mutual_recursion(int* out) { out[threadIdx.x] = even(threadIdx.x % 9) + odd(threadIdx.x % 4); }

__device__ __noinline__ void sort_range(int* values, int low, int high) {
  if (low >= high) return;
  int pivot = values[(low + high) / 2], i = low, j = high;
  while (i <= j) {
    while (values[i] < pivot) i++;
    while (values[j] > pivot) j--;
    if (i <= j) {
      int held = values[i];
      values[i++] = values[j];
      values[j--] = held;
    }
  }
  sort_range(values, low, j);
  sort_range(values, i, high);
}
extern "C" __global__ void quicksort(int* values, int each) {
  sort_range(values + each * threadIdx.x, 0, each - 1);
}

typedef float (*Operation)(float, float);
__device__ __noinline__ float plus(float a, float b) { return a + b; }
__device__ __noinline__ float times(float a, float b) { return a * b; }
__device__ __noinline__ float larger(float a, float b) { return a > b ? a : b; }
__device__ Operation operations[3] = {plus, times, larger};
extern "C" __global__ void function_pointers(float* out, const float* in) {
  out[threadIdx.x] = operations[threadIdx.x % 3](in[threadIdx.x], in[threadIdx.x + 1]);
}

struct Shape {
  __device__ virtual float area() const = 0;
  float size;
};
struct Square : Shape {
  __device__ float area() const override { return size * size; }
};
struct Circle : Shape {
  __device__ float area() const override { return 3.0f * size * size; }
};
extern "C" __global__ void virtual_calls(float* out) {
  Square square;
  Circle circle;
  square.size = threadIdx.x;
  circle.size = threadIdx.x + 0.5f;
  Shape* shapes[2] = {&square, &circle};
  float sum = 0;
  for (int k = 0; k < 4; k++) sum += shapes[(threadIdx.x + k * k) & 1]->area();
  out[threadIdx.x] = sum;
}

extern "C" __global__ void double_functions(double* out, const double* in, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  double x = in[i];
  out[i] = pow(fabs(x), 1.25);
  out[n + i] = sin(x);
  out[2 * n + i] = cos(x);
  out[3 * n + i] = tan(x);
  out[4 * n + i] = atan2(x, 0.75);
}

extern "C" __global__ void prints(const float* in) {
  if (threadIdx.x % 16 == 3) printf("thread %d of %u: %8.3f [%-5s] %c%% %lld %#x\n", threadIdx.x, blockDim.x, in[threadIdx.x], "ab", 'x', 1ll << 40, 255);
  if (threadIdx.x == 0) printf("plain\n");
}

extern "C" __global__ void asserts(const int* in, int limit) {
  int i = threadIdx.x;
  assert(in[i] < limit);
}

extern "C" __global__ void profiled(int* out) {
  asm volatile("pmevent 3;");
  out[threadIdx.x] = 1;
}

struct Node {
  int value;
  char mark;
  Node* next;
};
extern "C" __global__ void lists(int* out, int4* copies, int count) {
  Node* first = nullptr;
  for (int k = 0; k < count; k++) {
    Node* node = new Node;
    node->value = k * threadIdx.x;
    node->mark = 1;
    node->next = first;
    first = node;
  }
  copies[threadIdx.x] = *(int4*)first;  // with bytes between mark and next that nobody wrote
  int sum = 0;
  while (first) {
    Node* next = first->next;
    sum += first->value;
    delete first;
    first = next;
  }
  out[threadIdx.x] = sum;
}
extern "C" __global__ void heap_beside_a_race(int** out, int* most, const int* in) {
  if (in[threadIdx.x] > *most) atomicMax(most, in[threadIdx.x]);
  out[threadIdx.x] = new int(in[threadIdx.x]);
}
extern "C" __global__ void heap_mistake(int* out, int which) {
  int* p = (int*)malloc(16);
  if (which == 0) p[4] = 1;
  if (which == 1) free(p);
  if (which < 3) p[0] = 5;
  if (which == 2) out[0] = p[1];
  if (which == 3) { free(p); free(p); }
  if (which == 4) free(out);
  if (which == 5) { out[0] = malloc(9 << 20) == nullptr; void* half = malloc(5 << 20); out[1] = half != nullptr;
                    out[2] = malloc(5 << 20) == nullptr; free(half); out[3] = malloc(5 << 20) != nullptr; }
}
struct alignas(64) Line { int words[16]; };
extern "C" __global__ void heap_aligned(int* out) {
  Line* line = new Line;
  line->words[3] = threadIdx.x;
  out[threadIdx.x] = (unsigned long long)line % 64 == 0 ? line->words[3] : -1;
  delete line;
}

extern "C" __global__ void clean(int* out) { out[threadIdx.x] = 3 * threadIdx.x; }
