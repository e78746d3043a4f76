// A merge on a GPU: what `merge` in jobs.h does, but for digests. The compiler of GPUs makes a
// kernel for one shape of merge, which macros tell: BASE_KIND, MODEL_KIND, OUT_KIND, MODELS, ELECTS,
// HAS_MASKS, HAS_BANDS. Tests compile it for processors, and say what that compiler has built in.
//
// A thread takes the 16 elements of one call of Philox: four runs of four that lie 32 apart. Blocks
// are merged as if nothing were NaN, and those where something is once more, with care.
#ifndef GPU_H
#define GPU_H

#ifndef THREADS  // of a block; tests have one, which takes all of its elements
#define THREADS 256
#endif
enum {
  WARP = THREADS < 32 ? THREADS : 32,
  RUN = 4, RUNS = 4, RUN_STEP = GROUP / RUNS,
  BLOCK_SIZE = 32768,  // elements; a block is of one chunk
  CALLS_PER_THREAD = BLOCK_SIZE / THREADS / RUN / RUNS,
  // As registers allow: runs that are loaded together, and blocks of a multiprocessor.
  TOGETHER = MODELS <= 4 ? RUNS : 1,
  AT_ONCE = MODELS <= 4 ? 2 : 1
};
#define EACH_LANE 0x01010101u
#define KEPT 0x80808080u  // the highest bit of a byte says whether its element is kept

// The tables that the host brings. What is reduced over threads must be zero at first.
typedef struct {
  u32 peak, over, drawn, kept;  // as the figures of `combine`
} Figures;

typedef struct {
  const u8 *base;
  u8 *out;
  const Operand *models;
  Figures *figures;  // of each chunk's models
  u32 *peak;         // the largest magnitude's bits before rounding
  i64 start, size;   // of the elements: chunks that follow each other
  i64 first_block;
  f64 scale;
} Part;

// A model as the threads of a block need it, whose places count from the block's first element.
typedef struct {
  const u8 *tuned;
  u32 key0, key1, high, low, is_masked;
  u32 is_banded, least, most;
  i32 end, begin;
  f32 weight, share;
} Model;

typedef struct {
  const u8 *base;
  u8 *out;
  u64 start;  // the number of the first element in its tensor
  i32 size;
  f32 scale;
} Block;

// The figures of one thread: its counts are at most 128, and lie in one byte each.
#if THREADS > 1
enum { COUNT_BITS = 8 };
typedef u32 Counts;
#else
enum { COUNT_BITS = 16 };
typedef u64 Counts;
#endif
typedef struct {
  u32 peak;
  Counts counts;
} Tally;

// ---------------------------------------------------------------- runs of stored elements

// An address as one of the device's memory, which is not shared by the threads of a block alone.
template <typename Address> INLINE Address in_memory(Address address) {
  __builtin_assume(__isGlobal(address));
  return address;
}

