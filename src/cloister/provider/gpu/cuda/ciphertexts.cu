// Ciphertexts: re-randomising, tensor products, sums. One thread a value unless said otherwise.

// Where value i of an array (n, p, k, N) stands.
struct Place {
  int x, j, m;
  long c;
  __device__ __forceinline__ Place(long i, int p, int k) {
    long row = i >> LOG_DEGREE;
    x = i & (N - 1);
    j = row % k;
    m = row / k % p;
    c = row / k / p;
  }
};

// c_m + E_m + V_m·b + V_{m-1}·a of ciphertexts (n, p, k, N); noise (n, 2p - 1, k, N) holds the E, then the V.
extern "C" __global__ void rerandomise(u32* out, const u32* cts, const u32* noise, const Factor* b, const Factor* a,
                                       const Prime* primes, int p, int k, long count) {
  long i = thread_number();
  if (i >= count) return;
  Place at(i, p, k);
  u32 q = primes[at.j].q;
  const u32* e = noise + (at.c * (2 * p - 1) * k + at.j) * N + at.x;
  long step = (long)k * N, place = (long)at.j * N + at.x;
  u32 v = add(cts[i], e[at.m * step], q);
  if (at.m < p - 1) v = add(v, product(e[(p + at.m) * step], __ldg(&b[place]), q), q);
  if (at.m > 0) v = add(v, product(e[(p + at.m - 1) * step], __ldg(&a[place]), q), q);
  out[i] = v;
}

// x - a·s in place, (n, k, N)
extern "C" __global__ void subtract_known(u32* x, const u32* a, const Factor* s, const Prime* primes, int k, long count) {
  long i = thread_number();
  if (i >= count) return;
  Place at(i, 1, k);
  u32 q = primes[at.j].q;
  x[i] = subtract(x[i], product(a[i], __ldg(&s[(long)at.j * N + at.x]), q), q);
}

// c_0 - m, (n, k, N), into the first polynomials of ciphertexts (n, 2, k, N)
extern "C" __global__ void subtract_into(u32* cts, const u32* c0, const u32* m, const Prime* primes, int k, long count) {
  long i = thread_number();
  if (i >= count) return;
  Place at(i, 1, k);
  cts[i + at.c * k * N] = subtract(c0[i], m[i], primes[at.j].q);
}

// x_c ⊗ y_c for every c: x (n, PX, k, N), y (n, PY, k, N)
template <int PX, int PY>
__device__ __forceinline__ void tensor(u32* out, const u32* x, const u32* y, const Prime* primes, int k, long count) {
  long i = thread_number();  // (n, k, N)
  if (i >= count) return;
  Place at(i, 1, k);
  u32 a[PX], b[PY];
#pragma unroll
  for (int m = 0; m < PX; m++) a[m] = x[((at.c * PX + m) * k + at.j) * N + at.x];
#pragma unroll
  for (int m = 0; m < PY; m++) b[m] = y[((at.c * PY + m) * k + at.j) * N + at.x];
#pragma unroll
  for (int o = 0; o < PX + PY - 1; o++) {
    u64 sum = 0;  // at most five products of 56 bits
#pragma unroll
    for (int m = 0; m < PX; m++)
      if (o - m >= 0 && o - m < PY) sum += (u64)a[m] * b[o - m];
    out[((at.c * (PX + PY - 1) + o) * k + at.j) * N + at.x] = reduce(sum, primes[at.j]);
  }
}

#define TENSOR(PX, PY)                                                                                                  \
  extern "C" __global__ void tensor_##PX##_##PY(u32* out, const u32* x, const u32* y, const Prime* primes, int k,       \
                                                long count) {                                                           \
    tensor<PX, PY>(out, x, y, primes, k, count);                                                                        \
  }
TENSOR(3, 1)
TENSOR(2, 2)
TENSOR(2, 3)
TENSOR(2, 4)
TENSOR(2, 5)
TENSOR(3, 2)
TENSOR(3, 3)
TENSOR(3, 4)
TENSOR(3, 5)
TENSOR(4, 2)
TENSOR(4, 3)
TENSOR(4, 4)
TENSOR(5, 2)
TENSOR(5, 3)

// out += f[c, j]·x, or out = where `fresh`; x may have fewer polynomials (px) than out (p) and more primes (kx).
// Factors and constants are one for all ciphertexts, or one for each where `each_factor`, `each_constant`.
extern "C" __global__ void add_multiple(u32* out, const u32* x, const Factor* f, int each_factor, const u32* constants,
                                        int each_constant, const Prime* primes, int p, int px, int k, int kx, int fresh,
                                        long count) {
  long i = thread_number();
  if (i >= count) return;
  Place at(i, p, k);
  u32 q = primes[at.j].q, v = fresh ? 0 : out[i];
  if (at.m < px)
    v = add(v, product(x[((at.c * px + at.m) * kx + at.j) * N + at.x], f[(each_factor ? at.c : 0) * k + at.j], q), q);
  if (constants != 0 && at.m == 0) v = add(v, constants[(each_constant ? at.c : 0) * k + at.j], q);
  out[i] = v;
}

