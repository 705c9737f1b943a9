// What CUDA's compiler knows and a C++ compiler does not, for kernels that run on a CPU, one thread after another.
#include <ucontext.h>
#include <cmath>
#include <cstdlib>
#include <vector>

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct double2 { double x, y; };
struct dim3 { unsigned x, y, z; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(x)
#define __shared__ static

static dim3 threadIdx, blockIdx, blockDim, gridDim;
static unsigned* dynamic_shared;

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, int n) {
  n &= 31;
  return n ? hi << n | lo >> (32 - n) : hi;
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, int n) {
  n &= 31;
  return n ? lo >> n | hi << (32 - n) : lo;
}
static inline unsigned __byte_perm(unsigned x, unsigned, unsigned) { return __builtin_bswap32(x); }  // 0x0123 only
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }

// Threads of a block are fibres: each runs to its next barrier, then the next one does.
static ucontext_t scheduler;
static std::vector<ucontext_t> fibres;
static std::vector<char> ended;
static unsigned current;
static void (*body)(void**);
static void** arguments;

static void __syncthreads() {
  swapcontext(&fibres[current], &scheduler);
}
static void start() {
  body(arguments);
  ended[current] = 1;
}

static void run_block(unsigned threads, bool barriers) {
  if (!barriers) {
    for (unsigned t = 0; t < threads; t++) {
      threadIdx = {t, 0, 0};
      body(arguments);
    }
    return;
  }
  const size_t size = 1 << 15;
  static std::vector<char> stacks;
  stacks.resize(size * threads);
  fibres.assign(threads, ucontext_t());
  ended.assign(threads, 0);
  for (unsigned t = 0; t < threads; t++) {
    getcontext(&fibres[t]);
    fibres[t].uc_stack.ss_sp = stacks.data() + size * t;
    fibres[t].uc_stack.ss_size = size;
    fibres[t].uc_link = &scheduler;
    makecontext(&fibres[t], start, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (unsigned t = 0; t < threads; t++) {
      if (ended[t]) continue;
      current = t;
      threadIdx = {t, 0, 0};
      swapcontext(&scheduler, &fibres[t]);
      left = left || !ended[t];
    }
  }
}

static void launch(void (*kernel)(void**), unsigned gx, unsigned gy, unsigned threads, unsigned shared, void** args,
                   bool barriers) {
  body = kernel;
  arguments = args;
  gridDim = {gx, gy, 1};
  blockDim = {threads, 1, 1};
  dynamic_shared = (unsigned*)std::malloc(shared + 16);
  for (unsigned y = 0; y < gy; y++)
    for (unsigned x = 0; x < gx; x++) {
      blockIdx = {x, y, 0};
      run_block(threads, barriers);
    }
  std::free(dynamic_shared);
}