template <enum Kind kind> struct Run {
  enum { WIDTH = width_of(kind), ALIGNMENT = WIDTH > 4 ? 16 : RUN * WIDTH };
  struct alignas(ALIGNMENT) { u32 words[WIDTH]; } stored;

  INLINE bool is_aligned(const u8 *from) { return (u64)from % ALIGNMENT == 0; }
  f32 operator[](int i) const {
    if (WIDTH >= 4) return load_kind(kind, stored.words, i, 1);
    u32 code = stored.words[i * WIDTH / 4] >> i * WIDTH % 4 * 8;
    return decoded(kind, WIDTH == 2 ? code & 0xFFFFu : code & 0xFFu);
  }
  void set(const f32 *values) {
    if (WIDTH >= 4) {
      UNROLLED for (int i = 0; i < RUN; i++) store_kind(kind, stored.words, i, values[i], 1);
    } else UNROLLED for (int i = 0; i < WIDTH; i++) {
      stored.words[i] = 0;
      UNROLLED for (int k = 0; k < 4 / WIDTH; k++) {
        stored.words[i] |= encoded(kind, values[4 / WIDTH * i + k]) << 8 * WIDTH * k;
      }
    }
  }
  void set_numbers(const f32 *values) {  // none of which is NaN
#ifdef __CUDACC_RTC__
    if (kind == BF16) {  // an instruction rounds two
      UNROLLED for (int i = 0; i < WIDTH; i++) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(stored.words[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
      }
      return;
    }
#endif
    set(values);
  }
  // Put the stored elements of another run of this kind where a mask says so.
  template <typename Other> void keep(const Other &other, const bool *stays) {
    u8 *to = (u8 *)stored.words;
    UNROLLED for (int i = 0; i < RUN * WIDTH; i++) {
      if (stays[i / WIDTH]) to[i] = ((const u8 *)other.stored.words)[i];
    }
  }
  void load(const u8 *from, i32 place, i32 size, bool is_careful) {
    from += (i64)place * WIDTH;
    if (!is_careful) stored = *(const decltype(stored) *)in_memory(from);
    else UNROLLED for (int i = 0; i < RUN * WIDTH; i++) {
      ((u8 *)stored.words)[i] = place + i / WIDTH < size ? from[i] : 0;
    }
  }
  void store(u8 *to, i32 place, i32 size, bool is_careful) const {
    to += (i64)place * WIDTH;
    if (!is_careful) *(decltype(stored) *)in_memory(to) = stored;
    else UNROLLED for (int i = 0; i < RUN * WIDTH; i++) {
      if (place + i / WIDTH < size) to[i] = ((const u8 *)stored.words)[i];
    }
  }
};

// ---------------------------------------------------------------- masks, four bytes at a time

// Where a byte is below the limit's; and where it is equal.
INLINE u32 bytes_below(u32 word, u32 limits) {
  u32 apart = (word | KEPT) - (limits & ~KEPT);
  return ((~word & limits) | (~(word ^ limits) & ~apart)) & KEPT;
}
INLINE u32 bytes_equal(u32 word, u32 limits) {
  u32 differ = word ^ limits;
  return ~(((differ & ~KEPT) + ~KEPT) | differ) & KEPT;
}

// The elements of a run that there are.
INLINE u32 present(i32 place, i32 size) {
  i32 count = size - place;
  return count >= RUN ? KEPT : count <= 0 ? 0 : KEPT >> 8 * (RUN - count);
}

// Draw the lanes of 16 elements of up to four models, and break their ties all together: few threads
// have one, but of those that run side by side almost always some.
template <int COUNT_OF_MODELS>
INLINE void draw_models(const Model *models, u64 start, i32 place, u32 (*lanes)[RUNS]) {
  u64 ties = 0, kept = 0;  // eight bits for each lane of a word: four for a model's words
  UNROLLED for (int m = 0; m < COUNT_OF_MODELS; m++) {
    if (!models[m].is_masked) continue;
    u64 element = start + (u64)place;
    Philox drawn = philox(element / GROUP * CALLS_PER_GROUP + element % RUN_STEP / RUN, 0,
                          models[m].key0, models[m].key1);
    u32 limits = models[m].high * EACH_LANE;
    UNROLLED for (int run = 0; run < RUNS; run++) {
      u32 there = lanes[m][run], equal = bytes_equal(drawn.words[run], limits) & there;
      lanes[m][run] = bytes_below(drawn.words[run], limits) & there;
      ties |= (u64)(equal >> 7 << (m % 2 * RUNS + run)) << m / 2 * 32;
    }
  }
  for (u64 left = ties; left; left &= left - 1) {
    int bit = __ffsll((i64)left) - 1;
    const Model *model = models + bit / 32 * 2 + bit % 8 / RUNS;
    u64 element = start + (u64)(place + bit % RUNS * RUN_STEP + bit % 32 / 8);
    Philox drawn = philox(element, TIE_BREAK, model->key0, model->key1);
    kept |= (u64)(drawn.words[0] < model->low) << bit;
  }
  if (kept) {
    UNROLLED for (int m = 0; m < COUNT_OF_MODELS; m++) {
      UNROLLED for (int run = 0; run < RUNS; run++) {
        u32 bits = (u32)(kept >> (m / 2 * 32)) >> (m % 2 * RUNS + run);
        lanes[m][run] |= (bits & EACH_LANE) << 7;
      }
    }
  }
}

// ---------------------------------------------------------------- sums

INLINE bool is_in_band(const Model &model, u32 magnitude, i32 place) {
  i64 low = (i64)model.least + (place >= model.end), high = (i64)model.most - (place < model.begin);
  return magnitude >= low && magnitude <= high;
}

// Take in one run of all models: add up or elect their deltas, add them to the base, store.
INLINE void merge_run(const Block &block, const Model *models, i32 place, bool is_careful,
                      const Run<BASE_KIND> &base, const Run<MODEL_KIND> (*tuned)[TOGETHER], int step,
                      const u32 (*lanes)[RUNS], int run, u32 threshold, Tally *tallies, u32 *peak) {
  f32 total[RUN] = {};
  Sides sides[RUN] = {};
  UNROLLED for (int m = 0; m < MODELS; m++) {
    u32 magnitudes[RUN], largest = 0, over = 0, kept = 0;
    f32 differences[RUN];
    UNROLLED for (int i = 0; i < RUN; i++) {
      differences[i] = tuned[m][step][i] - base[i];
      magnitudes[i] = magnitude_of(differences[i]);
      largest = max_words(largest, magnitudes[i]);
    }
    tallies[m].peak = max_words(tallies[m].peak, largest);
    if (largest > threshold) {  // seldom
      UNROLLED for (int i = 0; i < RUN; i++) over += magnitudes[i] > threshold;
    }
    UNROLLED for (int i = 0; i < RUN; i++) {
      bool is_kept = lanes[m][run] & 0x80u << 8 * i;
      if (HAS_BANDS && models[m].is_banded) {
        is_kept = is_kept && is_in_band(models[m], magnitudes[i], place + i);
        kept += is_kept;
      }
      f32 term = (is_kept ? differences[i] : 0) * models[m].weight;
      if (ELECTS) sides[i] = cast(sides[i], term, models[m].share);
      else total[i] += term;
    }
    u32 drawn = (u32)__builtin_popcount(lanes[m][run]);
    tallies[m].counts += over | (Counts)drawn << COUNT_BITS | (Counts)kept << 2 * COUNT_BITS;
  }
  Run<OUT_KIND> out;
  f32 values[RUN];
  bool stays[RUN];
  u32 largest = 0;
  UNROLLED for (int i = 0; i < RUN; i++) {
    f32 change = ELECTS ? outcome(sides[i], sides[i].above + sides[i].below) : total[i];
    f32 sum = base[i] + change * block.scale;
    largest = max_words(largest, magnitude_of(sum));
    stays[i] = change == 0;
    values[i] = stays[i] ? base[i] : sum;
  }
  *peak = max_words(*peak, largest);
  if (is_careful) out.set(values);
  else out.set_numbers(values);
  if (BASE_KIND == OUT_KIND && (is_careful || BASE_KIND == F64)) out.keep(base, stays);
  out.store(block.out, place, block.size, is_careful);
}

// Take in the elements of one call, the first of which is at a place in the block.
INLINE void merge_call(const Block &block, const Model *models, i32 place, bool is_careful,
                       u32 threshold, Tally *tallies, u32 *peak) {
  u32 lanes[MODELS][RUNS];
  UNROLLED for (int m = 0; m < MODELS; m++) {
    UNROLLED for (int run = 0; run < RUNS; run++) {
      lanes[m][run] = is_careful ? present(place + run * RUN_STEP, block.size) : KEPT;
    }
  }
  UNROLLED for (int first = 0; first < RUNS; first += TOGETHER) {
    Run<BASE_KIND> base[TOGETHER];
    Run<MODEL_KIND> tuned[MODELS][TOGETHER];
    UNROLLED for (int step = 0; step < TOGETHER; step++) {
      i32 from = place + (first + step) * RUN_STEP;
      base[step].load(block.base, from, block.size, is_careful);
      UNROLLED for (int m = 0; m < MODELS; m++) {
        tuned[m][step].load(models[m].tuned, from, block.size, is_careful);
      }
    }
    if (HAS_MASKS && first == 0) {  // while what was asked for is on its way
      UNROLLED for (int m = 0; m + 4 <= MODELS; m += 4) {
        draw_models<4>(models + m, block.start, place, lanes + m);
      }
      if (MODELS % 4) draw_models<MODELS % 4>(models + MODELS / 4 * 4, block.start, place,
                                              lanes + MODELS / 4 * 4);
    }
    UNROLLED for (int step = 0; step < TOGETHER; step++) {
      int run = first + step;
      merge_run(block, models, place + run * RUN_STEP, is_careful, base[step], tuned, step, lanes, run,
                threshold, tallies, peak);
    }
  }
}

// ---------------------------------------------------------------- blocks

// The part that a block is of.
INLINE const Part *part_of(const Part *parts, i64 count, i64 number) {
  i64 first = 0;
  while (count - first > 1) {
    i64 middle = (first + count) / 2;
    if (parts[middle].first_block <= number) first = middle;
    else count = middle;
  }
  return parts + first;
}

INLINE Block block_of(const Part *part, i64 number) {
  i64 first = (number - part->first_block) * BLOCK_SIZE;
  i32 size = (i32)least_i64(BLOCK_SIZE, part->size - first);
  return {part->base + first * width_of(BASE_KIND), part->out + first * width_of(OUT_KIND),
          (u64)(part->start + first), size, (f32)part->scale};
}

INLINE i32 place_in(const Block &block, i64 element) {
  return (i32)most_i64(0, least_i64(element - (i64)block.start, BLOCK_SIZE));
}

INLINE Model model_of(const Part *part, const Block &block, int m) {
  const Operand &given = part->models[m];
  i64 first = (i64)block.start - part->start;
  bool is_banded = given.band.least >= 0;
  return {(const u8 *)given.tuned + first * width_of(MODEL_KIND),
          (u32)given.key0, (u32)given.key1, (u32)given.high, (u32)given.low, given.high < 256,
          is_banded, is_banded ? (u32)given.band.least : 0, (u32)given.band.most,
          place_in(block, given.band.end), place_in(block, given.band.begin),
          (f32)given.weight, (f32)given.share};
}

// Whether a block is short, or not all of it lies where runs are loaded at once.
INLINE bool needs_care(const Block &block, const Model *models) {
  bool is_aligned = Run<BASE_KIND>::is_aligned(block.base) && Run<OUT_KIND>::is_aligned(block.out);
  for (int m = 0; m < MODELS; m++) is_aligned = is_aligned && Run<MODEL_KIND>::is_aligned(models[m].tuned);
  return block.size < BLOCK_SIZE || !is_aligned;
}

// The place in a block of a thread's call.
INLINE i32 place_of(int round, int thread) {
  i32 call = round * THREADS + thread;
  return call / CALLS_PER_GROUP * GROUP + call % CALLS_PER_GROUP * RUN;
}

// ---------------------------------------------------------------- finding a cut

// The magnitude of a rank among those of a delta that are not zero, and the place after the last of
// its equals that counts. Each round counts in bins, and the next counts in the bin that was found:
// three rounds find the magnitude, three the place.
enum { BINS = 2048, TO_MAGNITUDE = 3 };
enum State { SEARCHING, FEWER, NOT_FINITE };  // FEWER than the rank are not zero
static const u8 SHIFTS[] = {20, 9, 0, 22, 11, 0};  // a bin has 2^shift magnitudes or places

typedef struct {
  const u8 *base, *tuned;
  i64 size, rank, magnitude, place;
  u32 *counts;        // of a round
  u32 state, blocks;  // those that have counted
} Search;

INLINE void count_run(const Search &search, i64 round, i64 place, i64 end, u32 *counts) {
  Run<BASE_KIND> base;
  Run<MODEL_KIND> tuned;
  i32 size = (i32)least_i64(RUN, end - place);
  const u8 *origin = search.base + place * width_of(BASE_KIND);
  const u8 *changed = search.tuned + place * width_of(MODEL_KIND);
  base.load(origin, 0, size, size < RUN || !base.is_aligned(origin));
  tuned.load(changed, 0, size, size < RUN || !tuned.is_aligned(changed));
  UNROLLED for (int i = 0; i < RUN; i++) {
    u32 magnitude = magnitude_of(tuned[i] - base[i]), above = magnitude - (u32)search.magnitude;
    u64 bin = round < TO_MAGNITUDE ? above : above ? ~0ull : (u64)(place + i - search.place);
    bin >>= SHIFTS[round];
    if (magnitude && bin < BINS) atomicAdd(counts + bin, 1);
  }
}

// Take the bin of the rank, counting down from the largest magnitude or up from the first place.
INLINE void end_round(Search *search, i64 round, const u32 *counts) {
  i64 total = 0, bin = 0;
  bool is_place = round >= TO_MAGNITUDE;
  if (round == 0) {
    for (bin = 0; bin < BINS; bin++) {
      total += counts[bin];
      if (bin >= INFINITE >> SHIFTS[0] && counts[bin]) search->state = NOT_FINITE;
    }
    if (total <= search->rank && !search->state) search->state = FEWER;
    if (search->state) return;
  }
  i64 bins = round == 2 ? 512 : BINS;  // further ones are of larger magnitudes
  for (i64 i = 0; i < bins; i++) {
    bin = is_place ? i : bins - 1 - i;
    if (search->rank <= counts[bin]) break;
    search->rank -= counts[bin];
  }
  *(is_place ? &search->place : &search->magnitude) += bin << SHIFTS[round];
}

// ---------------------------------------------------------------- kernels

#define ROLLED_LOOP _Pragma("unroll 1")

INLINE u32 largest_of_warp(u32 value) {
  UNROLLED for (int apart = WARP / 2; apart; apart /= 2) value = max_words(value, __shfl_xor_sync(~0u, value, apart));
  return value;
}
INLINE u32 sum_of_warp(u32 value) {
  UNROLLED for (int apart = WARP / 2; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
merge_parts(const Part *parts, i64 count, i64 threshold, i64 chunk) {
  __shared__ Model models[MODELS];
  __shared__ Figures sums[MODELS];
  __shared__ u32 largest;
  const Part *part = part_of(parts, count, blockIdx.x);
  Block block = block_of(part, blockIdx.x);
  int own = (int)threadIdx.x;
  for (int m = own; m < MODELS; m += THREADS) models[m] = model_of(part, block, m), sums[m] = {};
  if (own == 0) largest = 0;
  __syncthreads();
  Tally tallies[MODELS] = {};
  u32 peak = 0;
  bool is_careful = needs_care(block, models);
  if (!is_careful) {
    ROLLED_LOOP for (int round = 0; round < CALLS_PER_THREAD; round++) {
      merge_call(block, models, place_of(round, own), false, (u32)threshold, tallies, &peak);
    }
    is_careful = __syncthreads_or(peak > INFINITE);
  }
  if (is_careful) {
    UNROLLED for (int m = 0; m < MODELS; m++) tallies[m] = {0, 0};
    ROLLED_LOOP for (int round = 0; round < CALLS_PER_THREAD; round++) {
      i32 place = place_of(round, own);
      if (place < block.size) merge_call(block, models, place, true, (u32)threshold, tallies, &peak);
    }
  }
  __syncwarp();
  bool is_first = own % WARP == 0;
  UNROLLED for (int m = 0; m < MODELS; m++) {
    u32 most = largest_of_warp(tallies[m].peak), counted = (1u << COUNT_BITS) - 1;
    u32 over = tallies[m].counts & counted, drawn = tallies[m].counts >> COUNT_BITS & counted;
    u32 pair = sum_of_warp(over | drawn << 16);
    u32 kept = HAS_BANDS ? sum_of_warp((u32)(tallies[m].counts >> 2 * COUNT_BITS)) : 0;
    if (!is_first) continue;
    atomicMax(&sums[m].peak, most);
    atomicAdd(&sums[m].over, pair & 0xFFFFu);
    atomicAdd(&sums[m].drawn, pair >> 16);
    atomicAdd(&sums[m].kept, kept);
  }
  peak = largest_of_warp(peak);
  if (is_first) atomicMax(&largest, peak);
  __syncthreads();
  if (own == 0) atomicMax(part->peak, largest);
  Figures *figures = part->figures + (blockIdx.x - part->first_block) * BLOCK_SIZE / chunk * MODELS;
  for (int m = own; m < MODELS; m += THREADS) {
    atomicMax(&figures[m].peak, sums[m].peak);
    atomicAdd(&figures[m].over, sums[m].over);
    atomicAdd(&figures[m].drawn, sums[m].drawn);
    atomicAdd(&figures[m].kept, sums[m].kept);
  }
}

// So many searches at once, each by the same number of blocks.
extern "C" __global__ void find_cuts(Search *searches, i64 count, i64 round) {
  __shared__ u32 counts[BINS];
  __shared__ bool is_last;
  u32 shared = gridDim.x / (u32)count, own = blockIdx.x % shared;
  Search *search = searches + blockIdx.x / shared;
  const Search known = *search;
  if (known.state) return;
  for (int bin = (int)threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = 0;
  __syncthreads();
  bool is_place = round >= TO_MAGNITUDE;
  i64 step = (i64)shared * THREADS * RUN, first = is_place ? known.place : 0;
  i64 end = is_place ? least_i64(known.size, first + ((i64)BINS << SHIFTS[round])) : known.size;
  i64 place = first + ((i64)own * THREADS + threadIdx.x) * RUN;
  for (; place < end; place += step) count_run(known, round, place, end, counts);
  __syncthreads();
  for (int bin = (int)threadIdx.x; bin < BINS; bin += THREADS) {
    if (counts[bin]) atomicAdd(known.counts + bin, counts[bin]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&search->blocks, 1) == shared - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int bin = (int)threadIdx.x; bin < BINS; bin += THREADS) {
    counts[bin] = known.counts[bin];
    known.counts[bin] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) end_round(search, round, counts), search->blocks = 0;
}

#endif
