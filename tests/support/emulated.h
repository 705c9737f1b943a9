// What CUDA's compiler knows and a C++ compiler does not, for kernels that run on a CPU, one thread after another.
#include <setjmp.h>
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

// Threads of a block are fibres: each runs to its next barrier, then the next one does. A fibre that has ended waits for
// the next block, so that it is made only once.
struct Fibre {
  ucontext_t made;
  jmp_buf at;
  bool started, ended;
};
static std::vector<Fibre*> fibres;
static jmp_buf scheduler;
static unsigned current, left;
static void (*body)(void**);
static void** arguments;

static void leave() {
  if (!_setjmp(fibres[current]->at)) _longjmp(scheduler, 1);
}
static void __syncthreads() { leave(); }
static void live() {
  for (;;) {
    body(arguments);
    fibres[current]->ended = true;
    leave();
  }
}

static void run_block(unsigned threads, bool barriers) {
  if (!barriers) {
    for (unsigned t = 0; t < threads; t++) {
      threadIdx = {t, 0, 0};
      body(arguments);
    }
    return;
  }
  const size_t size = 1 << 16;
  while (fibres.size() < threads) {
    Fibre* f = new Fibre();
    getcontext(&f->made);
    f->made.uc_stack.ss_sp = std::malloc(size);
    f->made.uc_stack.ss_size = size;
    makecontext(&f->made, live, 0);
    fibres.push_back(f);
  }
  for (unsigned t = 0; t < threads; t++) fibres[t]->ended = false;
  do {
    left = 0;
    for (current = 0; current < threads; current++) {
      if (fibres[current]->ended) continue;
      threadIdx = {current, 0, 0};
      if (!_setjmp(scheduler)) {
        if (fibres[current]->started) _longjmp(fibres[current]->at, 1);
        fibres[current]->started = true;
        setcontext(&fibres[current]->made);
      }
      left += !fibres[current]->ended;
    }
  } while (left);
}

static void launch(void (*kernel)(void**), unsigned gx, unsigned gy, unsigned threads, unsigned shared, void** args,
                   bool barriers) {
  body = kernel;
  arguments = args;
  gridDim = {gx, gy, 1};
  blockDim = {threads, 1, 1};
  dynamic_shared = (unsigned*)std::malloc(shared + 16);
  for (blockIdx.y = 0; blockIdx.y < gy; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++) run_block(threads, barriers);
  std::free(dynamic_shared);
}
