// Randomness by counters, so that every value is drawn by itself: ChaCha20 [RFC 8439] for what stays on the card
// (errors, masks), under keys from the operating system; AES-256 in counter mode [SP 800-38A] for what both sides draw
// from a public seed.

struct Key {
  u32 w[8];
};

__device__ __forceinline__ u32 turned(u32 x, int n) { return __funnelshift_l(x, x, n); }

__device__ __forceinline__ void quarter_round(u32& a, u32& b, u32& c, u32& d) {
  a += b;
  d = turned(d ^ a, 16);
  c += d;
  b = turned(b ^ c, 12);
  a += b;
  d = turned(d ^ a, 8);
  c += d;
  b = turned(b ^ c, 7);
}

// What a stream is for: the last word but one of its nonce.
#define FOR_NOISE 1
#define FOR_MASKS 2
#define FOR_MASKS_AGAIN 3  // and 4

__device__ __forceinline__ void chacha(const Key& key, u32 counter, u32 n0, u32 n1, u32 n2, u32* out) {
  u32 s[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, key.w[0], key.w[1], key.w[2], key.w[3],
               key.w[4],   key.w[5],   key.w[6],   key.w[7],   counter,  n0,       n1,       n2};
  u32 x[16];
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = s[i];
#pragma unroll
  for (int i = 0; i < 10; i++) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[1], x[5], x[9], x[13]);
    quarter_round(x[2], x[6], x[10], x[14]);
    quarter_round(x[3], x[7], x[11], x[15]);
    quarter_round(x[0], x[5], x[10], x[15]);
    quarter_round(x[1], x[6], x[11], x[12]);
    quarter_round(x[2], x[7], x[8], x[13]);
    quarter_round(x[3], x[4], x[9], x[14]);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) out[i] = x[i] + s[i];
}

// Blocks of the stream itself, for the test vector of the standard.
extern "C" __global__ void chacha_stream(u32* out, const Key* key, u32 first, u32 n0, u32 n1, u32 n2, long blocks) {
  long i = thread_number();
  if (i >= blocks) return;
  u32 o[16];
  chacha(*key, first + (u32)i, n0, n1, n2, o);
  for (int m = 0; m < 16; m++) out[16 * i + m] = o[m];
}

// Errors and ternary polynomials, (rows, N): of every m rows the first `gaussians` are errors. `table` is that of
// `prg.gaussian_table`, and start[h] how many of its entries every word with the 12 leading bits h reaches. A ternary
// coefficient is a 64-bit word modulo 3, less one.
extern "C" __global__ void small_noise(i8* out, const Key* key, const u64* table, const unsigned char* start, int size,
                                       int m, int gaussians, long blocks) {
  __shared__ u64 t[128];
  __shared__ unsigned char first[4096];
  for (int i = threadIdx.x; i < 128; i += blockDim.x) t[i] = i < size ? table[i] : ~0ull;
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) first[i] = start[i];
  __syncthreads();
  long i = thread_number();  // eight coefficients
  if (i >= blocks) return;
  long row = i / (N / 8);
  int at = i % (N / 8);
  bool gaussian = (int)(row % m) < gaussians;
  u32 o[16];
  chacha(*key, at, (u32)row, FOR_NOISE, 0, o);
#pragma unroll
  for (int e = 0; e < 8; e++) {
    u64 word = (u64)o[2 * e + 1] << 32 | o[2 * e];
    int value;
    if (gaussian) {
      int c = first[word >> 52];
      while (c < size && word >= t[c]) c++;
      value = c - size / 2;
    } else {
      value = (int)((o[2 * e] % 3 + o[2 * e + 1] % 3) % 3) - 1;  // 2^32 is 1 modulo 3
    }
    out[row * N + at * 8 + e] = (i8)value;
  }
}

// ---- AES-256 ---------------------------------------------------------------------------------------------------------
// One table of 256 words (2S, S, S, 3S), held once per lane of a warp, so that look-ups never wait for each other.

#define LANES 32
#define AES_WORDS (256 * LANES + 64)  // of shared memory: the table, and 60 words of round keys

