// Digests of what lies in a GPU's memory. Sums of all blocks of 1,024 bytes are made at once; then
// each chunk's blocks are taken one after the other, which only mixes 64 bytes of each. Tests run
// the threads of a block one after the other, and bring their own `sum_blocks`.
#ifndef GPU_DIGESTS_H
#define GPU_DIGESTS_H

enum { THREADS = 256, WARP = 32, LANES_OF_STRIPE = STRIPE / 8 };

INLINE u64 *sums_of(u64 *sums, i64 piece, i64 blocks, i64 block) {
  return sums + (piece * blocks + block) * LANES_OF_STRIPE;
}

// The digest of a piece from the sums of its blocks, as `advance_hash` left them.
INLINE Digest end_piece(Piece piece, const u64 *sums) {
  Hash hash = begin_hash(piece.data, piece.size);
  hash.done = mixed_blocks(piece.size) * BLOCK;
  __builtin_memcpy(hash.sums, sums, sizeof(hash.sums));
  return end_hash(&hash);
}

#ifdef __CUDACC_RTC__
// A warp takes a block; eight of its threads take a stripe at a time.
extern "C" __global__ void sum_blocks(const Piece *pieces, i64 count, i64 blocks, u64 *sums) {
  i64 number = ((i64)blockIdx.x * THREADS + threadIdx.x) / WARP, block = number % blocks;
  if (number >= count * blocks) return;
  Piece piece = pieces[number / blocks];
  if (block >= mixed_blocks(piece.size)) return;
  int own = (int)threadIdx.x % WARP, lane = own % LANES_OF_STRIPE;
  const u64 *words = (const u64 *)(piece.data + block * BLOCK);
  u64 sum = 0;
  UNROLLED for (int i = own; i < STRIPES * LANES_OF_STRIPE; i += WARP) {
    u64 value = words[i], key = value ^ SECRET[i / LANES_OF_STRIPE + lane];
    sum += __shfl_xor_sync(~0u, value, 1) + (key & 0xFFFFFFFFu) * (key >> 32);
  }
  UNROLLED for (int apart = LANES_OF_STRIPE; apart < WARP; apart *= 2) {
    sum += __shfl_xor_sync(~0u, sum, apart);
  }
  if (own < LANES_OF_STRIPE) sums_of(sums, number / blocks, blocks, block)[lane] = sum;
}
#endif

extern "C" __global__ void digest_sums(const Piece *pieces, i64 count, i64 blocks, u64 *sums,
                                       Digest *digests) {
  __shared__ u64 last[THREADS];
  i64 number = ((i64)blockIdx.x * THREADS + threadIdx.x) / LANES_OF_STRIPE;
  int lane = (int)threadIdx.x % LANES_OF_STRIPE;
  bool is_there = number < count;
  if (is_there) {
    const u64 *own = sums_of(sums, number, blocks, 0) + lane;
    i64 mixed = mixed_blocks(pieces[number].size);
    u64 sum = begin_hash(0, 0).sums[lane];
    _Pragma("unroll 8") for (i64 block = 0; block < mixed; block++) {
      sum = scrambled(sum + own[block * LANES_OF_STRIPE], lane);
    }
    last[threadIdx.x] = sum;
  }
  __syncthreads();
  if (is_there && lane == LANES_OF_STRIPE - 1) {
    digests[number] = end_piece(pieces[number], last + threadIdx.x - lane);
  }
}

#endif
