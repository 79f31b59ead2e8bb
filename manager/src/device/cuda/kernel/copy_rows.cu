// Copies of many rows between device memory and mapped host memory in one launch. Compiled to
// copy_rows.ptx by .ci/kernels.py.
//
// The table travels in the parameters of the launch: every multiprocessor has it in its constant
// cache, nobody reads it over the bus, and it needs no memory that would have to live until the
// kernel has run.
//
// A rectangle is moved in units of 16 bytes where its addresses, pitches and width allow, else of 4,
// else of 1. Its units are numbered row by row; a piece is the next UNITS of them, whichever rows they
// are in, and a warp takes a piece: narrow rows leave no lanes idle, and every lane has EACH loads on
// the bus before it stores.

typedef unsigned int u32;
typedef unsigned long long u64;

// `Table` of table.rs is the same.
enum : u32 { RECTS = 112, EACH = 8, UNITS = 32 * EACH };

struct Table {
    u64 device[RECTS];
    u64 host[RECTS];
    u32 width[RECTS];
    u32 rows[RECTS];
    u32 device_pitch[RECTS];
    u32 host_pitch[RECTS];
    // Pieces up to the end of each rectangle.
    u32 end[RECTS];
    u32 count;
    u32 to_host;
};

static_assert(sizeof(Table) <= 4096, "what every driver takes as parameters");

struct Side {
    u64 start;
    u32 pitch;
};

template <typename Unit>
__device__ __forceinline__ void move(Side from, Side to, u32 width, u32 rows, u32 piece) {
    const u32 per_row = width / sizeof(Unit);
    const u32 all = per_row * rows;
    const u32 first = piece * UNITS + threadIdx.x % 32;
    Unit held[EACH];
#pragma unroll
    for (u32 each = 0; each < EACH; each++) {
        const u32 at = first + each * 32;
        if (at < all) {
            const u64 row = at / per_row, in_row = at % per_row;
            // Of no use to anyone in the caches: the engine's data stays there.
            held[each] = __ldcs((const Unit *)(from.start + row * from.pitch) + in_row);
        }
    }
#pragma unroll
    for (u32 each = 0; each < EACH; each++) {
        const u32 at = first + each * 32;
        if (at < all) {
            const u64 row = at / per_row, in_row = at % per_row;
            __stcs((Unit *)(to.start + row * to.pitch) + in_row, held[each]);
        }
    }
}

extern "C" __global__ void copy_rows(const Table table) {
    const u32 warps = gridDim.x * (blockDim.x / 32);
    const u32 pieces = table.end[table.count - 1];
    for (u32 at = (blockIdx.x * blockDim.x + threadIdx.x) / 32; at < pieces; at += warps) {
        // The first rectangle that ends behind the piece.
        u32 rect = 0, last = table.count - 1;
        while (rect < last) {
            const u32 middle = (rect + last) / 2;
            if (table.end[middle] > at) {
                last = middle;
            } else {
                rect = middle + 1;
            }
        }
        const u32 piece = at - (rect == 0 ? 0 : table.end[rect - 1]);
        const Side device = {table.device[rect], table.device_pitch[rect]};
        const Side host = {table.host[rect], table.host_pitch[rect]};
        const Side from = table.to_host ? device : host;
        const Side to = table.to_host ? host : device;
        const u32 width = table.width[rect], rows = table.rows[rect];
        // `unit_bytes` of table.rs is the same.
        const u32 odd = (u32)device.start | (u32)host.start | device.pitch | host.pitch | width;
        if (odd % 16 == 0) {
            move<uint4>(from, to, width, rows, piece);
        } else if (odd % 4 == 0) {
            move<u32>(from, to, width, rows, piece);
        } else {
            move<unsigned char>(from, to, width, rows, piece);
        }
    }
}
