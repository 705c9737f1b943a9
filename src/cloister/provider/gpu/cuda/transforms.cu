// Transforms between coefficients and NTT form, in the order of `kernels.forward`: one block of threads a polynomial,
// 16 values a thread. Four passes go through shared memory; within a pass a thread keeps its values in registers.
//
// Values grow between reductions: a butterfly takes v < 2q from its product and gives lo + v and lo + 2q - v. From
// values below 2q, seven stages stay below 16q < 2^32.

#define THREADS (N / 16)
#define PADDED(i) ((i) + ((i) >> 3))  // no two threads of a warp in one bank

// A pass does L stages from stage S on. Its groups are 2^L values, `stride` apart, and share a block of factors.
template <int S, int L>
struct Pass {
  static const int size = 1 << L, groups = 16 >> L, stride = N >> (S + L);
  int block, base;
  __device__ __forceinline__ Pass(int group) {
    block = group >> (LOG_DEGREE - S - L);
    base = block * (N >> S) + (group & (stride - 1));
  }
};

template <int S, int L>
__device__ __forceinline__ void butterflies_down(u32* r, int block, const Factor* w, u32 q) {
#pragma unroll
  for (int l = 0; l < L; l++) {
    const int half = 1 << (L - l - 1);
#pragma unroll
    for (int b = 0; b < (1 << l); b++) {
      Factor f = __ldg(&w[(1 << (S + l)) + (block << l) + b]);
#pragma unroll
      for (int j = 0; j < half; j++) {
        const int lo = 2 * b * half + j, hi = lo + half;
        u32 x = r[lo], v = lazy_product(r[hi], f, q);
        r[lo] = x + v;
        r[hi] = x + 2 * q - v;
      }
    }
  }
}

