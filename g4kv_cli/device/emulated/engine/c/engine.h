// The bytecode engine: one handler an instruction over the 32 lanes of a warp.
//
// A kernel is an array of basic blocks, a block an array of instructions that ends with one whose handler is null. A
// handler reads and writes the frame of its warp: a 32-bit register is 32 consecutive u32 (16-bit ones have zeros
// above), a 64-bit register 32 u64, a predicate one bit a lane in a u32. Offsets into the frame are the instruction's
// fields.
//
// A broken rule is only detected here, as a Fault that names the place. The launch is then taken back (undo.c) and run
// by the interpreter, which writes the report.
//
// Freestanding: no C library, no allocation, no state between launches but what Python keeps for it. Vectors, not
// intrinsics, so that one source serves every processor; nothing may depend on what C leaves undefined.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;
typedef double f64;

#define LANES 32
#define ALL_LANES 0xffffffffu
typedef u32 U32 __attribute__((ext_vector_type(32), aligned(4)));
typedef i32 I32 __attribute__((ext_vector_type(32), aligned(4)));
typedef f32 F32 __attribute__((ext_vector_type(32), aligned(4)));
typedef u64 U64 __attribute__((ext_vector_type(32), aligned(8)));
typedef i64 I64 __attribute__((ext_vector_type(32), aligned(8)));
typedef f64 F64 __attribute__((ext_vector_type(32), aligned(8)));
typedef _Bool Bits32 __attribute__((ext_vector_type(32)));
typedef u32 Mask;  // one bit a lane

#define INLINE static inline __attribute__((always_inline))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define COPY(to, from, bytes) __builtin_memcpy(to, from, bytes)
INLINE f32 f32_of(u32 bits) {
  f32 value;
  COPY(&value, &bits, 4);
  return value;
}
INLINE u32 bits_of(f32 value) {
  u32 bits;
  COPY(&bits, &value, 4);
  return bits;
}

// What a launch may be stopped or replayed for. The names stand in structures.py too, in this order.
enum FaultKind {
  FAULT_NONE,
  FAULT_TRAP,
  FAULT_GLOBAL_BOUNDS,
  FAULT_MISALIGNED,
  FAULT_UNINITIALISED,
  FAULT_PARAMETER_BOUNDS,
  FAULT_SHARED_BOUNDS,
  FAULT_SHARED_UNINITIALISED,
  FAULT_SHARED_RACE,
  FAULT_LOST_WRITE,
  FAULT_MEMBERS,
  FAULT_DIVERGENT_BARRIER,
  FAULT_BARRIER_COUNT,
  FAULT_DEADLOCK,
  FAULT_UNKNOWN_RESULT,
  FAULT_COPIES_FULL,
  FAULT_WATCHDOG,
  FAULT_CLOCKS,
  FAULT_FOREIGN_READ,
  FAULT_MBARRIER,
  FAULT_UNFINISHED,
  // What only may be wrong: the interpreter decides.
  FAULT_EQUAL_STORES,
  FAULT_GUESSED_RACE,
  FAULT_LOCAL_BOUNDS,
  FAULT_SEVERAL_SPACES,
  FAULT_ALL_WAIT,
  FAULT_TRACE_FULL,
  FAULT_UNSURE,
};

typedef struct {
  i32 kind, site, warp, block;
  Mask lanes;
  u32 unused;
  u64 address;
} Fault;

// [begin, end) of device memory. state: 1 initialised as a whole, 0 look at the state bytes, -1 freed.
typedef struct {
  u64 begin, end;
  i64 state;
} Range;

// A range in cells of which each owner may read its own (checks/owned_reads.py). numbers: of each cell, its number
// among those that have an owner, or -1. owners: for each of these whose it is, one bit an owner in `words` words; with
// no words nobody asks which owner a block works for. may_be: whom each block that is resident may still work for;
// last: the cell it read last.
typedef struct {
  u64 begin, end, cell_bytes;
  const i32 *numbers;
  const u64 *owners;
  u64 *may_be;
  i64 *last, words;
} OwnedRange;

