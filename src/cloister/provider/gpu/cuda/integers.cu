// Coefficients as long integers of 32-bit words, lowest first: masks below Q, and the owner's rescaling.

struct Words {
  u32 w[MOST_WORDS];
};

// How a refresh scales: ⌊x·factor / 2^shift⌋, shift ≥ -32, of which `outs` words are kept.
struct Scaling {
  u32 factor;
  int shift, outs;
};

__device__ __forceinline__ void rescale(u32* w, int words, Scaling f) {
  u32 x[MOST_WORDS + 2];
  u64 carry = 0;
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++) {
    u64 v = m < words ? (u64)w[m] * f.factor + carry : carry;
    x[m] = (u32)v;
    carry = v >> 32;
  }
  x[MOST_WORDS] = (u32)carry;
  x[MOST_WORDS + 1] = 0;
  int skip = f.shift >> 5, by = f.shift & 31;
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++) {
    u32 lo = 0, hi = m + skip == -1 ? x[0] : 0;
#pragma unroll
    for (int a = 0; a <= MOST_WORDS; a++) {  // registers have no index that is known at run time only
      if (a == m + skip) {
        lo = x[a];
        hi = x[a + 1];
      }
    }
    w[m] = m < f.outs ? (u32)((((u64)hi << 32) | lo) >> by) : 0;
  }
}

// Σ w[m]·2^(32 m) + start mod q; powers[m] = 2^(32 m) mod q
__device__ __forceinline__ u32 residue(const u32* w, const u64* powers, u64 start, Prime p) {
  u64 sum = start;
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++) sum += (u64)w[m] * powers[m];
  return reduce(sum, p);
}

// Whether w < bound, after what lies beyond its bits is cut off.
__device__ __forceinline__ bool cut_and_compare(u32* w, const Words& bound, int words, int bits) {
  bool less = false, equal = true;
#pragma unroll
  for (int m = MOST_WORDS - 1; m >= 0; m--) {
    if (m >= words) w[m] = 0;
    if (m == words - 1 && (bits & 31)) w[m] >>= 32 - (bits & 31);
    less = less || (equal && w[m] < bound.w[m]);
    equal = equal && w[m] == bound.w[m];
  }
  return less;
}

// A long integer below a bound for each of two coefficients, from ChaCha20 by counters: the same key gives the same again.
__device__ __forceinline__ void draw(u32 w[2][MOST_WORDS], const Key& key, const Words& bound, int words, int bits, long c,
                                     int at) {
  u32 o[16];
  chacha(key, at, (u32)c, FOR_MASKS, 0, o);
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int m = 0; m < MOST_WORDS; m++) w[h][m] = o[8 * h + m];
    for (u32 again = 1; !cut_and_compare(w[h], bound, words, bits); again++) {
      chacha(key, at, (u32)c, FOR_MASKS_AGAIN + h, again, o);
#pragma unroll
      for (int m = 0; m < MOST_WORDS; m++) w[h][m] = o[m];
    }
  }
}

// Masks uniform below a bound, (n, words, N).
extern "C" __global__ void masks(u32* out, const Key* key, const Words* bound, int words, int bits, long pairs) {
  long i = thread_number();  // two coefficients
  if (i >= pairs) return;
  long c = i / (N / 2);
  int at = i % (N / 2);
  u32 w[2][MOST_WORDS];
  draw(w, *key, *bound, words, bits, c, at);
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++)
    if (m < words) *(uint2*)(out + (c * words + m) * N + 2 * at) = make_uint2(w[0][m], w[1][m]);
}

// Long integers (n, words, N) plus an offset, as residues (n, k, N).
extern "C" __global__ void residues_of(u32* out, const u32* in, int words, const u32* offset, const u64* powers,
                                       const Prime* primes, int k, long count) {
  long i = thread_number();
  if (i >= count) return;
  long c = i >> LOG_DEGREE;
  int x = i & (N - 1);
  u32 w[MOST_WORDS];
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++) w[m] = m < words ? in[(c * words + m) * N + x] : 0;
  for (int j = 0; j < k; j++) out[(c * k + j) * N + x] = residue(w, powers + j * MOST_WORDS, offset[j], primes[j]);
}

// The owner's: coefficients (n, k, N) as integers in [0, Q) by Garner's algorithm, (n, words, N).
// inverses[m·MOST_PRIMES + j] is q_m^-1 modulo q_j.
extern "C" __global__ void words_of(u32* out, const u32* in, const Factor* inverses, int k, int words, const Prime* primes,
                                    long count) {
  long i = thread_number();
  if (i >= count) return;
  long c = i >> LOG_DEGREE;
  int x = i & (N - 1);
  u32 d[MOST_PRIMES], w[MOST_WORDS];
#pragma unroll
  for (int j = 0; j < MOST_PRIMES; j++) d[j] = j < k ? in[(c * k + j) * N + x] : 0;
#pragma unroll
  for (int j = 1; j < MOST_PRIMES; j++) {
    if (j < k) {
      u32 q = primes[j].q;
#pragma unroll
      for (int m = 0; m < j; m++)  // primes differ by less than a factor of two
        d[j] = product(d[j] + q - once(d[m], q), inverses[m * MOST_PRIMES + j], q);
    }
  }
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++) w[m] = 0;
#pragma unroll
  for (int j = MOST_PRIMES - 1; j >= 0; j--) {
    if (j < k) {
      u64 carry = d[j];
#pragma unroll
      for (int m = 0; m < MOST_WORDS; m++) {
        u64 v = (u64)w[m] * primes[j].q + carry;
        w[m] = (u32)v;
        carry = v >> 32;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++)
    if (m < words) out[(c * words + m) * N + x] = w[m];
}

// Twice the real and imaginary parts of integers (n, words, N) below `bound`, as `pair_kernels.halves` has them, times f,
// plus an error (2n, N) if there are any, as residues (2n, back, N).
extern "C" __global__ void halves(u32* out, const u32* in, const i8* errors, const Words* bound, int words,
                                  const Scaling* scaling, const u64* powers, const Prime* primes, int back, long count) {
  long i = thread_number();  // (2n, N)
  if (i >= count) return;
  long row = i >> LOG_DEGREE;
  bool imaginary = row & 1;
  int x = i & (N - 1), a = imaginary ? (x + N / 2) & (N - 1) : x, b = (N - a) & (N - 1);
  const u32* from = in + row / 2 * words * N;
  u32 w[MOST_WORDS];
  long long sum = 0;
#pragma unroll
  for (int m = 0; m < MOST_WORDS; m++) {
    if (m < words) {
      long long y = from[(long)m * N + a], z = from[(long)m * N + b], Q = bound->w[m];
      if (imaginary) {
        if (x < N / 2) sum += y + z;
        if (x > N / 2) sum += 2 * Q - y - z;
      } else {
        sum += x == 0 ? 2 * y : y - z + Q;
      }
    }
    w[m] = (u32)sum;
    sum >>= 32;
  }
  rescale(w, words + 1, *scaling);
  int e = errors == 0 ? 0 : errors[i];
  for (int j = 0; j < back; j++)
    out[(row * back + j) * N + x] = residue(w, powers + j * MOST_WORDS, residue_of_small(e, primes[j].q), primes[j]);
}
