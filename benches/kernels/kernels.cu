// Kernels of the benchmark and of the GPU tests. Compiled to kernels.ptx by .ci/kernels.py.
//
// A page lies in `segments` parts of `length` bytes: part s of page p begins at
// `bases[s] + p * stride`. Its image is the parts in order. `pages` names the pages of a copy.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Pages {
    const u64 *bases;
    const u32 *pages;
    u64 stride;
    u64 length;
    u32 segments;
    u32 count;
};

// `word` of device/pattern.rs is the same on the CPU.
__device__ __forceinline__ u64 pattern(u64 seed, u32 page, u64 word) {
    u64 bits = seed + page * 0x9e3779b97f4a7c15ull + word * 0xd1b54a32d192ed03ull;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
    return bits ^ (bits >> 31);
}

__device__ __forceinline__ u64 now_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__device__ __forceinline__ u64 *part(const Pages &of, u64 at) {
    const u32 segment = at % of.segments;
    const u32 page = of.pages[at / of.segments];
    return (u64 *)(of.bases[segment] + page * of.stride);
}

// Busy for so many nanoseconds. One block keeps one multiprocessor.
extern "C" __global__ void spin(u64 ns) {
    const u64 end = now_ns() + ns;
    while (now_ns() < end) {
    }
}

// Busy until the host stores something else than zero, or for so many nanoseconds.
extern "C" __global__ void spin_until(volatile u32 *flag, u64 ns_max) {
    const u64 end = now_ns() + ns_max;
    while (*flag == 0 && now_ns() < end) {
    }
}

// A fixed amount of arithmetic: how long it takes says how much of the GPU others took meanwhile.
extern "C" __global__ void work(u64 loops, float *sink) {
    float value = threadIdx.x;
    for (u64 at = 0; at < loops; at++) {
        value = value * 0.999f + 1.0f;
    }
    // Never true, which the compiler cannot know.
    if (value == -1.0f) {
        *sink = value;
    }
}

// Every word of every page becomes what the seed says. `first_page` is the number of the first.
extern "C" __global__ void fill(Pages to, u64 seed, u32 first_page) {
    const u64 parts = (u64)to.count * to.segments;
    const u64 words = to.length / 8;
    for (u64 at = blockIdx.x; at < parts; at += gridDim.x) {
        u64 *out = part(to, at);
        const u32 page = first_page + at / to.segments;
        const u64 before = at % to.segments * words;
        for (u64 word = threadIdx.x; word < words; word += blockDim.x) {
            out[word] = pattern(seed, page, before + word);
        }
    }
}

// Counts words that are not what the seed says, in the parts from `first` to `end` of each page.
extern "C" __global__ void compare(
    Pages from, u64 seed, u32 first_page, u32 first, u32 end, u64 *wrong) {
    const u32 each = end - first;
    const u64 parts = (u64)from.count * each;
    const u64 words = from.length / 8;
    u64 found = 0;
    for (u64 at = blockIdx.x; at < parts; at += gridDim.x) {
        const u64 segment = first + at % each;
        const u64 *in = part(from, at / each * from.segments + segment);
        const u32 page = first_page + at / each;
        for (u64 word = threadIdx.x; word < words; word += blockDim.x) {
            found += in[word] != pattern(seed, page, segment * words + word);
        }
    }
    if (found != 0) {
        atomicAdd(wrong, found);
    }
}

// Between device pages and their images one after the other in mapped host memory. A warp takes a
// piece: neither few long parts nor many short ones leave lanes idle.
__device__ __forceinline__ void copy(const Pages &of, u64 images, bool to_host) {
    const u64 piece = of.length < 4096 ? of.length : 4096;
    const u64 pieces = (of.length + piece - 1) / piece;
    const u64 all = (u64)of.count * of.segments * pieces;
    const u64 warps = gridDim.x * (blockDim.x / 32);
    for (u64 at = (blockIdx.x * blockDim.x + threadIdx.x) / 32; at < all; at += warps) {
        const u64 begin = at % pieces * piece;
        const u64 bytes = of.length - begin < piece ? of.length - begin : piece;
        ulonglong2 *on_device = (ulonglong2 *)((char *)part(of, at / pieces) + begin);
        ulonglong2 *on_host = (ulonglong2 *)(images + at / pieces * of.length + begin);
        const ulonglong2 *in = to_host ? on_device : on_host;
        ulonglong2 *out = to_host ? on_host : on_device;
        for (u64 vector = threadIdx.x % 32; vector < bytes / 16; vector += 32) {
            out[vector] = in[vector];
        }
    }
}

extern "C" __global__ void gather(Pages from, u64 images) { copy(from, images, true); }

extern "C" __global__ void scatter(Pages to, u64 images) { copy(to, images, false); }
