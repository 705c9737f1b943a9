// Coefficients as long integers of 32-bit words, lowest first: masks below Q, and the owner's rescaling.

struct Words {
  u32 w[MOST_WORDS];
};

// How a refresh scales: ⌊x·factor / 2^shift⌋, of which `outs` words are kept.
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
    u32 lo = 0, hi = 0;
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

// Masks uniform below a bound, as residues (n, k, N) of M + offset, or of ⌊M·f⌋ + offset where `scaling` is given. They
// come from ChaCha20 by counters, so the same key gives the same masks again; or they are given, (n, words, N).
extern "C" __global__ void masks(u32* out, const u32* given, const Key* key, const Words* bound, int words, int bits,
                                 const Scaling* scaling, const u32* offset, const u64* powers, const Prime* primes, int k,
                                 long pairs) {
  long i = thread_number();  // two coefficients
  if (i >= pairs) return;
  long c = i / (N / 2);
  int at = i % (N / 2);
  u32 o[16];
  if (given == 0) chacha(*key, at, (u32)c, FOR_MASKS, 0, o);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int x = 2 * at + h;
    u32 w[MOST_WORDS];
#pragma unroll
    for (int m = 0; m < MOST_WORDS; m++) w[m] = given == 0 ? o[8 * h + m] : m < words ? given[(c * words + m) * N + x] : 0;
    for (u32 again = 1; given == 0 && !cut_and_compare(w, *bound, words, bits); again++) {
      u32 z[16];
      chacha(*key, at, (u32)c, FOR_MASKS_AGAIN + h, again, z);
#pragma unroll
      for (int m = 0; m < MOST_WORDS; m++) w[m] = z[m];
    }
    if (scaling != 0) rescale(w, words, *scaling);
#pragma unroll
    for (int j = 0; j < MOST_PRIMES; j++)
      if (j < k) out[(c * k + j) * N + x] = residue(w, powers + j * MOST_WORDS, offset[j], primes[j]);
  }
}

// The owner's: coefficients (n, k, N) as integers in [0, Q) by Garner's algorithm, ⌊x·f⌋ plus an error, as residues
// (n, back, N). inverses[m·MOST_PRIMES + j] is q_m^-1 modulo q_j.
extern "C" __global__ void rescaled(u32* out, const u32* in, const i8* errors, const Factor* inverses, int k, int words,
                                    const Scaling* scaling, const u64* powers, const Prime* primes, int back, long count) {
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
  rescale(w, words, *scaling);
#pragma unroll
  for (int j = 0; j < MOST_PRIMES; j++)
    if (j < back)
      out[(c * back + j) * N + x] =
          residue(w, powers + j * MOST_WORDS, residue_of_small(errors[i], primes[j].q), primes[j]);
}