// Bytes of the arena that consecutive lanes of a warp stored to, or loaded where that is watched, `each` bytes a lane
// from lane `first` on (warp * 32 + lane; -1 for loads of several lanes). each is 0 for what atomics changed, whose
// threads do not matter; first is their operation then.
typedef struct {
  i64 begin;
  i32 bytes, site, block, is_load, first, each;
} Store;

// One executed cp.async of a warp, of 4, 8 or 16 bytes a lane: it takes effect when its lanes wait for its group.
typedef struct {
  Mask lanes;
  i32 site, bytes;
  U32 group;
  U32 to;
  u8 data[LANES][16];
} Copy;

typedef struct Warp Warp;
typedef struct Launch Launch;
typedef struct Chunk Chunk;
// What the lanes of a warp were like when they last fell asleep before a loop.
typedef struct Slept {
  u64 seen[LANES];
  i64 changes[LANES];
} Slept;
typedef struct Instruction Instruction;
typedef const Instruction *(*Handler)(const Instruction *, char *frame, Warp *);  // returns the next instruction

#define FIELDS 22
struct Instruction {
  Handler run;
  i32 field[FIELDS];
};

// What a launch does with an allocation, as bits; LOOKS at a tensor map, which no thread reads.
enum Access { LOOKS = 0, READS = 1, STORES = 2, UPDATES = 4 };

enum BlockEnd { END_JUMP, END_BRANCH, END_EXIT, END_TRAP, END_BARRIER, END_WARP, END_PHASE, END_CLUSTER };

// full: the code for 32 lanes here together; masked: the code that keeps what other lanes have in shared registers.
// A barrier's number and count of threads (0: all) are literals, or complements (~) of frame offsets; where lanes of a
// warp meet, barrier is that of the member mask, and threads 1 for a bar.warp.sync. A wait for a phase has its parity
// in threads and its address at a frame offset, 64 bits wide or not, and an offset behind it. waits: a loop begins here
// in which threads may wait for others, the waits-th of the kernel; look digests the registers that live there.
typedef struct {
  const Instruction *full, *masked, *look;
  i32 end, size, successor[2], guard, site, barrier, threads, stores, loads, waits, address, is_wide, offset;
} Block;

// One of a block's 16 barriers: the warps that wait there (bits), their threads, the count asked for (0: all that
// live), where the first of them stands; the predicates of a bar.red that hold and were given, now and at the last
// release; the warps that arrived without waiting; and what those knew who met there last, if it counted threads.
#define BARRIERS 16
typedef struct {
  u32 waiting;
  i32 arrived, expected, site;
  i32 held, given, last_held, last_given, has_met;
  u32 signalled;
  u32 met[LANES];
} Barrier;

// An mbarrier of a block (async.h).
typedef struct Mbarrier Mbarrier;
typedef struct Transfer Transfer;
typedef struct BulkStore BulkStore;
typedef struct Product Product;
typedef struct TensorBox TensorBox;

enum WarpState { WARP_READY, WARP_WAITS, WARP_ENDED };

struct Warp {
  Launch *launch;
  char *frame;
  u32 *pending;   // for each basic block, the lanes that wait to run it
  u64 *occupied;  // one bit a basic block: pending is not zero
  u8 *local, *local_state;  // of each lane, local_stride bytes
  Copy *copies;
  i64 copy_count;
  Mask mask, block_mask, live, waiting;  // lanes that execute; the same without an instruction's guard; not exited
  Mask waited;  // that have waited for the launch in front
  i32 number, state, following, site;
  i32 space;  // of the generic addresses looked at last
  i32 resident, rank, row;  // numbers of its block among those that are resident and in its cluster; of all their warps
  // Where warps run together (together.c): lanes of the step, that meet others, that begin a loop again, that sleep;
  // where each of them goes on, and what it had seen of memory (changes).
  Mask stepping, parked, turning, asleep;
  u32 members[LANES];
  i32 parked_to[LANES], turning_to[LANES], asleep_to[LANES], turn_block[LANES];
  i64 turn_changes[LANES], asleep_changes[LANES];
  Mask repeats;       // of those asleep, whose last two turns ended alike
  u64 seen[LANES];    // a digest of the registers that live where they sleep
  Slept *slept;  // for each loop that waits
  U32 committed;  // cp.async groups of each lane
  // What only asynchronous kernels use: lanes that wait for a phase, or for their cluster.
  i32 sleeper_count;
  struct {
    Mask lanes;
    i32 following, mbarrier, parity;
  } sleepers[LANES];
  Mask cluster_arrived, cluster_passed;  // in the phase that goes on, and in the one before; none of them has waited
  Mask cluster_waiting;
  i32 cluster_following;
  i64 cluster_seen[LANES];  // the phase that had begun when a lane last waited
  Product *products;        // wgmma of which nobody has waited for the end
  i32 product_count;
  u32 issued_products, committed_products, finished_products;  // before the last of these all were waited for
  U32 bulk_committed;  // groups of bulk stores of each lane
};