struct Aes {
  const u32 *table, *keys;
  int lane;
  __device__ __forceinline__ u32 t(u32 byte, int turn) const {
    u32 x = table[(byte & 255) * LANES + lane];
    return __funnelshift_r(x, x, turn);
  }
  __device__ __forceinline__ u32 s(u32 byte) const { return (table[(byte & 255) * LANES + lane] >> 16) & 255; }
  __device__ __forceinline__ u32 middle(u32 a, u32 b, u32 c, u32 d, u32 key) const {
    return t(a >> 24, 0) ^ t(b >> 16, 8) ^ t(c >> 8, 16) ^ t(d, 24) ^ key;
  }
  __device__ __forceinline__ u32 last(u32 a, u32 b, u32 c, u32 d, u32 key) const {
    return __byte_perm((s(a >> 24) << 24 | s(b >> 16) << 16 | s(c >> 8) << 8 | s(d)) ^ key, 0, 0x0123);
  }
  // The block of a 128-bit counter, as four words in the order of memory.
  __device__ __forceinline__ void block(u64 high, u64 low, u32* out) const {
    u32 a = (u32)(high >> 32) ^ keys[0], b = (u32)high ^ keys[1], c = (u32)(low >> 32) ^ keys[2], d = (u32)low ^ keys[3];
#pragma unroll
    for (int r = 4; r < 56; r += 4) {
      u32 e = middle(a, b, c, d, keys[r]), f = middle(b, c, d, a, keys[r + 1]);
      u32 g = middle(c, d, a, b, keys[r + 2]), h = middle(d, a, b, c, keys[r + 3]);
      a = e;
      b = f;
      c = g;
      d = h;
    }
    out[0] = last(a, b, c, d, keys[56]);
    out[1] = last(b, c, d, a, keys[57]);
    out[2] = last(c, d, a, b, keys[58]);
    out[3] = last(d, a, b, c, keys[59]);
  }
};

// Fill shared memory with the table and the round keys of a 32-byte key.
__device__ __forceinline__ Aes aes_of(u32* shared, const u32* table, const Key* key) {
  u32* keys = shared + 256 * LANES;
  for (int i = threadIdx.x; i < 256 * LANES; i += blockDim.x) shared[i] = table[i / LANES];
  __syncthreads();
  Aes aes = {shared, keys, (int)(threadIdx.x % LANES)};
  if (threadIdx.x == 0) {
    u32 constant = 1;
    for (int i = 0; i < 60; i++) {
      if (i < 8) {
        keys[i] = __byte_perm(key->w[i], 0, 0x0123);
        continue;
      }
      u32 x = keys[i - 1];
      if (i % 8 == 0) x = turned(x, 8);
      if (i % 4 == 0) x = aes.s(x >> 24) << 24 | aes.s(x >> 16) << 16 | aes.s(x >> 8) << 8 | aes.s(x);
      if (i % 8 == 0) {
        x ^= constant << 24;
        constant = constant << 1;
      }
      keys[i] = keys[i - 8] ^ x;
    }
  }
  __syncthreads();
  return aes;
}

extern "C" __global__ void aes_stream(u32* out, const u32* table, const Key* key, long blocks) {
  extern __shared__ u32 shared[];
  Aes aes = aes_of(shared, table, key);
  for (long i = thread_number(); i < blocks; i += (long)gridDim.x * blockDim.x) aes.block(0, (u64)i, out + 4 * i);
}

// The word `at` of a seed's stream modulo a prime, and words of counters of its own where that would favour small
// residues (`ring.Halves`).
__device__ __forceinline__ u32 seeded(const Aes& aes, u64 word, u64 at, Prime p) {
  for (u64 again = 1; word > p.last; again++) {
    u32 o[4];
    aes.block(again, at, o);
    word = (u64)o[1] << 32 | o[0];
  }
  return reduce(word, p);
}

// Uniform polynomials (k, N) as `ring.Halves` of the seed gives them, from number `first` on, each at its first `keep`
// primes; `stride` words apart.
extern "C" __global__ void uniform(u32* out, long stride, const u32* table, const Key* seed, const Prime* primes, int k,
                                   int keep, long first, long words) {
  extern __shared__ u32 shared[];
  Aes aes = aes_of(shared, table, seed);
  for (long i = thread_number(); 2 * i < words; i += (long)gridDim.x * blockDim.x) {
    u32 o[4];
    long row = 2 * i >> LOG_DEGREE, c = row / keep, place = 2 * i & (N - 1);
    int j = row % keep;
    long at = (((first + c) * k + j) << LOG_DEGREE) + place;  // word of the stream
    aes.block(0, (u64)at / 2, o);
    Prime p = primes[j];
    u32 x = seeded(aes, (u64)o[1] << 32 | o[0], at, p), y = seeded(aes, (u64)o[3] << 32 | o[2], at + 1, p);
    *(uint2*)(out + c * stride + (long)j * N + place) = make_uint2(x, y);
  }
}
