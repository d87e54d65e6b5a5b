// sin, cos, tanh, and the double functions that start from an approximation.
extern "C" __global__ void fast_sine(float* out, const float* in, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  out[i] = __sinf(in[i]);
  out[n + i] = __cosf(in[i]);
  out[2 * n + i] = __tanf(in[i]);
}
extern "C" __global__ void fast_tanh(float* out, const float* in, int n) {
  int i = threadIdx.x;
  if (i < n) asm("tanh.approx.f32 %0, %1;" : "=f"(out[i]) : "f"(in[i]));
}
extern "C" __global__ void gelu(float* out, const float* in, int n) {
  int i = threadIdx.x;
  if (i < n) out[i] = 0.5f * in[i] * (1.0f + tanhf(0.79788456f * (in[i] + 0.044715f * in[i] * in[i] * in[i])));
}
extern "C" __global__ void double_elementary(double* out, const double* in, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  double x = in[i];
  out[i] = exp(x);
  out[n + i] = log(fabs(x) + 1e-3);
  out[2 * n + i] = sqrt(fabs(x));
  out[3 * n + i] = rsqrt(fabs(x) + 0.25);
  out[4 * n + i] = 1.0 / x;
  out[5 * n + i] = x / 7.0;
  out[6 * n + i] = cbrt(x);
  out[7 * n + i] = tanh(x);
}
extern "C" __global__ void large_sine(float* out, const float* in, int n) {
  int i = threadIdx.x;
  if (i < n) out[i] = sinf(in[i]);
}
extern "C" __global__ void powers(float* out, const float* in, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  out[i] = powf(fabsf(in[i]), 2.3f);
  out[n + i] = erff(in[i]);
  out[2 * n + i] = log1pf(fabsf(in[i]));
}
extern "C" __global__ void negative_index(int* out, int offset) {
  int local[16];
  for (int k = 0; k < 16; k++) local[k] = k * (int)threadIdx.x;
  int sum = 0;
  for (int k = -8; k < 8; k++) sum += local[k + 8] * ((k + offset) & 3) + local[(k * 5 + offset) & 15];
  out[threadIdx.x] = sum;
}