// Constants (n, k) to every slot, in place.
extern "C" __global__ void add_constants(u32* cts, const u32* constants, const Prime* primes, int p, int k, long count) {
  long i = thread_number();  // (n, k, N)
  if (i >= count) return;
  Place at(i, 1, k);
  u32* y = cts + (at.c * p * k + at.j) * N + at.x;
  *y = add(*y, constants[at.c * k + at.j], primes[at.j].q);
}

// Σ x over n ciphertexts (n, p, k, N): one, (p, k, N)
extern "C" __global__ void total(u32* out, const u32* x, const Prime* primes, int n, int k, long count) {
  long i = thread_number();
  if (i >= count) return;
  u64 sum = 0;
  for (int c = 0; c < n; c++) sum += x[c * count + i];
  out[i] = reduce(sum, primes[(i >> LOG_DEGREE) % k]);
}

// n·x - Σ x; factor is n, sum (p, k, N)
extern "C" __global__ void centre(u32* out, const u32* x, const u32* sum, const Factor* factor, const Prime* primes,
                                  int k, long one, long count) {
  long i = thread_number();
  if (i >= count) return;
  int j = (i >> LOG_DEGREE) % k;
  u32 q = primes[j].q;
  out[i] = subtract(product(x[i], factor[j], q), sum[i % one], q);
}

#define TERMS 32  // products, at most two of them per term, that add up in one word before it is reduced

// Σ_f x_f ⊗ y_f, (3, k, N), for x and y (count, 2, k, N): one thread a value of each polynomial
extern "C" __global__ void dot(u32* out, const u32* x, const u32* y, const Prime* primes, int terms, int k) {
  long i = thread_number();  // (k, N)
  if (i >= (long)k * N) return;
  Prime p = primes[i >> LOG_DEGREE];
  long step = (long)k * N;
  u64 o0 = 0, o1 = 0, o2 = 0;
  for (int f = 0; f < terms; f++) {
    const u32 *a = x + 2 * f * step + i, *b = y + 2 * f * step + i;
    u64 a0 = a[0], a1 = a[step], b0 = b[0], b1 = b[step];
    o0 += a0 * b0;
    o1 += a0 * b1 + a1 * b0;
    o2 += a1 * b1;
    if (f % TERMS == TERMS - 1) {
      o0 = reduce(o0, p);
      o1 = reduce(o1, p);
      o2 = reduce(o2, p);
    }
  }
  out[i] = reduce(o0, p);
  out[i + step] = reduce(o1, p);
  out[i + 2 * step] = reduce(o2, p);
}

// out[r, m] = Σ_f x[r, f] ⊗ y[at[m, f]]: x (rows, terms, 2, k, N), y (·, 2, k, N), out (rows, many, 3, k, N).
// A thread does a tile of 4 x 4 results in one slot; a block 128 slots of one prime.
#define TILE 4
extern "C" __global__ void __launch_bounds__(128) tensor_rows(u32* out, const u32* x, const u32* y, const int* at,
                                                               const Prime* primes, int rows, int many, int terms, int k) {
  int across = (many + TILE - 1) / TILE, tiles = across * ((rows + TILE - 1) / TILE);
  int tile = blockIdx.x % tiles, s = blockIdx.x / tiles * blockDim.x + threadIdx.x, j = blockIdx.y;
  int r0 = tile / across * TILE, m0 = tile % across * TILE;
  Prime p = primes[j];
  long step = (long)k * N, place = (long)j * N + s;
  u64 o[TILE][TILE][3];
#pragma unroll
  for (int a = 0; a < TILE; a++)
#pragma unroll
    for (int b = 0; b < TILE; b++) o[a][b][0] = o[a][b][1] = o[a][b][2] = 0;
  for (int f = 0; f < terms; f++) {
    u32 u[TILE][2], v[TILE][2];
#pragma unroll
    for (int a = 0; a < TILE; a++) {
      const u32* from = x + ((long)min(r0 + a, rows - 1) * terms + f) * 2 * step + place;
      u[a][0] = from[0];
      u[a][1] = from[step];
    }
#pragma unroll
    for (int b = 0; b < TILE; b++) {
      const u32* from = y + (long)__ldg(&at[min(m0 + b, many - 1) * terms + f]) * 2 * step + place;
      v[b][0] = from[0];
      v[b][1] = from[step];
    }
#pragma unroll
    for (int a = 0; a < TILE; a++)
#pragma unroll
      for (int b = 0; b < TILE; b++) {
        o[a][b][0] += (u64)u[a][0] * v[b][0];
        o[a][b][1] += (u64)u[a][0] * v[b][1] + (u64)u[a][1] * v[b][0];
        o[a][b][2] += (u64)u[a][1] * v[b][1];
        if (f % TERMS == TERMS - 1)
#pragma unroll
          for (int e = 0; e < 3; e++) o[a][b][e] = reduce(o[a][b][e], p);
      }
  }
#pragma unroll
  for (int a = 0; a < TILE; a++)
#pragma unroll
    for (int b = 0; b < TILE; b++)
      if (r0 + a < rows && m0 + b < many)
#pragma unroll
        for (int e = 0; e < 3; e++)
          out[(((long)(r0 + a) * many + m0 + b) * 3 + e) * step + place] = reduce(o[a][b][e], p);
}