// Marks of the race check (races.h). writers, readers: for 16 bytes of shared memory; fine_*: for 1 << granule_shift
// bytes; has_fine: whether there are any of those within 16 bytes. fine_atomics is null where there are no atomics.
// lane_of, fine_lane_of: beside the writers of kernels with agents, one more than the lane that wrote.
typedef struct {
  u32 *writers, *readers, *fine_writers, *fine_readers, *fine_atomics;
  u8 *has_fine, *lane_of, *fine_lane_of;
} Places;

// What a block that is resident has of its own. Handlers see that of the block that runs in Launch (enter_block).
typedef struct {
  Warp *warps;
  u8 *shared, *shared_state;
  Places places;
  i32 number, live_threads, coordinates[3];
  Barrier barriers[BARRIERS];
  u32 *signals;  // for each barrier what those know that arrived without waiting, as clocks
  Mbarrier *mbarriers;
  u8 *mbarrier_at;  // for each 8 bytes of shared memory, one more than the number of the mbarrier there
  i32 mbarrier_count;
} Resident;

enum Pause { RUN_ENDED, RUN_FAULT, RUN_SLICE_OVER, RUN_LOGS_FULL, RUN_CLOCKS_FULL };

// All a launch needs. Filled by Python (structures.py repeats the fields in this order).
struct Launch {
  // Device memory: bytes and state bytes of the arena, its first device address, the allocations in order.
  u8 *data, *state;
  u64 base;
  const Range *ranges;
  i64 range_count;
  Range *hints;  // for each site, the allocation found last
  u8 *used;      // for each allocation, what this launch does with it (enum Access)
  const u8 *parameters;
  i64 parameter_bytes;
  // Shared memory of the block that runs, at first of all that may be resident; a byte was written if its state is the
  // block's generation.
  u8 *shared, *shared_state;
  const i32 (*within)[2];         // for each site, the bytes of shared memory that it may access
  i64 shared_bytes, shared_room;  // of one block; of all that launches ever had
  u64 generation;
  // Local memory of a thread; a byte was written if its state is the block's generation.
  i64 local_bytes, local_stride;
  Places places;  // of that block, as above
  i64 granules;
  i32 granule_shift, reader_stride, races_on, warp_count;
  u32 *clocks;  // [KNOWN or FENCED][row][agent], see races.h
  i32 agents_each, agents, is_async, unused4;
  u32 clock, origin, latest, unused2;
  i32 is_guess;  // whether some lanes of a warp met alone, or threads may learn of others by what they find
  // Stores in the order they were made, and the old contents of every arena page stored to (undo.c).
  Store *stores;
  i64 store_count, store_capacity;
  u64 watch_begin, watch_end;  // addresses of which loads are logged too
  u32 *saved_in;  // for each page the number of the launch that saved it; of all threads that run the launch
  u8 *saved;
  i64 *saved_pages;
  i64 saved_count, saved_capacity;
  u32 launch_number, unused1;
  Fault *faults;
  i64 fault_count, fault_capacity;
  OwnedRange *owned;
  i64 owned_count;
  const i64 *in_front;  // [begin, end) of the arena, ascending: what launches wrote that may not have ended
  i64 in_front_count;
  // Tables of the approximate functions: constant, linear and quadratic coefficients; squares cut to 17 bits.
  const f64 *ex2_table, *lg2_table, *rsqrt_table, *rcp_table, *sqrt_table, *sin_table, *tanh_table;
  const u16 *square_table;
  // What runs an opcode without a handler (call.c), and where operands and results pass.
  i32 (*call)(i32 number, Mask lanes);
  u8 *called;
  // The kernel and the grid.
  const Block *blocks;
  i64 block_count, entry, image_bytes, frame_bytes, copies_each;
  const char *image;  // the first frame of every warp: constants and parameters
  i32 clear_frames, threads;
  i32 grid[3], extent[3];
  // Progress: linear number of the thread block, of the first one not to run, and the step; limits. cursor: the next
  // block that no thread has begun, where several run the launch, each with a Launch of its own.
  i64 next, last, step, *cursor;
  i64 instructions, instruction_limit, steps, step_limit, slice, spent;
  i32 is_running, stop, current, coordinates[3], at_warp, at_block;  // the two that ran last
  u32 dynamic_shared_bytes, total_shared_bytes;
  i32 always_guesses;
  i32 together, loops;  // whether all blocks of a chunk run together; loops that may wait
  i64 changes;   // of memory that threads may wait for
  i64 ticks;     // of the clock, when it was read last
  i32 resident_count, ranks, cluster[3], unused5;  // blocks that run together, and those of a cluster
  const i64 *order;  // numbers of the blocks in their order, if those of a cluster run together
  const i32 *pool;   // fields of instructions that have more than FIELDS
  i64 products_each, transfer_capacity, bulk_capacity;
  // Laid out by engine_begin.
  Resident *residents, *here;  // blocks that there is room for, and the one that runs
  Warp *warps;                 // of that block, as the barriers
  Barrier *barriers;
  Chunk *chunk;
  u8 *trace;  // trace.h; null where nothing is written down
  i64 trace_bytes, trace_room, trace_step;
  u64 trace_begin, trace_end;  // addresses of memory that several threads use
  const u8 *trace_sites;       // for each site, whether threads may meet by it
  u32 *joined, *cluster_joining, *cluster_done;  // clocks on their way
  Transfer *transfers;
  TensorBox *boxes;
  BulkStore *bulk_stores;
  i64 transfer_count, box_count, bulk_store_count, cluster_phase;
  i32 batch, unused3;
};