// Values below 2q to values below 2q: sums double at every stage, so they are reduced before the fourth.
template <int S, int L>
__device__ __forceinline__ void butterflies_up(u32* r, int block, const Factor* w, u32 q, u32 one) {
#pragma unroll
  for (int l = L - 1; l >= 0; l--) {
    const int half = 1 << (L - l - 1);
    const u32 grown = 2u << (L - 1 - l);  // values are below grown·q here
    const u32 bound = grown > 8 ? 2 : grown;
#pragma unroll
    for (int b = 0; b < (1 << l); b++) {
      Factor f = __ldg(&w[(1 << (S + l)) + (block << l) + b]);
#pragma unroll
      for (int j = 0; j < half; j++) {
        const int lo = 2 * b * half + j, hi = lo + half;
        u32 x = r[lo], y = r[hi];
        if (grown > 8) {
          x = lazy(x, q, one);
          y = lazy(y, q, one);
        }
        r[lo] = x + y;
        r[hi] = lazy_product(x + bound * q - y, f, q);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < (1 << L); j++) r[j] = lazy(r[j], q, one);
}

// One pass of the forward transform; the first takes its values from registers.
template <int S, int L, bool FIRST, bool REDUCE>
__device__ __forceinline__ void pass_down(u32* s, const u32* mine, const Factor* w, u32 q, u32 one) {
  typedef Pass<S, L> P;
#pragma unroll
  for (int g = 0; g < P::groups; g++) {
    P at(threadIdx.x + g * THREADS);
    u32 r[P::size];
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      r[j] = FIRST ? mine[g * P::size + j] : s[PADDED(at.base + j * P::stride)];
      if (REDUCE) r[j] = lazy(r[j], q, one);
    }
    butterflies_down<S, L>(r, at.block, w, q);
#pragma unroll
    for (int j = 0; j < P::size; j++) s[PADDED(at.base + j * P::stride)] = r[j];
  }
  __syncthreads();
}

template <int S, int L>
__device__ __forceinline__ void pass_up(u32* s, const Factor* w, u32 q, u32 one) {
  typedef Pass<S, L> P;
#pragma unroll
  for (int g = 0; g < P::groups; g++) {
    P at(threadIdx.x + g * THREADS);
    u32 r[P::size];
#pragma unroll
    for (int j = 0; j < P::size; j++) r[j] = s[PADDED(at.base + j * P::stride)];
    butterflies_up<S, L>(r, at.block, w, q, one);
#pragma unroll
    for (int j = 0; j < P::size; j++) s[PADDED(at.base + j * P::stride)] = r[j];
  }
  __syncthreads();
}

#if LOG_DEGREE == 12
#define SECOND 4, 2
#define THIRD 6, 3
#define FOURTH 9, 3
#elif LOG_DEGREE == 13
#define SECOND 4, 3
#define THIRD 7, 3
#define FOURTH 10, 3
#else
#define SECOND 4, 3
#define THIRD 7, 4
#define FOURTH 11, 3
#endif

// `mine`: the thread's values, at threadIdx.x + j·THREADS, below 2q. The result stays in s, not reduced.
__device__ __forceinline__ void transform_in(u32* s, const u32* mine, const Factor* w, Prime p) {
  pass_down<0, 4, true, false>(s, mine, w, p.q, p.one);
  pass_down<SECOND, false, false>(s, mine, w, p.q, p.one);
  pass_down<THIRD, false, true>(s, mine, w, p.q, p.one);
  pass_down<FOURTH, false, false>(s, mine, w, p.q, p.one);
}

__device__ __forceinline__ void transform(u32* s, const u32* mine, const Factor* w, Prime p, u32* out) {
  transform_in(s, mine, w, p);
#pragma unroll
  for (int j = 0; j < 16; j++) {
    int i = threadIdx.x + j * THREADS;
    out[i] = once(lazy(s[PADDED(i)], p.q, p.one), p.q);
  }
}

// Values in s, below 2q, to coefficients.
__device__ __forceinline__ void transform_back(u32* s, const Factor* v, Prime p, u32* out) {
  pass_up<FOURTH>(s, v, p.q, p.one);
  pass_up<THIRD>(s, v, p.q, p.one);
  pass_up<SECOND>(s, v, p.q, p.one);
  pass_up<0, 4>(s, v, p.q, p.one);
  Factor n_inv = make_uint2(p.n_inv, p.n_inv_s);
#pragma unroll
  for (int j = 0; j < 16; j++) {
    int i = threadIdx.x + j * THREADS;
    out[i] = product(s[PADDED(i)], n_inv, p.q);
  }
}

// Polynomials (rows, k, N), to NTT form; out may be x.
extern "C" __global__ void __launch_bounds__(THREADS) forward(u32* out, const u32* x, const Factor* w, const Prime* primes,
                                                               int k) {
  extern __shared__ u32 s[];
  long row = blockIdx.x;
  int j = row % k;
  u32 mine[16];
#pragma unroll
  for (int i = 0; i < 16; i++) mine[i] = x[row * N + threadIdx.x + i * THREADS];
  transform(s, mine, w + (long)j * N, primes[j], out + row * N);
}

// Small signed coefficients (n, m, N), to NTT form (n, m, k, N); residues `extra` (n, k, N), if any, are added to the
// first polynomial of every ciphertext.
extern "C" __global__ void __launch_bounds__(THREADS) forward_small(u32* out, const i8* small, const u32* extra,
                                                                     const Factor* w, const Prime* primes, int m, int k) {
  extern __shared__ u32 s[];
  long row = blockIdx.x, polynomial = row / k, ciphertext = polynomial / m;
  int j = row % k;
  bool more = extra != 0 && polynomial % m == 0;
  u32 mine[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int x = threadIdx.x + i * THREADS;
    mine[i] = residue_of_small(small[polynomial * N + x], primes[j].q);
    if (more) mine[i] += extra[(ciphertext * k + j) * N + x];
  }
  transform(s, mine, w + (long)j * N, primes[j], out + row * N);
}

// The owner's: coefficients of c_0 + Σ c_i·s^i, (n, k, N), of ciphertexts (n, p, k, N); powers (p - 1, most, N).
extern "C" __global__ void __launch_bounds__(THREADS) opened(u32* out, const u32* cts, const Factor* powers,
                                                              const Factor* v, const Prime* primes, int p, int k, int most) {
  extern __shared__ u32 s[];
  long row = blockIdx.x, c = row / k;
  int j = row % k;
  u32 q = primes[j].q;
  for (int i = 0; i < 16; i++) {
    int x = threadIdx.x + i * THREADS;
    u32 sum = cts[(c * p * k + j) * N + x];
    for (int m = 1; m < p; m++) {
      Factor f = __ldg(&powers[((long)(m - 1) * most + j) * N + x]);
      sum = add(sum, product(cts[((c * p + m) * k + j) * N + x], f, q), q);
    }
    s[PADDED(x)] = sum;
  }
  __syncthreads();
  transform_back(s, v + (long)j * N, primes[j], out + row * N);
}
