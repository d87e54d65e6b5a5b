// Clocks, video instructions, packed integers, indexed branches, textures.
extern "C" __global__ void clocks(long long* out) {
  long long begin = clock64();
  unsigned c = clock();
  unsigned long long time;
  unsigned sm;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  __nanosleep(100);
  long long end = clock64();
  out[threadIdx.x] = (end > begin) + 2 * (time != 0) + 4 * (sm < 1024) + 8 * ((unsigned)clock() != c);
}
extern "C" __global__ void video(unsigned* out, const unsigned* a, const unsigned* b) {
  int i = threadIdx.x;
  unsigned r;
  asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(r) : "r"(a[i]), "r"(b[i]), "r"(5u));
  out[i] = r;
  out[32 + i] = __vabsdiffu4(a[i], b[i]);
  out[64 + i] = __vmaxs2(a[i], b[i]);
  out[96 + i] = __vminu2(a[i], b[i]);
  out[128 + i] = __vadd4(a[i], b[i]);
  out[160 + i] = __vcmpgtu4(a[i], b[i]);
  out[192 + i] = __vavgu4(a[i], b[i]);
  out[224 + i] = __viaddmax_s32(a[i], b[i], 7);
  out[256 + i] = __vimax3_s16x2(a[i], b[i], 0x00030003u);
  out[288 + i] = __vsads4(a[i], b[i]);
}
extern "C" __global__ void packed_integers(unsigned* out, const unsigned* a, const unsigned* b) {
#if __CUDA_ARCH__ >= 900
  int i = threadIdx.x;
  unsigned r;
  asm("max.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a[i]), "r"(b[i]));
  out[i] = r;
  asm("min.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a[i]), "r"(b[i]));
  out[32 + i] = r;
  asm("add.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a[i]), "r"(b[i]));
  out[64 + i] = r;
  asm("max.s16x2.relu %0, %1, %2;" : "=r"(r) : "r"(a[i]), "r"(b[i]));
  out[96 + i] = r;
#endif
}
extern "C" __global__ void logic(unsigned* out, const unsigned* a, const unsigned* b) {
  int i = threadIdx.x;
  unsigned r, p;
#if __CUDA_ARCH__ >= 700
  asm("{.reg .pred q, s; setp.ne.u32 s, %2, 0; lop3.or.b32 %0|q, %2, %3, %2, 0x3c, s; selp.u32 %1, 1, 0, q;}" : "=r"(r), "=r"(p) : "r"(a[i]), "r"(b[i]));
  out[i] = r;
  out[32 + i] = p;
#endif
  asm("fns.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a[i]), "r"(3u), "r"(2));
  out[64 + i] = r;
}
extern "C" __global__ void indexed_branch(int* out, const int* in) {
  int r;
  asm volatile("{.reg .u32 k; and.b32 k, %1, 3;\n"
    "table: .branchtargets one, two, three, four;\n"
    "brx.idx k, table;\n"
    "one: mov.u32 %0, 10; bra.uni end;\n"
    "two: add.s32 %0, %1, 20; bra.uni end;\n"
    "three: mul.lo.s32 %0, %1, 3; bra.uni end;\n"
    "four: mov.u32 %0, -4;\n"
    "end: }" : "=r"(r) : "r"(in[threadIdx.x]));
  out[threadIdx.x] = r;
}
extern "C" __global__ void texture(float* out, unsigned long long handle) {
  out[threadIdx.x] = tex1Dfetch<float>(handle, threadIdx.x);
}
