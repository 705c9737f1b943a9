// Openings in pairs (`pairs`): packing, switching keys, dropping primes; and residues in tight words for the wire.

// lift·(a + i·b) of ciphertexts (n, p, k, N), two and two; where the last is alone, b is zero.
extern "C" __global__ void pack_pairs(u32* out, const u32* x, const Factor* turn, const Factor* lift, const Prime* primes,
                                      int p, int k, long n, long count) {
  long i = thread_number();
  if (i >= count) return;
  Place at(i, p, k);
  u32 q = primes[at.j].q, y = x[((2 * at.c * p + at.m) * k + at.j) * N + at.x];
  if (2 * at.c + 1 < n)
    y = add(y, product(x[(((2 * at.c + 1) * p + at.m) * k + at.j) * N + at.x], __ldg(&turn[(long)at.j * N + at.x]), q), q);
  out[i] = product(y, lift[at.j], q);
}

// Coefficients (n, many, k, N) of the polynomials from `first` on of ciphertexts (n, p, k, N).
extern "C" __global__ void __launch_bounds__(THREADS) backward(u32* out, const u32* cts, const Factor* v,
                                                                const Prime* primes, int first, int many, int p, int k) {
  extern __shared__ u32 s[];
  long row = blockIdx.x, c = row / k / many;
  int j = row % k, m = row / k % many;
  const u32* from = cts + ((c * p + first + m) * k + j) * N;
  for (int i = 0; i < 16; i++) {
    int x = threadIdx.x + i * THREADS;
    s[PADDED(x)] = from[x];
  }
  __syncthreads();
  transform_back(s, v + (long)j * N, primes[j], out + row * N);
}

// (c_0, c_1) + Σ_m Σ_i NTT(digit i of c_(2+m))·key[m, i], (n, 2, k, N): cts (n, p, k, N), their coefficients from c_2 on
// in digits (n, p - 2, k, N), keys (·, most, 2, most, N), of which `which` names one for each m: (p - 2), or (n, p - 2)
// where `each`. At most 6 · 8 products of 57 bits add up before they are reduced.
extern "C" __global__ void __launch_bounds__(THREADS) switched(u32* out, const u32* cts, const u32* digits,
                                                                const u32* keys, const int* which, int each,
                                                                const Factor* w, const Prime* primes, int p, int k,
                                                                int most) {
  extern __shared__ u32 s[];
  long c = blockIdx.x / k;
  int j = blockIdx.x % k;
  Prime prime = primes[j];
  u64 o0[16], o1[16];
#pragma unroll
  for (int e = 0; e < 16; e++) {
    int x = threadIdx.x + e * THREADS;
    o0[e] = cts[(c * p * k + j) * N + x];
    o1[e] = cts[((c * p + 1) * k + j) * N + x];
  }
  const int* named = which + (each ? c * (p - 2) : 0);
  for (int m = 0; m < p - 2; m++) {
    if (m > 0 && m % 6 == 0)
#pragma unroll
      for (int e = 0; e < 16; e++) {
        o0[e] = reduce(o0[e], prime);
        o1[e] = reduce(o1[e], prime);
      }
    int key = __ldg(&named[m]);
    for (int i = 0; i < k; i++) {
      const u32* key0 = keys + (((long)key * most + i) * 2 * most + j) * N;
      const u32* key1 = key0 + (long)most * N;
      const u32* from = digits + ((c * (p - 2) + m) * k + i) * N;
      u32 mine[16], other = primes[i].q;
#pragma unroll
      for (int e = 0; e < 16; e++) {  // numbers about zero: with a mean, their noise would gather in the first slots
        u32 y = from[threadIdx.x + e * THREADS];
        mine[e] = y > other >> 1 ? y + prime.q - other : y;
      }
      __syncthreads();  // until all have read what is in s
      transform_in(s, mine, w + (long)j * N, prime);
#pragma unroll
      for (int e = 0; e < 16; e++) {
        int x = threadIdx.x + e * THREADS;
        u64 y = lazy(s[PADDED(x)], prime.q, prime.one);
        o0[e] += y * __ldg(&key0[x]);
        o1[e] += y * __ldg(&key1[x]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 16; e++) {
    int x = threadIdx.x + e * THREADS;
    out[(c * 2 * k + j) * N + x] = reduce(o0[e], prime);
    out[((c * 2 + 1) * k + j) * N + x] = reduce(o1[e], prime);
  }
}

// ⌊(x + half) / D⌋ of coefficients (rows, k, N) at the first `keep` primes, D the product of the others; plus masks
// (rows / 2, keep, N), if there are any, in every second row, from the first on. Below 2q.
extern "C" __global__ void drop_primes(u32* out, const u32* in, const u32* half, const u32* masks, const Factor* inverses,
                                       const Prime* primes, int k, int keep, long count) {
  long i = thread_number();  // (rows, N)
  if (i >= count) return;
  long row = i >> LOG_DEGREE;
  int x = i & (N - 1);
  u32 d[MOST_PRIMES];
#pragma unroll
  for (int j = 0; j < MOST_PRIMES; j++) d[j] = j < k ? add(in[(row * k + j) * N + x], half[j], primes[j].q) : 0;
#pragma unroll
  for (int last = MOST_PRIMES - 1; last > 0; last--) {
    if (last < k && last >= keep) {
#pragma unroll
      for (int j = 0; j < last; j++) {
        u32 q = primes[j].q;
        d[j] = product(d[j] + q - once(d[last], q), inverses[last * MOST_PRIMES + j], q);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < MOST_PRIMES; j++)
    if (j < keep) out[(row * keep + j) * N + x] = d[j] + (row & 1 || masks == 0 ? 0 : masks[(row / 2 * keep + j) * N + x]);
}

// ---- tight words -----------------------------------------------------------------------------------------------------

// Rows of N residues of `bits` bits without gaps, lowest first: one thread a word of the result.
extern "C" __global__ void tighten(u32* out, const u32* x, int bits, long count) {
  long i = thread_number();
  if (i >= count) return;
  int words = N / 32 * bits;
  const u32* row = x + i / words * N;
  int start = (int)(i % words) * 32, first = start / bits;
  u64 held = (u64)row[first] >> (start - first * bits);
  for (int at = first + 1; at * bits < start + 32; at++) held |= (u64)row[at] << (at * bits - start);
  out[i] = (u32)held;
}

// And back, (rows, k, N); counts what is no residue.
extern "C" __global__ void loosen(u32* out, const u32* x, int* wrong, int bits, const Prime* primes, int k, long count) {
  long i = thread_number();
  if (i >= count) return;
  int words = N / 32 * bits;
  long row = i >> LOG_DEGREE;
  const u32* from = x + row * words;
  int start = (int)(i & (N - 1)) * bits, first = start >> 5, by = start & 31;
  u64 held = from[first];
  if (by + bits > 32) held |= (u64)from[first + 1] << 32;
  u32 y = (u32)(held >> by) & ((1u << bits) - 1);
  if (y >= primes[row % k].q) *wrong = 1;
  out[i] = y;
}