void raise_fault(Warp *w, int kind, int site, Mask lanes, u64 address);
void raise_race(Warp *w, int site, u32 lane, u64 address);
INLINE const Instruction *done(const Instruction *i) { return i + 1; }
// A field of an instruction that may have more than FIELDS; the last one then says where in the pool they go on.
INLINE i32 field_of(const Launch *c, const Instruction *i, int number) {
  return number < FIELDS - 1 ? i->field[number] : c->pool[i->field[FIELDS - 1] + number - (FIELDS - 1)];
}
#define HANDLER(name) const Instruction *op_##name(const Instruction *i, char *frame, Warp *w)
#define AT(type, number) (*(type *)(frame + i->field[number]))

INLINE U32 expand(Mask mask) {
  Bits32 bits;
  COPY(&bits, &mask, 4);
  return -__builtin_convertvector(bits, U32);
}
INLINE Mask pack32(U32 flags) {
  Bits32 bits = __builtin_convertvector(flags, Bits32);
  Mask mask;
  COPY(&mask, &bits, 4);
  return mask;
}
INLINE Mask pack64(U64 flags) {
  Bits32 bits = __builtin_convertvector(flags, Bits32);
  Mask mask;
  COPY(&mask, &bits, 4);
  return mask;
}
INLINE U32 select32(U32 flags, U32 yes, U32 no) { return (yes & flags) | (no & ~flags); }
INLINE U64 widen(U32 a) { return __builtin_convertvector(a, U64); }
INLINE I64 widen_signed(U32 a) { return __builtin_convertvector((I32)a, I64); }
INLINE U32 low32(U64 a) { return __builtin_convertvector(a, U32); }
INLINE U64 select64(Mask flags, U64 yes, U64 no) {
  U64 wide = (U64)widen_signed(expand(flags));
  return (yes & wide) | (no & ~wide);
}
INLINE int first_lane(Mask mask) { return __builtin_ctz(mask); }
