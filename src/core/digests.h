// XXH3-128 of many pieces of memory in one call. The library `xxhash` has the same digests, one
// piece at a time: threads would ask for the interpreter's lock after every piece.

enum { STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES };  // bytes at a time, until a scramble
// First bytes of the secret for each use.
enum { LOW_HALF = 11, HIGH_HALF = 117, LAST_STRIPE = 121, SCRAMBLE = 128 };

// The bytes that the input is mixed with, in words.
static const u64 SECRET[24] = {
  0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
  0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
  0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
  0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
  0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
  0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
#define PRIME_1 0x9E3779B185EBCA87ull
#define PRIME_2 0xC2B2AE3D27D4EB4Full

// The product of two words, its upper half on its lower one.
INLINE u64 folded(u64 left, u64 right) {
  u64 a = left >> 32, b = left & ~0u, c = right >> 32, d = right & ~0u;
  u64 middle = a * d + (b * d >> 32), other = b * c + (middle & ~0u);
  return (a * c + (middle >> 32) + (other >> 32)) ^ left * right;
}

INLINE u64 joined(const u64 *sums, const u8 *secret, u64 start) {
  u64 words[8];
  __builtin_memcpy(words, secret, sizeof(words));
  for (int i = 0; i < 8; i += 2) start += folded(sums[i] ^ words[i], sums[i + 1] ^ words[i + 1]);
  start = (start ^ start >> 37) * 0x165667919E3779F9ull;
  return start ^ start >> 32;
}

typedef struct {
  const u8 *data;
  i64 size;  // more than 240
} Piece;
typedef struct {
  u64 high, low;
} Digest;

typedef struct {
  Piece piece;
  i64 done;
  u64 sums[8];
} Hash;  // of a piece of which a part is done; HASH_BYTES in core.py is as much or more

static Hash begin_hash(const u8 *data, i64 size) {
  Hash hash = {{data, size}, 0, {0xC2B2AE3D, PRIME_1, PRIME_2, 0x165667B19E3779F9ull,
               0x85EBCA77C2B2AE63ull, 0x85EBCA77, 0x27D4EB2F165667C5ull, 0x9E3779B1}};
  return hash;
}

INLINE u64 scrambled(u64 sum, int lane) {
  return (sum ^ sum >> 47 ^ SECRET[SCRAMBLE / 8 + lane]) * 0x9E3779B1;
}

// The blocks of a piece after which its sums are scrambled: all but the last one.
INLINE i64 mixed_blocks(i64 size) { return (size - 1) / BLOCK; }

// Digest whole blocks up to an end, but for the piece's last one.
WIDE static void advance_hash(Hash *hash, i64 end) {
  u64 sums[8];
  i64 done = hash->done;
  __builtin_memcpy(sums, hash->sums, sizeof(sums));
  for (; done + BLOCK <= end && done + BLOCK < hash->piece.size; done += BLOCK) {
    add_stripes(sums, hash->piece.data + done, (const u8 *)SECRET, STRIPES);
    for (int i = 0; i < 8; i++) sums[i] = scrambled(sums[i], i);
  }
  __builtin_memcpy(hash->sums, sums, sizeof(sums));
  hash->done = done;
}

static Digest end_hash(Hash *hash) {
  advance_hash(hash, hash->piece.size);
  const u8 *data = hash->piece.data + hash->done, *secret = (const u8 *)SECRET;
  const u8 *last = hash->piece.data + hash->piece.size - STRIPE;
  u64 size = (u64)hash->piece.size;
  for (; data < last; data += STRIPE, secret += 8) add_stripes(hash->sums, data, secret, 1);
  secret = (const u8 *)SECRET;
  add_stripes(hash->sums, last, secret + LAST_STRIPE, 1);
  Digest found = {joined(hash->sums, secret + HIGH_HALF, ~(size * PRIME_2)),
                  joined(hash->sums, secret + LOW_HALF, size * PRIME_1)};
  return found;
}

ENTRY(void, digest_pieces)(const Array *pieces, Array *out) {
  for (i64 i = 0; i < pieces->size / 2; i++) {
    Hash hash = begin_hash(AT(Piece, pieces)[i].data, AT(Piece, pieces)[i].size);
    AT(Digest, out)[i] = end_hash(&hash);
  }
}
